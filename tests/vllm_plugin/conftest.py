from __future__ import annotations

from typing import Any

import pytest
from support.vllm.toy_model import placed

from dcr_daemon.vllm_plugin.loader import place_model
from dcr_daemon.vllm_plugin.weights import faults


@pytest.fixture
def toy_loader(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Workers attach to the toy model without vLLM, and planted faults work; none outlives the test."""

    def attach(model: Any, config: Any, layout: Any, platform: str) -> Any:
        placement, homes = placed(model)
        return placement, homes.live

    monkeypatch.setattr(place_model, "attach_model", attach)  # vLLM's loader is another test's
    monkeypatch.setattr(faults, "ENABLED", True)
    yield
    for name in faults.NAMES:
        faults.inject(name, times=0)


@pytest.fixture
def inspect_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM looks at a model's class in a process of its own; nothing here minds a GPU."""
    monkeypatch.setattr("vllm.model_executor.models.registry._run_in_subprocess", lambda look: look())

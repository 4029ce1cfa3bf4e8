"""What of vLLM's internals is checked before the plugin changes anything."""

from __future__ import annotations

import importlib

import pytest

from dcr_daemon.vllm_plugin import compat
from dcr_daemon.vllm_plugin.compat import UnsupportedVllm
from dcr_daemon.vllm_plugin.loader import derived

GOOD = {"VLLM_PLUGINS": "dcr,dcr_endpoint", "DCR_SOCKET": "/run/dcr/vllm.sock"}


def test_this_vllm_has_every_name_we_touch() -> None:
    pytest.importorskip("vllm")
    compat.require(compat.ENGINE_NAMES)
    compat.require(compat.CPU_RIG_NAMES)
    compat.require(compat.WORKER_NAMES)


def test_a_missing_name_is_told_with_what_to_do() -> None:
    assert compat.missing({"json": ("loads", "JSONDecoder.nothing"), "no_such_module": ("x",)}) == [
        "json.JSONDecoder.nothing",
        "no_such_module",
    ]
    pytest.importorskip("vllm")
    with pytest.raises(UnsupportedVllm, match=r"json\.nothing.*docs/VLLM\.md"):
        compat.require({"json": ("nothing",)})


class Executor:
    """As an executor of vLLM: some attributes only its instances have."""

    late: list[str]

    def __init__(self) -> None:
        self.is_failed = False


class MultiprocExecutor(Executor):
    def start(self) -> None:
        self.workers = ["worker"]


def test_attributes_that_only_instances_have_are_found_and_missed_by_name() -> None:
    names = ("MultiprocExecutor.is_failed", "MultiprocExecutor.workers", "MultiprocExecutor.late")
    assert compat.missing({__name__: names}) == []
    gone = ("MultiprocExecutor.response_mqs", "MultiprocExecutor.workers.proc")
    assert compat.missing({__name__: gone}) == [f"{__name__}.{name}" for name in gone]


@pytest.mark.parametrize(
    ("module", "owner", "name"),
    [
        ("vllm.model_executor.model_loader.reload.layerwise", "", "_place_kernel_tensors"),
        ("vllm.model_executor.layers.fused_moe.modular_kernel", "FusedMoEKernel", "fused_experts"),
    ],
)
def test_a_worker_of_a_vllm_that_lacks_a_name_does_not_load_a_model(
    module: str, owner: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("vllm")
    held = importlib.import_module(module)
    monkeypatch.delattr(getattr(held, owner) if owner else held, name)
    with pytest.raises(UnsupportedVllm, match=f"{module}.*{name}"):
        derived.install()


def test_a_changed_signature_is_found() -> None:
    assert compat.wrong_signatures({("json", "loads"): ("s", "nothing")}) == ["json.loads(nothing=)"]


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"VLLM_PLUGINS": "dcr"}, "does not name both"),
        ({"VLLM_PLUGINS": ""}, "does not name both"),
        ({"VLLM_USE_RUST_FRONTEND": "1"}, "Rust front end"),
    ],
)
def test_a_start_that_could_never_be_proved_is_refused(change: dict[str, str], text: str) -> None:
    compat.require_start(GOOD)
    with pytest.raises(UnsupportedVllm, match=text):
        compat.require_start(GOOD | change)

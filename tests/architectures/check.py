"""One architecture: a small model of it is served by vLLM in this process, refitted, and compared with fresh loads."""

from __future__ import annotations

import importlib.util
import re
import sys
import traceback
from importlib.machinery import ModuleSpec
from pathlib import Path
from unittest import mock

from support.vllm.refits import Refitted
from support.vllm.worker_rig import step

from architectures.checkpoints import write_checkpoint_for, write_checkpoint_of
from architectures.configs import BORROWED, OPTIONS, RENAMED, small_config
from architectures.outcome import Outcome
from dcr_daemon.errors import EngineRefused
from dcr_daemon.vllm_plugin.core.verify_sums import join_placement

#: Share of each tensor's elements that each version changes.
SHARES = (0.01, 0.01, 1.0)
#: What vLLM's classes say of a configuration or of names of tensors that are not theirs: the fault is in `configs`.
UNSUITABLE = re.compile(
    r"Config' object has no attribute|'\w+' object has no attribute|^KeyError|unhashable|no module or parameter named"
    r"|not initialized from checkpoint|^StrictDataclass|^IndexError"
)
TORCHVISION = ("torchvision", *(f"torchvision.{name}" for name in (
    "io", "ops", "transforms", "transforms.functional", "transforms.v2", "transforms.v2.functional",
)))  # fmt: skip


def check(architecture: str, home: Path) -> Outcome:
    """Attach, refit to three versions with a rollback in the first, and compare with fresh loads."""
    from vllm.model_executor.models import registry

    _stand_in_for_torchvision()
    options = {"skip_tokenizer_init": True, "max_model_len": 128} | OPTIONS.get(architecture, {})
    registry._run_in_subprocess = lambda look: look()  # it looks for what a class does to a GPU: nothing here does
    try:
        config = small_config(architecture)
        if config is None:
            return Outcome(architecture, "no config")
        if architecture in BORROWED:
            path = write_checkpoint_for(config, home / "v0", renamed=RENAMED.get(architecture, {}), **options)
        else:
            path = write_checkpoint_of(config, home / "v0")
        served = Refitted(path, home, **options)
    except Exception as error:  # noqa: BLE001  # whatever transformers or vLLM raise
        text = _place(error)
        ours = "dcr_daemon" in traceback.extract_tb(error.__traceback__)[-1].filename
        return Outcome(architecture, "failed" if ours else "no config" if UNSUITABLE.search(text) else "cannot", text)
    return _refit(architecture, served)


def _refit(architecture: str, served: Refitted) -> Outcome:
    try:
        served.attach()
        counts = {"tensors": len(served.layout), "computed": len(served.computed)}
        if served.attached.refusals:
            return Outcome(architecture, "refused", _reasons(served.attached.refusals), **counts)
        try:
            join_placement(served.layout, [served.attached])
        except EngineRefused as error:
            return Outcome(architecture, "refused", str(error), **counts)
        wrong = served.wrong_sums()
        for number, share in enumerate(SHARES, start=1):
            served.refit(step(served.states[-1], share, seed=number), back=number == 1)
            wrong += [*served.wrong_sums(), *served.against_a_fresh_load()]
        if wrong:
            return Outcome(architecture, "wrong", ", ".join(sorted(set(wrong))), **counts)
        return Outcome(architecture, "exact", **counts)
    except Exception as error:  # noqa: BLE001  # a row, not the end of the sweep
        return Outcome(architecture, "failed", _place(error))


def _stand_in_for_torchvision() -> None:
    """Classes that also serve images import their transforms; no image is shown here."""
    if importlib.util.find_spec("torchvision") is None:
        for name in TORCHVISION:
            sys.modules[name] = mock.MagicMock(__spec__=ModuleSpec(name, None), __path__=[])


def _reasons(refusals: dict[str, str]) -> str:
    """Each kind of reason once: paths without layers, no shapes."""
    texts = (f"{name}: {reason}" if name else reason for name, reason in refusals.items())
    short = (re.sub(r"(\w+\.)+(?=\w+\.\w+)", "", re.sub(r"\(\d[\d, ]*\)", "(…)", text)) for text in texts)
    return "; ".join(list(dict.fromkeys(short))[:2])[:300]


def _place(error: Exception) -> str:
    """What was raised, and where."""
    frames = traceback.extract_tb(error.__traceback__)
    last = frames[-1]
    text = " ".join(str(error).split())[:160]
    return f"{type(error).__name__}: {text} ({'/'.join(Path(last.filename).parts[-3:])}:{last.lineno})"

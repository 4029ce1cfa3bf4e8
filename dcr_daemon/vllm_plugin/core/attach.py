"""Attach: a subscriber becomes the owner of the engine, and the engine finds out what its weights are.

Runs in the EngineCore process. `Core` starts `attach_steps` after it has raised the owner token. The workers record
where vLLM's loader puts the canonical tensors (or adopt a begun transaction); the answers are joined to one placement,
the live weights are summed, and the result is kept in `EngineState`.
"""

from __future__ import annotations

import logging

from dcr_daemon.engine import messages
from dcr_daemon.engine.port import Attached, TensorClass
from dcr_daemon.engine.staged import read_layout
from dcr_daemon.errors import EngineRefused
from dcr_daemon.vllm_plugin import calls
from dcr_daemon.vllm_plugin.calls import AttachedRank, Op
from dcr_daemon.vllm_plugin.core import verify_sums
from dcr_daemon.vllm_plugin.core.operations import Steps
from dcr_daemon.vllm_plugin.core.state import EngineState
from dcr_daemon.vllm_plugin.core.verify_sums import JointPlacement
from dcr_daemon.vllm_plugin.settings import Settings
from dcr_daemon.wording import shorten

log = logging.getLogger("vllm.dcr")


def attach_steps(state: EngineState, call: messages.Attach, *, settings: Settings) -> Steps:
    """Place the tensors and sum the live weights; answers `Attached`.

    While a transaction is begun only the token changes, and the answer names that transaction (must E6).
    Raises `EngineUnsupported` if a tensor cannot be kept up to date in place, `EngineRefused` if somebody writes
    meanwhile.
    """
    if reason := state.workers.unsupported():
        raise verify_sums.unsupported([reason])
    state.forget_prepared()
    request = calls.Attach(
        layout=call.facts.layout,
        layout_digest=call.facts.layout_digest,
        cap=settings.stage_cap,
        cpus=list(settings.background_cpus) if settings.background_cpus else None,
    )
    answers = state.workers.ask(Op.ATTACH, AttachedRank, arg=request)
    adopted = next((answer.adopted for answer in answers if answer.adopted), None)
    if adopted is not None:
        state.begun = adopted
        return _answer(state, b"", adopted)
    if state.begun is not None:
        # No rank has begun: the last answer of that transaction was lost.
        state.begun, state.begun_record, state.paused_for = None, None, ""
    layout = read_layout(call.facts.layout, call.facts.layout_digest)
    placement = verify_sums.join_placement(layout, answers, cap=settings.computed_cap)
    generations = list(state.workers.generations)
    live = yield from state.fingerprint(call.id, placement)
    if generations != state.workers.generations:
        raise EngineRefused("an external writer wrote the weights while they were summed", hint="attach again")
    if live.torn:
        log.error("dcr: these weights are no version until one is loaded: %s", live.torn)
    state.record_attach(call.facts, placement, live=live, generations=generations)
    _log_left_out(placement)
    return _answer(state, live.vector.tobytes(), None)


def _log_left_out(placement: JointPlacement) -> None:
    left_out = [
        spec.name for spec, kind in zip(placement.layout, placement.classes, strict=True) if kind is TensorClass.ABSENT
    ]
    if left_out:
        log.info("dcr: vLLM's loader does not read these tensors, so they are left out: %s", shorten(left_out))


def _answer(state: EngineState, vector: bytes, adopted: str | None) -> Attached:
    return Attached(
        token=state.workers.token,
        incarnation=state.incarnation,
        adopted=adopted,
        version=state.proved,
        serving=state.host.running,
        vector=vector,
        classes=list(state.placement.classes) if state.placement else [],
    )

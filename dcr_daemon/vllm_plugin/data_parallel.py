"""Merges the answers of several data parallel engines into one answer (must E9). Pure.

Runs in the API server, called by `endpoint.EngineGroup`: a call and one answer per engine come in, one answer goes out.
Dense engines are independent copies. Each verifies its own ranks; a change ends in one joint decision: all engines
write and hold, then all commit or all roll back. If engines differ all the same, the answer says which engine says
what, and attach reports no version, so that a load repairs them. (Where experts are split over engines, attach
refuses.)
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from typing import TypeVar

import msgspec
import numpy as np

from dcr_daemon.engine import messages
from dcr_daemon.engine.messages import AnyAnswer, AnyCall, Done, Pending, RankChecksums, Refused, Report
from dcr_daemon.engine.port import Attached, EngineStatus, Prepared, Scrubbed, Swapped, Verdict
from dcr_daemon.errors import EngineRefused
from dcr_daemon.vllm_plugin.core.coordinator import AWAITING_VERDICT
from dcr_daemon.vllm_plugin.core.phases import longest

T = TypeVar("T")


class JointDecision(Enum):
    """What engines that hold a verified change do next."""

    COMMIT = "commit"
    ROLL_BACK = "roll back"


Changing = messages.Swap | messages.FinishAdopted | messages.Load


def merge(call: AnyCall, answers: Sequence[AnyAnswer]) -> AnyAnswer:
    """The common answer. A refusal by any engine is the answer, unless another engine has changed its weights already:
    then the verdict lists what each engine did."""
    if len(answers) == 1:
        return answers[0]
    for answer in answers:
        if isinstance(answer, Pending):
            return answer
    changed = isinstance(call, Changing) and any(_changed(swap) for swap in _swaps(answers))
    for number, answer in enumerate(answers):
        if isinstance(answer, Refused) and not changed:
            return msgspec.structs.replace(answer, message=f"engine {number}: {answer.message}")
    try:
        return messages.done(call.id, _merged(call, answers))
    except EngineRefused as error:
        return messages.refused(call.id, error)


def joint_verdict(answers: Sequence[AnyAnswer]) -> JointDecision | None:
    """Commit if every engine is verified (or has committed before); roll back if one is not and none has committed.

    None if no engine waits for a decision, or if one has committed and another cannot: the answer then reports both.
    """
    swaps = _swaps(answers)
    held = [swap is not None and swap.verdict is Verdict.BEGUN and swap.reason == AWAITING_VERDICT for swap in swaps]
    committed = [swap is not None and swap.verdict is Verdict.COMMITTED for swap in swaps]
    if not any(held):
        return None
    if all(is_held or is_committed for is_held, is_committed in zip(held, committed, strict=True)):
        return JointDecision.COMMIT
    return None if any(committed) else JointDecision.ROLL_BACK


def after_both_rounds(answer: AnyAnswer, held: Sequence[AnyAnswer], *, pause: float) -> AnyAnswer:
    """The outcome of the second round with the phases of the first one, `held`, and the pause (seconds) of both."""
    if not isinstance(answer, Done):
        return answer
    swapped = messages.result_of(answer, Swapped)
    rounds = [swapped.phases, *(swap.phases for swap in _swaps(held) if swap is not None)]
    return messages.done(answer.id, msgspec.structs.replace(swapped, pause=pause, phases=longest(rounds)))


def _merged(call: AnyCall, answers: Sequence[AnyAnswer]) -> object:
    match call:
        case messages.Attach():
            return _attached(_results(answers, Attached))
        case messages.Prepare():
            return _prepared(_results(answers, Prepared))
        case messages.Swap() | messages.FinishAdopted() | messages.Load() | messages.Outcome():
            return _swapped(answers)
        case messages.Status():
            return _status(_results(answers, EngineStatus))
        case messages.Scrub():
            return _scrubbed(_results(answers, Scrubbed))
        case messages.Inspect():
            return _report(_results(answers, Report))
        case messages.Checksums():
            ranks = [rank for engine in _results(answers, list[RankChecksums]) for rank in engine]
            return [msgspec.structs.replace(rank, rank=number) for number, rank in enumerate(ranks)]
    return None


def _swaps(answers: Sequence[AnyAnswer]) -> list[Swapped | None]:
    """Of each engine how its change ended, None if it refused."""
    return [messages.result_of(answer, Swapped) if isinstance(answer, Done) else None for answer in answers]


def _changed(swap: Swapped | None) -> bool:
    """Whether this engine did more than to note that its weights are a later version, too."""
    return swap is not None and not (swap.verdict is Verdict.COMMITTED and swap.tries == 0)


def _results(answers: Sequence[AnyAnswer], kind: type[T]) -> list[T]:
    return [messages.result_of(answer, kind) for answer in answers]


def _same(values: Sequence[T], difference: str) -> T:
    if any(value != values[0] for value in values):
        raise EngineRefused(f"the data parallel engines {difference}: {list(values)}", hint="restart the server")
    return values[0]


def _prepared(engines: Sequence[Prepared]) -> Prepared:
    """What all engines prepared; each took its own time."""
    same = _same([msgspec.structs.replace(engine, spent={}) for engine in engines], "prepared different changes")
    return msgspec.structs.replace(same, spent=longest(engine.spent for engine in engines))


def _attached(engines: Sequence[Attached]) -> Attached:
    first = engines[0]
    incarnation = "+".join(engine.incarnation for engine in engines)
    adopted = next((engine.adopted for engine in engines if engine.adopted), None)
    _same([engine.token for engine in engines], "have different owners")
    if adopted is None:
        _same([engine.classes for engine in engines], "place different tensors")
    return msgspec.structs.replace(
        first,
        vector=_common_vector([engine.vector for engine in engines]) if adopted is None else b"",
        incarnation=incarnation,
        adopted=adopted,
        version=_common(engine.version for engine in engines),
        serving=all(engine.serving for engine in engines),
    )


def _common_vector(vectors: Sequence[bytes]) -> bytes:
    """The engines' vector, with 0, which no version has, where they differ: so no version matches until a load."""
    columns = np.stack([np.frombuffer(vector, "<u8") for vector in vectors])
    return np.where((columns == columns[0]).all(axis=0), columns[0], np.uint64(0)).astype("<u8").tobytes()


def _common(values: object) -> int | None:
    """The value that all share, else None."""
    found = set(values)  # type: ignore[call-overload]  # any iterable of hashables
    return found.pop() if len(found) == 1 else None


def _swapped(answers: Sequence[AnyAnswer]) -> Swapped:
    swaps = _swaps(answers)
    known = [swap for swap in swaps if swap is not None]
    texts = [
        f"engine {number}: " + (f"{swap.verdict} {swap.reason}".strip() if swap else getattr(answer, "message", ""))
        for number, (swap, answer) in enumerate(zip(swaps, answers, strict=True))
    ]
    # An engine that refused has changed nothing, like one that rolled back.
    unmoved = all(swap.verdict is Verdict.ROLLED_BACK for swap in known)
    agreed = unmoved or (len(known) == len(swaps) and len({swap.verdict for swap in known}) == 1)
    verdict = known[0].verdict if agreed else Verdict.BEGUN
    return Swapped(
        txn=known[0].txn,
        verdict=verdict,
        version=_common(swap.version for swap in known) if agreed else None,
        serving=all(swap.serving for swap in known) and len(known) == len(swaps),
        pause=max(swap.pause for swap in known),
        tries=max(swap.tries for swap in known),
        phases=longest(swap.phases for swap in known),
        reason="" if verdict is Verdict.COMMITTED else "; ".join(texts),
    )


def _status(engines: Sequence[EngineStatus]) -> EngineStatus:
    return EngineStatus(
        incarnation="+".join(engine.incarnation for engine in engines),
        version=_common(engine.version for engine in engines),
        serving=all(engine.serving for engine in engines),
        prepared=next((engine.prepared for engine in engines if engine.prepared), None),
        begun=next((engine.begun for engine in engines if engine.begun), None),
    )


def _scrubbed(engines: Sequence[Scrubbed]) -> Scrubbed:
    """Continue where the slowest engine stopped; the others sum some tensors again."""
    ends = [engine.next for engine in engines if engine.next is not None]
    return Scrubbed(
        version=_common(engine.version for engine in engines),
        tensors=min(engine.tensors for engine in engines),
        bytes=sum(engine.bytes for engine in engines),
        next=min(ends, default=None),
        differing=[
            msgspec.structs.replace(difference, engine=number)
            for number, engine in enumerate(engines)
            for difference in engine.differing
        ],
    )


def _report(engines: Sequence[Report]) -> Report:
    """The ranks of all engines one after another; a tensor's sum is shown only if all engines agree."""
    tensors = []
    for rows in zip(*(engine.tensors for engine in engines), strict=True):
        agreed = len({row.sum for row in rows}) == 1
        tensors.append(
            msgspec.structs.replace(
                rows[0],
                held=[count for row in rows for count in row.held],
                sum=rows[0].sum if agreed else "",
                reason=rows[0].reason if agreed else "the engines hold different values",
            )
        )
    return Report(
        incarnation="+".join(engine.incarnation for engine in engines),
        version=_common(engine.version for engine in engines),
        serving=all(engine.serving for engine in engines),
        tensors=tensors,
    )

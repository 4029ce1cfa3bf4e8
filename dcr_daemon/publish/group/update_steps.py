"""One update of one rank, step by step: what is opened, agreed upon and diffed, in which order (musts P2, P3).

    open ─► (declare ─► agree) twice, until a version is sealed ─► start ─► blocks ─► (agree) ─► residual ─► finish

An attempt is opened before the weights are looked at: a rank that finds a fault tells all ranks, and none waits for it.
Residual tensors are constructed by collective calls, which would wait without end for a rank that has failed, so the
ranks meet in the bucket before the first one.

The weights are looked at on the trainer's thread, while a coordinator lives on an event loop. So `diff_update` is told
how to have work done on that loop (`on_loop`): `run_on_thread` runs it on the trainer's thread with `HandOver`; on the
loop itself it is simply awaited, with an `on_loop` that returns the work.
"""

from __future__ import annotations

import contextlib
from collections.abc import Awaitable, Callable, Coroutine, Generator
from typing import Any, Generic, Protocol, TypeVar

from dcr_daemon.codec.chunk import Codec
from dcr_daemon.ledger import names
from dcr_daemon.projection import host
from dcr_daemon.publish.group.coordinator import Coordinator
from dcr_daemon.publish.group.projected import AgreedProjection, RankProjection
from dcr_daemon.publish.inputs.sources import TensorSource, synchronize_sources
from dcr_daemon.publish.inputs.tensors import as_shards
from dcr_daemon.publish.version.attempt import Attempt

T = TypeVar("T")

EXPORT = names.ROUNDS + 1  #: the round in which every rank says that it can take part in the exports
_READY = b"ready"


class OnLoop(Protocol):
    """Awaiting what it returns runs the work on the coordinator's loop, and gives its result or raises its error."""

    def __call__(self, work: Coroutine[Any, Any, T], /) -> Awaitable[T]: ...


async def diff_update(
    coordinator: Coordinator, projection: RankProjection, weights: Any, *, step: int | None, call: int, on_loop: OnLoop
) -> Attempt:
    """Open an attempt and diff what this rank holds of `weights`.

    Args:
        step, call: see `Coordinator.open`.

    Returns:
        The finished attempt, which is to be sealed.
    """
    record = await on_loop(coordinator.open(step=step, call=call))
    weights = as_shards(weights)
    agreed = projection.agreed
    if agreed and coordinator.context.committed:
        agreed.bind(weights)
    else:  # every rank knows whether a version of this group was sealed; nothing else tells all of them alike
        first = projection.declare(weights, record)
        verdict = await on_loop(coordinator.agree(record, 1, first.declaration, projection.judge))
        second = first.probe(verdict)
        verdict = await on_loop(coordinator.agree(record, 2, second.declaration, projection.judge))
        agreed = projection.agreed = second.accept_verdict(verdict)
        await on_loop(_hold(coordinator, agreed))
    host.synchronize_devices(agreed.devices())
    attempt = await on_loop(coordinator.start(record))
    await on_loop(attempt.diff_blocks(agreed.blocks()))
    if agreed.exports:
        await on_loop(coordinator.agree(record, EXPORT, _READY, lambda declared: _READY))
    with contextlib.closing(agreed.residual()) as residual:
        for index, tensor, overwrite in residual:
            source = TensorSource(coordinator.layout[index].name, tensor)
            synchronize_sources([source])
            await on_loop(attempt.diff([(index, source)], Codec.OVERWRITE if overwrite else None))
    await on_loop(attempt.finish())
    return attempt


async def _hold(coordinator: Coordinator, agreed: AgreedProjection) -> None:
    coordinator.context.hold(agreed.owned)


class HandOver(Generic[T]):
    """An `OnLoop` for a coroutine that `run_on_thread` runs."""

    def __init__(self, work: Coroutine[Any, Any, T], /) -> None:
        self._work = work

    def __await__(self) -> Generator[Coroutine[Any, Any, T], T, T]:
        result = yield self._work
        return result


def run_on_thread(steps: Coroutine[Any, Any, T], call: Callable[[Coroutine[Any, Any, Any]], Any]) -> T:
    """Run a coroutine, which awaits `HandOver`s alone, to its end on this thread, without a loop.

    Args:
        call: runs work on the coordinator's loop, and waits for it.
    """
    try:
        work = steps.send(None)
        while True:
            try:
                result = call(work)
            except BaseException as error:  # noqa: BLE001  it is raised where the work was asked for
                work = steps.throw(error)
            else:
                work = steps.send(result)
    except StopIteration as end:
        value: T = end.value
        return value

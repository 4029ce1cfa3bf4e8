"""One update of one rank, step by step: what is opened, agreed on and diffed, in which order (musts P2, P3).

    check ─► open ─► agree: (declare ─► verdict) twice, until a version is sealed
               └──► start ─► diff: blocks ─► (agree) ─► residual ─► finish

Only `TensorTable.check` finds faults before an attempt opens. A stream has no tensor yet; a `RankShards` (many ranks,
or one process whose names differ from the checkpoint's) has to tell a fault to all ranks, which needs an open attempt.
Residual tensors are constructed by collective calls, which would wait without end for a rank that has failed, so the
ranks meet in the bucket before the first one.

The weights are looked at on the trainer's thread, while a coordinator lives on an event loop. So `diff_update` gets
`on_loop`, a function that runs work on that loop: `run_on_thread` runs `diff_update` on the trainer's thread with
`HandOver`; on the loop itself it is simply awaited, with an `on_loop` that returns the work.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Generator
from typing import Any, Generic, TypeVar

from dcr_daemon.publish.group.coordinator import Coordinator
from dcr_daemon.publish.group.update_inputs import OnLoop, UpdateInput
from dcr_daemon.publish.version.attempt import Attempt

T = TypeVar("T")


async def diff_update(
    coordinator: Coordinator, weights: UpdateInput, *, step: int | None, call: int, on_loop: OnLoop
) -> Attempt:
    """Open an attempt, and diff into it what this process holds of the weights.

    Args:
        step, call: see `Coordinator.open`.

    Returns:
        The finished attempt, which is to be sealed.
    """
    weights.check()
    record = await on_loop(coordinator.open(step=step, call=call))
    agreed = await weights.agree(coordinator, record, on_loop=on_loop)
    attempt = await on_loop(coordinator.start(record))
    await agreed.diff(coordinator, record, attempt=attempt, on_loop=on_loop)
    await on_loop(attempt.finish())
    return attempt


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

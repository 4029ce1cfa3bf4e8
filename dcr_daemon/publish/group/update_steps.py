"""One update of one rank of many, step by step: what is opened, agreed upon and diffed, in which order (musts P2, P3).

    open ─► (declare ─► agree) twice, until a version is sealed ─► start ─► blocks ─► (agree) ─► residual ─► finish

An attempt is opened before anything is looked at: whoever finds a fault says so to all ranks, and none waits for it.
What is residual is constructed by collectives, which would wait without end for a rank that has failed, so the ranks
meet in the bucket before the first one.
The weights are the trainer's and are looked at on its thread, while sessions live on a loop. So the order is a
generator of what the loop is to do; whoever drives it decides where the rest runs.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Coroutine, Generator
from typing import Any

from dcr_daemon.checkpoint.blocks import BlockSet
from dcr_daemon.codec.chunk import Codec
from dcr_daemon.ledger import names
from dcr_daemon.projection import host
from dcr_daemon.publish.group.coordinator import Coordinator
from dcr_daemon.publish.group.projected import Projected
from dcr_daemon.publish.inputs.sources import TensorSource, synchronize_sources
from dcr_daemon.publish.inputs.tensors import as_shards
from dcr_daemon.publish.version.attempt import Attempt

EXPORT = names.ROUNDS + 1  #: the round in which every rank says that it can take part in the exports
_READY = b"ready"

Steps = Generator[Coroutine[Any, Any, Any], Any, Attempt]


def steps(coordinator: Coordinator, projected: Projected, weights: Any, *, step: int | None, call: int) -> Steps:
    """Diff what this rank holds of `weights`; ends with the finished attempt, which is to be sealed.

    Each value is work for the coordinator's loop; its result is to be sent in, what it raises to be thrown in.
    """
    record = yield coordinator.open(step=step, call=call)
    weights = as_shards(weights)
    if projected.agreed and coordinator.context.committed:
        projected.bind(weights)
    else:  # until a version is sealed: only that is known to all ranks alike
        projected.hear((yield coordinator.agree(record, 1, projected.declare(weights, record), projected.judge)))
        projected.hear((yield coordinator.agree(record, 2, projected.probe(record), projected.judge)))
        yield _hold(coordinator, projected.settle())
    host.synchronize_devices(projected.devices())
    attempt: Attempt = yield coordinator.start(record)
    yield attempt.diff_blocks(projected.blocks())
    if projected.exports:
        yield coordinator.agree(record, EXPORT, _READY, lambda declared: _READY)
    with contextlib.closing(projected.residual()) as residual:
        for index, tensor, overwrite in residual:
            source = TensorSource(coordinator.layout[index].name, tensor)
            synchronize_sources([source])
            yield attempt.diff([(index, source)], Codec.OVERWRITE if overwrite else None)
    yield attempt.finish()
    return attempt


async def _hold(coordinator: Coordinator, blocks: BlockSet) -> None:
    coordinator.context.hold(blocks)


def drive(taken: Steps, call: Callable[[Coroutine[Any, Any, Any]], Any]) -> Attempt:
    """Take steps to their end on this thread; `call` runs a coroutine on the session's loop and waits for it."""
    try:
        work = next(taken)
        while True:
            try:
                result = call(work)
            except BaseException as error:  # noqa: BLE001  it is raised where the work was asked for
                work = taken.throw(error)
            else:
                work = taken.send(result)
    except StopIteration as end:
        attempt: Attempt = end.value
        return attempt

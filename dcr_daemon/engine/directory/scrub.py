"""Sums a directory's tensors again, a block at a time between other calls, and compares them with what was accepted.

`DirectoryEngine.scrub` calls it; it only reads. What any reader of the files gets is summed: from the page cache, where
they lie in it.
"""

from __future__ import annotations

from dcr_daemon import runtime
from dcr_daemon.canonical.fingerprint import MASK
from dcr_daemon.checkpoint.blocks import split_tensor
from dcr_daemon.engine.directory.assemble import sum_read
from dcr_daemon.engine.directory.state import DirectoryState
from dcr_daemon.engine.port import Difference, Scrubbed

CALL_SECONDS = 30.0  #: one scrub call takes about as long
POLL_SECONDS = 0.25  #: a resting scrub looks as often whether another call has come


async def scrub(state: DirectoryState, *, rate: float, first: int) -> Scrubbed:
    """As the port says."""
    if state.turn.locked():
        return Scrubbed(version=None, tensors=0, bytes=0, next=first)
    async with state.turn:
        version, call, began = _scrubbable(state), state.calls, runtime.monotonic()
    tensors, size, differing = 0, 0, list[Difference]()
    for tensor in range(first, len(state.layout)):
        late = tensors > 0 and runtime.monotonic() - began > CALL_SECONDS
        same = None if late else await _is_same(state, tensor, rate=rate, call=call)
        if same is None:
            return Scrubbed(version=version, tensors=tensors, bytes=size, next=tensor)
        tensors, size = tensors + 1, size + state.layout[tensor].nbytes
        if not same:
            differing.append(Difference(tensor=state.layout[tensor].name))
            break
    return Scrubbed(version=version, tensors=tensors, bytes=size, differing=differing)


def _scrubbable(state: DirectoryState) -> int:
    """The version that the files must have. Files that somebody replaced or cut are no damage, but a foreign change."""
    _ = state.stream
    state.check_owner()
    version = state.require_proved()
    if [seen[:2] for seen in state.stamp_now()] != [seen[:2] for seen in state.stamp]:
        state.check_stamp()
    return version


async def _is_same(state: DirectoryState, tensor: int, *, rate: float, call: int) -> bool | None:
    """Whether a tensor sums to what was accepted; None if another call came between.

    What differs is summed once more with every other process kept out: a new owner claims before it writes (must E3).
    """
    layout, total = state.layout, 0
    blocks = split_tensor(tensor, layout[tensor])
    for block in blocks:
        if state.turn.locked() or state.calls != call:
            return None
        async with state.turn:
            _scrubbable(state)
            total += await state.run(sum_read, state.open, layout, block)
        await _rest(state, block.box.elements * layout[tensor].width / rate if rate else 0, call)
    if total & MASK == int(state.vector[tensor]):
        return True
    if state.calls != call:
        return None
    async with state.turn, state.locked():
        _scrubbable(state)
        sums = [await state.run(sum_read, state.open, layout, block) for block in blocks]
        if sum(sums) & MASK == int(state.vector[tensor]):
            return True
        state.version, state.serving = None, False
        state.discard()
        return False


async def _rest(state: DirectoryState, seconds: float, call: int) -> None:
    """Sleep for `seconds`, or until another call has come."""
    while seconds > 0 and state.calls == call:
        pause = min(seconds, POLL_SECONDS)
        await runtime.sleep(pause)
        seconds -= pause

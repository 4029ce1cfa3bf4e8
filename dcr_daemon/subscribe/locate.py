"""Finds the version that an engine's weights are, by their content, never by a label (musts E2, F3).

The search ends at the floor, below which no chain begins; and if there is an anchor, after the newest versions, since
from older ones the chain costs more than the anchor. So unknown weights cost the same in a long history as in a short
one. Only weights that may be anybody's, and are not replaced unless they are of this stream, are compared with all
versions: the records of those below the floor stay.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from dcr_daemon.canonical.fingerprint import Vector, total
from dcr_daemon.canonical.layout import Layout
from dcr_daemon.engine.port import TensorClass
from dcr_daemon.errors import Corrupt, NotFound
from dcr_daemon.events import Emit, Waiting
from dcr_daemon.ledger.ledger import Ledger
from dcr_daemon.ledger.objects import BelowFloor, Objects
from dcr_daemon.ledger.records import Seal, Stream, digest, show_u64, total_of, version_of

REPORT = 512  #: seals read between two reports
#: Versions compared before version 0 is: a fresh engine holds the base, and must not pay for a long history. If an
#: older version has the base's vector too, both names mean the same weights, and only the route differs (F3).
RECENT = 256


@dataclass(frozen=True)
class LiveWeights:
    """An engine's weights, as attach describes them: `vector` is u64, in layout order, 0 where a class is not exact."""

    vector: Vector
    classes: Sequence[TensorClass]

    @cached_property
    def stored(self) -> bytes:
        """The vector as an object of the bucket holds it."""
        return self.vector.astype("<u8").tobytes()

    @cached_property
    def digest(self) -> str:
        return digest(self.stored)


async def matches(record: Stream | Seal, live: LiveWeights, *, objects: Objects, layout: Layout) -> bool:
    """Whether live sums are those of a version, on every tensor that the engine holds exactly (F3).

    For an engine that holds all tensors the record is enough: it has the digest of the whole vector.
    """
    exact = np.array([kind is TensorClass.EXACT for kind in live.classes], dtype=bool)
    if exact.all():
        return show_u64(total(live.vector)) == total_of(record) and live.digest == record.fingerprint.sha256
    try:
        expected = await objects.read_vector(record, layout)
    except BelowFloor:
        return False
    return bool(np.array_equal(expected[exact], live.vector[exact]))


async def locate(
    ledger: Ledger,
    live: LiveWeights,
    *,
    objects: Objects,
    layout: Layout,
    highest: int,
    hint: int | None = None,
    thorough: bool = False,
    below_floor: bool = False,
    emit: Emit,
) -> int | None:
    """The newest version up to `highest` whose vector the live weights have; None if they are of no version.

    Args:
        hint: what the engine itself says it was last proved at; taken if its content agrees, since a version of
            equal content is then one empty step of the chain away.
        thorough: compare all versions above the floor. Otherwise None may also mean: of an old version, from which
            the route by an anchor is cheaper.
        below_floor: compare those below it too.

    Raises:
        Corrupt: the engine was proved at a version that this ledger does not have (must T1).
    """
    if hint is not None and hint > highest:
        try:
            await ledger.version_record(hint)
        except NotFound as error:
            raise Corrupt(
                f"the engine is at version {hint}, which {ledger.store.url} does not have",
                hint="is this the stream that it was following? A bucket that was rolled back needs an operator",
            ) from error
    if hint is not None and await matches(await ledger.version_record(hint), live, objects=objects, layout=layout):
        return hint
    if not live.vector.any():
        return None
    # The version that it was proved at is below the floor and its vector is gone, so it cannot be identified. If
    # version 0 has the same bits, that is an older name for them, and no engine goes back to an older version (must E2,
    # F3).
    lost = hint is not None and 0 < hint < ledger.state.floor
    looked = 0
    async for record in _newest_first(ledger, highest, lowest=1 if below_floor else ledger.state.floor):
        if lost and isinstance(record, Stream):
            break
        if await matches(record, live, objects=objects, layout=layout):
            return version_of(record)
        looked += 1
        if looked == RECENT:
            if not lost and await matches(ledger.stream, live, objects=objects, layout=layout):
                return 0
            if not (thorough or below_floor) and await _anchored(ledger, highest):
                return None
        if looked % REPORT == 0:
            emit(Waiting(what=f"which version the engine holds: {looked} versions compared"))
    return None


async def _anchored(ledger: Ledger, highest: int) -> bool:
    """Whether an anchor leads to `highest`."""
    async for anchor in ledger.history.anchors_back():
        if anchor.version <= highest:
            return True
    return False


async def _newest_first(ledger: Ledger, highest: int, *, lowest: int) -> AsyncIterator[Stream | Seal]:
    """The records that sealed what may be held, from `highest` down to `lowest`; version 0 last."""
    async for seal in ledger.history.seals_back(highest, max(lowest, highest - RECENT + 1)):
        if seal.version < lowest:
            break
        yield seal
    yield ledger.stream

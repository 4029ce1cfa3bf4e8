"""Bugs of publishers (musts L3, L4, P1, P3 to P5, P7), and those that other systems were seen to have."""

from __future__ import annotations

from typing import Any

import numpy as np
from sim.planted.bug import Put, bug

from dcr_daemon.codec.encode import ChunkEncoder
from dcr_daemon.ledger import names
from dcr_daemon.publish.baseline.baseline import Baseline
from dcr_daemon.publish.group import anchors, opening
from dcr_daemon.publish.group.context import RankContext
from dcr_daemon.publish.version import attempt
from dcr_daemon.publish.version.attempt import Attempt
from dcr_daemon.publish.version.uploads import Uploads


@bug("L3 (elsewhere: a resumed run mixed leftovers into its files)", "answer_is_lost", "take_over", "publisher_dies")
def attempts_share_their_names(put: Put) -> None:
    """Chunks are named by version alone: a second attempt finds the first one's objects under its names."""
    right = names.chunk

    def chunk(version: int, attempt_: int, group: str, rank: int, nonce: str, n: int) -> str:
        return right(version, 0, "g", rank, "0", n)

    put(names, "chunk", chunk)


@bug("L4 (elsewhere: marked stable although a copy had failed)", "first", "publisher_dies", "answer_is_lost")
def seal_does_not_wait_for_chunks(put: Put) -> None:
    """The seal is written while chunks that it names are still on their way."""

    async def finish(self: Uploads) -> None:
        return None

    put(Uploads, "finish", finish)


@bug("P3 (elsewhere: the snapshot moved before the write was durable)", "squatter", "answer_is_lost")
def baseline_moves_before_the_seal(put: Put) -> None:
    """What was diffed counts as published, whether or not it was sealed: it is never sent again."""

    async def undo(self: Attempt) -> None:
        await self.cancel()
        self._spool.clear()

    put(Attempt, "undo", undo)


@bug("P7", "squatter", "answer_is_lost")
def undo_forgets_a_chunk(put: Put) -> None:
    """An abort takes back all chunks of the attempt but one, and nobody sums what is left."""
    right = Attempt._undo
    seen: set[int] = set()

    def undo(self: Attempt, data: bytes, old: bytes) -> None:
        if self.id not in seen:
            seen.add(self.id)
            return
        right(self, data, old)

    async def restored(self: Baseline) -> bool:
        return True

    put(Attempt, "_undo", undo)
    put(Baseline, "restored", restored)


@bug("P1", "squatter")
def other_bytes_under_my_name_are_mine(put: Put) -> None:
    """A name that is taken counts as written, whatever lies there."""

    async def put_if_absent(store: Any, key: str, body: Any, **_: Any) -> None:
        await store.create(key, body)

    from dcr_daemon.publish.version import uploads

    put(uploads, "put_if_absent", put_if_absent)
    put(attempt, "put_if_absent", put_if_absent)


@bug("P5 (elsewhere: pages that a crash lost went unnoticed)", "power_cut", "publisher_dies")
def cache_is_believed(put: Put) -> None:
    """A restarted publisher takes its cache for what a small file beside it says, without summing it."""

    async def prove(self: Baseline, *candidates: Any) -> Any:
        version, vector = candidates[0]
        self.version, self._vector, self._sums, self.unverified_base = (
            version,
            vector.copy(),
            await self._measure(),
            False,
        )
        return vector

    put(Baseline, "prove", prove)


@bug("P4 (elsewhere: a periodic full copy could not repair)", "damaged_baseline")
def anchor_of_a_damaged_baseline(put: Put) -> None:
    """An anchor is written from memory without asking whether it is still the version."""

    async def prove(self: RankContext, *_: Any, **__: Any) -> None:
        return None

    put(RankContext, "prove", prove)
    put(anchors, "check_vector", lambda *_, **__: None)


@bug("elsewhere: values compared as numbers", "first")
def minus_zero_equals_zero(put: Put) -> None:
    """Old and new are compared as numbers: a sign that a zero gains is not sent."""
    right = ChunkEncoder.add

    def add(self: ChunkEncoder, tensor: int, box: Any, base: Any, new: Any, codec: Any = None) -> Any:
        top = np.array(1 << (8 * new.itemsize - 1), np.uint64).astype(new.dtype)
        both = ((base & ~top) == 0) & ((new & ~top) == 0)
        return right(self, tensor, box, base, np.where(both, base, new), codec)

    put(ChunkEncoder, "add", add)


@bug("L6", "lenient_store")
def store_is_not_probed(put: Put) -> None:
    """A publisher trusts every store to honour create-if-absent."""

    async def probe(store: Any, **_: Any) -> list[str]:
        return []

    put(opening, "probe", probe)

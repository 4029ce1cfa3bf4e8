"""Bugs of publishers (musts L3, L4, P1, P3 to P5, P7), and those that other systems were seen to have."""

from __future__ import annotations

from typing import Any

import numpy as np
from sim.planted.bug import Put, bug

from dcr_daemon.codec.encode import ChunkEncoder
from dcr_daemon.ledger import names
from dcr_daemon.publish import anchors, attempt
from dcr_daemon.publish.attempt import Attempt
from dcr_daemon.publish.restore import Restorer
from dcr_daemon.publish.session import Session
from dcr_daemon.publish.uploads import Uploads


@bug("L3", "answer_is_lost", "take_over", "publisher_dies")
def attempts_share_their_names(put: Put) -> None:
    """Chunks are named by version alone: a second attempt finds the first one's objects under its names."""
    right = names.chunk

    def chunk(version: int, attempt_: int, group: str, rank: int, nonce: str, n: int) -> str:
        return right(version, 0, "g", rank, "0", n)

    put(names, "chunk", chunk)


@bug("L4", "first", "publisher_dies", "answer_is_lost")
def seal_does_not_wait_for_chunks(put: Put) -> None:
    """The seal is written while chunks that it names are still on their way."""
    right = Uploads.admit

    async def admit(self: Uploads, n: int, chunk: Any, body: Any) -> None:
        await right(self, n, chunk, body)
        self._done[n] = chunk

    async def finish(self: Uploads) -> list[Any]:
        return [self._done[n] for n in sorted(self._done)]

    put(Uploads, "admit", admit)
    put(Uploads, "finish", finish)


@bug("P3", "answer_is_lost", "first", "publisher_dies")
def baseline_moves_before_the_seal(put: Put) -> None:
    """What was diffed counts as published, whether or not it was sealed: it is never sent again."""

    async def undo(self: Attempt) -> None:
        await self.cancel()
        self._baseline.restored()
        self._spool.clear()

    put(Attempt, "undo", undo)


@bug("P7", "answer_is_lost", "first")
def undo_forgets_a_chunk(put: Put) -> None:
    """An abort takes back all chunks of the attempt but the last one."""
    right = Attempt._undo
    seen: dict[int, bool] = {}

    def undo(self: Attempt, data: bytes, old: bytes) -> None:
        if seen.setdefault(id(self), True) and len(self._spool.numbers) > 1:
            seen[id(self)] = False
            return
        right(self, data, old)

    put(Attempt, "_undo", undo)


@bug("P1", "squatter")
def other_bytes_under_my_name_are_mine(put: Put) -> None:
    """A name that is taken counts as written, whatever lies there."""

    async def create_once(store: Any, key: str, body: Any, **_: Any) -> None:
        await store.create(key, body)

    from dcr_daemon.publish import uploads

    put(uploads, "create_once", create_once)
    put(attempt, "create_once", create_once)


@bug("P5", "publisher_dies", "power_cut")
def cache_is_believed(put: Put) -> None:
    """A restarted publisher takes its cache for what a small file beside it says, without summing it."""

    async def fingerprint(self: Any) -> Any:
        return self._vector

    right = Restorer._cached

    async def cached(self: Restorer, head: int) -> int | None:
        kind = type(self._baseline)
        before = kind.fingerprint
        hint = self._baseline.hint()
        if hint is not None:
            self._baseline._vector = hint[1]
        kind.fingerprint = fingerprint  # type: ignore[method-assign]
        try:
            return await right(self, head)
        finally:
            kind.fingerprint = before  # type: ignore[method-assign]

    put(Restorer, "_cached", cached)


@bug("P4", "damaged_baseline")
def anchor_of_a_damaged_baseline(put: Put) -> None:
    """An anchor is written from memory without asking whether it is still the version."""

    async def prove(self: Session, *_: Any, **__: Any) -> None:
        return None

    put(Session, "_prove_baseline", prove)
    put(anchors, "check_vector", lambda *_, **__: None)


@bug("P7", "answer_is_lost", "publisher_dies")
def next_update_begins_over_the_last(put: Put) -> None:
    """The fate of an update is not learnt before the next one is diffed."""
    right = Session.settle

    async def settle(self: Session, reason: str) -> Any:
        if reason == "the next update began":
            self._attempt = self._contribution = None
            return None
        return await right(self, reason)

    put(Session, "settle", settle)


@bug("elsewhere: values compared as numbers", "first")
def minus_zero_equals_zero(put: Put) -> None:
    """Old and new are compared as numbers: a sign that a zero gains is not sent."""
    right = ChunkEncoder.add

    def add(self: ChunkEncoder, tensor: int, box: Any, base: Any, new: Any) -> Any:
        top = np.array(1 << (8 * new.itemsize - 1), np.uint64).astype(new.dtype)
        both = ((base & ~top) == 0) & ((new & ~top) == 0)
        return right(self, tensor, box, base, np.where(both, base, new))

    put(ChunkEncoder, "add", add)

"""Reads the objects that records name, and returns them only if their size and SHA-256 match (musts L6, T1).

An object that is missing at or above the floor is *not yet* there (a replicated bucket may show a seal before its
chunks): it is waited for, up to the caller's patience. Below the floor it may be deleted for good, and the caller plans
again. Bytes that differ are fetched once more; a second difference is damage in the bucket, not on the way.
"""

from __future__ import annotations

import contextlib
from collections.abc import Awaitable, Callable, Sequence
from functools import partial

import numpy as np

from dcr_daemon import runtime
from dcr_daemon.canonical.fingerprint import Vector, total
from dcr_daemon.canonical.layout import Layout
from dcr_daemon.codec.chunk import CHUNK_LIMIT
from dcr_daemon.errors import Corrupt, Incompatible, KeyNotFound, NotFound, StoreUnavailable
from dcr_daemon.events import Emit, Waiting, discard
from dcr_daemon.ledger import names, records
from dcr_daemon.ledger.records import (
    FORMAT,
    PART_LIMIT,
    Anchor,
    AnchorIndex,
    ChunkRef,
    ObjectRef,
    Part,
    Seal,
    Stream,
)
from dcr_daemon.ledger.slot import pause_before
from dcr_daemon.store.partial import PartialFile
from dcr_daemon.store.port import Store
from dcr_daemon.task_limiter import run_limited

LAYOUT_LIMIT = 256 << 20  #: bytes
FILE_LIMIT = (1 << 30) + (128 << 20)  #: bytes of one anchor file: 1 GiB of tensors and a header
CONTENTS_LIMIT = 256 << 20  #: bytes of the tables of contents of one anchor
AT_ONCE = 16  #: parts read at a time
PATIENCE = 60.0  #: seconds that a missing object is waited for, unless the caller says otherwise


class ObjectPending(StoreUnavailable):
    """An object at or above the floor did not appear in time. It has to exist: report it, and try again."""

    kind = "NotYet"


class BelowFloor(NotFound):
    """An object of a version below the floor is gone, as retention may delete it: plan again from an anchor."""


class Objects:
    """Reads objects of one stream.

    Args:
        floor: the floor as last read; called at each miss, since it may have risen meanwhile.
        refresh: reads the ledger on; awaited at each miss before `floor` is called, so that nobody waits for what was
            deleted under a floor that this process has not read yet (must L6).
        patience: seconds that a missing object is waited for.
        workers: where digests are computed; None computes them in place.
    """

    def __init__(
        self,
        store: Store,
        *,
        floor: Callable[[], int],
        refresh: Callable[[], Awaitable[object]] | None = None,
        emit: Emit = discard,
        patience: float = PATIENCE,
        workers: runtime.Workers | None = None,
    ) -> None:
        self.store = store
        self._floor = floor
        self._refresh = refresh
        self._emit = emit
        self._patience = patience
        self._workers = workers

    async def read(
        self, ref: ObjectRef | ChunkRef, version: int | None, *, limit: int, keep: PartialFile | None = None
    ) -> bytes:
        """The bytes that `ref` names. `version`: the one that it belongs to; None for what is never deleted.

        `keep`: where to keep what has arrived, so that a restart goes on there. The caller clears it.

        Raises:
            Corrupt: it has other bytes than the digest says, at two reads, or more than `limit` of them.
            ObjectPending: it is still missing after `patience` seconds.
            BelowFloor: missing, and `version` is below the floor.
        """
        if ref.size > limit:
            raise Corrupt(f"{self._name(ref)} is said to have {ref.size} bytes; the limit is {limit}")
        reads = 2
        while reads:
            resumed = keep is not None and await keep.exists()
            with contextlib.suppress(Corrupt):  # more bytes than it should have
                body = await self._fetch(ref, version, keep)
                if len(body) == ref.size and await self._digest(body) == ref.sha256:
                    return body
            if keep:
                await keep.clear()
            reads -= not resumed  # what an earlier process left on this disk says nothing about the bucket
        raise Corrupt(
            f"{self._name(ref)} does not have the bytes that the ledger names (SHA-256 {ref.sha256[:12]}…), twice",
            hint="the bucket or the way to it damages objects; `dcr verify` tells what can be rebuilt",
        )

    async def read_layout(self, stream: Stream) -> Layout:
        """The stream's layout. Its digest is the digest of the object."""
        return Layout.decode(await self.read(stream.layout, None, limit=LAYOUT_LIMIT))

    async def read_vector(self, record: Stream | Seal, layout: Layout) -> Vector:
        """The fingerprint vector (u64, layout order) of a version; its total is compared with the record's."""
        version = records.version_of(record)
        body = await self.read(record.fingerprint, version, limit=8 * len(layout))
        if len(body) != 8 * len(layout):
            raise Corrupt(f"{self._name(record.fingerprint)} is not a vector of {len(layout)} sums")
        vector = np.frombuffer(body, dtype="<u8").astype(np.uint64)
        if records.show_u64(total(vector)) != records.total_of(record):
            raise Corrupt(f"{self._name(record.fingerprint)} does not add up to what the record of {version} says")
        return vector

    async def read_parts(self, seal: Seal) -> list[Part]:
        """The parts of a version, each checked to be of exactly this attempt (must P2), chunks named once."""
        parts = await run_limited((partial(self._read_part, seal, ref) for ref in seal.parts), AT_ONCE)
        keys = [chunk.key for part in parts for chunk in part.chunks]
        if len(set(keys)) != len(keys):
            raise Corrupt(f"the parts of version {seal.version} name a chunk twice")
        if sum(part.changed for part in parts) != seal.changed:
            raise Corrupt(f"the parts of version {seal.version} do not add up to its {seal.changed} changes")
        return parts

    async def read_chunk(self, chunk: ChunkRef, version: int, *, keep: PartialFile | None = None) -> bytes:
        """The verified, still encoded bytes of one chunk of `version`."""
        return await self.read(chunk, version, limit=CHUNK_LIMIT, keep=keep)

    async def read_anchor_index(self, anchor: Anchor) -> AnchorIndex:
        """The files of an anchor, all of them below its own prefix."""
        body = await self.read(anchor.index, anchor.version, limit=PART_LIMIT)
        try:
            index = records.decode_anchor_index(body)
        except ValueError as error:
            raise Corrupt(f"{self._name(anchor.index)} does not parse: {error}") from error
        self._same_format(index.format, anchor.index)
        if (index.stream, index.version) != (anchor.stream, anchor.version):
            raise Corrupt(f"{self._name(anchor.index)} is of version {index.version} of stream {index.stream}")
        self._below(f"anchors/{anchor.version}/", index.all, anchor.index)
        return index

    async def read_contents(self, index: AnchorIndex) -> bytes | None:
        """The tables of what is in the files of an anchor, still packed; None if it has none."""
        return await self.read(index.contents, index.version, limit=CONTENTS_LIMIT) if index.contents else None

    async def read_file(self, ref: ObjectRef, version: int, *, keep: PartialFile | None = None) -> bytes:
        """One verified file of an anchor (at most about 1 GiB)."""
        return await self.read(ref, version, limit=FILE_LIMIT, keep=keep)

    async def _read_part(self, seal: Seal, ref: ObjectRef) -> Part:
        body = await self.read(ref, seal.version, limit=PART_LIMIT)
        try:
            part = records.decode_part(body)
        except ValueError as error:
            raise Corrupt(f"{self._name(ref)} does not parse: {error}") from error
        self._same_format(part.format, ref)
        found = (part.stream, part.attempt, part.base, part.version)
        expected = (seal.stream, seal.attempt, seal.base, seal.version)
        if found != expected:
            raise Corrupt(f"{self._name(ref)} belongs to another attempt: {found} instead of {expected}")
        if sum(chunk.changed for chunk in part.chunks) != part.changed:
            raise Corrupt(f"{self._name(ref)} does not add up to its {part.changed} changes")
        self._below(names.attempt(seal.version, seal.attempt), part.chunks, ref)
        return part

    async def _fetch(self, ref: ObjectRef | ChunkRef, version: int | None, keep: PartialFile | None) -> bytes:
        deadline, tries = runtime.monotonic() + self._patience, 0
        while True:
            try:
                return await self.store.get(ref.key, limit=ref.size, keep=keep)
            except KeyNotFound:
                gone = await self._may_be_deleted(version)
            # One answer that it is absent may be wrong, so nothing is built on the first.
            if tries and gone:
                raise BelowFloor(f"{self._name(ref)} is gone: version {version} is below the floor")
            if tries and runtime.monotonic() >= deadline:
                waited = f"did not appear in {self._patience:g} s" if self._patience else "is not there"
                raise ObjectPending(
                    f"{self._name(ref)} is named by the ledger and {waited}",
                    hint="if the bucket is a replica, it lags; if something deletes objects, `dcr verify` tells what",
                )
            tries += 1
            if not gone:
                self._emit(Waiting(what=f"{ref.key}: named by the ledger, not there yet"))
            await pause_before(tries)

    async def _may_be_deleted(self, version: int | None) -> bool:
        """Whether `version` is below the floor, by the present ledger if what was read of it does not say so."""
        if version is None:
            return False
        if self._refresh and version >= self._floor():
            await self._refresh()
        return version < self._floor()

    async def _digest(self, body: bytes) -> str:
        return await self._workers.run(records.digest, body) if self._workers else records.digest(body)

    def _below(self, prefix: str, refs: Sequence[ObjectRef | ChunkRef], of: ObjectRef) -> None:
        if foreign := [ref.key for ref in refs if not ref.key.startswith(prefix)]:
            raise Corrupt(f"{self._name(of)} names {foreign[0]}, which is not below {prefix}")

    def _same_format(self, format_: int, ref: ObjectRef) -> None:
        if format_ != FORMAT:
            raise Incompatible(f"{self._name(ref)} has format {format_}", hint="upgrade DCR here")

    def _name(self, ref: ObjectRef | ChunkRef) -> str:
        return f"{self.store.url}/{ref.key}"

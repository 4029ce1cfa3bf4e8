"""Checks one version or one anchor: reads all of its objects, compares digests, and recomputes the sums.

For `verify` alone. Damage is collected, not raised.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from typing import ParamSpec, TypeVar

import msgspec
import numpy as np

from dcr_daemon import runtime
from dcr_daemon.canonical.box import Box
from dcr_daemon.canonical.fingerprint import MASK, Vector, sum_box, total
from dcr_daemon.canonical.layout import Layout
from dcr_daemon.checkpoint.contents import Contents, read_contents, split_tables
from dcr_daemon.checkpoint.pieces import read_pieces
from dcr_daemon.checkpoint.safetensors import SafetensorsBytes
from dcr_daemon.codec.decode import open_chunk
from dcr_daemon.errors import Corrupt
from dcr_daemon.events import Emit
from dcr_daemon.ledger import names, records
from dcr_daemon.ledger.audit.agreement import Found, check_anchor, check_attempt
from dcr_daemon.ledger.audit.repairs import SPARE, Damage
from dcr_daemon.ledger.objects import BelowFloor, ObjectPending, Objects
from dcr_daemon.ledger.records import Anchor, AnchorIndex, ObjectRef, Part, Seal, Stream
from dcr_daemon.store.port import Store
from dcr_daemon.wording import shorten

T = TypeVar("T")
P = ParamSpec("P")
AT_ONCE = 4  #: objects in flight

Sums = list[tuple[int, Box, int]]  #: of each entry of a file: tensor, box, sum


class Check:
    """Reads and compares; collects damages instead of raising them."""

    def __init__(
        self,
        store: Store,
        stream: Stream,
        *,
        seals: Mapping[int, Seal],
        floor: int,
        emit: Emit,
        workers: runtime.Workers | None,
    ) -> None:
        self.damages: list[Damage] = []
        self.objects = 0
        self.bytes = 0
        self._stream, self._seals, self._floor = stream, seals, floor
        self._workers = workers
        # No patience: an object that is missing is what this command has to report.
        self._reader = Objects(store, floor=lambda: floor, emit=emit, patience=0, workers=workers)
        self._first_reader = Objects(store, floor=lambda: 0, emit=emit, patience=0, workers=workers)
        self._slots = asyncio.Semaphore(AT_ONCE)
        self._layout: Layout
        self._totals = {0: stream.total} | {seal.version: seal.after for seal in seals.values()}
        self._known: tuple[int, Vector] | None = None

    async def open(self) -> None:
        """Read the layout, and the vector that the chain starts from."""
        stream = self._stream
        try:
            self._layout = await self._reader.read_layout(stream)
        except ObjectPending as error:
            raise Corrupt(
                f"{stream.layout.key} is gone, and nothing can be read without it",
                hint="put the layout back: any checkpoint of this stream gives the same bytes",
            ) from error
        self._count(stream.layout.size)
        vector = await self._try(
            stream.fingerprint.key, 0, self._first_reader.read_vector(stream, self._layout), stream.fingerprint.size
        )
        self._known = None if vector is None else (0, vector)
        if vector is None and self._floor:
            self.damages = [msgspec.structs.replace(d, version=None, repair=_FIRST) for d in self.damages]

    async def version(self, seal: Seal) -> None:
        """Everything that one seal names, and that the chunks lead from the vector before to its own."""
        place = names.attempt(seal.version, seal.attempt)
        vector = await self._try(
            seal.fingerprint.key, seal.version, self._reader.read_vector(seal, self._layout), seal.fingerprint.size
        )
        sizes = [ref.size for ref in seal.parts]
        blamed = seal.parts[0].key if len(seal.parts) == 1 else place  # of several, the message says which
        parts = await self._try(blamed, seal.version, self._reader.read_parts(seal), *sizes)
        changes = await self._changes(seal, parts) if parts is not None else None
        await self._sums(seal, parts or [])
        if len(seal.parts) > 1:
            self._note(await check_attempt(self._reader.store, seal, self._layout), seal.version)
        before, self._known = self._known, None if vector is None else (seal.version, vector)
        if seal.before != self._totals.get(seal.base, seal.before):
            self._damage(names.record(seal.seq), seal.version, "its sum before is not the sum after the version before")
        if changes is None or before is None or before[0] != seal.base:
            return
        reached = before[1] + changes
        if vector is not None and not np.array_equal(reached, vector):
            tensors = [self._layout[int(i)].name for i in np.flatnonzero(reached != vector)]
            self._damage(
                place,
                seal.version,
                f"its chunks do not lead from version {seal.base} to its fingerprint: {shorten(tensors)}",
            )
        if vector is None and records.show_u64(total(reached)) == seal.after:
            self._known = (seal.version, reached)
            self._rebuildable(seal.fingerprint.key)

    async def anchor(self, anchor: Anchor) -> None:
        """An anchor's index, every file it names, and that the tensors in them are the version (must L5)."""
        if anchor.total != self._totals.get(anchor.version):
            self._damage(names.record(anchor.seq), anchor.version, "its sum is not that of the version")
        index = await self._try(
            anchor.index.key, anchor.version, self._reader.read_anchor_index(anchor), anchor.index.size
        )
        if index is None:
            return
        contents = await self._contents(index)
        files = await asyncio.gather(*(self._file(ref, anchor.version) for ref in index.files))
        await asyncio.gather(*(self._extra(ref, anchor.version) for ref in index.extras))
        sums = [entries for entries in files if entries is not None]
        if len(sums) == len(files) and (wrong := await self._wrong(anchor, sums)):
            self._damage(anchor.index.key, anchor.version, f"its files do not hold the version: {wrong}")
        seal = self._seals.get(anchor.version)
        if seal and len(seal.parts) > 1:
            self._note(await check_anchor(self._reader.store, anchor, index, objects=self._reader), anchor.version)
        if index.contents and contents is not None and (lies := self._outside(contents, files)):
            self._damage(index.contents.key, anchor.version, lies)

    async def _contents(self, index: AnchorIndex) -> list[Contents] | None:
        """The tables of what is in an anchor's files; None if it has none, or they are damaged."""
        if index.contents is None:
            return None
        reading = self._reader.read_contents(index)
        body = await self._try(index.contents.key, index.version, reading, index.contents.size)
        if body is None:
            return None
        try:
            return [read_contents(table, len(self._layout)) for table in split_tables(body)]
        except Corrupt as error:
            self._damage(index.contents.key, index.version, error.message)
            return None

    def _outside(self, tables: Sequence[Contents], files: Sequence[Sums | None]) -> str:
        """What is in a file and not where the tables say that it is; empty if there is nothing."""
        places = [(table, number) for table in tables for number in range(table.counts.size)]
        if len(places) != len(files):
            return f"it speaks of {len(places)} files, and there are {len(files)}"
        for (table, number), entries in zip(places, files, strict=True):
            if wrong := table.outside(number, ((tensor, box) for tensor, box, _ in entries or ())):
                return f"it does not know of all that the files hold of {self._layout[min(wrong)].name}"
        return ""

    async def _wrong(self, anchor: Anchor, files: Iterable[Sums]) -> str:
        """Tensors that are not all there, or not as the version has them; empty if all are."""
        vector, counts = [0] * len(self._layout), [0] * len(self._layout)
        for tensor, box, value in (entry for entries in files for entry in entries):
            vector[tensor] = (vector[tensor] + value) & MASK
            counts[tensor] += box.elements
        short = {spec.name for spec, count in zip(self._layout, counts, strict=True) if count != spec.elements}
        seal = self._seals.get(anchor.version, self._stream)
        try:
            want = await self._reader.read_vector(seal, self._layout)
        except (Corrupt, ObjectPending, BelowFloor):  # told elsewhere; the total still says whether anything is wrong
            differ = set() if records.show_u64(sum(vector) & MASK) == anchor.total else {"some tensor"}
        else:
            differ = {s.name for s, ours, theirs in zip(self._layout, vector, want, strict=True) if ours != int(theirs)}
        return shorten(sorted(short | differ))

    async def _changes(self, seal: Seal, parts: Iterable[Part]) -> Vector | None:
        """What the chunks add to the vector (mod 2^64); None if one of them cannot be read."""
        known = [(ref, part, self._part_contents(ref, part)) for ref, part in zip(seal.parts, parts, strict=True)]
        sums = await asyncio.gather(
            *(
                self._chunk(seal, ref, part=part, n=n, contents=held)
                for ref, part, held in known
                for n in range(len(part.chunks))
            )
        )
        vector = np.zeros(len(self._layout), dtype=np.uint64)
        for delta in sums:
            if delta is None:
                return None
            vector += delta
        return vector

    def _part_contents(self, ref: ObjectRef, part: Part) -> Contents | None:
        """What a part says about its chunks; None if nothing, or nothing that counts."""
        if part.contents is None:
            return None
        try:
            contents = read_contents(part.contents, len(self._layout))
            if contents.counts.size != len(part.chunks):
                raise Corrupt(f"its contents speak of {contents.counts.size} chunks, not {len(part.chunks)}")
        except Corrupt as error:  # whoever would go by it reads all chunks instead
            self.damages.append(
                Damage(key=ref.key, version=part.version, what=error.message, rebuildable=True, repair=SPARE)
            )
            return None
        return contents

    async def _sums(self, seal: Seal, parts: Iterable[Part]) -> None:
        """That what the ranks held before and after adds up to what the seal says (must P3).

        Early writers put down only what they held before.
        """
        n, added, key, whole = len(self._layout), np.zeros(2, dtype=np.uint64), "", True
        for part in parts:
            key, size = part.sums.key, part.sums.size
            reading = self._reader.read(part.sums, seal.version, limit=16 * n)
            body = await self._try(key, seal.version, reading, size)
            if body is None:
                return
            if len(body) not in (8 * n, 16 * n):
                self._damage(key, seal.version, f"it does not hold vectors of {n} tensors")
                return
            whole &= len(body) == 16 * n
            sums = np.frombuffer(body, dtype="<u8").reshape(-1, n).sum(axis=1, dtype=np.uint64)
            added[: len(sums)] += sums
        if seal.before != self._totals.get(seal.base, seal.before):
            return  # told already
        if key and records.show_u64(int(added[0])) != seal.before:
            self._damage(key, seal.version, "the sums beside the parts do not add up to the seal's sum before")
        if key and whole and records.show_u64(int(added[1])) != seal.after:
            self._damage(key, seal.version, "the sums beside the parts do not add up to the seal's sum after")

    async def _chunk(
        self, seal: Seal, of: ObjectRef, *, part: Part, n: int, contents: Contents | None
    ) -> Vector | None:
        ref = part.chunks[n]

        async def read() -> tuple[Vector, set[int]]:
            data = await self._reader.read_chunk(ref, seal.version)
            return await self._work(_chunk_sums, data, self._layout, part, n, contents)

        async with self._slots:
            found = await self._try(ref.key, seal.version, read(), ref.size)
        if found and found[1]:
            what = f"its contents leave out what chunk {n} changes in {self._layout[min(found[1])].name}"
            self.damages.append(Damage(key=of.key, version=seal.version, what=what, repair=_MISLEADS))
        return found[0] if found else None

    async def _file(self, ref: ObjectRef, version: int) -> Sums | None:
        async def read() -> Sums:
            body = await self._reader.read_file(ref, version)
            return await self._work(_file_sums, body, ref.key, self._layout)

        async with self._slots:
            return await self._try(ref.key, version, read(), ref.size)

    async def _extra(self, ref: ObjectRef, version: int) -> None:
        async with self._slots:
            await self._try(ref.key, version, self._reader.read_file(ref, version), ref.size)

    async def _work(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        if self._workers:
            return await self._workers.run(function, *args)
        return function(*args, **kwargs)

    async def _try(self, key: str, version: int, reading: Awaitable[T], *sizes: int) -> T | None:
        """Await a read of objects of these sizes; damage is noted under `key` and answered with None."""
        try:
            result = await reading
        except BelowFloor:
            return None
        except (Corrupt, ObjectPending) as error:
            self._damage(key, version, error.message)
            return None
        self._count(*sizes)
        return result

    def _note(self, found: Iterable[Found], version: int) -> None:
        """What ranks put there beside what records name: nobody needs it any more."""
        for one in found:
            if one.wrong:
                self.damages.append(
                    Damage(key=one.key, version=version, what=one.wrong, rebuildable=True, repair=SPARE)
                )
            else:
                self._count(one.size)

    def _count(self, *sizes: int) -> None:
        self.objects += len(sizes)
        self.bytes += sum(sizes)

    def _damage(self, key: str, version: int, what: str) -> None:
        self.damages.append(Damage(key=key, version=version, what=what))

    def _rebuildable(self, key: str) -> None:
        """The content of a damaged vector follows from the version before and the chunks."""
        self.damages = [msgspec.structs.replace(d, rebuildable=True) if d.key == key else d for d in self.damages]


#: of the vector of version 0 below the floor, which is never deleted
_FIRST = (
    "no version is lost: an engine that holds the base checkpoint is not recognised any more, and loads an anchor; "
    "a backup of the object, or the same from any other stream that was created from this base, puts it right"
)
_MISLEADS = (
    "replicas are not concerned; a rank of many that restores without a cache needs an anchor at or above it: "
    "restarted with --anchor-every 1 the publisher writes one at once"
)


def _chunk_sums(
    data: bytes, layout: Layout, part: Part, number: int, contents: Contents | None
) -> tuple[Vector, set[int]]:
    """What one chunk adds to the vector, and the tensors in which it changes more than the contents say. Decodes every
    segment: a chunk that cannot be applied is damage."""
    chunk, ref = open_chunk(data, layout), part.chunks[number]
    found = (chunk.id.stream, chunk.id.attempt, chunk.id.base, chunk.id.version, chunk.id.group, chunk.id.rank)
    if found != (part.stream, part.attempt, part.base, part.version, part.group, part.rank):
        raise Corrupt(f"{ref.key} is a chunk of another attempt: {chunk.id}")
    if (len(chunk.segments), sum(s.changed for s in chunk.segments)) != (ref.segments, ref.changed):
        raise Corrupt(f"{ref.key} does not have the {ref.segments} segments and {ref.changed} changes of its part")
    sums = [0] * len(layout)
    for n, segment in enumerate(chunk.segments):
        chunk.changes(n)
        sums[segment.tensor] += segment.after - segment.before
    outside = contents.outside(number, ((s.tensor, s.box) for s in chunk.segments)) if contents else set[int]()
    return np.array([value % (1 << 64) for value in sums], dtype=np.uint64), outside


def _file_sums(body: bytes, name: str, layout: Layout) -> Sums:
    """What one file of an anchor holds."""
    found = read_pieces(SafetensorsBytes(body, name), layout)
    return [(t, box, sum_box(bits, box, key=int(layout.keys[t]))) for t, box, bits in found if box is not None]

"""Is everything that the ledger names there, and does it add up? (`dcr verify`)

Reads every record, every object of every version at or above the floor, and every file of every anchor; recomputes
the chain of fingerprint vectors from the chunks. It only reads, and may run beside publishers and replicas. What it
finds is said together with what still can be done about it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from typing import TypeVar

import msgspec
import numpy as np

from dcr_daemon import runtime
from dcr_daemon.canonical.fingerprint import Vector, total
from dcr_daemon.canonical.layout import Layout
from dcr_daemon.codec.decode import open_chunk
from dcr_daemon.errors import Corrupt
from dcr_daemon.events import Emit, discard
from dcr_daemon.ledger import names, records
from dcr_daemon.ledger.fold import Step
from dcr_daemon.ledger.objects import BelowFloor, NotYet, Objects
from dcr_daemon.ledger.records import Anchor, ChunkRef, ObjectRef, Part, Seal, State, Stream
from dcr_daemon.ledger.replay import replay
from dcr_daemon.store.port import Store

T = TypeVar("T")
AT_ONCE = 4  #: objects in flight


class Damage(msgspec.Struct, frozen=True, kw_only=True):
    """One thing that is wrong. `repair` says what can be done; `rebuildable` whether its content still exists."""

    key: str
    version: int | None
    what: str
    rebuildable: bool = False
    repair: str = ""


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """What was looked at, and what was found.

    `void` names records that count for nobody. Those of a stale epoch harm nothing; others are among the damages.
    """

    stream: str
    head: int
    floor: int
    records: int
    void: list[str]
    versions: int
    anchors: int
    objects: int
    bytes: int
    damages: list[Damage]

    @property
    def ok(self) -> bool:
        return not self.damages


Progress = Callable[[str, int, int], None]
"""Called with what is being read, how many of how many."""


async def verify(
    store: Store,
    *,
    emit: Emit = discard,
    progress: Progress | None = None,
    workers: runtime.Workers | None = None,
) -> Report:
    """Check the whole stream in `store`.

    Raises:
        NotFound: there is no stream.
        Corrupt: its first record or its layout cannot be read: then nothing can be checked.
        Incompatible: it is of a newer format.
    """
    found = await _read_ledger(store)
    check = _Check(store, found, emit=emit, workers=workers)
    await check.open()
    seals = [seal for seal in found.seals if seal.version >= found.state.floor]
    anchors = [anchor for anchor in found.anchors if anchor.version >= found.state.floor]
    for n, seal in enumerate(seals):
        if progress:
            progress(f"version {seal.version}", n, len(seals) + len(anchors))
        await check.version(seal)
    for n, anchor in enumerate(anchors):
        if progress:
            progress(f"anchor of version {anchor.version}", len(seals) + n, len(seals) + len(anchors))
        await check.anchor(anchor)
    # Retention may have raised the floor meanwhile: what it may delete is not damage (must L5).
    floor = max(found.state.floor, (await _read_ledger(store)).state.floor) if check.damages else found.state.floor
    damages = [d for d in check.damages if d.version is None or d.version >= floor]
    return Report(
        stream=found.stream.stream,
        head=found.state.seal.version,
        floor=floor,
        records=found.records,
        void=found.void,
        versions=len(seals),
        anchors=len(anchors),
        objects=check.objects,
        bytes=check.bytes,
        damages=[*found.damages, *(_with_repair(d, damages, anchors) for d in damages)],
    )


class _Found:
    """The ledger, read from its first record."""

    def __init__(self, stream: Stream, state: State) -> None:
        self.stream = stream
        self.state = state
        self.records = 1
        self.void: list[str] = []
        self.seals: list[Seal] = []
        self.anchors: list[Anchor] = []
        self.damages: list[Damage] = []
        self._foreign = -1

    def note_void(self, step: Step) -> None:
        """A void record; the first of a run that no honest writer can have written is damage."""
        seq = step.tip.seq
        self.void.append(f"record {seq}: {step.void}")
        if not step.foreign:
            return
        if seq != self._foreign + 1:
            what = f"record {seq} is not what was written after record {seq - 1}: {step.void}"
            repair = (
                "void, and so is what was written after it; if one of the two once counted, restore it from a backup"
            )
            self.damages.append(Damage(key=names.record(seq), version=None, what=what, repair=repair))
        self._foreign = seq


async def _read_ledger(store: Store) -> _Found:
    found: _Found | None = None
    try:
        async for step in replay(store):
            if found is None:
                assert isinstance(step.record, Stream)
                found = _Found(step.record, step.tip.state)
                continue
            found.records, found.state = found.records + 1, step.tip.state
            if step.record is None:
                found.note_void(step)
            elif isinstance(step.record, Seal):
                found.seals.append(step.record)
            elif isinstance(step.record, Anchor):
                found.anchors.append(step.record)
    except Corrupt as error:
        if found is None:
            raise
        found.damages.append(
            Damage(
                key=names.record(found.records),
                version=None,
                what=error.message,
                repair="the ledger above it cannot be trusted: restore the record from a backup of the bucket",
            )
        )
    assert found is not None
    return found


class _Check:
    """Reads and compares; collects damages instead of raising them."""

    def __init__(self, store: Store, found: _Found, *, emit: Emit, workers: runtime.Workers | None) -> None:
        self.damages: list[Damage] = []
        self.objects = 0
        self.bytes = 0
        self._found = found
        self._workers = workers
        # No patience: what is missing when it is looked for is what this command is asked about.
        self._reader = Objects(store, floor=lambda: found.state.floor, emit=emit, patience=0, workers=workers)
        self._slots = asyncio.Semaphore(AT_ONCE)
        self._layout: Layout
        self._totals = {0: found.stream.total} | {seal.version: seal.after for seal in found.seals}
        self._known: tuple[int, Vector] | None = None

    async def open(self) -> None:
        """Read the layout, and the vector that the chain starts from."""
        stream, floor = self._found.stream, self._found.state.floor
        try:
            self._layout = await self._reader.read_layout(stream)
        except NotYet as error:
            raise Corrupt(
                f"{stream.layout.key} is gone, and nothing can be read without it",
                hint="put the layout back: any checkpoint of this stream gives the same bytes",
            ) from error
        self._count(stream.layout.size)
        if floor == 0:
            vector = await self._try(
                stream.fingerprint.key, 0, self._reader.read_vector(stream, self._layout), stream.fingerprint.size
            )
            self._known = None if vector is None else (0, vector)

    async def version(self, seal: Seal) -> None:
        """Everything that one seal names, and that the chunks lead from the vector before to its own."""
        place = names.attempt(seal.version, seal.attempt)
        vector = await self._try(
            seal.fingerprint.key, seal.version, self._reader.read_vector(seal, self._layout), seal.fingerprint.size
        )
        sizes = [ref.size for ref in seal.parts]
        parts = await self._try(place, seal.version, self._reader.read_parts(seal), *sizes)
        changes = await self._changes(seal, parts) if parts is not None else None
        before, self._known = self._known, None if vector is None else (seal.version, vector)
        if seal.before != self._totals.get(seal.base, seal.before):
            self._damage(names.record(seal.seq), seal.version, "its sum before is not the sum after the version before")
        if changes is None or before is None or before[0] != seal.base:
            return
        reached = before[1] + changes
        if vector is not None and not np.array_equal(reached, vector):
            tensors = [self._layout[int(i)].name for i in np.flatnonzero(reached != vector)[:3]]
            self._damage(
                place,
                seal.version,
                f"its chunks do not lead from version {seal.base} to its fingerprint: {', '.join(tensors)}",
            )
        if vector is None and records.show_u64(total(reached)) == seal.after:
            self._known = (seal.version, reached)
            self._rebuildable(seal.fingerprint.key, "its content follows from the version before and the chunks")

    async def anchor(self, anchor: Anchor) -> None:
        """An anchor's index and every file it names."""
        if anchor.total != self._totals.get(anchor.version):
            self._damage(names.record(anchor.seq), anchor.version, "its sum is not that of the version")
        index = await self._try(
            anchor.index.key, anchor.version, self._reader.read_anchor_index(anchor), anchor.index.size
        )
        if index is None:
            return
        files = [*index.files, *index.extras]
        await asyncio.gather(*(self._file(ref, anchor.version) for ref in files))

    async def _changes(self, seal: Seal, parts: Iterable[Part]) -> Vector | None:
        """What the chunks add to the vector (mod 2^64); None if one of them cannot be read."""
        sums = await asyncio.gather(*(self._chunk(seal, part, chunk) for part in parts for chunk in part.chunks))
        vector = np.zeros(len(self._layout), dtype=np.uint64)
        for delta in sums:
            if delta is None:
                return None
            vector += delta
        return vector

    async def _chunk(self, seal: Seal, part: Part, ref: ChunkRef) -> Vector | None:
        async def read() -> Vector:
            data = await self._reader.read_chunk(ref, seal.version)
            if self._workers:
                return await self._workers.run(_chunk_sums, data, self._layout, part, ref)
            return _chunk_sums(data, self._layout, part, ref)

        async with self._slots:
            return await self._try(ref.key, seal.version, read(), ref.size)

    async def _file(self, ref: ObjectRef, version: int) -> None:
        async with self._slots:
            await self._try(ref.key, version, self._reader.read_file(ref, version), ref.size)

    async def _try(self, key: str, version: int, reading: Awaitable[T], *sizes: int) -> T | None:
        """Await a read of objects of these sizes; damage is noted under `key` and answered with None."""
        try:
            result = await reading
        except BelowFloor:
            return None
        except (Corrupt, NotYet) as error:
            self._damage(key, version, error.message)
            return None
        self._count(*sizes)
        return result

    def _count(self, *sizes: int) -> None:
        self.objects += len(sizes)
        self.bytes += sum(sizes)

    def _damage(self, key: str, version: int, what: str) -> None:
        self.damages.append(Damage(key=key, version=version, what=what))

    def _rebuildable(self, key: str, repair: str) -> None:
        self.damages = [
            msgspec.structs.replace(d, rebuildable=True, repair=repair) if d.key == key else d for d in self.damages
        ]


def _chunk_sums(data: bytes, layout: Layout, part: Part, ref: ChunkRef) -> Vector:
    """What one chunk adds to the vector. Decodes every segment: a chunk that cannot be applied is damage."""
    chunk = open_chunk(data, layout)
    found = (chunk.id.stream, chunk.id.attempt, chunk.id.base, chunk.id.version, chunk.id.group, chunk.id.rank)
    if found != (part.stream, part.attempt, part.base, part.version, part.group, part.rank):
        raise Corrupt(f"{ref.key} is a chunk of another attempt: {chunk.id}")
    if (len(chunk.segments), sum(s.changed for s in chunk.segments)) != (ref.segments, ref.changed):
        raise Corrupt(f"{ref.key} does not have the {ref.segments} segments and {ref.changed} changes of its part")
    sums = [0] * len(layout)
    for n, segment in enumerate(chunk.segments):
        chunk.changes(n)
        sums[segment.tensor] += segment.after - segment.before
    return np.array([value % (1 << 64) for value in sums], dtype=np.uint64)


def _with_repair(damage: Damage, damages: list[Damage], anchors: list[Anchor]) -> Damage:
    """Say what can be done about one damage, knowing all others."""
    if damage.repair or damage.version is None:
        return damage
    hurt = {d.version for d in damages if d.key.startswith("anchors/")}
    whole = sorted(a.version for a in anchors if a.version not in hurt)
    broken = {d.version for d in damages if d.key.startswith("data/") and not d.rebuildable}
    version = damage.version
    if damage.key.startswith("anchors/"):
        start = max((a for a in whole if a < version and not broken & set(range(a + 1, version + 1))), default=None)
        if start is None:
            return msgspec.structs.replace(damage, repair="lost; replicas need a later anchor")
        repair = f"`dcr materialize --version {version}` still builds it, from the anchor of version {start}"
        return msgspec.structs.replace(damage, rebuildable=True, repair=repair)
    if damage.key.startswith("ledger/"):
        return msgspec.structs.replace(damage, repair="replicas refuse it: have the publisher write an anchor above it")
    past = next((a for a in whole if a >= version), None)
    if past is not None:
        repair = f"harmless now: replicas below version {version} go by the anchor of version {past}"
    else:
        repair = f"replicas below version {version} wait until the publisher writes an anchor at or above it"
    return msgspec.structs.replace(damage, repair=repair)

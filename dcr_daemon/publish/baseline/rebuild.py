"""Fills a baseline from a bucket or a checkpoint: reads only what its blocks need, many objects at a time.

A rank of many holds a small part of the model, and a rank that replaces it must not read the whole model: an anchor
says what is in its files, a part what its chunks touch (`checkpoint.contents`). An object without such a table, or with
a damaged one, is read. Nothing is proved here: `Restorer` does that, or rank 0 for all ranks (must P3).
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from functools import partial

from dcr_daemon import runtime
from dcr_daemon.checkpoint.contents import Contents, read_contents, split_tables
from dcr_daemon.checkpoint.directory import Checkpoint
from dcr_daemon.checkpoint.pieces import read_pieces
from dcr_daemon.checkpoint.safetensors import SafetensorsBytes
from dcr_daemon.codec.decode import Chunk, open_chunk
from dcr_daemon.errors import Corrupt
from dcr_daemon.events import Degraded, Emit, Rebuilding
from dcr_daemon.ledger.objects import ObjectPending, Objects
from dcr_daemon.ledger.records import Anchor, AnchorIndex, ChunkRef, ObjectRef, Part, Seal
from dcr_daemon.publish.baseline.baseline import Baseline
from dcr_daemon.publish.baseline.fetched import FetchedObjects
from dcr_daemon.runtime import Workers
from dcr_daemon.store.poller import REPORT_EVERY
from dcr_daemon.task_limiter import TaskLimiter, run_in_order
from dcr_daemon.wording import shorten

AT_ONCE = 16  #: objects read at a time
BUDGET_BYTES = 1 << 30  #: bytes that they may have together; anchor files are the large ones, four of them fit


class Rebuild:
    """Fills one baseline.

    Attributes:
        damaged: versions of which an object did not appear, or is not what the ledger says.
        thorough: read all objects, whatever the tables of contents say.
    """

    def __init__(
        self, objects: Objects, baseline: Baseline, *, fetched: FetchedObjects, workers: Workers, emit: Emit
    ) -> None:
        self._objects, self._baseline, self._workers, self._emit = objects, baseline, workers, emit
        self._fetched = fetched
        self.damaged: set[int] = set()
        self.thorough = False

    async def load_base(self, checkpoint: Checkpoint) -> None:
        """Load all blocks from an open checkpoint. Raises as `Baseline.load`."""
        blocks = self._baseline.blocks
        progress = _Progress(self._emit, f"the base {checkpoint.path}", sum(map(blocks.nbytes, range(len(blocks)))))
        await self._baseline.load(checkpoint, progress.add)

    async def load_anchor(self, anchor: Anchor) -> None:
        """Load all blocks from an anchor.

        Raises:
            Corrupt: it does not hold all blocks.
        """
        index = await self._objects.read_anchor_index(anchor)
        wanted, rest = await self._files(index)
        self._baseline.invalidate()
        blocks, filled = self._baseline.blocks, [0] * len(self._baseline.layout)
        what = f"the anchor of version {anchor.version}"
        for files in (wanted, rest):
            await self._load_files(files, filled, what=what, version=anchor.version)
            short = [s.name for t, s in enumerate(blocks.layout) if filled[t] != blocks.elements(t)]
            if not short:
                return
            if files is wanted and rest:
                self._emit(Degraded(what=f"{what}: it holds {short[0]} elsewhere than it says; all of it is read"))
        raise Corrupt(f"{what} does not hold all of {shorten(short)}")

    async def _files(self, index: AnchorIndex) -> tuple[list[ObjectRef], list[ObjectRef]]:
        """The files of an anchor that may hold a part of the blocks, and the others."""
        if self.thorough or self._baseline.blocks.complete:
            return index.files, []
        try:
            tables = await self._objects.read_contents(index)
            if tables is None:
                return index.files, []
            touched = await self._workers.run(self._touched, split_tables(tables), len(index.files))
        except (Corrupt, ObjectPending) as error:
            self._emit(Degraded(what=f"reading all of the anchor of version {index.version}: {error.message}"))
            return index.files, []
        return (
            [file for file, wanted in zip(index.files, touched, strict=True) if wanted],
            [file for file, wanted in zip(index.files, touched, strict=True) if not wanted],
        )

    def _touched(self, tables: Iterable[bytes], objects: int) -> list[bool]:
        """Which of so many objects may hold a part of the blocks, by their tables, which follow one another."""
        blocks, found = self._baseline.blocks, list[bool]()
        for table in tables:
            contents: Contents = read_contents(table, len(blocks.layout))
            found += contents.touched(blocks.boxes).tolist()
        if len(found) != objects:
            raise Corrupt(f"tables of contents speak of {len(found)} objects, and there are {objects}")
        return found

    async def _load_files(self, files: Sequence[ObjectRef], filled: list[int], *, what: str, version: int) -> None:
        progress = _Progress(self._emit, what, sum(file.size for file in files))

        async def load(ref: ObjectRef) -> None:
            body = await self._fetched.read(ref, lambda keep: self._objects.read_file(ref, version, keep=keep))
            for tensor, elements in await self._workers.run_uncancellable(self._place, body, ref.key):
                filled[tensor] += elements
            progress.add(ref.size)
            runtime.failpoint("publish.restore.anchor")

        async with TaskLimiter(AT_ONCE, BUDGET_BYTES) as group:
            for ref in files:
                await group.start(partial(load, ref), ref.size)

    def _place(self, body: bytes, name: str) -> list[tuple[int, int]]:
        pieces = read_pieces(SafetensorsBytes(body, name), self._baseline.layout)
        return [(t, self._baseline.place(t, box, bits)) for t, box, bits in pieces if box is not None]

    async def apply(self, versions: Sequence[int], seal_of: Callable[[int], Awaitable[Seal]]) -> None:
        """Move the baseline forward by these versions, one after the other.

        The chunks of one version are applied in any order, since no two of them have an element in common. Those of the
        next are fetched meanwhile, and wait; parts are read further ahead.

        Raises:
            ObjectPending, Corrupt: a chunk or a part did not appear, or has other bytes; `damaged` has the version.
        """
        self._baseline.invalidate()
        before = asyncio.Event()
        before.set()

        async def plan(version: int) -> tuple[Seal, list[ChunkRef]]:
            with self._blames(version):
                seal = await seal_of(version)
                return seal, await self._chunks(seal)

        plans = run_in_order((partial(plan, version) for version in versions), AT_ONCE)
        async with TaskLimiter(AT_ONCE, BUDGET_BYTES) as group, contextlib.aclosing(plans):
            async for seal, chunks in plans:
                before = await self._apply(group, seal, chunks=chunks, before=before)

    @contextlib.contextmanager
    def _blames(self, version: int) -> Iterator[None]:
        """Reads only objects of `version`: what fails is damage of that version."""
        try:
            yield
        except (Corrupt, ObjectPending):
            self.damaged.add(version)
            raise

    async def _apply(
        self, group: TaskLimiter, seal: Seal, *, chunks: list[ChunkRef], before: asyncio.Event
    ) -> asyncio.Event:
        """Begin to apply the chunks of a version as soon as `before` says that its base is there. What is returned
        says the same of the version."""
        left, done = itertools.count(len(chunks) - 1, -1), asyncio.Event()
        progress = _Progress(self._emit, f"version {seal.version}", sum(ref.size for ref in chunks))

        def ended() -> None:
            runtime.failpoint("publish.restore.version")
            done.set()

        async def take(ref: ChunkRef) -> None:
            with self._blames(seal.version):
                chunk = await self._open(ref, seal)
            await before.wait()
            await self._workers.run_uncancellable(self._baseline.apply, chunk)
            progress.add(ref.size)
            if next(left) == 0:
                ended()

        async def nothing() -> None:
            await before.wait()
            ended()

        if not chunks:
            await group.start(nothing)
        for ref in chunks:
            await group.start(partial(take, ref), ref.size)
        return done

    async def _chunks(self, seal: Seal) -> list[ChunkRef]:
        """The chunks of a version that may change the blocks."""
        parts = await self._objects.read_parts(seal)
        if self.thorough or self._baseline.blocks.complete:
            return [chunk for part in parts for chunk in part.chunks]
        wanted, damage = await self._workers.run(self._wanted, parts)
        if damage:
            self._emit(Degraded(what=f"reading more chunks of version {seal.version} than are needed: {damage}"))
        return wanted

    def _wanted(self, parts: Iterable[Part]) -> tuple[list[ChunkRef], str]:
        """The chunks that may change the blocks; and the damage because of which more are among them, if any."""
        wanted, damage = list[ChunkRef](), ""
        for part in parts:
            touched = [True] * len(part.chunks)
            if part.contents is not None:
                try:
                    touched = self._touched([part.contents], len(part.chunks))
                except Corrupt as error:
                    damage = f"of rank {part.rank}, {error.message}"
            wanted += [chunk for chunk, one in zip(part.chunks, touched, strict=True) if one]
        return wanted, damage

    async def _open(self, ref: ChunkRef, seal: Seal) -> Chunk:
        data = await self._fetched.read(ref, lambda keep: self._objects.read_chunk(ref, seal.version, keep=keep))
        chunk = await self._workers.run(open_chunk, data, self._baseline.layout)
        found = (chunk.id.stream, chunk.id.attempt, chunk.id.base, chunk.id.version)
        if found != (seal.stream, seal.attempt, seal.base, seal.version):
            raise Corrupt(f"{ref.key} belongs to another attempt: {found}")
        return chunk


class _Progress:
    """Emits `Rebuilding` every `REPORT_EVERY` seconds, and at the end if it has emitted one before."""

    def __init__(self, emit: Emit, what: str, total: int) -> None:
        self._emit, self._what, self._total = emit, what, total
        self._done, self._told, self._said = 0, runtime.monotonic(), False

    def add(self, size: int) -> None:
        self._done += size
        if runtime.monotonic() - self._told > REPORT_EVERY or (self._said and self._done == self._total):
            self._told, self._said = runtime.monotonic(), True
            self._emit(Rebuilding(what=self._what, done=self._done, total=self._total))

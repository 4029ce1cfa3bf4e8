"""One try at building a version: diff as tensors come, encode, spool, upload; then a part that a seal can name.

    diff ... diff ─► finish ─► upload ─► (the leader seals) ─► forget
       └───────────────┴─────────┴────────► cancel ─► undo

Diffing runs on all workers, one encoder each, and full chunks leave while later tensors are still being read. Until the
fate is known everything that `undo` needs is in the spool. Vectors are carried along:
vector(version) = vector(base) + sum of (after - before) over its segments (must P3).
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from dcr_daemon import runtime
from dcr_daemon.canonical.fingerprint import Bits, Vector, advance
from dcr_daemon.checkpoint.blocks import Block, block_bytes
from dcr_daemon.checkpoint.contents import Contents
from dcr_daemon.codec.chunk import ChunkId, Codec, Segment
from dcr_daemon.codec.decode import open_chunk
from dcr_daemon.codec.encode import ChunkEncoder, EncodedChunk
from dcr_daemon.codec.undo import undo_chunk
from dcr_daemon.errors import DcrError, ResourceExhausted
from dcr_daemon.events import Diffed
from dcr_daemon.ledger import names, records
from dcr_daemon.ledger.records import ChunkRef, ObjectRef, Open, Part
from dcr_daemon.publish.baseline.baseline import Baseline
from dcr_daemon.publish.inputs.sources import Source
from dcr_daemon.publish.resources import RankResources
from dcr_daemon.publish.version.fate import AttemptFate
from dcr_daemon.publish.version.spool import Spool
from dcr_daemon.publish.version.uploads import Uploads
from dcr_daemon.store.port import Store
from dcr_daemon.store.put_if_absent import put_if_absent
from dcr_daemon.store.retry import RetryPolicy
from dcr_daemon.task_limiter import run_limited

Batch = list[tuple[int, Callable[[], Bits]]]  #: numbers of blocks, and what reads their new bits


@dataclass(frozen=True, slots=True)
class Upload:
    """An object that a record will name: its digest is known before it is in the bucket."""

    ref: ObjectRef
    body: bytes

    @classmethod
    def of(cls, key: str, body: bytes) -> Upload:
        return cls(ObjectRef(key, len(body), records.digest(body)), body)

    async def put(self, store: Store, patience: float) -> ObjectRef:
        """Returns when it is durable."""
        await put_if_absent(store, self.ref.key, self.body, patience=RetryPolicy(patience))
        return self.ref


@dataclass(frozen=True, slots=True)
class Contribution:
    """What one rank's finished part of an attempt offers to the seal. Sizes in bytes, `changed` in elements.

    `before` and `after` are vectors over all that the rank owns, changed or not (must P3).
    """

    part: Upload
    sums: Upload
    before: Vector
    after: Vector
    changed: int
    bytes: int


class Attempt:
    """The attempt that `record` opened. One at a time; owned by one `RankContext`.

    Attributes:
        id: the seq of its `open` record.
        fate: what becomes of it; `RankContext`, `Leader` and `Member` write it, and `Update` if the background work
            dies.
        segments: of the chunks that were made so far.
        changed: elements that differ from the base, so far.
        started: when it began, on `runtime.monotonic`.
    """

    def __init__(
        self, record: Open, resources: RankResources, *, baseline: Baseline, spool: Spool, uploads: Uploads
    ) -> None:
        self.record = record
        self.id = record.seq
        self.version = record.version
        self.fate = AttemptFate(record.version)
        self.started = runtime.monotonic()
        self._rank, self._baseline, self._spool = resources.rank, baseline, spool
        self._uploads, self._workers, self._emit = uploads, resources.workers, resources.emit
        codec, chunk_bytes = resources.options.codec, resources.options.chunk_bytes
        self._encoders = [
            ChunkEncoder(baseline.layout, codec=codec, target=chunk_bytes) for _ in range(self._workers.count)
        ]
        self._batch_bytes = block_bytes(chunk_bytes)
        self._number = itertools.count()
        self.segments: list[Segment] = []
        self._of_chunk: dict[int, Sequence[Segment]] = {}
        self._refs: dict[int, ChunkRef] = {}
        self._stopped = self._baseline_unknown = False
        self.changed = 0
        baseline.begin()
        runtime.failpoint("publish.baseline.begun")

    @property
    def size(self) -> int:
        """Bytes of its chunks so far."""
        return sum(ref.size for ref in self._refs.values())

    async def diff(self, inputs: Iterable[tuple[int, Source]], codec: Codec | None = None) -> None:
        """Take up whole tensors, `(layout index, source)` each; returns when none of the sources is needed any more.

        Args:
            codec: of their changes; by default that of the attempt.

        Raises:
            ResourceExhausted: the spool's disk is full.
            StoreUnavailable, Corrupt: an upload failed; the attempt is to be cancelled and undone.
        """
        blocks, layout = self._baseline.blocks, self._baseline.layout

        def read(source: Source, block: Block) -> Bits:
            return source.read(block.box.dst, block.box.elements, layout[block.tensor].dtype)

        await self.diff_blocks(
            ((n, partial(read, source, blocks[n])) for t, source in inputs for n in blocks.of(t)), codec
        )

    async def diff_blocks(self, inputs: Iterable[tuple[int, Callable[[], Bits]]], codec: Codec | None = None) -> None:
        """Diff blocks of the baseline, by number, each with what reads its new bits, on any thread; as `diff`."""
        work = self._batches(inputs)
        await self._run_all([self._diff_on_one_worker(encoder, work, codec) for encoder in self._encoders])

    async def finish(self) -> None:
        """No more tensors will come: close the chunks that are begun."""
        await self._run_all([self._flush(encoder) for encoder in self._encoders])
        if not self._stopped:
            seconds = runtime.monotonic() - self.started
            self._emit(Diffed(version=self.version, attempt=self.id, changed=self.changed, seconds=seconds))
        runtime.failpoint("publish.diffed")

    async def _run_all(self, diffs: Sequence[Awaitable[None]]) -> None:
        """Run every diff to its end, whatever happens: a thread that still diffs must not outlive its attempt."""
        ended = asyncio.gather(*diffs, return_exceptions=True)
        try:
            results = await asyncio.shield(ended)
        except asyncio.CancelledError:
            self._stopped = True
            await ended
            raise
        for result in results:
            if isinstance(result, BaseException):
                raise result

    async def _diff_on_one_worker(self, encoder: ChunkEncoder, work: Iterator[Batch], codec: Codec | None) -> None:
        try:
            for batch in work:
                if self._stopped:
                    return
                for chunk, ref in await self._workers.run(self._encode_batch, encoder, batch, codec):
                    await self._spool_and_queue(chunk, ref)
        except BaseException:
            self._stopped = True  # the other diffs need not go on
            raise

    async def _flush(self, encoder: ChunkEncoder) -> None:
        if encoder.changed:
            await self._spool_and_queue(*await self._workers.run(self._close, encoder))

    def _batches(self, inputs: Iterable[tuple[int, Callable[[], Bits]]]) -> Iterator[Batch]:
        """Small blocks together, so that a hop to a worker thread pays."""
        batch, size = [], 0
        for number, read in inputs:
            batch.append((number, read))
            size += self._baseline.blocks.nbytes(number)
            if size >= self._batch_bytes:
                yield batch
                batch, size = [], 0
        if batch:
            yield batch

    def _encode_batch(
        self, encoder: ChunkEncoder, batch: Batch, codec: Codec | None
    ) -> list[tuple[EncodedChunk, ChunkRef]]:
        blocks, full = self._baseline.blocks, []
        for number, read in batch:
            block, new = blocks[number], read()
            try:
                encoder.add(block.tensor, block.box, self._baseline[number], new, codec)
            except BaseException:
                self._baseline_unknown = True  # the baseline may have moved without a segment that says so
                raise
            if encoder.full:
                full.append(self._close(encoder))
        return full

    def _close(self, encoder: ChunkEncoder) -> tuple[EncodedChunk, ChunkRef]:
        r, n = self.record, next(self._number)
        identity = ChunkId(
            stream=r.stream, attempt=r.seq, base=r.base, version=r.version, group=r.group,
            rank=self._rank.number, nonce=self._rank.nonce, n=n,
        )  # fmt: skip
        chunk = encoder.finish(identity)
        key = names.chunk(r.version, r.seq, r.group, self._rank.number, self._rank.nonce, n)
        digest = records.digest(chunk.data)
        return chunk, ChunkRef(key, len(chunk.data), digest, len(chunk.segments), chunk.changed)

    async def _spool_and_queue(self, chunk: EncodedChunk, ref: ChunkRef) -> None:
        n = chunk.id.n
        await self._spool.put(chunk)
        self.segments.extend(chunk.segments)
        self._of_chunk[n], self._refs[n] = chunk.segments, ref
        self.changed += chunk.changed
        if not self._stopped:
            await self._uploads.admit(n, ref, lambda: self._spool.data(n))

    async def contribution(self, *, anchor: bool = False) -> Contribution:
        """What this rank's part and sums will be, once the diff is finished. Nothing is uploaded.

        Args:
            anchor: ask for an anchor of the version.
        """
        r = self.record
        before = self._baseline.vector
        after = advance(before, self.segments)
        address = (r.version, r.seq, r.group, self._rank.number, self._rank.nonce)
        sums = Upload.of(names.sums(*address), np.concatenate([before, after]).astype("<u8").tobytes())
        chunks = [self._refs[n] for n in sorted(self._refs)]
        part = Part(
            stream=r.stream, group=r.group, call=r.call, attempt=r.seq, base=r.base, version=r.version,
            rank=self._rank.number, nonce=self._rank.nonce, chunks=chunks, sums=sums.ref, changed=self.changed,
            bytes=self.size, stray=self._baseline.unverified_base, anchor=anchor,
            contents=await self._contents(),
        )  # fmt: skip
        upload = Upload.of(names.part(*address), records.encode(part))
        return Contribution(upload, sums, before, after, self.changed, part.bytes)

    async def upload(self, own: Contribution, patience: float) -> None:
        """Returns when all of this rank that the seal will name is durable (must L4).

        The sums do not wait for the last chunks. Neither does the part of rank 0, which seals when this has returned;
        that of another rank tells rank 0 that all it names is durable.

        Raises:
            StoreUnavailable, Corrupt: as from `diff`.
        """
        store = self._uploads.store

        async def put_chunks() -> None:
            await self._uploads.finish()
            runtime.failpoint("publish.chunks.put")

        async def put_sums() -> None:
            await own.sums.put(store, patience)
            runtime.failpoint("publish.sums.put")

        async def put_part() -> None:
            await own.part.put(store, patience)
            runtime.failpoint("publish.part.put")

        if self._rank.leads:
            await run_limited([put_chunks, put_sums, put_part], 3)
        else:
            await run_limited([put_chunks, put_sums], 2)
            await put_part()

    async def _contents(self) -> bytes | None:
        """What each chunk touches, for other ranks that restore: they read those that touch what is theirs. None
        for a single process: it has no other ranks."""
        if self._baseline.blocks.complete:
            return None
        return await self._workers.run(_contents, [self._of_chunk[n] for n in sorted(self._of_chunk)])

    async def cancel(self) -> None:
        """Stop uploading. What is in the bucket stays there, named by nothing."""
        self._stopped = True
        await self._uploads.cancel()

    async def undo(self) -> bool:
        """Bring the baseline back to the version it held, proved by its full fingerprint (must P7).

        Returns False if that failed: the baseline is then lost, never half undone.
        """
        undone = False
        try:
            await self.cancel()
            with contextlib.suppress(ResourceExhausted):  # the spool holds such a chunk all the same
                await self.finish()
            for n in self._spool.numbers:
                data, old = await self._spool.data(n), await self._spool.undo(n)
                await self._workers.run_uncancellable(self._undo, data, old)
            undone = not self._baseline_unknown and await self._baseline.restored()
        except (DcrError, OSError, ValueError, MemoryError):
            pass  # if the undo fails, the baseline is rebuilt from an anchor and the chain
        finally:
            if not undone:
                self._baseline.invalidate()
            self._spool.clear()
        return undone

    def _undo(self, data: bytes, old: bytes) -> None:
        undo_chunk(open_chunk(data, self._baseline.layout), old, locate=self._baseline.locate)

    def forget(self) -> None:
        """The version is sealed: nothing will be undone."""
        self._spool.clear()


def _contents(chunks: Sequence[Sequence[Segment]]) -> bytes | None:
    return Contents.of([[(segment.tensor, segment.box) for segment in segments] for segments in chunks]).pack()


async def put(store: Store, key: str, body: bytes, patience: float) -> ObjectRef:
    """Upload an object that a record will name."""
    return await Upload.of(key, body).put(store, patience)

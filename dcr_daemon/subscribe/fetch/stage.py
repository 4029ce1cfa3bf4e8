"""The staging directory: chunks of versions, verified and bounded in bytes, until an engine has taken them.

It promises: a `VersionDelta` consists of exactly the chunks that the seal's parts name, each with its SHA-256 (must
F1); chunks that a prefetch brought are verified again then; the directory never holds more than `limit` bytes. Files
left by an earlier run are used if their digest is right, and those that had arrived in part are continued, so that a
restart fetches only what is missing.
"""

from __future__ import annotations

import asyncio
import contextlib
import shutil
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Sequence
from functools import partial
from pathlib import Path, PurePosixPath

from dcr_daemon import runtime
from dcr_daemon.canonical.layout import Layout
from dcr_daemon.codec.chunk import ChunkId
from dcr_daemon.codec.decode import read_id
from dcr_daemon.engine.port import StreamFacts, VersionDelta
from dcr_daemon.errors import Corrupt, DcrError, ResourceExhausted
from dcr_daemon.events import ChunkFetched, Emit, Staged
from dcr_daemon.ledger import records
from dcr_daemon.ledger.objects import Objects
from dcr_daemon.ledger.records import ChunkRef, Part, Seal, Stream, version_of
from dcr_daemon.store.partial import SUFFIX, PartialFile, partial_path
from dcr_daemon.subscribe.fetch.files import file_digest, write_staged
from dcr_daemon.task_limiter import TaskLimiter, Work, run_in_order, run_limited

CONCURRENCY = 8  #: chunks, or other large objects, fetched at a time
AHEAD = 16  #: versions whose parts and vectors are read ahead

Wanted = dict[Path, tuple[ChunkRef, Part]]  #: the chunks of a version, by their files


class Stage:
    """The staged versions of one stream below `path`.

    Args:
        path: a directory from `staging.open_staging`; only this stream's staging lies in it.
        limit: bytes of chunks staged at most.
    """

    def __init__(
        self,
        path: Path,
        *,
        limit: int,
        objects: Objects,
        stream: Stream,
        layout: Layout,
        workers: runtime.Workers,
        emit: Emit,
    ) -> None:
        self.path = path
        self.limit = limit
        self.objects = objects
        self.layout = layout
        self.stream = stream
        self._workers = workers
        self._emit = emit
        self._vectors: dict[int, Path] = {}  #: files of vectors, by version
        self._writing_vector = asyncio.Lock()
        self.downloads = asyncio.Semaphore(CONCURRENCY)  #: whoever fetches a chunk holds one, for a prefetch too
        self._arriving: dict[Path, asyncio.Event] = {}  #: chunks that are being fetched
        self._digests: dict[Path, str] = {}  #: of chunks that were prefetched by this process, until they are used
        self._sizes: dict[Path, int] = {
            file: file.stat().st_size
            for file in [*path.glob("*-*/*.dcr"), *path.glob(f"*-*/.*.dcr{SUFFIX}")]
            if file.suffix == SUFFIX or not file.name.startswith(".")
        }
        self.used = sum(self._sizes.values())  #: bytes of chunks that are here, in whole or part, or being fetched

    def attempt_path(self, version: int, attempt: int) -> Path:
        """Directory of one attempt's chunks."""
        return self.path / f"{version}-{attempt}"

    async def stream_facts(self) -> StreamFacts:
        """What an engine is told at attach; writes the layout to a file that it can read."""
        path = self.path / f"layout-{self.layout.digest}.json"
        await self.write(path, self.layout.encoded)
        return StreamFacts(stream=self.stream.stream, layout=str(path), layout_digest=self.layout.digest)

    async def vector_file(self, record: Stream | Seal) -> str:
        """The file of a version's whole fingerprint vector, verified. What is here already is not fetched again."""
        path = self._vectors.get(version_of(record))
        if path and await self._workers.run(file_digest, path) == record.fingerprint.sha256:
            return str(path)
        vector = await self.objects.read_vector(record, self.layout)
        return await self.write_vector(record, vector.astype("<u8").tobytes())

    async def write_vector(self, record: Stream | Seal, body: bytes) -> str:
        """The same of a vector that is known; `body` has the digest that the record names."""
        path = self.path / f"vector-{record.fingerprint.sha256}.bin"
        async with self._writing_vector:  # versions of the same content have the same file
            await self.write(path, body)
        self._vectors[version_of(record)] = path
        return str(path)

    async def stage_deltas(self, seals: Sequence[Seal], before: Stream | Seal) -> list[VersionDelta]:
        """Stage consecutive sealed versions: as many as fit, at least one; `before` is the version they start from.

        Raises:
            Corrupt: an object has other bytes than its seal says, twice.
            ResourceExhausted: the first version alone is larger than the limit, or the file system is full.
            ObjectPending, BelowFloor, StoreUnavailable: it cannot be fetched (now, or any more).
        """
        ready = list[VersionDelta]()
        async with contextlib.aclosing(run_in_order(self._deltas(seals, before), AHEAD)) as deltas:
            try:
                async for delta in deltas:
                    ready.append(delta)
                    size = sum(self._sizes[Path(path)] for path in delta.chunks)
                    self._emit(Staged(version=delta.version, bytes=size, chunks=len(delta.chunks)))
            except DcrError:
                if not ready:
                    raise
                # The versions that are ready can be applied; the next call meets the error again.
        return ready

    async def _deltas(self, seals: Sequence[Seal], before: Stream | Seal) -> AsyncGenerator[Work[VersionDelta]]:
        """For each version that fits beside those before it, in order, the fetching of its chunks. Parts and vectors
        are read ahead; room is made when it is a version's turn, so that no later version takes that of an earlier."""
        kept, held = set[Path](), 0

        def make_room() -> None:
            self._make_room(held, kept)

        path = await self.vector_file(before)
        works = (partial(self._describe, seal) for seal in self._fitting(seals))
        async with contextlib.aclosing(run_in_order(works, AHEAD)) as described:
            async for seal, parts, after in described:
                place = self.attempt_path(seal.version, seal.attempt)
                kept.add(place)
                wanted = {
                    place / PurePosixPath(chunk.key).name: (chunk, part) for part in parts for chunk in part.chunks
                }
                size = sum(chunk.size for chunk, _ in wanted.values())
                if held and held + size > self.limit:
                    return
                held += size
                staged = wanted.keys() | {partial_path(path) for path in wanted}
                self._drop([path for path in self._sizes if path.parent == place and path not in staged])
                make_room()
                delta = VersionDelta(
                    version=seal.version,
                    base=seal.base,
                    attempt=seal.attempt,
                    chunks=[str(path) for path in wanted],
                    before=path,
                    after=after,
                )
                yield partial(self._stage_delta, delta, wanted, seal, make_room)
                path = after

    def _fitting(self, seals: Sequence[Seal]) -> Iterator[Seal]:
        """The first of `seals` and those after it that fit into the limit together, by what the seals say."""
        held = 0
        for seal in seals:
            held += seal.bytes
            if held > self.limit and seal is not seals[0]:
                return
            yield seal

    async def _describe(self, seal: Seal) -> tuple[Seal, list[Part], str]:
        """The parts of a version, which say what chunks it has, and the file of its vector."""
        async with TaskLimiter(2) as group:
            parts = await group.start(partial(self.objects.read_parts, seal))
            vector = await group.start(partial(self.vector_file, seal))
        return seal, parts.result(), vector.result()

    async def _stage_delta(
        self, delta: VersionDelta, wanted: Wanted, seal: Seal, room: Callable[[], None]
    ) -> VersionDelta:
        """Fetch the chunks of one version, verified: all that its parts name, and no others of its attempt."""

        async def complete(path: Path, chunk: ChunkRef, part: Part) -> None:
            if arriving := self._arriving.get(path):
                await arriving.wait()
            async with self.downloads:
                await self._complete(path, chunk, part, seal, room)

        works = (partial(complete, path, chunk, part) for path, (chunk, part) in wanted.items())
        await run_limited(works, CONCURRENCY, settles=True)
        return delta

    def _make_room(self, size: int, kept: set[Path]) -> None:
        """Room for `size` bytes in the directories `kept`: chunks that were prefetched for others are deleted."""
        if size > self.limit:
            raise ResourceExhausted(
                f"a version of {size} bytes does not fit into {self.limit} bytes of staging at {self.path}",
                hint="raise --staging-limit, or name a larger --staging directory",
            )
        missing = size - sum(have for path, have in self._sizes.items() if path.parent in kept)
        others = sorted((path for path in self._sizes if path.parent not in kept), key=_version)
        while others and self.used + missing > self.limit:
            self._drop([others.pop()])

    async def _complete(self, path: Path, chunk: ChunkRef, part: Part, seal: Seal, room: Callable[[], None]) -> None:
        if self._sizes.get(path) == chunk.size:
            if await self._digest(path) == chunk.sha256:
                return
            self._drop([path])
        began = runtime.monotonic()
        room()  # a prefetch may have taken what was made for this version
        async with self.fetching(path, chunk.size) as keep:
            body = await self.objects.read_chunk(chunk, seal.version, keep=keep)
            self._check(body, chunk, part)
            await self.write_chunk(path, body, keep)
        runtime.failpoint("subscribe.chunk.kept")
        self._emit(
            ChunkFetched(
                version=seal.version,
                attempt=seal.attempt,
                key=chunk.key,
                bytes=len(body),
                sealed=True,
                seconds=runtime.monotonic() - began,
            )
        )

    async def _digest(self, path: Path) -> str:
        """The digest of a staged chunk. One that was computed as its bytes came in counts once: a version that is
        staged again, since its engine has refused it, is read."""
        known, is_there = self._digests.pop(path, ""), await self._workers.run(path.exists)
        return known if known and is_there else await self._workers.run(file_digest, path)

    def _check(self, body: bytes, chunk: ChunkRef, part: Part) -> None:
        """Raise `Corrupt` unless the chunk's own header says what its part says of it."""
        found = read_id(body)
        same = ChunkId(
            stream=part.stream,
            attempt=part.attempt,
            base=part.base,
            version=part.version,
            group=part.group,
            rank=part.rank,
            nonce=part.nonce,
            n=found.n,
        )
        if found != same:
            raise Corrupt(f"{chunk.key} holds a chunk of {found}, its part is of {same}", hint="run `dcr verify`")

    @contextlib.asynccontextmanager
    async def fetching(self, path: Path, size: int) -> AsyncIterator[PartialFile]:
        """Room for a chunk of `size` bytes while it is fetched and written. What has arrived is kept if it fails.

        Raises:
            ResourceExhausted: above the limit, at once, or at the end because a sealed version needed the room.
        """
        keep = PartialFile(path, workers=self._workers)
        held = self.used - self._sizes.get(path, 0) - self._sizes.get(keep.path, 0)
        if held + size > self.limit:
            raise ResourceExhausted(f"staging {self.path} is full ({self.limit} bytes)", hint="raise --staging-limit")
        self._drop([path])
        self._count(keep.path, 0)  # it becomes the chunk, and takes the chunk's room
        self._count(path, size)
        self._arriving[path] = asyncio.Event()
        try:
            yield keep
            if path not in self._sizes:
                self._drop([path])
                raise ResourceExhausted(f"the room of {path.name} was needed for a version that is sealed")
        except BaseException:
            self._count(path, 0)
            self._count(keep.path, keep.kept)
            raise
        finally:
            self._arriving.pop(path).set()

    async def write_prefetched(self, path: Path, body: bytes, keep: PartialFile) -> None:
        """`write_chunk` of one that no seal names yet; its digest is computed now, beside the downloads of others."""
        digest = await self._workers.run(records.digest, body)
        await self.write_chunk(path, body, keep)
        self._digests[path] = digest

    async def write_chunk(self, path: Path, body: bytes, keep: PartialFile) -> None:
        """Write a chunk whole or not at all, in the place of what had arrived of it."""
        await keep.clear()
        await self.write(path, body)

    def _count(self, path: Path, size: int) -> None:
        """`path` takes `size` bytes from now on; 0: it is not counted."""
        self.used += size - self._sizes.pop(path, 0)
        if size:
            self._sizes[path] = size

    async def write(self, path: Path, body: bytes) -> None:
        """Write a file whole or not at all."""
        await self._workers.run(write_staged, path, body)

    def has(self, path: Path) -> bool:
        return path in self._sizes

    def forget_up_to(self, served: int) -> None:
        """Delete all attempts at versions up to `served`, and the vectors of older ones."""
        self._remove(lambda version, _: version <= served)
        self._vectors = {version: path for version, path in self._vectors.items() if version >= served}
        for path in set(self.path.glob("vector-*.bin")) - set(self._vectors.values()):
            path.unlink(missing_ok=True)

    def forget_attempt(self, attempt: int) -> None:
        """Delete what was prefetched of an attempt that was aborted."""
        self._remove(lambda _, found: found == attempt)

    def _remove(self, done: Callable[[int, int], bool]) -> None:
        for place in self.path.glob("*-*"):
            version, _, attempt = place.name.partition("-")
            if version.isdigit() and attempt.isdigit() and done(int(version), int(attempt)):
                self._drop([path for path in self._sizes if path.parent == place])
                shutil.rmtree(place, ignore_errors=True)
                runtime.failpoint("subscribe.stage.dropped")

    def _drop(self, paths: list[Path]) -> None:
        for path in paths:
            path.unlink(missing_ok=True)
            self.used -= self._sizes.pop(path, 0)
            self._digests.pop(path, None)


def _version(path: Path) -> int:
    return int(path.parent.name.partition("-")[0])

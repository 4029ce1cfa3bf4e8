"""The canonical values of the last sealed version, in one file-backed map.

The map outlives the process, but nobody believes it: at start it counts only if its full fingerprint is that of a
sealed version (must P3). While an attempt is being diffed the map runs ahead of its version; only `commit` moves the
version, only undo brings the bytes back. The JSON beside it is a hint written at clean points.

One sum per slice is carried along with the vector, so that any slice can be checked on its own at any quiet time (must
P4). A *stray* baseline holds bytes of which only the fingerprint is known: they are not what the ledger names for its
version, which cannot be built from the bucket any more. The next version is diffed from them all the same, and brings
every element to its true value.
"""

from __future__ import annotations

import asyncio
import contextlib
import mmap
import os
from collections.abc import AsyncIterable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np

from dcr_daemon import runtime
from dcr_daemon.canonical.dtypes import lane_dtype
from dcr_daemon.canonical.fingerprint import MASK, Bits, Vector, advance, sum_run
from dcr_daemon.canonical.layout import Layout, TensorSpec
from dcr_daemon.checkpoint.directory import Checkpoint
from dcr_daemon.codec.chunk import SEGMENT_BYTES, Segment
from dcr_daemon.codec.decode import Chunk
from dcr_daemon.disk import exhausted, write_whole
from dcr_daemon.errors import Corrupt, Incompatible
from dcr_daemon.publish.intake import differences
from dcr_daemon.runtime import Workers
from dcr_daemon.untrusted import decode_json

ALIGNMENT = 64  #: bytes; every tensor begins on a cache line of its own


@dataclass(frozen=True, slots=True)
class Slice:
    """`count` consecutive elements of one tensor from number `start`; at most `SEGMENT_BYTES` of weights."""

    tensor: int
    start: int
    count: int


def slices(tensor: int, spec: TensorSpec, limit: int = SEGMENT_BYTES) -> Iterator[Slice]:
    """Cut a tensor into pieces of at most `limit` bytes, which one segment may span; none for an empty tensor."""
    step = max(1, limit // spec.width)
    for start in range(0, spec.elements, step):
        yield Slice(tensor, start, min(step, spec.elements - start))


class _Clean(msgspec.Struct, frozen=True, kw_only=True):
    """The hint: what the map held when it was last known to hold a sealed version."""

    stream: str
    layout: str
    version: int
    vector: str


_hints = msgspec.json.Decoder(_Clean)


class Baseline:
    """Bytes of one version, in memory that is shared with a file.

    Args:
        directory: of the state; `baseline.bin` and `baseline.json` lie in it.
        layout: the stream's.
        stream: its random id.
        workers: for passes over all bytes.

    Raises:
        Exhausted: the disk cannot hold a dense copy of the model.
    """

    def __init__(self, directory: Path, layout: Layout, stream: str, workers: Workers) -> None:
        self.layout = layout
        self.version: int | None = None
        self.stray = False
        self.stream, self._workers = stream, workers
        self._hint = directory / "baseline.json"
        self._pieces = [piece for tensor, spec in enumerate(layout) for piece in slices(tensor, spec)]
        self._number = {(piece.tensor, piece.start): n for n, piece in enumerate(self._pieces)}
        self._sums = [0] * len(self._pieces)
        self._vector = np.zeros(len(layout), dtype=np.uint64)
        offsets, size = _offsets(layout)
        #: the file is new: there is nothing in it to be proved
        self.new, self._map = _map_file(directory / "baseline.bin", max(size, mmap.PAGESIZE))
        self._bits = [
            np.frombuffer(self._map, dtype=lane_dtype(spec.width), count=spec.elements, offset=offset)
            for spec, offset in zip(layout, offsets, strict=True)
        ]

    def __getitem__(self, tensor: int) -> Bits:
        """Unsigned lanes [elements] of a tensor by layout index; writable, shared with the file."""
        return self._bits[tensor]

    @property
    def vector(self) -> Vector:
        """Fingerprint of what the map holds at `version`, carried along by commits. A copy."""
        return self._vector.copy()

    @property
    def slices(self) -> int:
        """How many slices `intact` can be asked about."""
        return len(self._pieces)

    def slice_bytes(self, number: int) -> int:
        piece = self._pieces[number]
        return piece.count * self.layout[piece.tensor].width

    def slice_name(self, number: int) -> str:
        """The tensor that it is a slice of."""
        return self.layout[self._pieces[number].tensor].name

    def hint(self) -> tuple[int, Vector] | None:
        """Version and vector the map last held cleanly, if a hint says so. To be proved by `fingerprint`."""
        try:
            clean = decode_json(_hints, self._hint.read_bytes())
            vector = np.frombuffer(bytes.fromhex(clean.vector), dtype="<u8")
        except (OSError, ValueError):
            return None
        if (clean.stream, clean.layout, vector.size) != (self.stream, self.layout.digest, len(self.layout)):
            return None
        return clean.version, vector

    def begin(self) -> None:
        """The map is about to run ahead of its version."""
        self._hint.unlink(missing_ok=True)

    def commit(self, version: int, segments: Iterable[Segment]) -> None:
        """The map holds `version`, which was sealed with exactly these segments, each within one slice."""
        segments = list(segments)
        for segment in segments:
            self._move(segment)
        self.version, self.stray = version, False
        self._vector = advance(self._vector, segments)
        self._write_hint()

    def _move(self, segment: Segment) -> None:
        step = max(1, SEGMENT_BYTES // self.layout[segment.tensor].width)
        number = self._number[segment.tensor, segment.box.dst // step * step]
        self._sums[number] = (self._sums[number] + segment.after - segment.before) & MASK

    async def prove(self, *candidates: tuple[int, Vector]) -> Vector:
        """The fingerprint of the bytes as they are. From now on they are the first version whose vector that is."""
        sums = await self._measure()
        found = self._by_tensor(sums)
        for version, vector in candidates:
            if np.array_equal(found, vector):
                self.version, self._vector, self._sums, self.stray = version, found, sums, False
                self._write_hint()
                break
        return found

    async def go_astray(self, version: int) -> None:
        """Take the bytes as they are for what the next version is diffed from: nothing leads to `version` any more."""
        self.begin()
        sums = await self._measure()
        self.version, self._vector, self._sums, self.stray = version, self._by_tensor(sums), sums, True

    async def restored(self) -> bool:
        """An attempt was undone: whether the map, by its full fingerprint, holds `version` again."""
        if self.version is None or await self._measure() != self._sums:
            return False
        if not self.stray:
            self._write_hint()
        return True

    async def intact(self, number: int) -> bool:
        """Whether a slice has the sum it should have. No attempt may be under way."""
        return await self._workers.run(self._sum, self._pieces[number]) == self._sums[number]

    def _write_hint(self) -> None:
        assert self.version is not None
        body = self._vector.astype("<u8").tobytes().hex()
        clean = _Clean(stream=self.stream, layout=self.layout.digest, version=self.version, vector=body)
        with contextlib.suppress(OSError):  # without the hint the next start rebuilds: slower, never wrong
            write_whole(self._hint, msgspec.json.encode(clean), what="hint", durable=False)

    def lose(self) -> None:
        """Nothing is known of the bytes any more; they are to be loaded anew."""
        self.version, self.stray = None, False
        self.begin()

    async def fingerprint(self) -> Vector:
        """The vector of the bytes as they are now: a full pass, on the workers."""
        return self._by_tensor(await self._measure())

    async def _measure(self) -> list[int]:
        return await asyncio.gather(*(self._workers.run(self._sum, piece) for piece in self._pieces))

    def _by_tensor(self, sums: list[int]) -> Vector:
        vector = [0] * len(self.layout)
        for piece, value in zip(self._pieces, sums, strict=True):
            vector[piece.tensor] = (vector[piece.tensor] + value) & MASK
        return np.array(vector, dtype=np.uint64)

    def _sum(self, piece: Slice) -> int:
        bits = self._bits[piece.tensor][piece.start : piece.start + piece.count]
        return sum_run(bits, int(self.layout.keys[piece.tensor]), piece.start)

    async def load(self, checkpoint: Checkpoint) -> None:
        """Copy a checkpoint into the map; no version is claimed by that.

        Raises:
            Incompatible: its layout is another, with the names that differ.
            Corrupt: a file shrinks while it is read.
        """
        self.lose()
        if checkpoint.layout != self.layout:
            raise Incompatible(
                f"{checkpoint.path} does not have the stream's layout: {differences(self.layout, checkpoint.layout)}",
                hint="give the checkpoint that the stream was created from",
            )
        jobs = [self._workers.run_whole(self._copy, checkpoint, piece) for piece in self._pieces]
        for result in await asyncio.gather(*jobs, return_exceptions=True):  # none writes on after the first failure
            if isinstance(result, BaseException):
                raise result

    def _copy(self, checkpoint: Checkpoint, piece: Slice) -> None:
        name = self.layout[piece.tensor].name
        bits = checkpoint.file(name).read(name, piece.start, piece.count)
        self._bits[piece.tensor][piece.start : piece.start + piece.count] = bits

    async def apply(self, chunks: AsyncIterable[Chunk]) -> None:
        """Move the map one version forward; `chunks` are all of that version's, verified and decoded.

        Raises:
            Corrupt: the map does not hold what a chunk changes.
        """
        self.lose()
        async for chunk in chunks:
            await self._workers.run_whole(self._apply, chunk)

    def _apply(self, chunk: Chunk) -> None:
        for i, segment in enumerate(chunk.segments):
            changes, bits = chunk.changes(i), self._bits[segment.tensor]
            where = segment.box.canonical(changes.positions)
            bits[where] = changes.resolve(bits[where])

    def close(self) -> None:
        """Unmap. The kernel writes the pages back; after a crash of the host the fingerprint tells."""
        self._bits = []
        with contextlib.suppress(BufferError):  # somebody still holds a view; the map goes with it
            self._map.close()


def _offsets(layout: Layout) -> tuple[list[int], int]:
    offsets, place = [], 0
    for spec in layout:
        offsets.append(place)
        place += -(-spec.nbytes // ALIGNMENT) * ALIGNMENT
    return offsets, place


def _map_file(path: Path, size: int) -> tuple[bool, mmap.mmap]:
    """Whether the file is new, and a map of exactly `size` bytes of it. Its disk space is reserved: a full disk must
    show here, not as SIGBUS."""
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise exhausted(error, path) from error
    try:
        runtime.failpoint("disk.baseline.write")
        new = os.fstat(descriptor).st_size != size
        if new:
            os.ftruncate(descriptor, 0)
        os.posix_fallocate(descriptor, 0, size)
        return new, mmap.mmap(descriptor, size)
    except OSError as error:
        raise exhausted(error, path) from error
    finally:
        os.close(descriptor)


def check_vector(want: Vector, have: Vector, layout: Layout, what: str, hint: str) -> None:
    """Raise `Corrupt` that names the tensors in which two fingerprints differ."""
    wrong = [layout[int(i)].name for i in np.flatnonzero(want != have)]
    if wrong:
        more = f" and {len(wrong) - 10} more" if len(wrong) > 10 else ""
        raise Corrupt(f"{what}: the fingerprint differs in {', '.join(wrong[:10])}{more}", hint=hint)

"""Consecutive hops become one set of absolute changes, every sum on the way checked (musts E4, E6, F1).

Nothing is written here. Relative codecs are resolved against the live bits, which the caller has proved to be the
first hop's base (must E7); each later hop against what the hops before it leave. Memory is one tensor's changes and the
decoded payload of the chunks that reach into it; their encoded bytes stay in their files.
"""

from __future__ import annotations

import mmap
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from dcr_daemon.canonical.fingerprint import Bits, Vector, advance, sum_at
from dcr_daemon.canonical.layout import Layout
from dcr_daemon.codec.decode import Chunk, open_chunk
from dcr_daemon.engine.directory.journal import Patched
from dcr_daemon.engine.port import VersionDelta
from dcr_daemon.engine.staged import read_vector
from dcr_daemon.errors import CorruptChunk, EngineRefused
from dcr_daemon.wording import shorten

Places = list[tuple[Chunk, int]]


def name_differences(layout: Layout, one: Vector, other: Vector) -> str:
    """Names of tensors whose sums differ, the first few of them."""
    return shorten(layout[int(i)].name for i in np.flatnonzero(one != other))


@dataclass(frozen=True, slots=True)
class OpenHop:
    """A hop whose chunks are decoded: where each tensor's segments are, and the vectors on both sides."""

    version: int
    segments: dict[int, Places]
    before: Vector
    after: Vector


def open_hop(layout: Layout, stream: str, hop: VersionDelta) -> OpenHop:
    """Decode the chunks of a hop and check that they are this hop's, and that they lead from vector to vector.

    Raises:
        CorruptChunk: a chunk does not decode.
        EngineRefused: a chunk of another stream, attempt or version, or sums that do not add up (must F1).
    """
    before, after = read_vector(hop.before, layout), read_vector(hop.after, layout)
    segments = dict[int, Places]()
    for path in hop.chunks:
        try:
            chunk = open_chunk(_mapped(path), layout)
        except CorruptChunk as error:
            raise CorruptChunk(f"{path}: {error.message}", hint=error.hint) from error
        found = (chunk.id.stream, chunk.id.attempt, chunk.id.base, chunk.id.version)
        if found != (stream, hop.attempt, hop.base, hop.version):
            raise EngineRefused(f"chunk {path} belongs to {found}, not to version {hop.version} of this stream")
        for n, segment in enumerate(chunk.segments):
            segments.setdefault(segment.tensor, []).append((chunk, n))
    reached = advance(before, (chunk.segments[n] for places in segments.values() for chunk, n in places))
    if not np.array_equal(reached, after):
        names = name_differences(layout, reached, after)
        raise EngineRefused(f"the chunks of version {hop.version} do not lead to its vector: {names}")
    return OpenHop(hop.version, segments, before, after)


def _mapped(path: str) -> memoryview:
    """A file's bytes, read when they are needed. Staged chunks are replaced and removed, never shortened."""
    with Path(path).open("rb") as file:
        if not file.seek(0, 2):
            return memoryview(b"")
        return memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))


def check_chain(layout: Layout, hops: Sequence[OpenHop], live: Vector) -> None:
    """Each hop must begin where the one before it ends, the first at the live weights.

    Raises:
        EngineRefused: naming the version and the tensors.
    """
    for hop in hops:
        if not np.array_equal(hop.before, live):
            names = name_differences(layout, hop.before, live)
            raise EngineRefused(f"version {hop.version} does not begin at the weights it would change: {names}")
        live = hop.after


def compose(layout: Layout, hops: Sequence[OpenHop], live: Callable[[str], Bits]) -> Iterator[Patched]:
    """Absolute changes of every touched tensor, in layout order.

    Args:
        live: the present bits of a tensor by name, unsigned lanes [elements].

    Raises:
        CorruptChunk: a segment does not decode.
        EngineRefused: before- or after-sums of a segment differ from its content, or a position is named twice.
    """
    left = Counter(chunk for hop in hops for places in hop.segments.values() for chunk, _ in places)
    for tensor in sorted(set().union(*(hop.segments for hop in hops))):
        bits = live(layout[tensor].name)
        positions = np.empty(0, np.int64)
        new = old = np.empty(0, bits.dtype)
        for hop in hops:
            if tensor in hop.segments:
                at, now, then = _resolve(layout, tensor, hop, bits, positions, new)
                positions, new, old = _merge(positions, new, old, at, now, then)
                for chunk, _ in hop.segments[tensor]:
                    left[chunk] -= 1
                    if not left[chunk]:
                        chunk.release()
        if positions.size:
            yield Patched(tensor, positions, new, old)


def _resolve(
    layout: Layout, tensor: int, hop: OpenHop, bits: Bits, over: npt.NDArray[np.int64], values: Bits
) -> tuple[npt.NDArray[np.int64], Bits, Bits]:
    """One hop's changes of one tensor: ascending positions, new bits, bits before it (overlay included)."""
    key = int(layout.keys[tensor])
    columns: list[tuple[npt.NDArray[np.int64], Bits, Bits]] = []
    for chunk, n in hop.segments[tensor]:
        changes = chunk.changes(n)
        at = changes.segment.box.canonical(changes.positions)
        then = bits[at]
        if over.size:
            place, known = _find(over, at)
            then[known] = values[place[known]]
        now = changes.resolve(then)
        sums = (sum_at(then, at, key), sum_at(now, at, key))
        if sums != (changes.segment.before, changes.segment.after):
            side = "before" if sums[0] != changes.segment.before else "after"
            name = layout[tensor].name
            raise EngineRefused(f"version {hop.version}: {name} does not have the sums {side} the change")
        columns.append((at, now, then))
    at, now, then = (np.concatenate(column) for column in zip(*columns, strict=True))
    if at.size > 1 and not bool((at[1:] > at[:-1]).all()):
        order = np.argsort(at, kind="stable")
        at, now, then = at[order], now[order], then[order]
        if bool((at[1:] == at[:-1]).any()):
            raise EngineRefused(f"version {hop.version} changes an element of {layout[tensor].name} twice")
    return at, now, then


def _find(
    sorted_positions: npt.NDArray[np.int64], wanted: npt.NDArray[np.int64]
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.bool_]]:
    """Where each wanted position lies among sorted ones, and whether it is there."""
    place = np.searchsorted(sorted_positions, wanted)
    place[place == sorted_positions.size] = 0
    return place, sorted_positions[place] == wanted


def _merge(
    positions: npt.NDArray[np.int64], new: Bits, old: Bits, at: npt.NDArray[np.int64], now: Bits, then: Bits
) -> tuple[npt.NDArray[np.int64], Bits, Bits]:
    """Lay one hop over the changes so far: newest values win, the oldest old ones stay."""
    if not positions.size:
        return at, now, then
    place, known = _find(positions, at)
    new = new.copy()
    new[place[known]] = now[known]
    fresh = ~known
    columns = (
        np.concatenate((positions, at[fresh])),
        np.concatenate((new, now[fresh])),
        np.concatenate((old, then[fresh])),
    )
    order = np.argsort(columns[0], kind="stable")
    return columns[0][order], columns[1][order], columns[2][order]

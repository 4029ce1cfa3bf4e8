"""Staged hops as absolute changes of whole tensors (musts E4, E6, F1).

Input: `VersionDelta`s and the live bits, which the caller has proved to be the first hop's base (must E7). Output:
`AbsoluteChanges`, one per touched tensor, every sum on the way checked. `DirectoryEngine.prepare` calls it, and writes
them into the journal. Nothing else is written.
"""

from __future__ import annotations

import mmap
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np

from dcr_daemon.canonical.fingerprint import Bits, sum_at
from dcr_daemon.canonical.layout import Layout
from dcr_daemon.codec.chunk import Changes
from dcr_daemon.codec.decode import Chunk
from dcr_daemon.engine.deltas import (
    Ints,
    SegmentTable,
    StagedSummary,
    canonical_order,
    open_staged_chunk,
    overlay,
    replace,
)
from dcr_daemon.engine.port import VersionDelta
from dcr_daemon.engine.staged import read_vector, unreadable
from dcr_daemon.errors import EngineRefused


@dataclass(frozen=True, slots=True)
class OpenHop:
    """A hop whose chunks are open: `segments` are, by layout index, the chunks and the numbers of segments in them."""

    summary: StagedSummary
    segments: dict[int, list[tuple[Chunk, int]]]


@dataclass(frozen=True, slots=True)
class AbsoluteChanges:
    """Changes of one tensor: `positions` int64 [k], ascending canonical elements; `new` and `old` [k] unsigned."""

    tensor: int
    positions: Ints
    new: Bits
    old: Bits


@dataclass(frozen=True, slots=True)
class _TensorGroup:
    hop: int
    element: Ints
    new: Bits
    old: Bits


def _map(path: str) -> memoryview:
    """A chunk file's bytes, read when they are needed. Staged chunks are replaced and removed, never shortened."""
    try:
        with Path(path).open("rb") as file:
            if not file.seek(0, 2):
                return memoryview(b"")
            return memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
    except OSError as error:
        raise unreadable(path, error) from error


def open_hop(layout: Layout, stream: str, *, hop: VersionDelta) -> OpenHop:
    """Open the chunks of a hop. `check_chain` is still to be asked whether they lead from vector to vector.

    Raises:
        CorruptChunk: a chunk does not decode, or belongs to another stream, attempt or version.
        EngineRefused, ResourceExhausted: a file cannot be read.
    """
    chunks = [open_staged_chunk(_map(path), hop, layout=layout, path=path, stream=stream) for path in hop.chunks]
    segments = dict[int, list[tuple[Chunk, int]]]()
    for chunk in chunks:
        for number, tensor in enumerate(chunk.table.tensor.tolist()):
            segments.setdefault(tensor, []).append((chunk, number))
    table = SegmentTable.join(chunk.table for chunk in chunks)
    before, after = read_vector(hop.before, layout), read_vector(hop.after, layout)
    return OpenHop(StagedSummary(hop.version, table, before, after), segments)


def compose(layout: Layout, hops: Sequence[OpenHop], *, live: Callable[[str], Bits]) -> Iterator[AbsoluteChanges]:
    """Absolute changes of every touched tensor, in layout order.

    Memory is one tensor's changes and the decoded payload of the chunks that reach into it; their encoded bytes stay
    in their files.

    Args:
        live: the present bits of a tensor by name, unsigned integers [elements].

    Raises:
        CorruptChunk: a segment does not decode.
        EngineRefused: before- or after-sums of a segment differ from its content, or one hop changes an element twice.
    """
    uses = Counter(chunk for hop in hops for places in hop.segments.values() for chunk, _ in places)
    for tensor in sorted(set().union(*(hop.segments for hop in hops))):
        bits, groups = live(layout[tensor].name), list[_TensorGroup]()
        for number, hop in enumerate(hops):
            places = hop.segments.get(tensor, ())
            touched = [
                _add_segment(layout, groups, number=number, hop=hop, changes=chunk.changes(n), bits=bits)
                for chunk, n in places
            ]
            if _repeats(touched):
                raise EngineRefused(
                    f"version {hop.summary.version} changes an element of {layout[tensor].name} twice",
                    hint="report this as a bug of its publisher",
                )
            for chunk, _ in places:
                uses[chunk] -= 1
                if not uses[chunk]:
                    chunk.release()
        if groups:
            yield _join(tensor, groups)


def _add_segment(
    layout: Layout, groups: list[_TensorGroup], *, number: int, hop: OpenHop, changes: Changes, bits: Bits
) -> Ints:
    """Resolve one segment over what earlier hops leave, and add it to the groups; its elements."""
    segment, key = changes.segment, int(layout.keys[changes.segment.tensor])
    element, changes = canonical_order(changes)
    if not element.size:
        return element
    old = bits[element]
    held = overlay(groups, number, element=element, bits=old)
    new = changes.resolve(old)
    sums = (sum_at(old, element, key=key), sum_at(new, element, key=key))
    if sums != (segment.before, segment.after):
        side, name = "before" if sums[0] != segment.before else "after", layout[segment.tensor].name
        raise EngineRefused(f"version {hop.summary.version}: {name} does not have the sums {side} the change")
    fresh = replace(held, new)
    if fresh is None:
        groups.append(_TensorGroup(number, element, new, old))
    elif fresh.any():
        groups.append(_TensorGroup(number, element[fresh], new[fresh], old[fresh]))
    return element


def _repeats(touched: Sequence[Ints]) -> bool:
    """Whether an element is in two of these arrays, each of which is ascending."""
    filled = [elements for elements in touched if elements.size]
    if all(one[-1] < other[0] for one, other in pairwise(filled)):
        return False  # pieces of a tensor one behind the other, as publishers cut large ones
    elements = np.sort(np.concatenate(filled), kind="stable")
    return bool((elements[1:] == elements[:-1]).any())


def _join(tensor: int, groups: Sequence[_TensorGroup]) -> AbsoluteChanges:
    positions, new, old = (np.concatenate([getattr(g, name) for g in groups]) for name in ("element", "new", "old"))
    if not bool((positions[1:] > positions[:-1]).all()):
        order = np.argsort(positions, kind="stable")
        positions, new, old = positions[order], new[order], old[order]
    return AbsoluteChanges(tensor, positions, new, old)

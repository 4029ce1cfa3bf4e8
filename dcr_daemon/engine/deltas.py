"""Staged deltas of consecutive versions: opened, checked as a chain, and composed into one change.

Input: the files that a subscriber has staged (`VersionDelta`: chunks, and the vectors before and after). Output:
groups, which hold each changed element once, with its bits before the first hop and after the last. Whoever composes
has proved the live bits to be the first hop's base (must E7). Nothing is written here.

`directory.compose` composes whole tensors. In vLLM, `worker.prepare` composes what one worker holds, in memory reserved
before, and EngineCore reads only summaries and checks the chain.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from dcr_daemon.canonical.fingerprint import Bits, Vector
from dcr_daemon.canonical.layout import Layout
from dcr_daemon.codec.chunk import Changes
from dcr_daemon.codec.decode import Chunk, Data, open_chunk
from dcr_daemon.codec.format import Table
from dcr_daemon.engine.port import VersionDelta
from dcr_daemon.engine.staged import read_staged, read_vector
from dcr_daemon.errors import CorruptChunk, EngineRefused
from dcr_daemon.wording import shorten

Ints = npt.NDArray[np.int64]


class HopId(Protocol):
    """What identifies the chunks of one hop: the fields that `VersionDelta` and a worker's record have in common."""

    @property
    def version(self) -> int: ...
    @property
    def base(self) -> int: ...
    @property
    def attempt(self) -> int: ...


def open_staged_chunk(data: Data, hop: HopId, *, layout: Layout, path: str, stream: str = "") -> Chunk:
    """Open the bytes of a staged chunk file, and check that the chunk belongs to `hop`.

    Args:
        data: the whole file; it may be a memory map.
        path: the file, named in errors.
        stream: also check that the chunk belongs to this stream.

    Raises:
        CorruptChunk: it does not decode, or is a chunk of another version, attempt or stream.
    """
    try:
        chunk = open_chunk(data, layout)
    except CorruptChunk as error:
        raise CorruptChunk(f"{path}: {error.message}", hint=error.hint) from error
    found = (chunk.id.version, chunk.id.base, chunk.id.attempt)
    if found != (hop.version, hop.base, hop.attempt) or (stream and chunk.id.stream != stream):
        of_stream = f" of stream {chunk.id.stream}" if stream and chunk.id.stream != stream else ""
        raise CorruptChunk(
            f"{path} is a chunk of version {found[0]} on {found[1]}, attempt {found[2]}{of_stream}; "
            f"expected version {hop.version} on {hop.base}, attempt {hop.attempt}",
            hint="stage the version again",
        )
    return chunk


# What the staged files say.


@dataclass(frozen=True, slots=True, eq=False)
class SegmentTable:
    """The segments of one version's chunks, in the order of its chunks: one row each, in columns.

    `tensor`: int64, layout index. `changed`: int64, elements. `before`, `after`: u64, sums over the changed elements.
    """

    tensor: Ints
    changed: Ints
    before: Vector
    after: Vector

    @classmethod
    def join(cls, tables: Iterable[Table]) -> SegmentTable:
        tables = list(tables)

        def column(name: str, dtype: type[np.generic]) -> npt.NDArray[Any]:
            return np.concatenate([np.zeros(0, dtype), *(getattr(table, name) for table in tables)]).astype(dtype)

        return cls(
            tensor=column("tensor", np.int64),
            changed=column("changed", np.int64),
            before=column("before", np.uint64),
            after=column("after", np.uint64),
        )

    def delta(self, tensors: int) -> Vector:
        """[tensors]: what this version adds to each tensor's fingerprint, mod 2^64."""
        total = np.zeros(tensors, dtype=np.uint64)
        np.add.at(total, self.tensor, self.after - self.before)
        return total


@dataclass(frozen=True, slots=True, eq=False)
class StagedSummary:
    """One staged version without its values: the table of its segments, and its vectors [tensors] before and after."""

    version: int
    table: SegmentTable
    before: Vector
    after: Vector


def read_summary(hop: VersionDelta, layout: Layout) -> StagedSummary:
    """Read a hop's vectors and the tables of its chunks; no segment is decoded.

    Raises:
        Corrupt: a file is damaged, or belongs to another version.
        EngineRefused, ResourceExhausted: a file cannot be read.
    """
    table = SegmentTable.join(
        open_staged_chunk(read_staged(path), hop, layout=layout, path=path).table for path in hop.chunks
    )
    return StagedSummary(hop.version, table, read_vector(hop.before, layout), read_vector(hop.after, layout))


def check_chain(
    layout: Layout,
    hops: Sequence[StagedSummary],
    live: Vector,
    *,
    exact: npt.NDArray[np.bool_] | None = None,
) -> None:
    """Must F1, for every tensor: the first hop begins at `live`, each other one where the hop before it ends, and the
    chunks of each lead from its vector before to its vector after.

    Args:
        live: the vector of the live weights.
        exact: [tensors], the tensors whose live bits can be summed; all of them by default.

    Raises:
        EngineRefused: naming the version and the tensors.
    """
    if not hops:
        return
    differs = hops[0].before != live
    if names := _names(layout, differs if exact is None else differs & exact):
        raise EngineRefused(
            f"the live weights are not the base of version {hops[0].version}: {names}",
            hint="attach again to find out which version is live",
        )
    reached = hops[0].before
    for hop in hops:
        if names := _names(layout, hop.before != reached):
            raise EngineRefused(f"version {hop.version} does not start where the version before it ended: {names}")
        reached = hop.before + hop.table.delta(len(layout))
        if names := _names(layout, reached != hop.after):
            raise EngineRefused(
                f"the chunks of version {hop.version} do not lead from its base to its seal: {names}",
                hint="a chunk is missing or not the seal's: stage the version again",
            )


def _names(layout: Layout, which: npt.NDArray[np.bool_]) -> str:
    return shorten(layout[int(tensor)].name for tensor in np.flatnonzero(which))


# Composition. A group holds elements that one segment was the first to change. So each element is in one group, with
# its bits before the first hop (`old`) and after the newest one so far (`new`).


class Group(Protocol):
    """`hop`: the number of the hop that made it. `element` [k] ascending integers; `new` [k] unsigned integers, in the
    same order."""

    @property
    def hop(self) -> int: ...
    @property
    def element(self) -> npt.NDArray[Any]: ...
    @property
    def new(self) -> Bits: ...


G = TypeVar("G", bound=Group)
Held = list[tuple[G, Ints]]


def canonical_order(changes: Changes) -> tuple[Ints, Changes]:
    """The canonical elements of a segment's changes, ascending, and the changes in that order."""
    box = changes.segment.box
    elements = box.canonical(changes.positions)
    if box.ascending:
        return elements, changes
    order = np.argsort(elements)
    return elements[order], Changes(changes.segment, changes.positions[order], changes.operands[order])


def overlay(groups: Iterable[G], hop: int, *, element: npt.NDArray[Any], bits: Bits) -> Held[G]:
    """Put into `bits`, the live bits of `element` (ascending), the values that earlier hops than `hop` leave there.

    Returns:
        The groups that hold some of these elements, each with the number of every element in it, or -1.
    """
    from dcr_daemon.engine import kernels

    held: Held[G] = []
    for group in groups:
        if group.hop == hop or group.element[0] > element[-1] or group.element[-1] < element[0]:
            continue
        found = np.full(element.size, -1, dtype=np.int64)
        if kernels.match(group.element, element, found):
            mine = np.flatnonzero(found >= 0)
            bits[mine] = group.new[found[mine]]
            held.append((group, found))
    return held


def replace(held: Held[G], new: Bits) -> npt.NDArray[np.bool_] | None:
    """Give the groups that `overlay` found the newer values of their elements.

    Returns:
        A mask of the elements that no group holds yet; None if that is all of them.
    """
    if not held:
        return None
    fresh = np.ones(new.size, dtype=bool)
    for group, found in held:
        mine = found >= 0
        group.new[found[mine]] = new[mine]
        fresh &= ~mine
    return fresh

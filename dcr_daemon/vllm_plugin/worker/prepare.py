"""Prepares a transaction on one worker: decodes staged hops against the live weights, which it only reads.

Input: the chunk files of several versions. Output: one `Transaction` and the answer for EngineCore. A later hop sees
the values of the earlier ones, each hop's sums are taken at its own step, and every element is held once, with its
value before the first hop and after the last: the composition of `engine.deltas`, in memory that was reserved at attach
(must E6). It runs on the worker's background thread (must E4).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from dcr_daemon.canonical.dtypes import bits_dtype
from dcr_daemon.canonical.layout import Layout
from dcr_daemon.codec.chunk import Changes
from dcr_daemon.codec.decode import Chunk
from dcr_daemon.engine.deltas import canonical_order, open_staged_chunk, overlay, replace
from dcr_daemon.engine.staged import read_staged
from dcr_daemon.errors import EngineRefused, ResourceExhausted
from dcr_daemon.vllm_plugin.calls import HopFiles, PreparedRank, SegmentSums
from dcr_daemon.vllm_plugin.weights import faults
from dcr_daemon.vllm_plugin.weights.arena import Arena, ArenaFull
from dcr_daemon.vllm_plugin.weights.memory import U32, Bits, Group, Reading, WeightMemory
from dcr_daemon.vllm_plugin.weights.placement import Placement
from dcr_daemon.vllm_plugin.worker.transaction import Transaction, box_sums

Advance = Callable[[float], None]


BATCH = 1 << 20  #: changed elements that are located before their live bits are read, all at once


@dataclass(slots=True)
class Part:
    """What one segment changes in one row. `old` gets the live bits."""

    segment: int
    row: int
    changes: Changes
    element: U32
    target: U32
    old: Bits


class Preparation:
    """Decodes hops into groups of absolute changes. One `run` per instance, on the worker's background thread."""

    def __init__(
        self,
        *,
        layout: Layout,
        placement: Placement,
        memory: WeightMemory,
        arena: Arena,
        advance: Advance = lambda part: None,
    ) -> None:
        self._layout = layout
        self._placement = placement
        self._memory = memory
        self._arena = arena
        self._advance = advance
        self._groups: list[Group] = []
        self._by_row: dict[int, list[Group]] = {}
        self._sums: dict[int, tuple[int, int]] = {}  # old and new of groups (by identity) that no later hop has changed
        self._computed: set[int] = set()
        self._spent: dict[str, float] = {}
        self._held = np.zeros(len(layout), dtype=bool)
        self._held[[*placement.by_tensor, *placement.computed]] = True

    def run(self, txn: str, hops: Sequence[HopFiles]) -> Transaction:
        """Prepare as many hops as fit.

        Raises:
            CorruptChunk: a chunk is damaged, or belongs to another hop.
            ResourceExhausted: the first hop alone does not fit into the arena, or a file cannot be read now.
            EngineRefused: tensors that share memory would differ, or this process does not see a file.
        """
        fits = len(hops)
        while True:
            self._arena.reset()
            self._groups, self._by_row, self._sums, self._computed = [], {}, {}, set()
            done: list[SegmentSums] = []
            try:
                for number, hop in enumerate(hops[:fits]):
                    done.append(self._hop(number, hop, fits))
                return self._finish(txn, fits, done)
            except ArenaFull as full:
                # A hop changes values that earlier hops put there, so a half-done one cannot be cut off: start again
                # with the hops that are known to fit, or with one less if the device's arena was the full one.
                fits = min(len(done), fits - 1)
                if fits == 0:
                    raise ResourceExhausted(
                        f"version {hops[0].version} alone needs more than the {full} that are reserved",
                        hint="raise DCR_STAGE_CAP where the engine is started",
                    ) from None

    def _hop(self, number: int, hop: HopFiles, hops: int) -> SegmentSums:
        """Add one hop to the groups; the sums of each of its segments here, before and after."""
        entries: list[tuple[int, int, int, int, int]] = []
        first = 0
        for i, path in enumerate(hop.chunks):
            with self._spending("read"):
                chunk = open_staged_chunk(read_staged(path), hop, layout=self._layout, path=path)
            parts: list[Part] = []
            located = 0
            for index in np.flatnonzero(self._held[chunk.table.tensor]).tolist():
                with self._spending("decode"):
                    for part in self._parts(chunk, index, number=first + index):
                        parts.append(part)
                        located += part.element.size
                if located >= BATCH:
                    entries += self._change(number, parts)
                    parts, located = [], 0
                faults.after_slice()
                self._advance((number + (i + (index + 1) / len(chunk)) / len(hop.chunks)) / hops)
            entries += self._change(number, parts)
            first += len(chunk)
            chunk.release()
        self._advance((number + 1) / hops)
        return _segment_sums(hop.version, entries)

    def _parts(self, chunk: Chunk, index: int, *, number: int) -> Iterator[Part]:
        """What segment `index` of a chunk, the hop's `number`th, changes in the rows that this worker holds."""
        segment = chunk.segment(index)
        if segment.tensor in self._placement.computed:
            self._computed.add(segment.tensor)
        rows = self._placement.rows_meeting(segment.tensor, segment.box)
        if not rows:
            return
        elements, changes = canonical_order(chunk.changes(index))
        dtype = bits_dtype(self._layout[segment.tensor].width)
        for row in rows:
            picked, element, target = self._memory.locate(row, elements)
            if not picked.size:
                continue
            mine = changes
            if picked.size < elements.size:
                mine = Changes(changes.segment, changes.positions[picked], changes.operands[picked])
            yield Part(number, row, mine, element, target, np.empty(picked.size, dtype=dtype))

    def _change(self, hop: int, parts: list[Part]) -> list[tuple[int, int, int, int, int]]:
        """Add what these parts of one hop change: (segment, box, count, before, after) of each."""
        with self._spending("gather"):
            self._memory.gather([Reading(part.row, part.element, part.target, part.old) for part in parts])
        with self._spending("sum"):
            return self._merge(hop, parts)

    def _merge(self, hop: int, parts: list[Part]) -> list[tuple[int, int, int, int, int]]:
        """Put the new values of these parts, whose `old` was read, into groups."""
        entries = []
        for part in parts:
            row, element, old = part.row, part.element, part.old
            held = overlay(self._by_row.get(row, ()), hop, element=element, bits=old)
            new = part.changes.resolve(old).astype(old.dtype, copy=False)
            before = self._memory.sum_bits(row, old, element)
            after = self._memory.sum_bits(row, new, element)
            fresh = replace(held, new)
            for other, _ in held:
                self._sums.pop(id(other), None)
            group = self._append(hop, row, element=element, target=part.target, old=old, new=new, fresh=fresh)
            if group is not None and fresh is None:
                self._sums[id(group)] = before, after
            entries.append((part.segment, self._placement.rows[row].box, int(element.size), before, after))
        return entries

    @contextmanager
    def _spending(self, on: str) -> Iterator[None]:
        began = time.monotonic()
        yield
        self._spent[on] = self._spent.get(on, 0.0) + time.monotonic() - began

    def _append(
        self,
        hop: int,
        row: int,
        *,
        element: U32,
        target: U32,
        old: Bits,
        new: Bits,
        fresh: npt.NDArray[np.bool_] | None,
    ) -> Group | None:
        count = element.size if fresh is None else int(fresh.sum())
        if not count:
            return None
        kept: list[npt.NDArray[Any]] = []
        for values in (element, target, old, new):
            space = self._arena.take(count, values.dtype)
            space[:] = values if fresh is None else values[fresh]
            kept.append(space)
        group = Group(row, hop, *kept)
        self._groups.append(group)
        self._by_row.setdefault(row, []).append(group)
        return group

    def _require_equal_aliases(self) -> None:
        """Raises `EngineRefused` if a change gives two values to memory that has two names."""
        for pair in self._placement.aliases:
            changes = [self._by_row.get(row, []) for row in pair]
            if not any(changes):
                continue
            one, other = (_joined(groups) if groups else None for groups in changes)
            if one is None or other is None or any(not np.array_equal(a, b) for a, b in zip(one, other, strict=True)):
                names = " and ".join(self._layout[self._placement.rows[row].tensor].name for row in pair)
                raise EngineRefused(
                    f"{names} share their memory in this engine, and the change makes them differ",
                    hint="train them tied, or serve a checkpoint whose config does not tie them",
                )

    def _finish(self, txn: str, fits: int, done: list[SegmentSums]) -> Transaction:
        """Give the groups to the memory, and compute what apply and rollback have to return."""
        memory, groups = self._memory, self._groups
        self._require_equal_aliases()
        with self._spending("stage"):
            memory.set_groups(groups)
        sums = [
            self._sums.get(id(g))
            or (memory.sum_bits(g.row, g.old, g.element), memory.sum_bits(g.row, g.new, g.element))
            for g in groups
        ]
        old, new = np.array(sums, dtype=np.uint64).reshape(-1, 2).T
        answer = PreparedRank(
            txn=txn,
            fits=fits,
            changed=sum(int(group.element.size) for group in groups),
            hops=done,
            before=box_sums(groups, old, placement=self._placement),
            after=box_sums(groups, new, placement=self._placement),
            spent=self._spent,
        )
        return Transaction(txn, fits, groups, answer, frozenset(self._computed))


def _joined(groups: Sequence[Group]) -> tuple[npt.NDArray[Any], ...]:
    """Live places and new values of several groups of one row, places ascending."""
    target, new = (np.concatenate([getattr(group, name) for group in groups]) for name in ("target", "new"))
    order = np.argsort(target)
    return target[order], new[order]


def _segment_sums(version: int, entries: list[tuple[int, int, int, int, int]]) -> SegmentSums:
    """Join rows of the same (segment, box)."""
    joined: dict[tuple[int, int], tuple[int, int, int]] = {}
    for segment, box, count, before, after in entries:
        a, b, c = joined.get((segment, box), (0, 0, 0))
        joined[segment, box] = (a + count, (b + before) % (1 << 64), (c + after) % (1 << 64))
    values = list(joined.values())
    return SegmentSums(
        version=version,
        segment=np.array([key[0] for key in joined], dtype="<u4").tobytes(),
        box=np.array([key[1] for key in joined], dtype="<u4").tobytes(),
        count=np.array([value[0] for value in values], dtype="<i8").tobytes(),
        before=np.array([value[1] for value in values], dtype="<u8").tobytes(),
        after=np.array([value[2] for value in values], dtype="<u8").tobytes(),
    )

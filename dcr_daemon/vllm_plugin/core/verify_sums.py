"""Adds up what the ranks summed, and compares it with what it must be (musts E4, E5, F1).

EngineCore calls these functions; they are pure. Input: the answers of all ranks, as arrays, and the summaries of the
staged files. Output: joined arrays, or `EngineRefused` with the names of tensors, never only a total.

Every rank sums what it holds, box by box. Equal boxes on several ranks are copies: they must have equal sums and are
counted once. Distinct boxes of a tensor add up to the tensor. That they tile it is shown in two steps: their sizes add
up to the tensor's (here), and the joined fingerprint equals a version's. A gap and an overlap of one size cannot pass
both, because a summand depends on its position.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from dcr_daemon.canonical.fingerprint import Vector
from dcr_daemon.canonical.layout import Layout
from dcr_daemon.engine.deltas import StagedSummary
from dcr_daemon.engine.port import Difference, EngineUnsupported, TensorClass
from dcr_daemon.errors import EngineRefused
from dcr_daemon.vllm_plugin.calls import AttachedRank, FingerprintRank, PreparedRank, SegmentSums, Sums, TensorHandling
from dcr_daemon.vllm_plugin.settings import computed_cap
from dcr_daemon.wording import shorten

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class JointPlacement:
    """Where the canonical tensors lie over all ranks.

    `classes`: [tensors]. `local`: per rank, the global number of each of its boxes. `tensor`, `elements`, `holders`:
    per global box, its tensor, its size, and how many local boxes of all ranks it is.
    """

    layout: Layout
    classes: tuple[TensorClass, ...]
    local: tuple[Ints, ...]
    tensor: Ints
    elements: Ints
    holders: Ints

    @property
    def exact(self) -> npt.NDArray[np.bool_]:
        """[tensors]: whether a tensor's live bits can be summed."""
        return np.array([kind is TensorClass.EXACT for kind in self.classes], dtype=bool)

    @property
    def computed(self) -> list[str]:
        """Names of the tensors that the loader computes with."""
        return [
            spec.name
            for spec, kind in zip(self.layout, self.classes, strict=True)
            if kind is TensorClass.LOADER_COMPUTED
        ]

    def held_elements(self, rank: int) -> Ints:
        """[tensors]: canonical elements on one rank."""
        count = np.zeros(len(self.layout), dtype=np.int64)
        np.add.at(count, self.tensor[self.local[rank]], self.elements[self.local[rank]])
        return count


@dataclass(frozen=True, slots=True, eq=False)
class LiveSums:
    """What the live weights sum to: `boxes` per global box, `vector` per tensor (0 where a tensor is not `exact`, or
    its copies differ, as `torn` then says)."""

    boxes: Vector
    vector: Vector
    torn: str = ""

    def after(self, placement: JointPlacement, ranks: Sequence[PreparedRank], vector: Vector) -> LiveSums:
        """The sums after a verified transaction is written; `vector` is that of the version it leads to."""
        boxes = self.boxes.copy()
        for local, rank in zip(placement.local, ranks, strict=True):
            box = local[np.frombuffer(rank.after.box, "<u4")]
            # Copies were found equal: all report the same of a box, so it does not matter which one is used.
            added = np.frombuffer(rank.after.sums, "<u8") - np.frombuffer(rank.before.sums, "<u8")
            boxes[box] = self.boxes[box] + added
        return LiveSums(boxes, vector * placement.exact)


def verify_hop(placement: JointPlacement, hop: StagedSummary, ranks: Sequence[SegmentSums]) -> None:
    """Compare each segment's sums over all ranks with the chunk's own, before and after this hop (must E4).

    Raises `EngineRefused` naming tensors: nothing has been written.
    """
    table, boxes = hop.table, max(1, placement.tensor.size)
    entries = []
    for local, rank in zip(placement.local, ranks, strict=True):
        segment = np.frombuffer(rank.segment, dtype="<u4").astype(np.int64)
        box = local[np.frombuffer(rank.box, dtype="<u4")]
        if segment.size and int(segment.max()) >= table.tensor.size:
            raise EngineRefused(f"a rank numbers more segments of version {hop.version} than its chunks have")
        columns = (
            np.frombuffer(rank.count, "<i8"),
            np.frombuffer(rank.before, "<u8"),
            np.frombuffer(rank.after, "<u8"),
        )
        entries.append((segment * boxes + box, columns))
    joined = _merge_copies(placement, entries, f"version {hop.version}")
    segment = joined.key // boxes
    counted, before, after = (np.zeros(table.tensor.size, dtype=kind) for kind in (np.int64, np.uint64, np.uint64))
    for total, column in zip((counted, before, after), joined.columns, strict=True):
        np.add.at(total, segment, column)
    exact = placement.exact[table.tensor]
    for wrong, text, hint in (
        (before != table.before, "the live weights are not what version {} was made from", "attach again"),
        (counted != table.changed, "version {} changes elements that no rank holds", "attach again"),
        (after != table.after, "version {} does not give the values that its chunks state", "stage the version again"),
    ):
        if (wrong & exact).any():
            tensors = sorted(set(table.tensor[wrong & exact].tolist()))
            names = shorten(placement.layout[t].name for t in tensors)
            raise EngineRefused(f"{text.format(hop.version)}: {names}", hint=hint)


def verify_composed(placement: JointPlacement, hops: Sequence[StagedSummary], ranks: Sequence[PreparedRank]) -> int:
    """Compare the one change that will be written with the hops from which it was composed.

    Returns how many distinct elements it changes.

    Raises `EngineRefused` naming tensors.
    """
    entries = []
    for local, rank in zip(placement.local, ranks, strict=True):
        if rank.before.box != rank.after.box or rank.before.count != rank.after.count:
            raise EngineRefused("a rank's transaction does not write what it read", hint="this is a bug: report it")
        box = local[np.frombuffer(rank.after.box, dtype="<u4")]
        sums = (np.frombuffer(one, "<u8") for one in (rank.before.sums, rank.after.sums))
        entries.append((box, (np.frombuffer(rank.after.count, "<i8"), *sums)))
    joined = _merge_copies(placement, entries, "transaction")
    count, before, after = joined.columns
    written = np.zeros(len(placement.layout), dtype=np.uint64)
    np.add.at(written, placement.tensor[joined.key], after - before)
    wanted = np.zeros_like(written)
    for hop in hops:
        wanted += hop.table.delta(len(placement.layout))
    if wrong := differing(placement, written, wanted):
        raise EngineRefused(
            f"the composed change is not the sum of its versions: {shorten(wrong)}", hint="this is a bug: report it"
        )
    return int(count.sum())


def compare_written(placement: JointPlacement, wanted: Sequence[Sums], found: Sequence[Sums]) -> str:
    """Compare every rank's live sums with what it had to write. Empty if they are equal, else the tensors and ranks."""
    faults = []
    for number, (local, want, have) in enumerate(zip(placement.local, wanted, found, strict=True)):
        if want.box != have.box:
            faults.append(f"rank {number} summed other boxes than it wrote")
            continue
        wrong = np.frombuffer(want.sums, "<u8") != np.frombuffer(have.sums, "<u8")
        if wrong.any():
            boxes = local[np.frombuffer(want.box, "<u4")[wrong]]
            faults.append(f"rank {number}: {_names(placement, boxes)}")
    return "; ".join(faults)


def join_placement(layout: Layout, ranks: Sequence[AttachedRank], *, cap: int | None = None) -> JointPlacement:
    """One placement from all ranks' answers to attach.

    Raises `EngineUnsupported` with every reason, the tensors it is given for, every tensor not covered exactly once,
    and the loaded tensors if they are more than `cap` bytes (None: a share of the model) over all ranks.
    """
    numbers: dict[tuple[Any, ...], int] = {}
    local = [
        np.array(
            [numbers.setdefault((b.tensor, b.dst, b.shape, b.strides), len(numbers)) for b in rank.boxes],
            dtype=np.int64,
        )
        for rank in ranks
    ]
    tensor = np.array([key[0] for key in numbers], dtype=np.int64)
    elements = np.array([int(np.prod(key[2], dtype=np.int64)) for key in numbers], dtype=np.int64)
    holders = np.zeros(len(numbers), dtype=np.int64)
    for boxes in local:
        np.add.at(holders, boxes, 1)
    reasons = _refusals(ranks)
    covered = np.zeros(len(layout), dtype=np.int64)
    np.add.at(covered, tensor, elements)
    classes = []
    for index, spec in enumerate(layout):
        held = {rank.held[index] for rank in ranks}
        if TensorHandling.LOADER_COMPUTED in held:
            classes.append(TensorClass.LOADER_COMPUTED)
            if (
                held - {TensorHandling.LOADER_COMPUTED, TensorHandling.SKIPPED, TensorHandling.REFUSED}
                or covered[index]
            ):
                reasons.append(f"{spec.name}: one rank's loader computes with it, another's copies it")
            continue
        if TensorHandling.PLACED in held or (spec.elements == 0 and TensorHandling.REFUSED not in held):
            classes.append(TensorClass.EXACT)
            if covered[index] != spec.elements:
                reasons.append(f"{spec.name}: {covered[index]} of {spec.elements} elements are in some rank's memory")
            continue
        # A fresh server would not read it either, and every parameter of the model is filled by other tensors.
        classes.append(TensorClass.ABSENT)
    reasons += _over_cap(layout, classes, computed_cap(cap, layout.nbytes))
    if reasons:
        raise unsupported(reasons)
    return JointPlacement(layout, tuple(classes), tuple(local), tensor, elements, holders)


def unsupported(reasons: Sequence[str]) -> EngineUnsupported:
    """The refusal of an engine that can never be kept up to date, as it was started."""
    return EngineUnsupported(
        f"this engine cannot be kept up to date in place: {shorten(reasons, limit=100, separator='; ')}",
        hint="docs/VLLM.md lists what is refused and why",
    )


def _over_cap(layout: Layout, classes: Sequence[TensorClass], cap: int) -> list[str]:
    """The reason to refuse, if the computed tensors have more than `cap` bytes: each change of one sends all of them,
    and the subscriber keeps their bytes."""
    loaded = [spec for spec, kind in zip(layout, classes, strict=True) if kind is TensorClass.LOADER_COMPUTED]
    size = sum(spec.nbytes for spec in loaded)
    if size <= cap:
        return []
    names = shorten(spec.name for spec in loaded)
    return [f"{names}: the loader computes with these {size} bytes, the cap is {cap} (DCR_LOADED_CAP)"]


def _refusals(ranks: Sequence[AttachedRank]) -> list[str]:
    """Reasons of all ranks, each once: the tensors that have it, and the ranks that gave it unless all did."""
    by_reason: dict[tuple[str, str], list[int]] = {}
    for number, rank in enumerate(ranks):
        for name, reason in rank.refusals.items():
            by_reason.setdefault((name, reason), []).append(number)
    names: dict[str, list[str]] = {}
    for (name, reason), who in by_reason.items():
        where = "" if len(who) == len(ranks) else f" (rank {', '.join(map(str, who))})"
        names.setdefault(reason + where, []).append(name)
    return [(f"{shorten(who)}: " if any(who) else "") + reason for reason, who in names.items()]


@dataclass(frozen=True, slots=True, eq=False)
class _Joined:
    """Entries of all ranks, copies merged: unique `key`s, and each column's value, of the first where they differ.
    `torn`: keys of copies that differ; `where`: that in words."""

    key: Ints
    columns: tuple[npt.NDArray[Any], ...]
    torn: Ints
    where: str = ""


def _merge_copies(
    placement: JointPlacement, entries: Sequence[tuple[Ints, tuple[npt.NDArray[Any], ...]]], what: str
) -> _Joined:
    """Merge copies as `_merge_torn_copies` does. Raises `EngineRefused` also where they differ."""
    joined = _merge_torn_copies(placement, entries, what)
    if joined.where:
        raise EngineRefused(
            f"{what}: {joined.where}",
            hint="the weights in one worker's memory are damaged: attach again, load an anchor",
        )
    return joined


def _merge_torn_copies(
    placement: JointPlacement, entries: Sequence[tuple[Ints, tuple[npt.NDArray[Any], ...]]], what: str
) -> _Joined:
    """Merge copies, also where they differ. A key is `row * boxes + box`; each rank gives its keys and columns.

    Raises `EngineRefused` where a holder of a box does not report it.
    """
    boxes = max(1, placement.tensor.size)
    key = np.concatenate([entry[0] for entry in entries])
    rank = np.repeat(np.arange(len(entries)), [entry[0].size for entry in entries])
    columns = [np.concatenate([entry[1][i] for entry in entries]) for i in range(len(entries[0][1]))]
    order = np.argsort(key, kind="stable")
    key, rank = key[order], rank[order]
    columns = [column[order] for column in columns]
    start = np.ones(key.size, dtype=bool)
    start[1:] = key[1:] != key[:-1]
    first = np.flatnonzero(start)
    group = np.cumsum(start) - 1
    differs = np.zeros(key.size, dtype=bool)
    for column in columns:
        differs |= column != column[first][group] if key.size else differs
    who = ", ".join(map(str, sorted(set(rank[differs].tolist()))))
    where = f"a copy differs on rank {who}: {_names(placement, key[differs] % boxes)}" if who else ""
    silent = np.bincount(group, minlength=first.size)[: first.size] != placement.holders[key[first] % boxes]
    if silent.any():
        raise EngineRefused(
            f"{what}: not every holder of a box summed it: {_names(placement, key[first][silent] % boxes)}",
            hint="the ranks do not hold the same transaction: attach again",
        )
    return _Joined(key[first], tuple(column[first] for column in columns), key[differs], where)


def _names(placement: JointPlacement, boxes: Ints) -> str:
    tensors = sorted(set(placement.tensor[boxes].tolist()))
    return shorten(placement.layout[t].name for t in tensors)


def join_fingerprint(placement: JointPlacement, ranks: Sequence[FingerprintRank]) -> LiveSums:
    """The sums of all live weights. A tensor whose copies differ gets the sum 0, which no version has: so the engine is
    at no version, and a load repairs it."""
    entries = [(local, (sums,)) for local, sums in _box_sums(placement, ranks)]
    joined = _merge_torn_copies(placement, entries, "fingerprint")
    vector = np.zeros(len(placement.layout), dtype=np.uint64)
    np.add.at(vector, placement.tensor[joined.key], joined.columns[0])
    vector[placement.tensor[joined.torn]] = 0
    boxes = np.zeros(placement.tensor.size, dtype=np.uint64)
    boxes[joined.key] = joined.columns[0]
    return LiveSums(boxes, vector, joined.where)


def _box_sums(placement: JointPlacement, ranks: Sequence[FingerprintRank]) -> list[tuple[Ints, Vector]]:
    """Per rank, the global numbers of its boxes and what it summed for them."""
    summed = []
    for local, rank in zip(placement.local, ranks, strict=True):
        sums = np.frombuffer(rank.sums, dtype="<u8")
        if sums.size != local.size:
            raise EngineRefused(f"a rank summed {sums.size} boxes and placed {local.size}", hint="attach again")
        summed.append((local, sums))
    return summed


NO_BOX = -1  #: in place of a damaged box, for a tensor that is right itself


def find_damage(
    placement: JointPlacement, live: LiveSums, *, ranks: Sequence[FingerprintRank], tensors: range
) -> list[Difference]:
    """Which of `tensors` do not sum to what was accepted, or have stale derived tensors, and on which ranks; in layout
    order. Then the parameters that the stream does not have, and that were changed."""
    wrong, right = dict[int, set[tuple[int, int]]](), set[int]()
    for number, (local, sums) in enumerate(_box_sums(placement, ranks)):
        tensor = placement.tensor[local]
        asked = (tensor >= tensors.start) & (tensor < tensors.stop)
        same = live.boxes[local] == sums
        right.update(local[asked & same].tolist())
        for box in local[asked & ~same].tolist():
            wrong.setdefault(int(placement.tensor[box]), set()).add((number, box))
    for number, rank in enumerate(ranks):
        for stale in rank.stale:
            wrong.setdefault(stale, set()).add((number, NO_BOX))
    others: dict[str, list[int]] = {}
    for number, rank in enumerate(ranks):
        for name in rank.changed:
            others.setdefault(name, []).append(number)
    return [
        Difference(
            tensor=placement.layout[tensor].name,
            ranks=sorted({number for number, _ in where}),
            replica=any(box in right for _, box in where),
        )
        for tensor, where in sorted(wrong.items())
    ] + [Difference(tensor=name, ranks=where) for name, where in sorted(others.items())]


def differing(placement: JointPlacement, one: Vector, other: Vector) -> list[str]:
    """Names of the exact tensors in which two vectors differ, in layout order."""
    return [placement.layout[int(t)].name for t in np.flatnonzero((one != other) & placement.exact)]

"""Joint verdicts: sums of arbitrary shards and replicas, and every way in which ranks may not agree."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dcr_daemon.canonical.fingerprint import Vector, fingerprint, sum_run
from dcr_daemon.canonical.layout import Layout, TensorSpec
from dcr_daemon.engine.deltas import SegmentTable, StagedSummary, check_chain
from dcr_daemon.engine.port import TensorClass
from dcr_daemon.errors import EngineRefused
from dcr_daemon.vllm_plugin.calls import AttachedRank, BoxRow, FingerprintRank, SegmentSums, Sums, TensorHandling
from dcr_daemon.vllm_plugin.core import verify_sums

LAYOUT = Layout([TensorSpec("a", "BF16", (12,)), TensorSpec("b", "BF16", (4,)), TensorSpec("c", "F32", (6,))])
VALUES = [np.arange(12, dtype="<u2"), np.array([1, 0, 7, 65535], dtype="<u2"), np.arange(6, dtype="<u4") * 77]
U64 = 1 << 64


def rank_of(
    boxes: list[tuple[int, int, int]], held: list[TensorHandling] | None = None, **refusals: str
) -> AttachedRank:
    """`boxes` are (tensor, start, count)."""
    rows = [BoxRow(tensor, start, (count,), (1,)) for tensor, start, count in boxes]
    have = {row.tensor for row in rows}
    marks = held or [TensorHandling.PLACED if i in have else TensorHandling.SKIPPED for i in range(len(LAYOUT))]
    return AttachedRank(token=1, adopted=None, held=marks, boxes=rows, refusals=refusals)


def summed(rank: AttachedRank) -> FingerprintRank:
    sums = []
    for row in rank.boxes:
        bits = VALUES[row.tensor][row.dst : row.dst + row.shape[0]]
        sums.append(sum_run(bits, int(LAYOUT.keys[row.tensor]), first=row.dst))
    return FingerprintRank(id="f", sums=np.array(sums, dtype="<u8").tobytes())


@st.composite
def shardings(draw: st.DrawFn) -> list[AttachedRank]:
    """Every tensor cut at random, every piece on one or more ranks, in any order."""
    ranks = draw(st.integers(1, 4))
    held: list[list[tuple[int, int, int]]] = [[] for _ in range(ranks)]
    for tensor, spec in enumerate(LAYOUT):
        cuts = draw(st.sets(st.integers(1, spec.elements - 1), max_size=3))
        edges = [0, *sorted(cuts), spec.elements]
        for start, end in itertools.pairwise(edges):
            for rank in draw(st.sets(st.integers(0, ranks - 1), min_size=1)):
                held[rank].append((tensor, start, end - start))
    return [rank_of(draw(st.permutations(boxes))) for boxes in held]


@settings(deadline=None, max_examples=60)
@given(shardings())
def test_any_sharding_joins_to_the_fingerprint(ranks: list[AttachedRank]) -> None:
    placement = verify_sums.join_placement(LAYOUT, ranks)
    assert placement.classes == (TensorClass.EXACT,) * 3
    live = verify_sums.join_fingerprint(placement, [summed(rank) for rank in ranks])
    assert (live.vector == fingerprint(LAYOUT, VALUES)).all()
    total = sum(int(placement.held_elements(rank).sum()) for rank in range(len(ranks)))
    assert total == int((placement.elements * placement.holders).sum())


@settings(deadline=None, max_examples=60)
@given(shardings(), st.data())
def test_a_box_that_is_missing_somewhere_is_never_overlooked(ranks: list[AttachedRank], data: st.DataObject) -> None:
    placement = verify_sums.join_placement(LAYOUT, ranks)
    number = data.draw(st.sampled_from([i for i, rank in enumerate(ranks) if rank.boxes]))
    sums = [summed(rank) for rank in ranks]
    spoiled = np.frombuffer(sums[number].sums, "<u8").copy()
    box = data.draw(st.integers(0, spoiled.size - 1))
    spoiled[box] += np.uint64(1)
    sums[number] = FingerprintRank(id="f", sums=spoiled.tobytes())
    replicated = placement.holders[placement.local[number][box]] > 1
    live = verify_sums.join_fingerprint(placement, sums)
    name = LAYOUT[ranks[number].boxes[box].tensor].name
    assert ("a copy differs" in live.torn, name in live.torn) == (replicated, replicated)
    assert verify_sums.differing(placement, live.vector, fingerprint(LAYOUT, VALUES)) == [name]


def whole() -> verify_sums.JointPlacement:
    return verify_sums.join_placement(LAYOUT, [rank_of([(0, 0, 12), (1, 0, 4), (2, 0, 6)])])


def test_a_gap_and_an_overlap_are_refused_by_name() -> None:
    with pytest.raises(EngineRefused) as caught:
        verify_sums.join_placement(LAYOUT, [rank_of([(0, 0, 11), (1, 0, 4), (1, 1, 3)])])
    assert "a: 11 of 12" in str(caught.value)
    assert "b: 7 of 4" in str(caught.value)


def test_what_no_loader_reads_is_left_out_on_both_sides() -> None:
    marks = [TensorHandling.PLACED, TensorHandling.PLACED, TensorHandling.SKIPPED]
    placement = verify_sums.join_placement(LAYOUT, [rank_of([(0, 0, 12), (1, 0, 4)], marks)])
    assert placement.classes[2] is TensorClass.ABSENT
    other = fingerprint(LAYOUT, VALUES)
    other[2] += np.uint64(5)
    live = fingerprint(LAYOUT, VALUES)
    live[2] = 0
    assert verify_sums.differing(placement, live, other) == []


def test_skipped_here_and_half_placed_there_is_refused() -> None:
    marks = [TensorHandling.PLACED, TensorHandling.PLACED, TensorHandling.SKIPPED]
    with pytest.raises(EngineRefused, match="c: 3 of 6"):
        verify_sums.join_placement(
            LAYOUT, [rank_of([(0, 0, 12), (1, 0, 4)], marks), rank_of([(0, 0, 12), (1, 0, 4), (2, 0, 3)])]
        )


def test_a_refusal_without_a_tensor_refuses_the_model() -> None:
    rank = AttachedRank(token=1, adopted=None, held=[TensorHandling.REFUSED] * 3, refusals={"": "LoRA is enabled"})
    with pytest.raises(EngineRefused, match="LoRA is enabled"):
        verify_sums.join_placement(LAYOUT, [rank])


def staged(before: Vector, after: Vector, *rows: tuple[int, int, int, int]) -> StagedSummary:
    """Version 1 with segments (tensor, changed, before, after)."""
    columns = list(zip(*rows, strict=True)) if rows else [[], [], [], []]
    table = SegmentTable(
        tensor=np.array(columns[0], dtype=np.int64),
        changed=np.array(columns[1], dtype=np.int64),
        before=np.array(columns[2], dtype=np.uint64),
        after=np.array(columns[3], dtype=np.uint64),
    )
    return StagedSummary(1, table, before, after)


def hop_sums(*rows: tuple[int, int, int, int, int]) -> SegmentSums:
    """Rows of (segment, box, count, before, after)."""
    columns = list(zip(*rows, strict=True)) if rows else [[], [], [], [], []]
    kinds = ("<u4", "<u4", "<i8", "<u8", "<u8")
    packed = [np.array(column, dtype=kind).tobytes() for column, kind in zip(columns, kinds, strict=True)]
    return SegmentSums(version=1, segment=packed[0], box=packed[1], count=packed[2], before=packed[3], after=packed[4])


SPLIT = [rank_of([(0, 0, 6), (1, 0, 4), (2, 0, 6)]), rank_of([(0, 6, 6), (1, 0, 4), (2, 0, 6)])]
GOOD = [hop_sums((0, 0, 2, 10, 20), (1, 1, 1, U64 - 3, 4)), hop_sums((0, 0, 3, U64 - 4, 7), (1, 1, 1, U64 - 3, 4))]
BASE = fingerprint(LAYOUT, VALUES)
SEGMENTS = [(0, 5, 6, 27), (1, 1, U64 - 3, 4)]
STAGED = staged(BASE, BASE + np.array([21, 7, 0], dtype=np.uint64), *SEGMENTS)


def test_shares_of_a_segment_add_up_and_replicas_count_once() -> None:
    verify_sums.verify_hop(verify_sums.join_placement(LAYOUT, SPLIT), STAGED, GOOD)


@pytest.mark.parametrize(
    ("ranks", "text"),
    [
        ([hop_sums((0, 0, 2, 11, 20), (1, 1, 1, U64 - 3, 4)), GOOD[1]], "not what version 1 was made from: a"),
        ([hop_sums((0, 0, 2, 10, 21), (1, 1, 1, U64 - 3, 4)), GOOD[1]], "does not give the values .*: a"),
        ([hop_sums((0, 0, 1, 10, 20), (1, 1, 1, U64 - 3, 4)), GOOD[1]], "elements that no rank holds: a"),
        ([hop_sums((0, 0, 2, 10, 20), (1, 1, 1, U64 - 2, 4)), GOOD[1]], r"a copy differs on rank 0, 1|rank 1: b"),
        ([hop_sums((0, 0, 2, 10, 20)), GOOD[1]], "not every holder of a box summed it: b"),
        ([hop_sums((2, 0, 2, 10, 20)), GOOD[1]], "numbers more segments"),
    ],
    ids=["before", "after", "count", "replica", "silent", "number"],
)
def test_every_disagreement_over_a_segment_is_named(ranks: list[SegmentSums], text: str) -> None:
    with pytest.raises(EngineRefused, match=text):
        verify_sums.verify_hop(verify_sums.join_placement(LAYOUT, SPLIT), STAGED, ranks)


def test_chunks_must_lead_from_base_to_seal_for_every_tensor() -> None:
    check_chain(LAYOUT, [STAGED], BASE)
    c_differs, b_differs = np.array([0, 0, 1], dtype=np.uint64), np.array([0, 1, 0], dtype=np.uint64)
    with pytest.raises(EngineRefused, match="do not lead from its base to its seal: c"):
        check_chain(LAYOUT, [staged(BASE, STAGED.after + c_differs, *SEGMENTS)], BASE)
    with pytest.raises(EngineRefused, match="not the base of version 1: b"):
        check_chain(LAYOUT, [STAGED], BASE + b_differs)
    check_chain(LAYOUT, [STAGED], BASE + b_differs, exact=np.array([True, False, True]))
    with pytest.raises(EngineRefused, match="does not start where the version before it ended: a, b"):
        check_chain(LAYOUT, [STAGED, STAGED], BASE)


def written(*rows: tuple[int, int, int]) -> Sums:
    columns = list(zip(*rows, strict=True))
    kinds = ("<u4", "<i8", "<u8")
    box, count, sums = (np.array(column, dtype=kind).tobytes() for column, kind in zip(columns, kinds, strict=True))
    return Sums(box=box, count=count, sums=sums)


def test_what_was_written_is_judged_rank_by_rank() -> None:
    placement = verify_sums.join_placement(LAYOUT, SPLIT)
    wanted = [written((0, 2, 20), (1, 1, 4)), written((0, 3, 7), (1, 1, 4))]
    assert verify_sums.compare_written(placement, wanted, wanted) == ""
    found = [wanted[0], written((0, 3, 7), (1, 1, 5))]
    assert verify_sums.compare_written(placement, wanted, found) == "rank 1: b"
    assert "other boxes" in verify_sums.compare_written(placement, wanted, [wanted[0], written((0, 3, 7))])

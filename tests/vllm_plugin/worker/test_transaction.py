"""A prepared transaction is exactly the change asked for, whatever the dtypes, shards, codecs, versions and cap."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from support.vllm.toy_model import LAYOUT, heldless, loaded, placed
from support.vllm.worker_rig import halves, random_lanes, segment_totals, step, unpack, write_version

from dcr_daemon.canonical.box import Box
from dcr_daemon.codec.chunk import Codec
from dcr_daemon.codec.decode import Chunk
from dcr_daemon.errors import CorruptChunk, ResourceExhausted
from dcr_daemon.vllm_plugin.weights.arena import Arena, ArenaFull
from dcr_daemon.vllm_plugin.weights.memory import HostMemory
from dcr_daemon.vllm_plugin.worker.prepare import Preparation

PLENTY = 1 << 20


class Ranks:
    """Two tensor-parallel ranks of the toy, started from the same values."""

    def __init__(self, lanes, cap: int = PLENTY) -> None:
        self.toys = [loaded(lanes, rank, 2) for rank in range(2)]
        self.placements, homes = zip(*(placed(toy) for toy in self.toys), strict=True)
        self.memories = [HostMemory(p, h, layout=LAYOUT) for p, h in zip(self.placements, homes, strict=True)]
        self.arenas = [Arena(cap) for _ in self.toys]

    def preparation(self, rank: int) -> Preparation:
        return Preparation(
            layout=LAYOUT, placement=self.placements[rank], memory=self.memories[rank], arena=self.arenas[rank]
        )

    def prepare(self, versions):
        return [self.preparation(rank).run("t", [v.hop for v in versions]) for rank in range(2)]

    def states(self):
        return [toy.state() for toy in self.toys]


def history(out: Path, count: int, share: float = 0.4, **how):
    states = [heldless(random_lanes(LAYOUT, 1))]
    hops = []
    for number in range(1, count + 1):
        states.append(heldless(step(states[-1], share, number)))
        hops.append(write_version(out, LAYOUT, states[-2], states[-1], version=number, **how))
    return states, hops


def joined(ranks: Ranks, answers, hop: int) -> dict[int, tuple[int, int, int]]:
    """Segment totals over both ranks, replicas counted once."""
    seen, out = set(), {}
    for placement, answer in zip(ranks.placements, answers, strict=True):
        sums = answer.answer.hops[hop]
        columns = zip(
            *(np.frombuffer(getattr(sums, name), kind).tolist() for name, kind in
              (("segment", "<u4"), ("box", "<u4"), ("count", "<i8"), ("before", "<u8"), ("after", "<u8"))),
            strict=True,
        )  # fmt: skip
        for segment, box, count, before, after in columns:
            key = (segment, placement.boxes[box])
            if key not in seen:
                a, b, c = out.get(segment, (0, 0, 0))
                out[segment] = (a + count, (b + before) % (1 << 64), (c + after) % (1 << 64))
            seen.add(key)
    return out


@pytest.mark.parametrize("codec", list(Codec))
@pytest.mark.parametrize("boxes", [None, halves], ids=["whole", "column shards"])
def test_several_versions_become_one_change_on_every_rank(tmp_path: Path, codec: Codec, boxes) -> None:
    states, hops = history(tmp_path, 4, codec=codec, boxes=boxes, target=200)
    ranks = Ranks(states[0])
    before = ranks.states()
    transactions = ranks.prepare(hops)
    assert ranks.states() == before, "prepare writes nothing"
    for number, version in enumerate(hops):
        totals = joined(ranks, transactions, number)
        wanted = {n: (s.changed, s.before, s.after) for n, s in enumerate(version.segments)}
        assert totals == wanted
    for _ in range(2):  # repeated, and in either order
        for rank, txn in enumerate(transactions):
            assert txn.apply(ranks.memories[rank], ranks.placements[rank]) == txn.answer.after
        assert ranks.states() == [loaded(states[-1], rank, 2).state() for rank in range(2)]
        for rank, txn in enumerate(transactions):
            assert txn.rollback(ranks.memories[rank], ranks.placements[rank]) == txn.answer.before
        assert ranks.states() == before


def test_composed_differences_are_the_hops_differences(tmp_path: Path) -> None:
    states, hops = history(tmp_path, 3)
    ranks = Ranks(states[0])
    for rank, txn in enumerate(ranks.prepare(hops)):
        by_tensor = dict.fromkeys(range(len(LAYOUT)), 0)
        for sums, sign in ((txn.answer.after, 1), (txn.answer.before, -1)):
            for box, (_, value) in unpack(sums).items():
                by_tensor[ranks.placements[rank].boxes[box].tensor] += sign * value
        for number, version in enumerate(hops):
            for segment, (_, before, after) in segment_totals(txn.answer.hops[number]).items():
                by_tensor[version.segments[segment].tensor] -= after - before
        assert all(value % (1 << 64) == 0 for value in by_tensor.values())


@pytest.mark.parametrize("fits", [1, 2, 3])
def test_the_cap_splits_a_route_at_a_version(tmp_path: Path, fits: int) -> None:
    states, hops = history(tmp_path, 4, share=0.1)
    needed = []
    for count in range(1, 5):
        ranks = Ranks(states[0])
        txn = ranks.preparation(0).run("t", [v.hop for v in hops[:count]])
        needed.append(sum(-(-g.nbytes // 8) * 8 for x in txn.groups for g in (x.element, x.target, x.old, x.new)))
    assert needed == sorted(set(needed)), "each version adds elements, so each cap below lies between two versions"
    ranks = Ranks(states[0], cap=needed[fits] - 8)
    txn = ranks.preparation(0).run("t", [v.hop for v in hops])
    assert txn.fits == fits
    assert len(txn.answer.hops) == fits
    assert txn.apply(ranks.memories[0], ranks.placements[0]) == txn.answer.after
    assert ranks.toys[0].state() == loaded(states[fits], 0, 2).state()


def test_a_version_over_the_cap_says_so(tmp_path: Path) -> None:
    states, hops = history(tmp_path, 1)
    with pytest.raises(ResourceExhausted, match="version 1 alone needs more than the 64 bytes of host memory"):
        Ranks(states[0], cap=64).preparation(0).run("t", [hops[0].hop])


def test_a_chunk_of_another_version_is_refused(tmp_path: Path) -> None:
    states, hops = history(tmp_path, 2)
    import msgspec

    mixed = msgspec.structs.replace(hops[1].hop, chunks=hops[0].hop.chunks)
    with pytest.raises(CorruptChunk, match="chunk of version 1"):
        Ranks(states[0]).preparation(0).run("t", [mixed])


def test_segments_that_no_row_meets_are_not_decoded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Expert parallelism: a damaged stream of somebody else's expert does not even get read."""
    states, hops = history(tmp_path, 1)
    ranks = Ranks(states[0])
    seen: list[int] = []
    decode = Chunk.changes
    monkeypatch.setattr(Chunk, "changes", lambda c, n: seen.append(c.segment(n).tensor) or decode(c, n))
    for rank in range(2):
        ranks.preparation(rank).run("t", [hops[0].hop])
    experts = [LAYOUT[t].name for t in seen if LAYOUT[t].name.startswith("expert")]
    assert sorted(experts) == [f"expert.{e}" for e in range(4)], "each expert is decoded by one rank only"


def test_a_transposed_box_is_applied_in_canonical_order(tmp_path: Path) -> None:
    def columns_first(layout, tensor: int) -> list[Box]:
        spec = layout[tensor]
        if len(spec.shape) != 2:
            return [Box.flat(0, spec.elements)]
        rows, columns = spec.shape
        return [Box(0, (columns, rows), (1, columns))]

    states, hops = history(tmp_path, 2, boxes=columns_first)
    ranks = Ranks(states[0])
    for rank, txn in enumerate(ranks.prepare(hops)):
        assert txn.apply(ranks.memories[rank], ranks.placements[rank]) == txn.answer.after
        assert ranks.toys[rank].state() == loaded(states[-1], rank, 2).state()


def test_an_arena_hands_out_aligned_pieces_and_never_more_than_it_has() -> None:
    arena = Arena(64)
    first, second = arena.take(3, "u1"), arena.take(4, "<u8")
    assert (first.size, second.size) == (3, 4)
    assert second.ctypes.data % 8 == 0
    with pytest.raises(ArenaFull):
        arena.take(4, "<u8")
    arena.reset()
    assert arena.take(8, "<u8").size == 8


def test_a_version_without_changes_is_a_version(tmp_path: Path) -> None:
    states, hops = history(tmp_path, 1)
    nothing = write_version(tmp_path, LAYOUT, states[1], states[1], version=2)
    assert nothing.hop.chunks == []
    ranks = Ranks(states[0])
    txn = ranks.preparation(0).run("t", [hops[0].hop, nothing.hop])
    assert (txn.fits, txn.answer.hops[1].count) == (2, b"")
    ranks = Ranks(states[1])
    txn = ranks.preparation(0).run("t", [nothing.hop])
    assert (txn.answer.changed, txn.apply(ranks.memories[0], ranks.placements[0])) == (0, txn.answer.after)

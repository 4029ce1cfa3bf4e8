"""The gate: what it lets pass, what it makes residual, what it refuses and in which words; and hostile declarations."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import msgspec
import numpy as np
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st
from support.tensors.regions import dense_regions

from dcr_daemon.canonical.coverage import exactly_once
from dcr_daemon.canonical.layout import Layout, TensorSpec
from dcr_daemon.canonical.region import Region, slab, whole
from dcr_daemon.errors import Incompatible
from dcr_daemon.projection.agreement import coverage, gate
from dcr_daemon.projection.agreement.gate import (
    Declaration,
    Verdict,
    declare,
    decode_declaration,
    decode_verdict,
    judge,
)
from dcr_daemon.projection.region_map import Map, shards_of

LAYOUT = Layout(
    [
        TensorSpec("layers.0.up", "BF16", (8, 6)),
        TensorSpec("layers.1.up", "BF16", (8, 6)),
        TensorSpec("norm", "F32", (6,)),
        TensorSpec("nothing", "BF16", (0, 4)),
    ]
)


def map_of(regions: Iterable[Region], residual: dict[str, str] | None = None, layout: Layout = LAYOUT) -> Map:
    by_dtype: dict[str, list[Region]] = {}
    for region in regions:
        by_dtype.setdefault(layout[layout.index(region.name)].dtype, []).append(region)
    shards = [s for dtype, of in by_dtype.items() for s in shards_of(dtype, (1000,), dtype, of, layout)]
    return Map(tuple(shards), residual or {})


def declared(rank: int, regions: Iterable[Region], world: int = 2, **fields: Any) -> Declaration:
    """Through bytes, as it comes to rank 0."""
    made = map_of(regions, fields.pop("residual", None), fields.get("layout", LAYOUT))
    layout = fields.pop("layout", LAYOUT)
    group = {"group": "g", "call": 3, "attempt": 17, "nonce": f"n{rank}"} | fields
    return decode_declaration(gate.encode_declaration(declare(made, layout, rank=rank, world=world, **group)))


def halves(rank: int, names: Sequence[str] = ("layers.0.up", "layers.1.up")) -> list[Region]:
    """Columns of the one, rows of the other, and the norm on rank 1."""
    made = []
    if "layers.0.up" in names:
        made += slab("layers.0.up", (8, 6), starts=(0, 3 * rank), sizes=(8, 3))
    if "layers.1.up" in names:
        made += slab("layers.1.up", (8, 6), starts=(4 * rank, 0), sizes=(4, 6))
    return made + (whole("norm", (6,)) if rank else [])


def test_a_sound_group_gets_a_verdict_that_every_rank_reads_alike() -> None:
    ranks = [declared(rank, halves(rank)) for rank in (1, 0)]
    verdict = judge(ranks, LAYOUT)
    assert verdict == judge(reversed(ranks), LAYOUT) == decode_verdict(gate.encode_verdict(verdict))
    assert (verdict.residues, verdict.direct_bytes, verdict.residual_bytes) == ({}, LAYOUT.nbytes, 0)
    assert verdict.boxes == 5
    assert verdict.report(LAYOUT) == "direct    100.000% by 2 ranks, 5 regions\nresidual  none"
    assert all(verdict.admits(rank) for rank in ranks)
    assert not verdict.admits(declared(0, halves(0), nonce="started anew"))
    assert not verdict.admits(declared(0, halves(0), attempt=18))


@pytest.mark.parametrize(
    ("ranks", "words"),
    [
        ([declared(0, halves(0))], "no word of rank 1 of 2"),
        ([], "no rank has declared"),
        ([declared(0, halves(0)), declared(0, halves(0)), declared(1, halves(1))], "two declarations of rank 0"),
        ([declared(0, []), declared(1, []), declared(2, [], 3)], "another world on rank 2"),
        ([declared(0, halves(0)), declared(1, halves(1)), declared(1, [], call=4)], "another call on rank 1"),
        (
            [declared(0, halves(0), export="hook"), declared(1, halves(1))],
            "cannot construct residual tensors together: another way to export on rank 1",
        ),
        (
            [declared(0, halves(0)), declared(1, [], layout=Layout([TensorSpec("a", "BF16", (2,))]))],
            "another layout than the stream's .* on rank 1",
        ),
    ],
)
def test_ranks_that_are_not_one_group_are_refused(ranks: list[Declaration], words: str) -> None:
    with pytest.raises(Incompatible, match=words):
        judge(ranks, LAYOUT)


def test_a_rank_without_a_layer_is_refused_and_the_words_say_where_to_look() -> None:
    with pytest.raises(Incompatible) as refused:
        judge([declared(0, halves(0)), declared(1, halves(1, ["layers.0.up"]))], LAYOUT)
    assert refused.value.message == (
        "1 of 4 tensors do not have exactly one source over all ranks: "
        "layers.1.up: 24 of 48 elements have no source (the others: rank 0)"
    )
    assert "every rank of every pipeline stage" in refused.value.hint
    assert "replica=" in refused.value.hint


def test_what_several_ranks_hold_alike_is_refused_with_the_ranks_and_the_remedy() -> None:
    both = [declared(rank, [*halves(rank), *([] if rank else whole("norm", (6,)))]) for rank in range(2)]
    with pytest.raises(Incompatible, match=r"norm: 6 of 6 elements have several sources \(ranks 0-1\)") as refused:
        judge(both, LAYOUT)
    assert "replica=(number, count)" in refused.value.hint


def test_a_map_of_another_model_is_refused() -> None:
    far = Region("norm", (6,), 0, (1,), 2, (1,))
    with pytest.raises(Incompatible, match=r"boxes beyond its 6 elements \(rank 0\); 6 of 6 elements have no source"):
        judge([declared(0, [*halves(0), *halves(1)[:-1], far], 1)], LAYOUT)


def test_what_has_not_one_source_is_residual_by_name_where_it_can_be_exported() -> None:
    ranks = [declared(0, halves(0), export="hook"), declared(1, halves(1)[:1], export="hook")]
    verdict = judge(ranks, LAYOUT)
    assert verdict.residual == {
        "layers.1.up": "24 of 48 elements have no source (the others: rank 0)",
        "norm": "6 of 6 elements have no source",
    }
    assert (verdict.direct_bytes, verdict.residual_bytes) == (96, 120)
    assert (verdict.owned(0), verdict.owned(1)) == (("layers.1.up",), ("norm",))
    assert verdict.overwrites == {"layers.1.up", "norm"}  # nobody knows what a hook computes
    own = judge([declared(0, halves(0), export="own"), declared(1, halves(1)[:1], export="own")], LAYOUT)
    assert own.residual == verdict.residual
    assert own.overwrites == frozenset()
    assert verdict.report(LAYOUT).splitlines() == [
        "direct    44.444% by 2 ranks, 2 regions",
        "residual  55.556%, 2 tensors",
        "          44.444% 24 of 48 elements have no source (the others: rank 0): layers.1.up",
        "          11.111% 6 of 6 elements have no source: norm",
    ]


def test_residual_on_one_rank_is_residual_on_all_and_the_reasons_are_joined() -> None:
    why = {"layers.0.up": "a scale for all", "norm": "exported otherwise"}
    one = declared(0, halves(0), residual=why, export="own", computed=("layers.0.up", "layers.1.up"))
    other = declared(1, halves(1), export="own", probed={"norm": "of another dtype"})
    verdict = judge([one, other], LAYOUT)
    assert verdict.residual == {
        "layers.0.up": "a scale for all (rank 0)",
        "norm": "rank 0: exported otherwise; rank 1: of another dtype",
    }
    assert verdict.overwrites == {"layers.0.up"}
    assert verdict.residues["layers.0.up"].owner != verdict.residues["norm"].owner
    both = [declared(rank, halves(rank), residual={"norm": "alike"}, export="own") for rank in range(2)]
    assert judge(both, LAYOUT).residual == {"norm": "alike"}


def test_residual_without_an_export_is_refused_by_name_and_reason() -> None:
    ranks = [declared(rank, halves(rank), residual={"norm": "aten.mul computes it"}) for rank in range(2)]
    with pytest.raises(Incompatible, match=r"no rank can export them: norm: aten\.mul computes it") as refused:
        judge(ranks, LAYOUT)
    assert "export=" in refused.value.hint
    ranks = [declared(0, halves(0), export="own", buildable={"norm"}.__contains__), declared(1, [], export="own")]
    ranks[1] = msgspec.structs.replace(ranks[1], buildable=b"\0")
    with pytest.raises(Incompatible, match="2 of 4 tensors do not have exactly one source"):
        judge(ranks, LAYOUT)


def test_owners_are_ranks_that_construct_the_tensor_and_loads_are_even() -> None:
    layout = Layout(TensorSpec(f"t{i:02}", "BF16", (1 + i,)) for i in range(40))
    why = {spec.name: "opaque" for spec in layout}
    can = {0: lambda name: name < "t20", 1: lambda name: name >= "t10", 2: lambda name: True}
    ranks = [
        declared(r, [], 3, layout=layout, residual=why, export="own", buildable=of_rank) for r, of_rank in can.items()
    ]
    verdict = judge(ranks, layout)
    loads = [sum(layout[layout.index(name)].nbytes for name in verdict.owned(rank)) for rank in range(3)]
    assert loads == [420, 610, 610], "rank 0 owns all that it can construct, and that is less than a third"
    assert all(can[residue.owner](name) for name, residue in verdict.residues.items())


@settings(max_examples=100, deadline=None)
@given(st.lists(dense_regions(), max_size=6), st.integers(1, 4))
def test_the_count_by_columns_is_exactly_once(regions: list[Region], world: int) -> None:
    """Whatever boxes, however they are dealt to ranks: the same elements missing and double as region by region."""
    size = max((region.dst_last for region in regions), default=3) + 2
    layout = Layout([TensorSpec("a", "BF16", (7,)), TensorSpec("t", "BF16", (size,)), TensorSpec("z", "BF16", (3,))])
    others = [*whole("a", (7,)), *whole("z", (3,))]
    ranks = [declared(r, [*regions[r::world], *(others if r == 0 else [])], world, layout=layout) for r in range(world)]
    found = exactly_once(regions, {"t": (size,)})
    faults = coverage.check(ranks, layout, np.zeros(3, np.bool_)).faults
    if not found:
        assert faults == ()
        return
    (fault,) = faults
    assert fault.tensor == 1
    assert fault.missing == sum(f.elements for f in found if f.kind == "missing")
    assert fault.double == sum(f.elements for f in found if f.kind == "double")
    assert fault.doubles == tuple(sorted({i % world for f in found if f.kind == "double" for i in f.holders}))


def test_stripes_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    layout = Layout(TensorSpec(f"t{i}", "BF16", (8, 6)) for i in range(9))
    ranks = [
        declared(
            r,
            [
                p
                for s in layout
                for p in slab(s.name, (8, 6), starts=(0, 3 * r), sizes=(8, 3))
                if (s.name, r) != ("t4", 1)
            ],
            layout=layout,
        )
        for r in range(2)
    ]  # fmt: skip
    expected = coverage.check(ranks, layout, np.zeros(9, np.bool_))
    assert [fault.tensor for fault in expected.faults] == [4]
    for stripe in (1, 3, 7):
        monkeypatch.setattr(coverage, "STRIPE", stripe)
        assert coverage.check(ranks, layout, np.zeros(9, np.bool_)) == expected


def test_a_thousand_ranks_are_judged_by_columns() -> None:
    """1,024 ranks of 500 boxes each, half of the tensors cut by columns: nothing here is an object per box."""
    world, tensors = 1024, 500
    layout = Layout(TensorSpec(f"t{i:03}", "BF16", (2, world)) for i in range(tensors))
    made = [
        p
        for i, s in enumerate(layout)
        for p in slab(s.name, (2, world), starts=(0, 0), sizes=(2, 1) if i % 2 else (1, 2))
    ]
    first = declare(map_of(made, layout=layout), layout, group="g", call=0, attempt=1, rank=0, world=world, nonce="")
    starts = np.frombuffer(first.starts, "<i8")
    steps = np.array([1 if i % 2 else 2 for i in range(tensors)])
    ranks = [
        msgspec.structs.replace(first, rank=rank, starts=(starts + rank * steps).astype("<i8").tobytes())
        for rank in range(world)
    ]
    verdict = judge(ranks, layout)
    assert (verdict.direct_bytes, verdict.boxes) == (layout.nbytes, world * tensors)
    late = msgspec.structs.replace(ranks[7], starts=ranks[8].starts)
    with pytest.raises(Incompatible, match=r"t000: 2 of 2,048 elements have no source.*\(ranks 7-8\)"):
        judge([*ranks[:7], late, *ranks[8:]], layout)


def test_a_declaration_is_small() -> None:
    """Experts of a hundred layers, 128 each: about a byte per box."""
    layout = Layout(TensorSpec(f"l.{i:03}.{e:03}", "BF16", (64, 64)) for i in range(100) for e in range(128))
    made = map_of([r for s in layout for r in slab(s.name, (64, 64), starts=(0, 16), sizes=(64, 16))], layout=layout)
    declaration = declare(made, layout, group="g", call=0, attempt=1, rank=0, world=4, nonce="n")
    assert declaration.forms == (((64, 64), (16, 1)),)
    assert len(gate.encode_declaration(declaration)) < 3 * declaration.boxes


SOUND = declared(0, halves(0))


def packed(**fields: Any) -> bytes:
    return gate.encode_declaration(msgspec.structs.replace(SOUND, **fields))


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"no zstd at all",
        zstandard.compress(b"\x80"),
        zstandard.compress(msgspec.msgpack.encode({"group": "g"})),
        zstandard.compress(b"\x91" * 100_000),
        zstandard.ZstdCompressor(write_content_size=False).compress(b"\x80"),
        gate.encode_declaration(SOUND)[:-3],
        gate.encode_declaration(SOUND) + b"x",
        packed(rank=2),
        packed(world=0),
        packed(layout="short"),
        packed(kinds=b""),
        packed(tensors=SOUND.tensors + b"\0"),
        packed(tensors=SOUND.tensors[::-1]),
        packed(forms=()),
        packed(forms=(((3, 1), (8, 6)),) * 2),
        packed(forms=(((8, 2), (3, 1)),) * 2),
        packed(forms=(((1 << 45, 1 << 45),),) * 2),
        packed(forms=(((8, 0),),) * 2),
        packed(starts=b"\xff" * len(SOUND.starts)),
        packed(computed=("norm",)),
        packed(residual={"": "why"}),
        packed(residual={"norm": "w" * 5000}),
        packed(export="anything"),
        packed(dropped=("name",) * 101),
    ],
    ids=range(25),
)  # fmt: skip
def test_bytes_that_are_no_declaration_are_a_value_error(body: bytes) -> None:
    with pytest.raises(ValueError):  # noqa: PT011 -- the texts are many; the kind is the promise
        decode_declaration(body)


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_a_damaged_declaration_is_sound_or_a_value_error(data: st.DataObject) -> None:
    body = bytearray(msgspec.msgpack.encode(SOUND))
    for _ in range(data.draw(st.integers(1, 4))):
        body[data.draw(st.integers(0, len(body) - 1))] = data.draw(st.integers(0, 255))
    try:
        declaration = decode_declaration(zstandard.compress(bytes(body)))
    except ValueError:
        return
    try:
        judge([declaration, declared(1, halves(1))], LAYOUT)
    except Incompatible:
        return


def test_a_bomb_is_refused_before_it_unpacks() -> None:
    bomb = zstandard.compress(bytes(200 << 20))
    assert len(bomb) < 1 << 16
    with pytest.raises(ValueError, match="would unpack to more"):
        decode_declaration(bomb)
    with pytest.raises(ValueError, match="would unpack to more"):
        decode_verdict(zstandard.compress(bytes(gate.UNPACKED_LIMIT + 1)))


def test_bytes_that_are_no_verdict_are_a_value_error() -> None:
    verdict = judge([declared(r, halves(r), residual={"norm": "w"}, export="own") for r in range(2)], LAYOUT)
    stranger = msgspec.structs.replace(verdict, nonces=())
    for body in (b"", zstandard.compress(b"\x80"), gate.encode_verdict(stranger), gate.encode_verdict(verdict)[:-1]):
        with pytest.raises(ValueError):  # noqa: PT011 -- as above
            decode_verdict(body)
    assert isinstance(decode_verdict(gate.encode_verdict(verdict)), Verdict)


def test_a_tensor_that_no_rank_holds_follows_the_one_that_it_is_tied_to() -> None:
    pairs = [("layers.0.up", "layers.1.up")]
    ranks = [declared(r, halves(r, ["layers.1.up"])) for r in range(2)]
    verdict = judge(ranks, LAYOUT, tied=pairs)
    assert decode_verdict(gate.encode_verdict(verdict)).follows == {"layers.0.up": "layers.1.up"}
    assert (verdict.direct_bytes, verdict.residues) == (LAYOUT.nbytes, {})
    assert not judge([declared(r, halves(r)) for r in range(2)], LAYOUT, tied=pairs).follows
    with pytest.raises(Incompatible, match=r"layers\.0\.up"):  # half of it is held: that is no tied tensor
        judge([ranks[0], declared(1, halves(1))], LAYOUT, tied=pairs)
    circle = msgspec.structs.replace(verdict, follows={"layers.0.up": "layers.1.up", "layers.1.up": "layers.0.up"})
    with pytest.raises(ValueError, match="source of its own"):
        decode_verdict(gate.encode_verdict(circle))


def test_a_residual_name_that_no_checkpoint_has_is_refused_where_it_arises() -> None:
    with pytest.raises(Incompatible, match="the layout does not have: stranger"):
        declared(0, [], residual={"stranger": "why"})


def test_a_collective_that_lacks_one_of_its_ranks_is_no_way_to_construct_anything() -> None:
    """Rank 1 holds nothing of a tensor that ranks 0 and 1 would have to gather together: refused, for it would hang."""
    up = ("layers.1.up",)
    fields: dict[str, Any] = {"export": "own", "partners": lambda name: (0, 1) if name == "layers.0.up" else ()}
    whole_group = [declared(rank, halves(rank, up), **fields) for rank in (0, 1)]
    assert set(judge(whole_group, LAYOUT).residual) == {"layers.0.up"}
    half = declared(1, halves(1, up), **fields, buildable=lambda name: name != "layers.0.up")
    with pytest.raises(Incompatible, match=r"layers\.0\.up"):
        judge([whole_group[0], half], LAYOUT)
    alone = declared(0, halves(0, up), export="own")  # what it holds whole it exports by itself
    assert judge([alone, half], LAYOUT).owned(0) == ("layers.0.up",)


def test_a_declaration_that_needs_ranks_it_does_not_name_is_none() -> None:
    sound = declared(0, halves(0), export="own", partners=lambda name: (0, 1))
    assert [sound.partners(n) for n in range(len(LAYOUT))] == [(0, 1)] * len(LAYOUT)
    for together in (b"\x02\x00" * len(LAYOUT), b"\x01"):
        spoilt = msgspec.structs.replace(sound, together=together)
        with pytest.raises(ValueError, match="ranks that it does not name"):
            decode_declaration(gate.encode_declaration(spoilt))

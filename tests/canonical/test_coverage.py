"""Exactly once: findings name precisely the elements that are missing or double, at any size."""

from __future__ import annotations

import itertools
import math
from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st
from support.tensors.regions import dense_regions, loose_regions

from dcr_daemon.canonical.coverage import Finding, exactly_once
from dcr_daemon.canonical.layout import Layout, TensorSpec
from dcr_daemon.canonical.region import Region, indices, slab, whole


def elements_of(finding: Finding) -> list[int]:
    axes = [range(n) for n, _ in finding.axes]
    return [
        finding.first + sum(i * stride for i, (_, stride) in zip(at, finding.axes, strict=True))
        for at in itertools.product(*axes)
    ]


def check_against_counting(regions: list[Region], elements: int) -> None:
    inside = [r for r in regions if r.dst_last < elements]
    counts = Counter(int(element) for r in inside for element in indices(r)[1])
    findings = exactly_once(regions, {"t": (elements,)})
    found = {
        kind: sorted(e for f in findings if f.kind == kind for e in elements_of(f)) for kind in ("missing", "double")
    }
    assert found["missing"] == [e for e in range(elements) if counts[e] == 0]
    assert found["double"] == [e for e in range(elements) if counts[e] > 1]
    for f in findings:
        assert f.elements == len(elements_of(f))
        if f.kind == "double":
            for element in elements_of(f):
                holding = [i for i, r in enumerate(regions) if r in inside for e in indices(r)[1] if e == element]
                assert sorted(f.holders) == holding
    assert sum(f.kind == "outside" for f in findings) == len(regions) - len(inside)


@settings(max_examples=300)
@given(st.lists(loose_regions(), max_size=5), st.integers(0, 120))
def test_any_regions_are_judged_as_counting_would(regions: list[Region], elements: int) -> None:
    check_against_counting(regions, elements)


@settings(max_examples=300)
@given(st.lists(dense_regions(), max_size=6), st.integers(1, 260))
def test_pieces_of_dense_tensors_are_judged_as_counting_would(regions: list[Region], elements: int) -> None:
    check_against_counting(regions, elements)


@given(st.lists(st.integers(1, 9), min_size=1, max_size=3), st.data())
def test_a_grid_of_slabs_is_exact_and_one_taken_out_is_missed(shape: list[int], data: st.DataObject) -> None:
    cuts = [sorted({0, n, *data.draw(st.lists(st.integers(0, n), max_size=3))}) for n in shape]
    spans = [list(itertools.pairwise(cut)) for cut in cuts]
    grid = [
        region
        for cell in itertools.product(*spans)
        for region in slab("t", shape, starts=[a for a, _ in cell], sizes=[b - a for a, b in cell])
    ]
    assert exactly_once(grid, {"t": shape}) == []
    gone = data.draw(st.integers(0, len(grid) - 1))
    rest = grid[:gone] + grid[gone + 1 :]
    missing = exactly_once(rest, {"t": shape})
    assert {f.kind for f in missing} == {"missing"}
    assert sorted(e for f in missing for e in elements_of(f)) == sorted(indices(grid[gone])[1].tolist())
    again = exactly_once([*grid, grid[gone]], {"t": shape})
    assert {f.kind for f in again} == {"double"}
    assert sum(f.elements for f in again) == grid[gone].elements


def test_a_model_of_a_quarter_trillion_elements_is_judged_whole() -> None:
    layers, experts, inner, hidden, ranks = 94, 128, 1536, 4096, 4
    shapes = {
        f"{layer}.{name}": shape
        for layer in range(layers)
        for name, shape in (("gate_up", (experts, 2 * inner, hidden)), ("down", (experts, hidden, inner)))
    }
    regions = [
        region
        for name, shape in shapes.items()
        for rank in range(ranks)
        for axis in (2 if name.endswith("down") else 1,)
        for region in slab(
            name,
            shape,
            starts=[rank * n // ranks if a == axis else 0 for a, n in enumerate(shape)],
            sizes=[n // ranks if a == axis else n for a, n in enumerate(shape)],
        )
    ]
    assert sum(math.prod(shape) for shape in shapes.values()) > 225e9
    assert exactly_once(regions, shapes) == []
    (finding,) = exactly_once(regions[:-1], shapes)
    assert (finding.kind, finding.name, finding.elements) == ("missing", "93.down", experts * hidden * inner // ranks)


def test_tensors_cut_alike_are_judged_alike_and_named_each() -> None:
    shapes = {f"expert{e}": (4, 6) for e in range(3)}
    regions = [r for name in shapes for r in slab(name, (4, 6), starts=(0, 0), sizes=(4, 3))]
    found = exactly_once([*regions, *regions[:1]], shapes)
    assert [(f.kind, f.name, f.holders) for f in found if f.kind == "double"] == [("double", "expert0", (0, 3))]
    assert [(f.name, f.elements) for f in found if f.kind == "missing"] == [(name, 12) for name in shapes]


def test_findings_read_well() -> None:
    shapes = {"w": (8, 6), "b": (4,)}
    regions = [*slab("w", (8, 6), starts=(0, 0), sizes=(8, 4)), *whole("b", (4,)), Region("b", (2,), 0, (1,), 0, (2,))]
    regions += [*whole("ghost", (2,)), Region("b", (2,), 0, (1,), 3, (1,))]
    assert [str(finding) for finding in exactly_once(regions, shapes)] == [
        "ghost: elements [0, 2): unknown",
        "b: elements [3, 5): outside",
        "w: elements [4, 6), 8 times every 6: missing",
        "b: 2 elements 2 apart from 0: double",
    ]


def test_a_layout_says_the_shapes_and_empty_tensors_need_nothing() -> None:
    layout = Layout([TensorSpec("a", "BF16", (2, 2)), TensorSpec("none", "BF16", (0, 4)), TensorSpec("s", "F32", ())])
    assert exactly_once(whole("a", (2, 2)) + whole("s", ()), layout) == []
    assert [f.name for f in exactly_once(whole("a", (2, 2)), layout)] == ["s"]

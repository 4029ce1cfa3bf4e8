"""Tracing: exports on tensors without elements against the same exports on index tensors."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dcr_daemon.canonical.region import indices
from dcr_daemon.projection.tracing import Conversion, trace

SHAPES = {"a": (4, 6), "b": (2, 3, 4), "c": (6,)}
Export = Callable[[dict[str, Any]], Mapping[str, Any]]


def check_against_numbers(export: Export, shapes: Mapping[str, tuple[int, ...]]) -> Conversion:
    """The traced answer equals what the export does to tensors whose elements are all different numbers."""
    numbered, home, at = {}, {}, 0
    for name, shape in shapes.items():
        size = torch.Size(shape).numel()
        numbered[name] = torch.arange(at, at + size).reshape(shape)
        home |= {at + i: (name, i) for i in range(size)}
        at += size
    exported = export(dict(numbered))
    traced = trace(export, {name: torch.empty(shape, dtype=torch.int64) for name, shape in shapes.items()})
    assert traced.opaque == {}
    assert {n: shape for n, (_, shape) in traced.tensors.items()} == {n: tuple(t.shape) for n, t in exported.items()}
    found: dict[tuple[str, int], tuple[str, int]] = {}
    for name, regions in traced.regions.items():
        for region in regions:
            for src, dst in zip(*indices(region), strict=True):
                assert (region.name, int(dst)) not in found
                found[region.name, int(dst)] = name, int(src)
    wanted = {(n, i): home[int(value)] for n, t in exported.items() for i, value in enumerate(t.reshape(-1))}
    assert found == wanted
    return traced


MOVES: list[Callable[[torch.Tensor], torch.Tensor]] = [
    lambda t: t.transpose(0, -1),
    lambda t: t.transpose(0, -1).contiguous(),
    lambda t: t.reshape(-1),
    lambda t: t.unsqueeze(0),
    lambda t: t.squeeze(),
    lambda t: t[1:],
    lambda t: t[..., ::2],
    lambda t: t[0] if t.ndim > 1 else t,
    lambda t: torch.cat([t, t.clone()], dim=-1)[..., : t.shape[-1]],
    lambda t: torch.cat(list(torch.chunk(t, 2, dim=0))[::-1], dim=0),
    lambda t: torch.stack(torch.unbind(t, 0), dim=-1),
    lambda t: t.reshape(t.shape[0], -1).t().clone().reshape(-1, 2) if t.numel() % 2 == 0 else t,
    lambda t: t.detach().to(t.dtype).permute(*range(t.ndim)),
]


@settings(max_examples=150, deadline=None)
@given(st.sampled_from(sorted(SHAPES)), st.lists(st.sampled_from(MOVES), max_size=5))
def test_whatever_moves_elements_is_followed(name: str, moves: list[Callable[[torch.Tensor], torch.Tensor]]) -> None:
    def export(table: dict[str, Any]) -> dict[str, Any]:
        tensor = table[name]
        for move in moves:
            if tensor.ndim == 0 or tensor.shape[0] < 2:
                break
            tensor = move(tensor)
        return {"out": tensor}

    check_against_numbers(export, SHAPES)


def test_several_tensors_meet_in_one_and_one_becomes_several() -> None:
    def export(table: dict[str, Any]) -> dict[str, Any]:
        joined = torch.cat([table["a"].reshape(2, 12), table["b"].reshape(2, 12)], dim=1)
        gate, up = joined.chunk(2, dim=1)
        return {"gate": gate.contiguous(), "up": up.t().contiguous(), "plain": table["c"]}

    traced = check_against_numbers(export, SHAPES)
    assert [len(regions) for regions in traced.regions.values()] == [1, 1, 1]


def test_full_size_costs_no_memory() -> None:
    huge = torch.empty(128, 4096, 1 << 20, dtype=torch.bfloat16, device="meta")
    traced = trace(lambda table: {f"{e}": w.t() for e, w in enumerate(table["w"].unbind(0))}, {"w": huge})
    assert sum(region.elements for region in traced.regions["w"]) == huge.numel()
    assert len(traced.regions["w"]) == 128


@pytest.mark.parametrize(
    ("compute", "why"),
    [
        (lambda t: t + 1, "add"),
        (lambda t: t.float(), "_to_copy"),
        (lambda t: t.expand(3, 6), "repeats elements"),
        (lambda t: t.view(torch.int32), "reinterprets"),
        (lambda t: torch.zeros(6), "no parameter"),
        (lambda t: (t * 2).reshape(2, 3), "mul"),
    ],
)
def test_what_computes_is_opaque_and_says_why(compute: Callable[[Any], Any], why: str) -> None:
    traced = trace(
        lambda table: {"out": compute(table["c"]), "moved": table["b"]},
        {n: torch.empty(s, dtype=torch.float64 if n == "c" else None) for n, s in SHAPES.items()},
    )
    assert why in traced.opaque["out"]
    assert traced.regions["c"] == []
    assert [r.name for r in traced.regions["b"]] == ["moved"]


def test_what_is_computed_still_names_the_tensors_that_it_is_made_of() -> None:
    """So the residual path knows what to gather, and no more."""

    def export(table: dict[str, Any]) -> Mapping[str, Any]:
        scale = table["c"].abs().max()
        merged = table["a"] + table["b"].reshape(4, 6)
        return {
            "scaled": table["a"] / scale,
            "scale": scale,
            "view of computed": merged[1:].t(),
            "moved": torch.cat([table["c"], table["a"][0]]),
            "none": torch.zeros(3),
        }

    traced = trace(export, {name: torch.empty(shape) for name, shape in SHAPES.items()})
    assert set(traced.opaque) == {"scaled", "scale", "view of computed", "none"}
    assert traced.sources == {
        "scaled": ("a", "c"),
        "scale": ("c",),
        "view of computed": ("a", "b"),
        "moved": ("a", "c"),
    }


@pytest.mark.parametrize("through", ["itself", "a view", "a slice of a stack"])
def test_what_an_export_writes_in_place_is_opaque(through: str) -> None:
    def export(table: dict[str, Any]) -> dict[str, Any]:
        if through == "itself":
            table["a"].mul_(2)
        elif through == "a view":
            table["a"].view(-1)[3:5].add_(1)
        else:
            torch.stack([table["a"], table["a"]])[0].zero_()
        return dict(table)

    found = trace(export, {"a": torch.empty(4, 3), "b": torch.empty(2)})
    assert set(found.opaque) == {"a"}
    assert "writes into it" in found.opaque["a"]
    assert found.regions["b"]

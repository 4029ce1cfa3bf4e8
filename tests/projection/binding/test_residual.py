"""Residual tensors: exactly those asked for, whole, on their owner; and exports that give anything else are refused."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from support.ranks.programs import agreement
from support.ranks.run import run_ranks
from support.tensors.maps import map_of

from dcr_daemon.canonical.layout import Layout, TensorSpec
from dcr_daemon.errors import Incompatible
from dcr_daemon.projection.agreement.gate import Residue, Verdict, declare, judge
from dcr_daemon.projection.binding.bind import Live, live
from dcr_daemon.projection.binding.reader import Reader
from dcr_daemon.projection.binding.residual import Exporter, ExportHook, Gather, Hook, Residual
from dcr_daemon.projection.probes.export_check import asked, probe_export
from dcr_daemon.projection.probes.self_check import probe
from dcr_daemon.projection.tracing import trace

LAYOUT = Layout([TensorSpec(name, "BF16", (4, 2)) for name in "abcd"])
VALUES = {name: torch.randn(4, 2).bfloat16() for name in "abcd"}


def verdict(layout: Layout, owners: Mapping[str, int], overwrites: Sequence[str] = (), world: int = 2) -> Verdict:
    return Verdict(
        group="g", call=1, attempt=1, layout=layout.digest, nonces=("n",) * world, maps="", export="hook",
        residues={name: Residue("why", owner, name in overwrites) for name, owner in owners.items()},
        direct_bytes=0, residual_bytes=0, boxes=0,
    )  # fmt: skip


def by_hook(export: ExportHook, rank: int = 0, owners: Mapping[str, int] | None = None) -> Residual:
    owners = {"a": 0, "b": 1, "c": 0} if owners is None else owners
    return Residual(verdict(LAYOUT, owners, "b"), LAYOUT, rank=rank, exporter=Hook(export, LAYOUT))


def test_a_hook_gives_each_owner_its_tensors_and_is_driven_alike_on_all_ranks() -> None:
    calls = []

    def export(names: Sequence[str]) -> Iterator[tuple[str, Any]]:
        for name in names:
            calls.append(name)
            yield name, VALUES[name]

    first, second, third = (by_hook(export, rank) for rank in range(3))
    got = list(first.iterate())
    assert [index for index, _ in got] == [0, 2]
    assert torch.equal(got[0][1], VALUES["a"])
    assert [index for index, _ in second.iterate()] == [1]
    assert list(third.iterate()) == []
    assert calls == ["a", "b", "c"] * 3
    assert first.overwrites == {1}
    calls.clear()
    assert [index for index, _ in first.iterate(["c", "b"])] == [2]
    assert calls == ["b", "c"]
    with pytest.raises(Incompatible, match="not residual by the verdict: d"):
        list(first.iterate(["d"]))


def test_a_hook_is_not_called_for_nothing() -> None:
    assert list(by_hook(lambda names: pytest.fail("called"), owners={}).iterate()) == []


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ("ab", "nothing for c"),
        ("", "nothing for a, b, c"),
        ("acb", "c where b is due"),
        ("aab", "a a second time"),
        ("abcd", "d, which was not asked for"),
        ("xyz", "x where a is due"),
    ],
)
@pytest.mark.parametrize("rank", [0, 2], ids=["owner", "no owner"])
def test_another_set_or_order_is_refused_on_every_rank(given: str, words: str, rank: int) -> None:
    def export(names: Sequence[str]) -> Iterator[tuple[str, Any]]:
        for name in given:
            yield name, VALUES.get(name, VALUES["a"])

    with pytest.raises(Incompatible, match=f"the residual export does not give what the checkpoint has: {words}") as e:
        list(by_hook(export, rank).iterate())
    assert "in that order, on every rank" in e.value.hint


def test_every_tensor_of_another_shape_or_dtype_is_named() -> None:
    given = {"a": VALUES["a"].half(), "b": VALUES["b"].t(), "c": VALUES["c"].int()}
    with pytest.raises(Incompatible) as refused:
        list(by_hook(lambda names: given.items()).iterate())
    assert refused.value.message.endswith(
        "a as F16 (4, 2), and the checkpoint has BF16 (4, 2); b as BF16 (2, 4), and the checkpoint has BF16 (4, 2); "
        "c as I32 (4, 2), and the checkpoint has BF16 (4, 2)"
    )


@pytest.mark.parametrize("item", [None, VALUES["a"], ("a",), ("a", 1.0), (1, VALUES["a"])], ids=range(5))
def test_what_is_no_pair_of_name_and_tensor_is_refused(item: Any) -> None:
    with pytest.raises(Incompatible, match="and no pair of name and tensor where a is due"):
        list(by_hook(lambda names: [item]).iterate())


def test_a_wider_float_is_rounded_and_a_view_is_made_dense() -> None:
    wide = torch.randn(2, 4).t().requires_grad_()
    ((_, tensor),) = by_hook(lambda names: [("a", wide)], owners={"a": 0}).iterate()
    assert torch.equal(tensor, wide.detach().bfloat16())
    assert tensor.is_contiguous()
    assert not tensor.requires_grad


def test_a_rank_that_gives_up_still_drives_the_export_to_its_end() -> None:
    """Another rank is waiting in the same collective."""
    calls = []

    def export(names: Sequence[str]) -> Iterator[tuple[str, Any]]:
        for name in names:
            calls.append(name)
            yield name, VALUES[name]

    running = by_hook(export).iterate()
    next(running)
    running.close()
    assert calls == ["a", "b", "c"]


def test_an_export_that_fails_is_not_driven_on() -> None:
    def export(names: Sequence[str]) -> Iterator[tuple[str, Any]]:
        yield "a", VALUES["a"]
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        list(by_hook(export).iterate())


def scaled(table: dict[str, Any]) -> dict[str, Any]:
    """An export with one scale for the whole tensor, as fp8 checkpoints have; `plain` only moves."""
    exported: dict[str, Any] = {}
    for name, tensor in table.items():
        if name == "weight":
            scale = tensor.abs().amax().float() / 448
            exported |= {"codes": (tensor / scale).to(torch.float8_e4m3fn), "scale": scale.reshape(1)}
        else:
            exported[name] = tensor
    return exported


def test_an_export_with_a_shared_scale_goes_residual_as_overwrites() -> None:
    """From the trace over the gate to the tensors: what is computed is found, judged, constructed."""
    tensors = {"weight": torch.randn(6, 4), "plain": torch.randn(5)}
    made = scaled(tensors)
    layout = Layout(
        [
            TensorSpec("codes", "F8_E4M3", (6, 4)),
            TensorSpec("scale", "F32", (1,)),
            TensorSpec("plain", "BF16", (5,)),
        ]
    )
    conversion = trace(scaled, tensors)
    mapped = map_of(tensors.items(), layout, conversion=conversion)
    exporter = Gather(lambda: tensors, layout, conversion=conversion, convert=scaled)
    declaration = declare(
        mapped, layout, group="g", call=1, attempt=1, rank=0, world=1, nonce="n",
        export=exporter.kind, buildable=exporter.can_build, computed=conversion.opaque,
    )  # fmt: skip
    judged = judge([declaration], layout)
    assert set(judged.residual) == judged.overwrites == {"codes", "scale"}
    assert "computes it" in judged.residual["codes"]
    got = {
        layout[index].name: tensor for index, tensor in Residual(judged, layout, rank=0, exporter=exporter).iterate()
    }
    assert got.keys() == {"codes", "scale"}
    assert all(torch.equal(tensor.view(torch.uint8), made[name].view(torch.uint8)) for name, tensor in got.items())


def test_only_what_a_residual_tensor_is_made_of_is_converted() -> None:
    tensors = {"w": torch.randn(4, 2), "lora_a": torch.randn(1, 2), "lora_b": torch.randn(4, 1), "d": torch.zeros(4, 2)}

    def merged(table: dict[str, Any]) -> dict[str, Any]:
        exported = {"a": table["w"] + table["lora_b"] @ table["lora_a"]} if "w" in table else {}
        return exported | ({"d": table["d"]} if "d" in table else {})

    layout = Layout([TensorSpec("a", "BF16", (4, 2)), TensorSpec("d", "BF16", (4, 2))])
    conversion = trace(merged, tensors)
    asked: list[set[str]] = []

    def watched(table: dict[str, Any]) -> dict[str, Any]:
        asked.append(set(table))
        return merged(table)

    gather = Gather(lambda: tensors, layout, conversion=conversion, convert=watched)
    ((index, tensor),) = Residual(verdict(layout, {"a": 0}), layout, rank=0, exporter=gather).iterate()
    assert (index, asked) == (0, [{"w", "lora_a", "lora_b"}])
    assert torch.equal(tensor, merged(tensors)["a"].bfloat16())
    assert list(Residual(verdict(layout, {"a": 0}), layout, rank=1, exporter=gather).iterate()) == []
    assert len(asked) == 1, "a rank that owns nothing converts nothing"


def test_a_conversion_that_needs_more_than_its_sources_is_refused_by_name() -> None:
    layout = Layout([TensorSpec("a", "F32", (4, 2)), TensorSpec("b", "F32", (4, 2))])
    tensors = {"a": torch.zeros(4, 2), "b": torch.zeros(4, 2)}

    def together(table: dict[str, Any]) -> dict[str, Any]:
        return dict(table) if len(table) == 2 else {}

    gather = Gather(lambda: tensors, layout, conversion=trace(together, tensors), convert=together)
    with pytest.raises(Incompatible, match="a is not exported from a alone; b is not exported from b alone"):
        list(Residual(verdict(layout, {"a": 0, "b": 0}), layout, rank=0, exporter=gather).iterate())


def test_a_gather_knows_what_it_can_construct() -> None:
    tensors = {"a": torch.zeros(4, 2), "b": torch.zeros(4, 2)}
    plain = Gather(lambda: tensors, LAYOUT)
    assert [plain.can_build(name) for name in "abcd"] == [True, True, False, False]
    conversion = trace(lambda table: {"c": table["a"] * 2, "d": torch.zeros(4, 2)}, tensors)
    assert not Gather(lambda: tensors, LAYOUT, conversion=conversion).can_build("c")
    traced = Gather(lambda: tensors, LAYOUT, conversion=conversion, convert=lambda table: {"c": table["a"] * 2})
    assert [traced.can_build(name) for name in "abcd"] == [False, False, True, False]


def test_four_ranks_construct_what_is_residual(tmp_path: Path) -> None:
    """A map that is wrong on one rank, from its probe over declarations and verdict to the tensors of its owners."""
    (out := tmp_path / "residual").mkdir()
    run_ranks(agreement.__name__, agreement.WORLD, out)


# ---- from what a trainer hands over to the tensors that are published

SCALED = Layout(
    [TensorSpec("codes", "F8_E4M3", (6, 4)), TensorSpec("scale", "F32", (1,)), TensorSpec("norm", "BF16", (4,))]
)


class Scaling:
    """torchtitan's interface over an export with one scale for a whole tensor."""

    def to_hf(self, table: dict[str, Any]) -> dict[str, Any]:
        exported = {name: tensor for name, tensor in table.items() if name != "weight"}
        if "weight" in table:
            scale = table["weight"].abs().amax().float() / 448
            exported |= {"codes": (table["weight"] / scale).to(torch.float8_e4m3fn), "scale": scale.reshape(1)}
        return exported


def judged(found: Live, exporter: Exporter) -> Verdict:
    """As a rank alone does it: probes, declaration, verdict."""
    probed = dict(probe(found.inputs, found.map, SCALED, conversion=found.conversion, convert=found.convert).residual)
    if exporter.kind == "hook":
        read = Reader(found, SCALED).read
        probed |= probe_export(exporter, read, mapped=found.map, layout=SCALED, names=asked(SCALED)).residual
    declaration = declare(
        found.map, SCALED, group="g", call=1, attempt=1, rank=0, world=1, nonce="n", export=exporter.kind,
        buildable=exporter.can_build, probed=probed,
        computed=found.conversion.opaque if found.conversion else (), dropped=found.dropped,
    )  # fmt: skip
    return judge([declaration], SCALED)


def test_an_export_with_a_shared_scale_is_constructed_from_the_weights_of_the_step() -> None:
    weights = {"weight": torch.randn(6, 4), "norm": torch.randn(4)}
    found = live(weights, SCALED, rank=0, world=1, adapter=Scaling())
    current = [found]
    exporter = Gather(lambda: current[0].inputs, SCALED, conversion=found.conversion, convert=found.convert)
    verdict = judged(found, exporter)
    assert verdict.overwrites == set(verdict.residual) == {"codes", "scale"}
    assert "residual  77.778%, 2 tensors" in verdict.report(SCALED)
    residual = Residual(verdict, SCALED, rank=0, exporter=exporter)
    for step in range(2):
        stepped = {name: tensor + step for name, tensor in weights.items()}
        current[0] = found.rebind(stepped)
        got = {SCALED[index].name: tensor for index, tensor in residual.iterate()}
        made = Scaling().to_hf(stepped)
        assert torch.equal(got["codes"].view(torch.uint8), made["codes"].view(torch.uint8))
        assert torch.equal(got["scale"], made["scale"])


def test_a_users_export_is_asked_for_what_a_rank_reads() -> None:
    """It gives the values of another step: every tensor goes residual, and no probe hides it."""
    weights = {"codes": torch.randn(6, 4).to(torch.float8_e4m3fn), "scale": torch.ones(1), "norm": torch.randn(4)}
    found = live(weights, SCALED, rank=0, world=1)
    right = Hook(lambda names: [(name, weights[name]) for name in names], SCALED)
    assert judged(found, right).residual == {}
    stale = Hook(lambda names: [(n, weights[n] * 2 if n == "norm" else weights[n]) for n in names], SCALED)
    assert judged(found, stale).residual == {
        "norm": "4 of 4 elements that this rank holds are not what the export gives"
    }


def test_a_layer_that_nobody_has_is_refused() -> None:
    found = live({"norm": torch.randn(4)}, SCALED, rank=0, world=1)
    exporter = Gather(lambda: found.inputs, SCALED)
    with pytest.raises(Incompatible, match=r"2 of 3 tensors .* codes: 24 of 24 elements have no source; scale"):
        judged(found, exporter)

"""The self check finds wrong maps, conversions and values, sends these by name, and costs next to nothing."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support.measure.torch_allocations import Allocations
from support.ranks.programs import agreement
from support.ranks.run import run_ranks
from support.tensors.maps import map_of

from dcr_daemon.canonical.layout import Layout, TensorSpec
from dcr_daemon.canonical.region import Region, boxes, slab, whole
from dcr_daemon.projection.binding.residual import Hook
from dcr_daemon.projection.frameworks.torchtitan import rotary_rows
from dcr_daemon.projection.probes import export_trial
from dcr_daemon.projection.probes.export_check import asked, probe_export
from dcr_daemon.projection.probes.self_check import CAP, Probed, probe, within
from dcr_daemon.projection.probes.synthetic import byte_rows, digits, numbered, random_bits, same, shrunk, special
from dcr_daemon.projection.region_map import Map
from dcr_daemon.projection.tracing import Conversion, trace
from dcr_daemon.projection.values import Add

LAYERS, EXPERTS, INNER, MODEL, HEADS, HEAD = 3, 4, 6, 8, 4, 4


def local_tensors() -> dict[str, Any]:
    """A mixture of experts as a framework may hold it: gate and up together, experts stacked, rotary pairs apart."""
    shapes: dict[str, tuple[int, ...]] = {"embed": (70, MODEL), "norm": (MODEL,)}
    for layer in range(LAYERS):
        shapes[f"layers.{layer}.gate_up"] = (EXPERTS, 2 * INNER, MODEL)
        shapes[f"layers.{layer}.q"] = (HEADS * HEAD, MODEL)
    return {name: torch.zeros(shape) for name, shape in shapes.items()}


def export(table: Mapping[str, Any]) -> dict[str, Any]:
    made: dict[str, Any] = {}
    for name, tensor in table.items():
        if name.endswith("gate_up"):
            for expert, one in enumerate(tensor.unbind(0)):
                gate, up = one.chunk(2, dim=0)
                made |= {f"{name}.{expert}.gate": gate, f"{name}.{expert}.up": up.contiguous()}
        elif name.endswith("q"):
            rows = tensor.reshape(HEADS, -1, 2, tensor.shape[1])
            made[f"{name}_proj"] = rows.transpose(1, 2).reshape(tensor.shape)
        else:
            made[name] = tensor
    return made


def layout_of(conversion: Conversion, dtype: str = "BF16") -> Layout:
    return Layout(TensorSpec(name, dtype, shape) for name, (_, shape) in conversion.tensors.items())


TENSORS = local_tensors()
CONVERSION = trace(export, TENSORS)
LAYOUT = layout_of(CONVERSION)
MAP = map_of(TENSORS.items(), LAYOUT, conversion=CONVERSION)


def probed(mapped: Map = MAP, conversion: Conversion = CONVERSION, convert: Any = export, **fields: Any) -> Probed:
    return probe(TENSORS, mapped, LAYOUT, conversion=conversion, convert=convert, **fields)


def test_a_sound_map_passes_and_a_model_costs_as_much_as_a_layer() -> None:
    found = probed()
    assert found.residual == {}
    assert (found.checked, found.forms) == (2 + 2 * LAYERS, 4)
    before = {name: tensor.clone() for name, tensor in TENSORS.items()}
    assert all(torch.equal(before[name], tensor) for name, tensor in TENSORS.items()), "weights were touched"


def planted(parameter: str, change: Callable[[Region], Region], mapped: Map = MAP) -> Map:
    return replace(
        mapped,
        shards=tuple(
            replace(one, regions=tuple(map(change, one.regions))) if one.parameter == parameter else one
            for one in mapped.shards
        ),
    )


def swapped(region: Region) -> Region:
    """The whole of a matrix, transposed."""
    rows, columns = TENSORS["embed"].shape
    return Region(region.name, (rows, columns), 0, (1, rows), 0, (columns, 1))


@pytest.mark.parametrize(
    ("parameter", "change", "names"),
    [
        ("embed", lambda r: replace(r, shape=(r.shape[0] - MODEL,), dst=MODEL), {"embed"}),
        ("embed", swapped, {"embed"}),
        (
            "layers.1.gate_up",
            lambda r: replace(r, name=r.name.replace("gate_up.1", "gate_up.0")),
            {f"layers.1.gate_up.{e}.{half}" for e in range(EXPERTS) for half in ("gate", "up")},
        ),
        ("layers.2.q", lambda r: replace(r, shape=(HEADS * HEAD * MODEL,), src_strides=(1,), dst_strides=(1,)),
         {"layers.2.q_proj"}),
    ],
    ids=["off by one row", "transposed", "another expert", "not permuted"],
)  # fmt: skip
def test_a_wrong_map_is_found_and_is_residual_by_name(
    parameter: str, change: Callable[[Region], Region], names: set[str]
) -> None:
    found = probed(planted(parameter, change))
    assert found.residual == dict.fromkeys(names, "its map is not what its placement and the export say")


def test_a_conversion_that_the_export_does_not_do_is_found() -> None:
    (told,) = CONVERSION.regions["layers.0.q"]
    plain = replace(told, shape=(told.elements,), src_strides=(1,), dst_strides=(1,))
    wrong = replace(CONVERSION, regions={**CONVERSION.regions, "layers.0.q": [plain]})
    found = probed(map_of(TENSORS.items(), LAYOUT, conversion=wrong), wrong)
    assert found.residual == {"layers.0.q_proj": "the conversion is not what the export does"}
    assert probed(map_of(TENSORS.items(), LAYOUT, conversion=wrong), wrong, convert=None).residual == {}, (
        "it is then believed"
    )


def two_faced(numbers_only: Callable[[Any], Any]) -> Callable[[Mapping[str, Any]], dict[str, Any]]:
    """An export that does one thing to traced tensors and another to real ones."""

    def convert(table: Mapping[str, Any]) -> dict[str, Any]:
        made = export(table)
        return {n: numbers_only(t) if type(t) is torch.Tensor and n == "norm" else t for n, t in made.items()}

    return convert


@pytest.mark.parametrize(
    ("lie", "why"),
    [
        (lambda t: t.flip(0), "the export puts elements elsewhere than the conversion says"),
        (lambda t: t[:-1], r"the export of numbered elements gives no norm of \(8,\)"),
        (
            lambda t: t + 0 if t.dtype == torch.int64 else t * 0,
            "cast(BF16) of special values is not what the export gives",
        ),
        (
            lambda t: t if t.dtype == torch.int64 or not t.reshape(-1)[0] else t.clone().fill_(t.reshape(-1)[0]),
            "a patch of a 1 % edit is not the export of the edited tensor",
        ),
    ],
    ids=["numbers", "shape", "values", "edit"],
)
def test_the_real_export_is_what_counts(lie: Callable[[Any], Any], why: str) -> None:
    found = probed(convert=two_faced(lie))
    assert found.residual.keys() == {"norm"}
    assert found.residual["norm"].replace("\\", "") == why.replace("\\", "")


def test_an_export_that_takes_only_floats_is_probed_digit_by_digit() -> None:
    def floats_only(table: Mapping[str, Any]) -> dict[str, Any]:
        if any(not t.dtype.is_floating_point for t in table.values()):
            raise TypeError("weights are floats")
        return export(table)

    assert probed(convert=floats_only).residual == {}

    def wrong(table: Mapping[str, Any]) -> dict[str, Any]:
        made = floats_only(table)
        return {n: t.flip(0) if type(t) is torch.Tensor and n == "embed" else t for n, t in made.items()}

    assert probed(convert=wrong).residual == {"embed": "the export puts elements elsewhere than the conversion says"}


def test_an_export_that_does_not_run_on_parts_or_stand_ins_is_residual_with_its_own_words() -> None:
    def refuses(table: Mapping[str, Any]) -> dict[str, Any]:
        if "norm" in table and type(table["norm"]) is torch.Tensor:
            raise ValueError("not these")
        return export(table)

    assert probed(convert=refuses).residual == {"norm": "its export does not run on small stand-ins: not these"}

    def together(table: Mapping[str, Any]) -> dict[str, Any]:
        if "norm" not in table:
            raise KeyError("norm")
        return export(table)

    found = probed(convert=together).residual
    assert found["embed"] == "its export does not run on embed alone: 'norm'"
    assert "norm" not in found


def test_a_value_function_that_is_not_the_exports_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """A cast that truncates where torch rounds, as a kernel may."""

    def truncated(value: Any, tensor: Any) -> Any:
        return (tensor.view(torch.int32) >> 16).to(torch.int16).view(torch.bfloat16)

    monkeypatch.setattr(export_trial, "apply", truncated)
    assert set(probed().residual.values()) == {"cast(BF16) of special values is not what the export gives"}
    assert probed().residual.keys() == {spec.name for spec in LAYOUT}


def test_a_constant_that_the_export_does_not_add_is_found() -> None:
    made = replace(
        MAP,
        shards=tuple(replace(s, value=Add(1.0, "BF16")) if s.parameter == "norm" else s for s in MAP.shards),
    )
    assert probed(made).residual == {"norm": "add(1, BF16) of special values is not what the export gives"}


def test_maps_of_others_are_not_judged_here() -> None:
    (shard,) = map_of([("norm", torch.zeros(MODEL))], LAYOUT).shards
    half = replace(shard, shape=(4,), regions=tuple(slab("norm", (MODEL,), starts=(4,), sizes=(4,))))
    assert probe({"norm": torch.zeros(4)}, Map((half,)), LAYOUT) == Probed({}, 0, 0, pytest.approx(0, abs=9))
    named = replace(half, parameter="decoder.norm")
    assert probe({"decoder.norm": torch.zeros(4)}, Map((named,)), LAYOUT).checked == 0


@pytest.mark.parametrize("cap", [CAP, CAP // 16])
def test_no_probe_allocates_a_tensor_of_the_model(cap: int) -> None:
    """Experts of gigabytes, on no device: probed by stand-ins, in less than the cap."""
    shapes = {"embed": (151936, 2048), "layers.0.gate_up": (64, 6144, 2048), "layers.0.q": (4096, 4096)}
    tensors = {name: torch.zeros(shape, dtype=torch.bfloat16, device="meta") for name, shape in shapes.items()}
    conversion = trace(export, tensors)
    layout = layout_of(conversion)
    mapped = map_of(tensors.items(), layout, conversion=conversion)
    with Allocations() as seen:
        found = probe(tensors, mapped, layout, conversion=conversion, convert=export, cap=cap)
    assert (found.residual, found.forms) == ({}, 3)
    assert 0 < seen.largest <= seen.most <= cap < min(tensor.nbytes for tensor in tensors.values())


def test_stand_ins_keep_what_an_export_may_look_at() -> None:
    shapes = {"e": (128, 1536, 2048), "v": (151936, 2048), "n": (2048,)}
    elements = 1 << 19
    found = list(shrunk(shapes, elements))
    assert found
    for made in found:
        assert sum(map(math.prod, made.values())) <= elements
        assert all(len(made[name]) == len(shape) for name, shape in shapes.items())
        assert made["e"][2] == made["v"][1], "equal axes stay equal"
        assert made["e"][0] != made["e"][2], "different ones stay different"
        assert made["v"][0] % 2 == 0, "even ones stay even"
    assert next(shrunk({"t": (4, 4)}, 16)) == {"t": (4, 4)}
    assert list(shrunk({"t": ()}, 16)) == [{"t": ()}]


def test_digits_are_the_numbers() -> None:
    given, _ = numbered({"a": (300, 300), "b": (7,)})
    tables = digits(given, {"a": torch.bfloat16, "b": torch.bfloat16})
    assert len(tables) == 3
    for name, tensor in given.items():
        total = sum(table[name].to(torch.int64) * 256**i for i, table in enumerate(tables))
        assert torch.equal(torch.as_tensor(total), tensor)
    assert digits(given, {"a": torch.int8, "b": torch.bfloat16}) == []


@pytest.mark.parametrize(
    "dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.int32, torch.bool]
)
def test_special_values_have_what_goes_wrong(dtype: Any) -> None:
    tensor = special((3, 100), dtype)
    assert tensor.shape == (3, 100)
    if dtype.is_floating_point and dtype.itemsize > 1:
        values = tensor.reshape(-1)
        assert values.isnan().any()
        assert values.isinf().any()
        assert ((values != 0) & (values.abs() < torch.finfo(dtype).smallest_normal)).any()
        assert (values == -3).any()
        assert torch.signbit(values[values == 0]).any()
    drawn = random_bits((50, 3), dtype, seed=5)
    assert same(drawn, random_bits((50, 3), dtype, seed=5), exact=True).all()
    assert byte_rows(drawn).shape == (150, dtype.itemsize)


def test_within_is_about_elements_and_not_about_boxes() -> None:
    truth = [*whole("t", (6, 4)), *slab("u", (6, 4), starts=(2, 0), sizes=(2, 4))]
    for region in (*slab("t", (6, 4), starts=(1, 1), sizes=(3, 2), src=0), *whole("t", (24,))):
        moved = Region(region.name, region.shape, region.dst, region.dst_strides, region.dst, region.dst_strides)
        assert within(moved, truth)
    (rotary,) = rotary_rows("t", 2, head_dim=6, columns=2)
    assert within(rotary, [rotary])
    assert not within(rotary, truth)
    assert not within(Region("t", (24,), 0, (1,), 1, (1,)), truth)
    assert not within(Region("v", (4,), 0, (1,), 0, (1,)), truth)
    assert not within(Region("u", (16,), 0, (1,), 8, (1,)), truth)
    halves = [Region("t", (12,), 0, (1,), 0, (1,)), Region("t", (12,), 12, (1,), 12, (1,))]
    assert within(Region("t", (4, 6), 0, (1, 4), 0, (1, 4)), halves)


def live_export(values: Mapping[str, Any]) -> Hook:
    return Hook(lambda names: [(name, values[name]) for name in names], LAYOUT)


def reader(values: Mapping[str, Any]) -> Callable[[int, Any], Any]:
    def read(index: int, box: Any) -> Any:
        flat = values[LAYOUT[index].name].reshape(-1).view(torch.int16).numpy().view("<u2")
        return flat[box.canonical(torch.arange(box.elements).numpy())]

    return read


def test_an_export_of_live_weights_is_compared_box_by_box() -> None:
    values = {spec.name: torch.randn(spec.shape).bfloat16() for spec in LAYOUT}
    values["norm"][3] = float("nan")
    names = asked(LAYOUT)
    assert names == tuple(spec.name for spec in LAYOUT), "a small model is asked for whole"
    found = probe_export(live_export(values), reader(values), mapped=MAP, layout=LAYOUT, names=names)
    assert (found.residual, found.checked) == ({}, len(LAYOUT))
    other = {name: tensor.clone() for name, tensor in values.items()}
    other["embed"][5] += 1
    other["norm"][3] = torch.tensor(-1, dtype=torch.int16).view(torch.bfloat16)
    found = probe_export(live_export(other), reader(values), mapped=MAP, layout=LAYOUT, names=names)
    assert found.residual == {"embed": "8 of 560 elements that this rank holds are not what the export gives"}


def test_what_an_export_is_asked_for_follows_from_the_layout() -> None:
    specs = [TensorSpec(f"layers.{i}.{kind}", "BF16", (64, 64)) for i in range(50) for kind in ("up", "down")]
    layout = Layout([*specs, TensorSpec("embed", "BF16", (1 << 20, 8)), TensorSpec("none", "BF16", (0,))])
    assert asked(layout, cap=1 << 20, budget=5 * 8192) == (
        "layers.0.down", "layers.0.up", "layers.1.down", "layers.9.down", "layers.9.up"
    )  # fmt: skip
    assert len(asked(layout, cap=1 << 20)) == 100
    assert "embed" in asked(layout)


def test_boxes_of_a_map_are_what_the_patch_is_made_of() -> None:
    """The edit of a permuted head goes through boxes that no flat range could say."""
    (region,) = CONVERSION.regions["layers.0.q"]
    assert any(len(one.shape) > 1 for one in boxes(region)) or region.src_strides != region.dst_strides


def test_four_ranks_ask_torch_where_it_puts_elements(tmp_path: Path) -> None:
    (out := tmp_path / "probes").mkdir()
    run_ranks(agreement.__name__, agreement.WORLD, out)

"""What was made from weights after loading is found wherever the model keeps it, and whatever made it."""

from __future__ import annotations

import gc
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch

from dcr_daemon.vllm_plugin.loader import derived, reachable
from dcr_daemon.vllm_plugin.loader.derived import UNKNOWN, Derived


class Layer(torch.nn.Module):
    """One weight, a statistic that no checkpoint holds, and room for what a hook keeps."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(4, 6).bfloat16(), requires_grad=False)
        self.register_buffer("scale", torch.ones(1))
        self.kept: Any = None


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = Layer()
        self.other = Layer()


FILLED = {"layer.weight", "other.weight"}


def stale(hook: Callable[[Model], Any], filled: set[str] = FILLED) -> dict[str, Derived]:
    model = Model()
    derived.follow(model, lambda: hook(model))
    found = derived.stale_after_update(model, filled)
    return {source: one for one in found for source in one.sources & {UNKNOWN, *filled}}


def keep(make: Callable[[torch.Tensor], Any]) -> Callable[[Model], None]:
    def hook(model: Model) -> None:
        model.layer.kept = make(model.layer.weight.data)

    return hook


def closed_over(weight: torch.Tensor) -> Callable[[], torch.Tensor]:
    copied = weight.float()
    return lambda: copied


def assembled(weight: torch.Tensor) -> torch.Tensor:
    packed = torch.empty(12, 4)
    packed[:6].copy_(weight.T)
    packed[6:].zero_()
    return packed


@pytest.mark.parametrize(
    "make",
    [
        pytest.param(lambda w: w.float(), id="cast"),
        pytest.param(lambda w: w.clone(), id="copy of the same bits"),
        pytest.param(lambda w: w.t().contiguous(), id="laid out anew"),
        pytest.param(lambda w: torch.cat([w, w]), id="gathered"),
        pytest.param(lambda w: (w.float().exp() * 2).bfloat16(), id="computed over two intermediates"),
        pytest.param(lambda w: torch.zeros(4, 6).copy_(w), id="written in place"),
        pytest.param(lambda w: torch.add(w, 1, out=torch.zeros(4, 6).bfloat16()), id="written by out="),
        pytest.param(lambda w: {"a": [(w.float(),)]}, id="inside containers"),
        pytest.param(lambda w: partial(torch.mm, w.float()), id="bound to a function"),
        pytest.param(closed_over, id="enclosed by a function"),
        pytest.param(assembled, id="assembled from parts"),
    ],
)
def test_what_a_hook_derives_is_found_by_the_name_of_its_source(make: Callable[[torch.Tensor], Any]) -> None:
    found = stale(keep(make))
    assert found.keys() == {"layer.weight"}
    assert found["layer.weight"].path.startswith("layer.kept")
    assert found["layer.weight"].sources == {"layer.weight"}


@pytest.mark.parametrize(
    "make",
    [
        pytest.param(lambda w: w.t(), id="transposed view"),
        pytest.param(lambda w: w.view(torch.int16)[1:], id="view of other type"),
        pytest.param(lambda w: w.mul_(2), id="changed in place"),
        pytest.param(lambda w: torch.zeros(3), id="made from nothing"),
        pytest.param(lambda w: torch.empty(3).fill_(1), id="filled with a constant"),
        pytest.param(lambda w: w.float().sum().item(), id="a number"),  # see the module's limits
    ],
)
def test_what_follows_the_weight_or_does_not_depend_on_it_is_no_reason(make: Callable[[torch.Tensor], Any]) -> None:
    assert stale(keep(make)) == {}


@pytest.mark.parametrize(
    ("make", "is_copy"),
    [
        pytest.param(lambda w: w.float(), True, id="cast"),
        pytest.param(lambda w: w.half(), True, id="cast to a narrower dtype"),
        pytest.param(lambda w: torch.zeros(4, 6).copy_(w), True, id="cast into memory"),
        pytest.param(lambda w: w.float().bfloat16(), True, id="cast to a wider dtype and back"),
        pytest.param(lambda w: w.half().float(), False, id="over a narrower dtype"),
        pytest.param(lambda w: torch.zeros(4, 6).copy_(w.half()), False, id="over a narrower dtype, into memory"),
        pytest.param(lambda w: w.to(torch.float8_e4m3fn).bfloat16(), False, id="over eight bits"),
        pytest.param(lambda w: w.float() * 1, False, id="computed"),
    ],
)
def test_a_copy_was_moved_or_cast_without_losing_bits_on_the_way(
    make: Callable[[torch.Tensor], Any], is_copy: bool
) -> None:
    assert stale(keep(make))["layer.weight"].moved_or_cast is is_copy


def test_a_registered_tensor_is_found_unless_the_layout_fills_it() -> None:
    def hook(model: Model) -> None:
        model.layer.weight = torch.nn.Parameter(model.layer.weight.data.flip(0), requires_grad=False)
        model.layer.register_buffer("transposed", model.layer.weight.data.t().contiguous())

    assert stale(hook)["layer.weight"].path == "layer.transposed"
    assert stale(hook, {*FILLED, "layer.transposed"}) == {}


def test_a_layer_that_is_reached_under_two_names_is_one() -> None:
    """Whichever of them the layout fills: mixtures that a list holds as well, layers that two decoders share."""

    def hook(model: Model) -> None:
        model.again = model.layer
        model.layer.weight = torch.nn.Parameter(model.layer.weight.data.flip(0), requires_grad=False)

    assert stale(hook) == {}
    assert stale(hook, {"again.weight", "other.weight"}) == {}
    assert stale(hook, {"other.weight"}) == {}

    def beside(model: Model) -> None:
        hook(model)
        model.layer.register_buffer("wide", model.layer.weight.float())

    found = stale(beside)
    assert found["layer.weight"].path == "layer.wide"
    assert found["layer.weight"].names == {"layer.wide", "again.wide"}


def test_a_registered_tensor_is_visited_once(monkeypatch: pytest.MonkeyPatch) -> None:
    inside, visits = reachable._inside, []

    def counted(value: Any) -> Any:
        for name, inner in inside(value):
            visits.append(id(inner))
            yield name, inner

    monkeypatch.setattr(reachable, "_inside", counted)
    model = Model()
    reachable.reachable(model)
    assert {visits.count(id(tensor)) for tensor in (*model.parameters(), *model.buffers())} == {1}


def test_a_buffer_that_was_there_before_and_is_filled_from_a_weight_is_found() -> None:
    def hook(model: Model) -> None:
        model.layer.scale.copy_(model.layer.weight.float().abs().max())
        model.layer.weight.copy_(model.layer.weight.flip(0))  # of itself: its sums prove it

    assert stale(hook)["layer.weight"].path == "layer.scale"


def test_what_comes_from_a_tensor_that_no_version_changes_is_no_reason() -> None:
    def hook(model: Model) -> None:
        model.layer.kept = model.layer.scale * 2

    assert stale(hook) == {}


def test_two_sources_are_both_named() -> None:
    def hook(model: Model) -> None:
        model.layer.kept = torch.cat([model.layer.weight.data, model.other.weight.data])

    found = stale(hook)
    assert found.keys() == FILLED
    assert found["other.weight"].sources == FILLED


def test_memory_that_no_operation_wrote_to_is_of_an_unknown_source() -> None:
    """As a kernel that torch does not see would leave it, and what is computed from it."""

    def hook(model: Model) -> None:
        packed = torch.empty(8)
        packed.numpy()[:] = 1
        model.layer.kept = packed.clone()

    assert stale(hook)[UNKNOWN].path == "layer.kept"


def test_an_address_that_is_given_again_is_another_tensor() -> None:
    def hook(model: Model) -> None:
        for _ in range(50):
            model.layer.weight.float()  # derived, and gone
            gc.collect()
            model.layer.kept = torch.zeros(4, 6)

    assert stale(hook) == {}


def test_a_model_loaded_before_nothing_was_followed_is_unknown() -> None:
    with pytest.raises(LookupError, match="before DCR"):
        derived.stale_after_update(Model(), FILLED)


def test_the_reason_names_tensor_source_and_operation() -> None:
    text = str(stale(keep(lambda w: w.float()))["layer.weight"])
    assert text == "layer.kept, which vLLM made from layer.weight after loading (_to_copy)"

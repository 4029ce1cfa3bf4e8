"""What the stream does not name is summed at the first attach, and every change of it is noticed afterwards."""

from __future__ import annotations

import pytest
import torch

from dcr_daemon.canonical.layout import Layout, TensorSpec
from dcr_daemon.vllm_plugin.loader import place_model
from dcr_daemon.vllm_plugin.loader.reachable import named
from dcr_daemon.vllm_plugin.loader.recorder import record
from dcr_daemon.vllm_plugin.weights.memory import HostMemory, LiveTensors, holders_of
from dcr_daemon.vllm_plugin.weights.placement import Placement
from dcr_daemon.vllm_plugin.worker.unnamed import UnnamedParameters


class Tower(torch.nn.Module):
    """Parameters of several forms: three axes, a view, transposed, a number, removed after loading."""

    def __init__(self) -> None:
        super().__init__()
        forms = {
            "a": torch.randn(4, 5, 3).bfloat16(),
            "b": torch.randn(6, 7)[:, 1:5],
            "c": torch.randn(4, 6).t(),
            "d": torch.tensor(1.0),
            "e": torch.empty(0),
        }
        for name, tensor in forms.items():
            self.register_parameter(name, torch.nn.Parameter(tensor, requires_grad=False))


def watch(model: Tower) -> UnnamedParameters:
    live = dict(model.named_parameters())

    def opened(placement: Placement, layout: Layout) -> HostMemory:
        return HostMemory(placement, LiveTensors(live, holders_of(model)), layout=layout)

    return UnnamedParameters(model, live, opened)


def test_a_change_is_noticed_by_name_and_still_by_the_next_attach() -> None:
    model = Tower()
    watched = watch(model)
    assert watched.changed() == []
    assert watched.changed() == []
    for number, name in enumerate("abcd"):
        model.get_parameter(name).data.fill_(3)
        assert watched.changed() == list("abcd"[: number + 1])
        assert watched.changed(part=range(number, number + 1)) == [name]
    assert watch(model).changed() == list("abcd")
    assert watch(Tower()).changed() == [], "another model's are its own"


@pytest.mark.parametrize("how", ["the parameter", "its memory"])
def test_one_that_was_replaced_is_noticed_and_not_read(how: str) -> None:
    model = Tower()
    watched = watch(model)
    assert watched.changed() == []
    new = torch.nn.Parameter(model.a.detach().clone(), requires_grad=False)
    if how == "the parameter":
        model.a = new
    else:
        model.a.data = new.data
    assert watched.changed() == watched.changed(part=range(1)) == ["a"]
    assert watch(model).changed() == [], "it has the same bits elsewhere"


def test_the_batches_of_a_scrub_have_all_of_them_in_turn() -> None:
    watched = watch(Tower())
    batches = [range(0, 3), range(3, 4), range(4, 9), range(9, 10)]
    assert [n for batch in batches for n in watched.share(batch, 10)] == [0, 1, 2, 3]


class Text(torch.nn.Module):
    def __init__(self, device: str) -> None:
        super().__init__()
        self.norm = torch.nn.Parameter(torch.zeros(3, device=device))
        self.head = torch.nn.Parameter(torch.zeros(5, device=device))


class Multimodal(torch.nn.Module):
    """As vLLM's multimodal classes, which say what their language model is."""

    supports_multimodal = True

    def __init__(self, device: str = "cpu") -> None:
        super().__init__()
        self.text = Text(device)
        self.tower = Text(device)

    def get_language_model(self) -> Text:
        return self.text

    def load_weights(self, weights) -> None:  # type: ignore[no-untyped-def]
        for name, tensor in weights:
            self.get_parameter(name).data.copy_(tensor)


def place(*names: str, model: type[Multimodal] = Multimodal) -> Placement:
    blank, live = model("meta"), model()
    layout = Layout([TensorSpec(name, "F32", (3 if "norm" in name else 5,)) for name in names])
    beside = place_model.beside_language_model(live)
    form = place_model.LoadFormat(named(live), named(blank), {}, {}, frozenset(live.state_dict()), beside=beside)
    return place_model.place(record(blank.load_weights, blank.named_parameters, layout), form, layout)


def test_a_stream_of_the_language_model_leaves_the_others_unnamed() -> None:
    placement = place("text.norm", "text.head")
    assert placement.refusals == {}
    assert placement.unnamed == ["tower.norm", "tower.head"]
    assert place("text.norm", "text.head", "tower.norm", "tower.head").unnamed == []


class Plain(Multimodal):
    supports_multimodal = False


class Shared(Multimodal):
    """The tower computes with memory of the text: an update would change what is watched."""

    def __init__(self, device: str = "cpu") -> None:
        super().__init__(device)
        self.tower.norm.data = self.text.norm.data


@pytest.mark.parametrize(
    ("names", "model", "unfilled"),
    [
        pytest.param(["text.norm"], Multimodal, "text.head", id="a tensor of the text is missing"),
        pytest.param(["text.norm", "text.head", "tower.norm"], Multimodal, "tower.head", id="part of the tower"),
        pytest.param(["tower.norm", "tower.head"], Multimodal, "text.norm", id="only the tower"),
        pytest.param(["text.norm", "text.head"], Plain, "tower.norm", id="no multimodal class"),
        pytest.param(["text.norm", "text.head"], Shared, "tower.norm", id="memory that both have"),
    ],
)
def test_every_other_gap_is_refused(names: list[str], model: type[Multimodal], unfilled: str) -> None:
    placement = place(*names, model=model)
    assert unfilled in placement.refusals[""]
    assert placement.unnamed == []

"""Where a copy of weights came from is found element by element, or not at all."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from dcr_daemon.vllm_plugin.loader import line_search
from dcr_daemon.vllm_plugin.loader.copies import WeightCopy, locate
from dcr_daemon.vllm_plugin.loader.reachable import shaped

Weights = dict[str, torch.Tensor]


def weights() -> Weights:
    torch.manual_seed(0)
    return {
        "gate": torch.randn(24, 32).bfloat16(),
        "up": torch.randn(24, 32).bfloat16(),
        "experts": torch.randn(3, 16, 24).bfloat16(),
        "sinks": torch.randn(8).bfloat16(),
        "view": torch.randn(20, 48).bfloat16()[:, 8:40],
        "head": torch.nn.functional.pad(torch.randn(20, 16), (0, 0, 0, 4)).bfloat16(),
    }


Make = Callable[[Weights], torch.Tensor]
COPIES: dict[str, tuple[int, Make]] = {
    "whole": (1, lambda w: w["up"].clone()),
    "vector": (1, lambda w: w["sinks"].clone()),
    "cast": (1, lambda w: w["sinks"].float()),
    "slice": (1, lambda w: w["up"][3:19, 8:24].clone()),
    "one row": (1, lambda w: w["up"][5].clone()),
    "one column of matrices": (1, lambda w: w["experts"][:, 3].clone()),
    "every other row": (1, lambda w: w["up"][::2].clone()),
    "transposed": (1, lambda w: w["up"].t().contiguous()),
    "transposed slice, cast": (1, lambda w: w["up"][2:20].t().float().contiguous()),
    "permuted": (1, lambda w: w["experts"].permute(2, 0, 1).contiguous()),
    "in memory order, with a transposed view": (1, lambda w: w["up"].clone().t()),
    "of a view": (1, lambda w: w["view"].contiguous()),
    "padded with zeros": (1, lambda w: w["head"].t().contiguous()),
    "joined": (2, lambda w: torch.cat([w["gate"], w["up"]])),
    "joined on the other axis": (2, lambda w: torch.cat([w["gate"], w["up"]], dim=1)),
    "a weight twice": (2, lambda w: torch.cat([w["up"], w["up"]])),
    "blocks in another order": (3, lambda w: torch.cat([w["up"][16:], w["up"][:8], w["up"][8:16]])),
    "joined, then transposed": (2, lambda w: torch.cat([w["gate"], w["up"][:10]]).t().contiguous()),
}


@pytest.mark.parametrize(("pieces", "make"), COPIES.values(), ids=COPIES)
def test_a_copy_follows_its_weights(pieces: int, make: Make) -> None:
    live = weights()
    made = make(live)
    copy = locate("kept", shaped(made), live)
    assert copy is not None
    assert copy.holds()
    assert sum(piece.target.numel() for piece in copy.pieces) == made.numel()
    assert len(copy.pieces) <= pieces
    assert copy.sources == {name for name in live if name in copy.sources}
    for tensor in live.values():
        tensor.copy_(torch.randn(tensor.shape))
    assert not copy.holds()
    copy.write()
    assert copy.holds()
    assert torch.equal(made, make(live)), "as a fresh load would make it"


OTHERS: dict[str, Make] = {
    "computed": lambda w: w["up"] * 2,
    "partly computed": lambda w: torch.cat([w["up"], w["gate"] + 1]),
    "one other element": lambda w: w["up"].clone().index_fill_(0, torch.tensor([23]), 1),
    "too many pieces": lambda w: torch.cat([w["up"], w["gate"]])[torch.randperm(48)],
    "too short to be told": lambda w: w["sinks"][:7].clone(),
    "constants": lambda w: torch.zeros(24, 32).bfloat16(),
    "numbers": lambda w: torch.arange(64),
    "nothing": lambda w: torch.zeros(0, 8).bfloat16(),
}


@pytest.mark.parametrize("make", OTHERS.values(), ids=OTHERS)
def test_what_is_not_understood_wholly_is_no_copy(make: Make) -> None:
    live = weights()
    assert locate("kept", shaped(make(live)), live) is None


@pytest.mark.parametrize("alike", ["all of it", "its first row", "its last row"])
def test_a_source_that_another_weight_equals_is_not_guessed(alike: str) -> None:
    """Experts may begin as copies of one another, and part later."""
    live = weights()
    rows = {"all of it": slice(None), "its first row": slice(0, 1), "its last row": slice(23, 24)}[alike]
    live["gate"][rows] = live["up"][rows]
    assert locate("kept", live["up"].clone(), live) is None


def test_a_source_is_not_guessed_where_too_many_places_look_like_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """A line that begins with zeros in a weight that is mostly zeros; another place of it may lie behind them."""
    row = torch.cat([torch.zeros(4), torch.randn(60), torch.zeros(8)]).bfloat16()
    weight = torch.zeros(6, 72).bfloat16()
    weight[0] = row
    assert locate("kept", row.clone(), {"weight": weight}) is not None
    weight[5] = row
    for looked_at in (line_search.SPURIOUS, 9):
        monkeypatch.setattr(line_search, "SPURIOUS", looked_at)
        assert locate("kept", row.clone(), {"weight": weight}) is None


def test_weights_that_share_memory_are_one() -> None:
    live = weights()
    copy = locate("kept", live["up"].clone(), live | {"tied": live["up"]})
    assert copy is not None
    assert copy.sources == {"up"}


def test_a_copy_keeps_its_axes_only_where_they_cover_its_memory() -> None:
    tensor = torch.zeros(4, 6)
    assert shaped(tensor.t()).shape == (4, 6)
    assert shaped(tensor[1:]).shape == (24,)
    assert shaped(torch.tensor(1.0)).shape == (1,)


def pieces_of(copy: WeightCopy | None) -> list[tuple[str, tuple[int, ...]]]:
    assert copy is not None
    return [(piece.parameter, tuple(piece.target.shape)) for piece in copy.pieces]


def test_a_piece_is_as_large_as_its_strides_are_right() -> None:
    live = weights()
    joined = torch.cat([live["gate"], live["up"][4:20]])
    assert pieces_of(locate("kept", joined, live)) == [("gate", (24, 32)), ("up", (16, 32))]

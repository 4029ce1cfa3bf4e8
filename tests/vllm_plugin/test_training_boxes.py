"""Boxes of any trainer on any engine: what a version was cut into is not seen in the weights, nor in a sum."""

from __future__ import annotations

import itertools
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.tensors.partitions import Cut, cuts
from support.vllm.toy_engine import ToyEngine
from support.vllm.toy_model import LAYOUT, Toy, placed
from support.vllm.unusual_loaders import FieldEngine, LaidOut, attach_model

from dcr_daemon.canonical.coverage import exactly_once
from dcr_daemon.canonical.layout import Layout
from dcr_daemon.canonical.region import Region
from dcr_daemon.engine.port import Verdict
from dcr_daemon.vllm_plugin.loader import place_model
from dcr_daemon.vllm_plugin.weights.placement import Placement

SHARES = (0.02, 0.4)


def as_regions(layout: Layout, cut: Cut) -> list[Region]:
    boxes = [(spec.name, box) for tensor, spec in enumerate(layout) for box in cut(layout, tensor)]
    return [Region(name, box.shape, box.dst, box.strides, box.dst, box.strides) for name, box in boxes]


@given(cuts())
def test_what_is_drawn_here_covers_every_tensor_once(cut: Cut) -> None:
    assert exactly_once(as_regions(LAYOUT, cut), LAYOUT) == []


def attach_toy(model: Toy, *_: Any) -> tuple[Placement, place_model.Named]:
    placement, homes = placed(model)
    return placement, homes.live


def follow(engine: ToyEngine, drawn: list[Cut], share: float) -> None:
    """One version on its own, the others as one transaction, each published by another set of ranks."""
    engine.ready()
    for cut in drawn:
        engine.cuts[engine.step(share)] = cut
    assert engine.refit(1, name="one").verdict is Verdict.COMMITTED
    assert engine.holds(1)
    rest = list(range(2, len(drawn) + 1))
    if rest:
        prepared = engine.prepare(*rest, name="rest")
        assert prepared.fits == len(rest)
        steps = list(itertools.pairwise(engine.lanes[1:]))
        touched = [np.logical_or.reduce([a[t] != b[t] for a, b in steps]).sum() for t in range(len(engine.layout))]
        assert prepared.changed == sum(touched)
        assert engine.swap("rest").verdict is Verdict.COMMITTED
        assert engine.holds(len(drawn))


@settings(max_examples=25, deadline=None)
@given(st.lists(cuts(), min_size=1, max_size=4), st.sampled_from([1, 2]), st.sampled_from(SHARES))
def test_versions_of_changing_worlds_arrive_on_another_one(drawn: list[Cut], ranks: int, share: float) -> None:
    with pytest.MonkeyPatch.context() as patch, tempfile.TemporaryDirectory() as home:
        patch.setattr(place_model, "attach_model", attach_toy)
        follow(ToyEngine(Path(home), ranks=ranks), drawn, share)


@settings(max_examples=12, deadline=None)
@given(st.lists(cuts(), min_size=1, max_size=3), st.sampled_from(SHARES))
def test_boxes_over_many_experts_reach_each_where_it_was_laid_out_anew(drawn: list[Cut], share: float) -> None:
    """One box spans the experts of both ranks, and of each rank hundreds of blocks that a kernel wants permuted."""
    with pytest.MonkeyPatch.context() as patch, tempfile.TemporaryDirectory() as home:
        patch.setattr(place_model, "attach_model", attach_model)
        follow(FieldEngine(Path(home), LaidOut), drawn, share)

"""The directory engine under versions whose boxes are those of training ranks, other ones each time."""

from __future__ import annotations

import asyncio
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.streams.versions import Versions
from support.tensors.partitions import Cut, cuts, megatron_cut

from dcr_daemon.canonical.layout import Layout
from dcr_daemon.engine.directory.compose import compose, open_hop
from dcr_daemon.engine.directory.engine import DirectoryEngine
from dcr_daemon.engine.port import Verdict
from dcr_daemon.projection.frameworks.megatron.grid import Grid
from dcr_daemon.projection.frameworks.megatron.model import layout as layout_of
from dcr_daemon.projection.frameworks.models.families import read_architecture

SMALL = {"vocab_size": 301, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
         "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 4}  # fmt: skip
MODELS: dict[str, dict[str, Any]] = {
    "gpt_oss": {"num_local_experts": 4},
    "qwen3_moe": {"num_experts": 4, "moe_intermediate_size": 16},
    "llama": {"attention_bias": True},
}
GRIDS = [Grid(tp=4, ep=2, dp=1), Grid(tp=2, pp=2, ep=2, dp=2), Grid(tp=8, etp=2, ep=4), Grid()]


async def follow(home: Path, versions: Versions) -> None:
    """Everything after version 0 as one transaction, bit for bit."""
    here, newest = versions.save(home / "current"), len(versions.values) - 1
    engine = DirectoryEngine(here)
    await engine.attach(versions.facts())
    await engine.prove(0, versions.vector_file(0), "v0")
    assert (await engine.prepare(versions.transaction(*range(1, newest + 1)))).fits == newest
    assert (await engine.swap(f"to-{newest}")).verdict is Verdict.COMMITTED
    await engine.close()
    assert versions.version_of(here) == newest


def stepped(home: Path, drawn: list[Cut], rate: float) -> Versions:
    """One version for each cut, written by a trainer that cuts so."""
    versions = Versions(home)
    for cut in drawn:
        versions.cuts[versions.step(rate)] = cut
    return versions


@settings(max_examples=25, deadline=None)
@given(st.lists(cuts(), min_size=1, max_size=3), st.sampled_from([0.01, 0.3]))
def test_versions_of_changing_worlds_are_one_change(drawn: list[Cut], rate: float) -> None:
    with tempfile.TemporaryDirectory() as home:
        versions = stepped(Path(home), drawn, rate)
        asyncio.run(follow(Path(home), versions))


@settings(max_examples=40, deadline=None)
@given(st.lists(cuts(), min_size=1, max_size=3), st.sampled_from([0.01, 0.3]))
def test_a_composed_change_is_the_difference_of_its_ends_however_it_was_cut(drawn: list[Cut], rate: float) -> None:
    with tempfile.TemporaryDirectory() as home:
        versions = stepped(Path(home), drawn, rate)
        hops = [open_hop(versions.layout, versions.stream, hop=versions.hop(v)) for v in range(1, len(drawn) + 1)]
        for patched in compose(versions.layout, hops, live=versions.values[0].__getitem__):
            name = versions.layout[patched.tensor].name
            first, last = versions.values[0][name], versions.values[-1][name]
            assert (np.diff(patched.positions) > 0).all()
            assert np.array_equal(patched.old, first[patched.positions])
            assert np.array_equal(patched.new, last[patched.positions])
            assert set(np.flatnonzero(first != last).tolist()) <= set(patched.positions.tolist())


@pytest.mark.parametrize("family", list(MODELS))
def test_megatron_ranks_may_be_others_at_each_version(family: str, tmp_path: Path) -> None:
    architecture = read_architecture({"model_type": family} | SMALL | MODELS[family])
    layout: Layout = layout_of(architecture)
    versions = Versions(tmp_path, layout=layout)
    for grid in GRIDS:
        versions.cuts[versions.step(0.05)] = megatron_cut(architecture, layout, grid)
    asyncio.run(follow(tmp_path, versions))

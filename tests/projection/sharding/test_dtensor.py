"""DTensors of four real processes: every placement names what the rank holds, and together they cover all, once.

The ranks (tests/support/ranks/programs/placements.py) compare their local elements themselves; here their answers are
put together, and the sharded checkpoints that they wrote are read back without torch.
"""

from __future__ import annotations

import itertools
import json
import math
from collections import defaultdict
from pathlib import Path

import numpy as np
import pytest
import torch
from support.ranks.programs import placements
from support.ranks.run import run_ranks
from support.tensors.maps import map_of, map_of_pieces, read_archived, safetensors_pieces
from torch.distributed.tensor import Shard
from torch.distributed.tensor._utils import _compute_local_shape_and_global_offset
from torch.distributed.tensor.placement_types import _StridedShard

from dcr_daemon.canonical.coverage import exactly_once
from dcr_daemon.canonical.layout import Layout, TensorSpec
from dcr_daemon.canonical.region import Region, indices, whole
from dcr_daemon.checkpoint.safetensors import SafetensorsFile
from dcr_daemon.projection.files.piece_map import Piece, dcp_pieces
from dcr_daemon.projection.region_map import Map, gaps
from dcr_daemon.projection.sharding.dtensor import shards
from dcr_daemon.projection.values import Cast


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("ranks")
    run_ranks(placements.__name__, placements.WORLD, out)
    return out


def of_rank(ranks: Path, rank: int) -> list[Region]:
    rows = json.loads((ranks / f"rank{rank}.json").read_text())
    return [Region(n, tuple(s), a, tuple(sa), b, tuple(sb)) for n, s, a, sa, b, sb in rows]


def test_all_placements_together_cover_every_tensor_exactly_once(ranks: Path) -> None:
    layout = Layout.decode((ranks / "layout.json").read_bytes())
    regions = [region for rank in range(placements.WORLD) for region in of_rank(ranks, rank)]
    assert exactly_once(regions, layout) == []
    assert len(layout) > 60


def test_even_placements_are_one_region_and_replicas_are_spread(ranks: Path) -> None:
    counts: dict[str, list[int]] = defaultdict(lambda: [0] * placements.WORLD)
    for rank in range(placements.WORLD):
        for region in of_rank(ranks, rank):
            counts[region.name][rank] += 1
    assert counts["packed.16"] == [1, 1, 1, 1]
    assert counts["fsdp over tp.layers.0.weight"] == [1, 1, 1, 1]
    assert counts["row.1"] == [1, 0, 0, 0]
    assert sum(counts["replicated"]) == sum(counts["on every rank"]) == 1
    assert sum(map(max, zip(*(c for n, c in counts.items() if n.startswith("both")), strict=True))) > 1


def check_pieces(made: Map, layout: Layout, lanes: dict[str, np.ndarray]) -> None:
    assert gaps([made], layout) == []
    for shard in made.shards:
        values = lanes[shard.parameter].view("<f4")
        assert values.size == math.prod(shard.shape)
        for region in shard.regions:
            src, dst = indices(region)
            assert (values[src] == dst).all(), shard.parameter


def written(ranks: Path) -> Layout:
    layout = Layout.decode((ranks / "layout.json").read_bytes())
    return Layout(s for s in layout if not s.name.startswith(("packed", "fsdp over uneven", "on every")))


def test_a_distributed_checkpoint_is_mapped_from_its_own_table(ranks: Path) -> None:
    layout, pieces = written(ranks), dcp_pieces(ranks / "dcp")
    lanes = {piece.label: read_archived(ranks / "dcp", piece) for piece in pieces}
    check_pieces(map_of_pieces(pieces, layout, prefix="model."), layout, lanes)


def test_files_of_a_sharded_writer_are_mapped_from_their_headers(ranks: Path) -> None:
    layout, pieces = written(ranks), safetensors_pieces(ranks / "sharded")
    assert len({piece.file for piece in pieces}) == placements.WORLD

    def lanes(piece: Piece) -> np.ndarray:
        with SafetensorsFile(ranks / "sharded" / piece.file) as file:
            return file.bits(piece.tensor).copy()

    check_pieces(map_of_pieces(pieces, layout), layout, {piece.label: lanes(piece) for piece in pieces})


def test_plain_tensors_need_no_process_group() -> None:
    layout = Layout([TensorSpec("a", "BF16", (4, 2)), TensorSpec("b", "F32", (3,))])
    made = map_of({"a": torch.zeros(4, 2), "b": torch.zeros(3), "stranger": torch.zeros(2)}.items(), layout)
    assert gaps([made], layout) == []
    assert [(s.parameter, str(s.value), len(s.regions)) for s in made.shards] == [
        ("a", "cast(BF16)", 1),
        ("b", "bits", 1),
        ("stranger", "bits", 0),
    ]
    (shard,) = shards("packed", torch.zeros(8), layout, [Region("a", (8,), 0, (1,), 0, (1,))])
    assert (shard.value, shard.regions) == (Cast("BF16"), tuple(whole("a", (4, 2))))


def test_offsets_that_torch_gets_wrong_are_found_out() -> None:
    """13 rows by FSDP over TP, 3 x 2 ranks: torch's own helper, which names the pieces of a distributed checkpoint,
    leaves one row out and names another twice. If this fails, torch has mended it, and the warning in files.py can go.
    """
    layout, pieces = Layout([TensorSpec("w", "F32", (13, 2))]), []
    for at in itertools.product(range(3), range(2)):
        shape, starts = _compute_local_shape_and_global_offset(
            (13, 2), (3, 2), at.__getitem__, [_StridedShard(0, split_factor=2), Shard(0)]
        )
        pieces.append(Piece("w", (13, 2), tuple(shape), tuple(starts), "F32", f"{at}.safetensors", (0, 0)))
    found = gaps([map_of_pieces(pieces, layout)], layout)
    assert [str(gap) for gap in found] == ["w: elements [14, 16): double", "w: elements [22, 24): missing"]

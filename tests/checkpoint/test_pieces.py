from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from dcr_daemon.canonical.layout import Layout, TensorSpec
from dcr_daemon.checkpoint.pieces import find_pieces, piece_metadata, plan_files, read_pieces
from dcr_daemon.checkpoint.safetensors import SafetensorsFile, write_safetensors
from dcr_daemon.errors import Corrupt

LAYOUT = Layout(
    [TensorSpec("big", "BF16", (10, 10)), TensorSpec("none", "BF16", (0,)), TensorSpec("small", "F32", (2,))]
)
VALUES = [np.arange(100, dtype="<u2"), np.empty(0, "<u2"), np.arange(2, dtype="<u4")]


@pytest.mark.parametrize("limit", [1, 7, 64, 200, 208, 1 << 20])
def test_pieces_join_to_the_tensors_whatever_the_limit(tmp_path: Path, limit: int) -> None:
    joined = [np.zeros_like(v) for v in VALUES]
    seen = [np.zeros(v.size, int) for v in VALUES]
    for n, pieces in enumerate(plan_files(LAYOUT, limit)):
        path = tmp_path / f"{n}.safetensors"
        items = [(p.entry, VALUES[p.tensor][p.run]) for p in pieces]
        write_safetensors(path, items, metadata=piece_metadata(LAYOUT, pieces))
        assert sum(p.entry.nbytes for p in pieces) <= max(limit, 4)
        with SafetensorsFile(path) as file:
            for tensor, box, bits in read_pieces(file, LAYOUT):
                if box is not None:
                    joined[tensor][box.dst : box.dst + box.elements] = bits
                    seen[tensor][box.dst : box.dst + box.elements] += 1
    assert all(np.array_equal(a, b) for a, b in zip(joined, VALUES, strict=True))
    assert all((s == 1).all() for s in seen)


def test_tensors_named_like_metadata_or_like_pieces_come_back(tmp_path: Path) -> None:
    names = ("format", "w", "w#1", "w#3", "w##3")
    layout = Layout([TensorSpec(name, "U8", (6 if name == "w" else 1,)) for name in names])
    values = [np.arange(spec.elements, dtype="u1") + 10 * n for n, spec in enumerate(layout)]
    joined = [np.zeros_like(v) for v in values]
    for n, pieces in enumerate(plan_files(layout, 1)):
        path = tmp_path / f"{n}.safetensors"
        items = [(p.entry, values[p.tensor][p.run]) for p in pieces]
        write_safetensors(path, items, metadata=piece_metadata(layout, pieces))
        with SafetensorsFile(path) as file:
            for tensor, box, bits in read_pieces(file, layout):
                assert box is not None
                joined[tensor][box.dst : box.dst + box.elements] += bits
    assert all(np.array_equal(a, b) for a, b in zip(joined, values, strict=True))


@pytest.mark.parametrize(
    "place",
    [
        '["big", 0, [25, 2], [1, 1]]',
        '["big", 60, [50], [1]]',
        '["other", 0, [50], [1]]',
        '["big", 0, [49], [1]]',
        '["small", 0, [2], [1]]',
        "no",
    ],
)
def test_a_piece_outside_its_tensor_is_corrupt(tmp_path: Path, place: str) -> None:
    path = tmp_path / "a.safetensors"
    write_safetensors(path, [(TensorSpec("big#0", "BF16", (50,)), VALUES[0][:50])], metadata={"big#0": place})
    with SafetensorsFile(path) as file, pytest.raises(Corrupt, match=r"a\.safetensors"):
        list(read_pieces(file, LAYOUT))


def test_tensors_that_the_layout_leaves_out_are_skipped_only_on_request(tmp_path: Path) -> None:
    """A checkpoint may store a tied head as well; whoever only looks for the layout's tensors does not mind."""
    kept, alias = TensorSpec("kept", "BF16", (4,)), TensorSpec("alias", "BF16", (4,))
    write_safetensors(tmp_path / "both", [(kept, np.arange(4, dtype="<u2")), (alias, np.zeros(4, dtype="<u2"))])
    with SafetensorsFile(tmp_path / "both") as file:
        layout = Layout([kept])
        assert [piece.entry for piece in find_pieces(file, layout, skip_unknown=True)] == [kept]
        with pytest.raises(Corrupt, match="alias is not in the stream's layout"):
            list(find_pieces(file, layout))

"""Checkpoints in pieces: what is not whole, not true or not ours is refused by name. (Real ones: test_dtensor.)"""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.numpy import save_file
from support.tensors.maps import map_of_pieces, read_archived, safetensors_pieces

from dcr_daemon.canonical.layout import Layout, TensorSpec
from dcr_daemon.canonical.region import Region
from dcr_daemon.errors import Corrupt, DcrError, Incompatible, NotFound
from dcr_daemon.projection.files.piece_map import dcp_pieces
from dcr_daemon.projection.region_map import gaps

TENSORS: dict[str, Any] = {
    "a": torch.arange(24, dtype=torch.float32).reshape(4, 6).bfloat16(),
    "turned": torch.arange(12, dtype=torch.float32).reshape(3, 4).t(),
    "part": torch.arange(100, dtype=torch.int64)[40:60:2],
    "scalar": torch.tensor(2.5),
    "none": torch.empty(0, 3),
    "step": 3,
}


pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    dcp.save({"model": TENSORS, "seen": {"x": [1, 2]}}, checkpoint_id=tmp_path / "c", no_dist=True)
    return tmp_path / "c"


def test_every_kind_of_tensor_is_read_without_unpickling_it(checkpoint: Path) -> None:
    pieces = {piece.tensor.removeprefix("model."): piece for piece in dcp_pieces(checkpoint)}
    assert pieces.keys() == TENSORS.keys() - {"step"}
    for name, piece in pieces.items():
        wanted = TENSORS[name].contiguous().reshape(-1)
        lanes = read_archived(checkpoint, piece)
        assert lanes.tobytes() == wanted.view(torch.uint8).numpy().tobytes() if name != "scalar" else lanes.size == 1


def test_a_training_framework_s_names_go_through_its_conversion(checkpoint: Path) -> None:
    layout = Layout([TensorSpec("one", "BF16", (2, 6)), TensorSpec("two", "BF16", (2, 6))])
    targets = {"a": [Region("one", (12,), 0, (1,), 0, (1,)), Region("two", (12,), 12, (1,), 0, (1,))]}
    made = map_of_pieces(dcp_pieces(checkpoint), layout, targets=targets, prefix="model.")
    assert gaps([made], layout) == []
    assert [len(shard.regions) for shard in made.shards] == [2]


def test_a_checkpoint_that_is_still_written_is_not_there(checkpoint: Path) -> None:
    (checkpoint / ".metadata").unlink()
    with pytest.raises(NotFound, match=r"has no \.metadata"):
        dcp_pieces(checkpoint)


@pytest.mark.parametrize("body", [b"", b"no pickle", pickle.dumps({"storage_data": {}}), pickle.dumps([1, 2])])
def test_a_table_of_another_kind_is_corrupt(checkpoint: Path, body: bytes) -> None:
    (checkpoint / ".metadata").write_bytes(body)
    with pytest.raises(Corrupt, match="no table of a distributed checkpoint"):
        dcp_pieces(checkpoint)


def test_any_byte_of_a_table_changed_gives_pieces_or_a_refusal(checkpoint: Path) -> None:
    table = checkpoint / ".metadata"
    body = table.read_bytes()
    dice = np.random.default_rng(7)
    for at in dice.integers(0, len(body), 300):
        table.write_bytes(body[:at] + bytes([body[at] ^ int(dice.integers(1, 256))]) + body[at + 1 :])
        try:
            for piece in dcp_pieces(checkpoint):
                _ = piece.regions
                read_archived(checkpoint, piece)
        except DcrError:
            pass


def test_a_file_that_is_not_what_the_table_says(checkpoint: Path) -> None:
    piece = next(p for p in dcp_pieces(checkpoint) if p.tensor == "model.a")
    path = checkpoint / piece.file
    whole = path.read_bytes()
    path.write_bytes(whole[: piece.span[0] + 10])
    with pytest.raises(Corrupt, match=r"ends before the piece of model\.a"):
        read_archived(checkpoint, piece)
    path.write_bytes(bytes(len(whole)))
    with pytest.raises(Corrupt, match=r"does not hold the piece of model\.a"):
        read_archived(checkpoint, piece)
    other = next(p for p in dcp_pieces(checkpoint) if p.tensor == "model.part")
    path.write_bytes(whole)
    with pytest.raises(Corrupt, match="not \\(4, 6\\)"):
        read_archived(checkpoint, replace(piece, span=other.span))
    shutil.rmtree(checkpoint)
    with pytest.raises(NotFound, match="there is no file"):
        read_archived(checkpoint, piece)


def write_sharded(path: Path, tensors: dict[str, np.ndarray], offsets: object) -> None:
    text = offsets if isinstance(offsets, str) else json.dumps(offsets)
    save_file(tensors, path, {"DCP_SHARDING_INFO": text})


def test_sharded_files_say_where_their_pieces_begin(tmp_path: Path) -> None:
    rows = np.arange(12, dtype=np.float32).reshape(4, 3)
    write_sharded(tmp_path / "1.safetensors", {"w": rows[:3]}, {"w": {"saved_offsets": [0, 0]}})
    write_sharded(tmp_path / "2.safetensors", {"w": rows[3:]}, {"w": {"saved_offsets": [3, 0]}})
    layout = Layout([TensorSpec("w", "F32", (4, 3))])
    assert gaps([map_of_pieces(safetensors_pieces(tmp_path), layout)], layout) == []
    (tmp_path / "2.safetensors").unlink()
    missing = gaps([map_of_pieces(safetensors_pieces(tmp_path), layout)], layout)
    assert [str(gap) for gap in missing] == ["w: elements [9, 12): missing"]


@pytest.mark.parametrize(
    "offsets", ["[", "[]", {"w": {}}, {"w": {"saved_offsets": [0]}}, {"w": {"saved_offsets": [-1, 0]}}, {}]
)
def test_offsets_that_do_not_fit_their_file_are_corrupt(tmp_path: Path, offsets: object) -> None:
    write_sharded(tmp_path / "1.safetensors", {"w": np.zeros((2, 2), np.float32)}, offsets)
    with pytest.raises(Corrupt, match=r"1\.safetensors"):
        safetensors_pieces(tmp_path)


def test_files_of_whole_tensors_are_told_apart(tmp_path: Path) -> None:
    save_file({"w": np.zeros((2, 2), np.float32)}, tmp_path / "1.safetensors")
    with pytest.raises(Incompatible, match="holds whole tensors"):
        safetensors_pieces(tmp_path)


def test_any_byte_of_an_archive_changed_gives_elements_or_a_refusal(checkpoint: Path) -> None:
    pieces = [piece for piece in dcp_pieces(checkpoint) if piece.tensor in ("model.a", "model.turned")]
    dice = np.random.default_rng(3)
    for piece in pieces:
        path = checkpoint / piece.file
        body = path.read_bytes()
        for at in dice.integers(*piece.span, 300):
            path.write_bytes(body[:at] + bytes([body[at] ^ int(dice.integers(1, 256))]) + body[at + 1 :])
            with contextlib.suppress(DcrError):
                assert read_archived(checkpoint, piece).size == np.prod(piece.shape)
        path.write_bytes(body)


def rewrite(checkpoint: Path, change: Callable[[Any], None]) -> None:
    """Let the library write another table."""
    with (checkpoint / ".metadata").open("rb") as file:
        table = pickle.load(file)  # noqa: S301 - written by this test
    change(table)
    (checkpoint / ".metadata").write_bytes(pickle.dumps(table))


def test_a_piece_may_lie_anywhere_in_a_large_file(checkpoint: Path) -> None:
    """Places were once taken for a shape, and refused where their product was more elements than a tensor has."""

    def move(table: Any) -> None:
        for info in table.storage_data.values():
            info.offset, info.length = 40 << 30, 2 << 30

    rewrite(checkpoint, move)
    assert {piece.span for piece in dcp_pieces(checkpoint)} == {(40 << 30, 42 << 30)}


@pytest.mark.parametrize("place", ["/etc/passwd", "../other/__0_0.distcp", "a/../../b", "", ".", "a\0b", 7])
def test_a_file_outside_the_checkpoint_is_refused(checkpoint: Path, place: Any) -> None:
    def move(table: Any) -> None:
        for info in table.storage_data.values():
            info.relative_path = place

    rewrite(checkpoint, move)
    with pytest.raises(Corrupt, match="is no table"):
        dcp_pieces(checkpoint)


def test_a_dtype_that_no_checkpoint_holds_harms_no_other_tensor(checkpoint: Path) -> None:
    def retype(table: Any) -> None:
        properties = table.state_dict_metadata["model.turned"].properties
        properties.dtype = torch.quint8

    rewrite(checkpoint, retype)
    dtypes = {piece.tensor: piece.dtype for piece in dcp_pieces(checkpoint)}
    assert dtypes["model.turned"] == "torch.quint8"
    assert dtypes["model.a"] == "BF16"


def test_an_archive_of_another_dtype_is_not_the_piece(checkpoint: Path) -> None:
    piece = next(p for p in dcp_pieces(checkpoint) if p.tensor == "model.a")
    with pytest.raises(Corrupt, match="it is BF16, not F16"):
        read_archived(checkpoint, replace(piece, dtype="F16"))


def test_what_is_no_plain_file_is_refused_and_not_waited_for(checkpoint: Path) -> None:
    (checkpoint / ".metadata").unlink()
    os.mkfifo(checkpoint / ".metadata")
    with pytest.raises(Incompatible, match="not a regular file"):
        dcp_pieces(checkpoint)

"""Tensors in pieces: any range of them is what it would be of the whole, whatever the pieces look like."""

from __future__ import annotations

import itertools
import json
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.numpy import save_file
from support.tensors.maps import safetensors_pieces

from dcr_daemon.canonical.layout import Layout, TensorSpec
from dcr_daemon.canonical.region import Region, row_major
from dcr_daemon.errors import Incompatible
from dcr_daemon.projection.files.piece_map import SHARDING_INFO, Piece, dcp_pieces
from dcr_daemon.publish.inputs.sources import SourceChanged
from dcr_daemon.publish.watch.file_identity import (
    MAX_FILES_LISTED,
    FileIdentity,
    checkpoint_identity,
    identify,
    is_digest,
)
from dcr_daemon.publish.watch.pieces.fit import Part, PiecedTensor, PieceFit
from dcr_daemon.publish.watch.pieces.names import PieceNames
from dcr_daemon.publish.watch.pieces.reader import ContentMismatch, PiecedSource, PieceFiles

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def cuts(draw: Any, size: int) -> list[tuple[int, int]]:
    marks = sorted({0, size, *draw(st.lists(st.integers(0, size), max_size=3))})
    return list(itertools.pairwise(marks))


@st.composite
def grids(draw: Any) -> tuple[tuple[int, ...], list[tuple[tuple[int, int], ...]]]:
    """A shape, and a grid of rectangular pieces of it."""
    shape = tuple(draw(st.lists(st.integers(1, 9), min_size=1, max_size=3)))
    return shape, list(itertools.product(*(cuts(draw, size) for size in shape)))


def files_of(directory: Path, *, archives: bool) -> PieceFiles:
    names = [path.name for path in directory.iterdir()]
    return PieceFiles(directory, {name: identify(directory / name) for name in names}, archives)  # type: ignore[misc]


def write_grid(directory: Path, values: np.ndarray, grid: list[tuple[tuple[int, int], ...]]) -> None:
    for old in directory.glob("*"):
        old.unlink()
    for n, box in enumerate(grid):
        part = np.ascontiguousarray(values[tuple(slice(a, b) for a, b in box)])
        table = {SHARDING_INFO: json.dumps({"w": {"saved_offsets": [a for a, _ in box]}})}
        save_file({"w": part}, directory / f"{n}.safetensors", table)


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(grids(), st.data())
def test_any_range_of_any_grid_of_pieces(
    tmp_path: Path, case: tuple[tuple[int, ...], list[tuple[tuple[int, int], ...]]], data: Any
) -> None:
    shape, grid = case
    values = np.arange(np.prod(shape), dtype=np.int32).reshape(shape)
    write_grid(tmp_path, values, grid)
    fit = PieceNames(Layout([TensorSpec("w", "I32", shape)])).fit(safetensors_pieces(tmp_path), complete=True)
    (tensor,) = fit.tensors
    source = PiecedSource(files_of(tmp_path, archives=False), tensor)
    start = data.draw(st.integers(0, values.size - 1))
    count = data.draw(st.integers(1, values.size - start))
    assert source.read(start, count, "I32").tobytes() == values.reshape(-1)[start : start + count].tobytes()


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_an_archive_holds_its_piece_in_any_order_of_axes(tmp_path: Path, order: tuple[int, ...]) -> None:
    """And a conversion may turn it once more on its way to the canonical tensor. Longer than what is read at one go."""
    shape = (40, 60, 70)
    whole = torch.arange(40 * 60 * 70, dtype=torch.float32).reshape(shape)
    laid = whole.permute(order).contiguous().permute(*np.argsort(order).tolist())
    assert laid.shape == shape
    dcp.save({"w": laid}, checkpoint_id=tmp_path / "c", no_dist=True)
    (piece,) = dcp_pieces(tmp_path / "c")
    files = files_of(tmp_path / "c", archives=True)
    turned = Region("t", shape, 0, row_major(shape), 0, (60, 1, 40 * 60))  # canonical (70, 40, 60)
    wanted = whole.permute(2, 0, 1).contiguous().reshape(-1)
    for region, values in ((piece.regions[0], whole.reshape(-1)), (turned, wanted)):
        source = PiecedSource(files, PiecedTensor(TensorSpec("t", "F32", shape), (Part(piece, region),)))
        for start in range(0, whole.numel(), 50_000):
            part = values[start : start + 50_000]
            assert source.read(start, part.numel(), "F32").tobytes() == part.numpy().tobytes()


def test_masters_are_rounded_as_torch_rounds(tmp_path: Path) -> None:
    values = torch.randn(64, 8)
    dcp.save({"w": values}, checkpoint_id=tmp_path / "c", no_dist=True)
    fit = PieceNames(Layout([TensorSpec("w", "BF16", (64, 8))])).fit(dcp_pieces(tmp_path / "c"), complete=True)
    source = PiecedSource(files_of(tmp_path / "c", archives=True), fit.tensors[0])
    assert source.given.dtype == "F32"
    assert source.read(0, 512, "BF16").tobytes() == values.bfloat16().view(torch.uint8).numpy().tobytes()


@pytest.mark.parametrize("archives", [False, True])
def test_a_range_costs_what_it_is_and_not_what_its_tensor_is(tmp_path: Path, archives: bool) -> None:
    values = np.zeros((4096, 4096), np.uint16)
    layout = Layout([TensorSpec("w", "I16" if archives else "U16", values.shape)])
    if archives:
        dcp.save({"w": torch.from_numpy(values.view(np.int16))}, checkpoint_id=tmp_path, no_dist=True)
        fit = PieceNames(layout).fit(dcp_pieces(tmp_path), complete=True)
    else:
        write_grid(tmp_path, values, [((0, 4096), (0, 1000)), ((0, 4096), (1000, 4096))])
        fit = PieceNames(layout).fit(safetensors_pieces(tmp_path), complete=True)
    source = PiecedSource(files_of(tmp_path, archives=archives), fit.tensors[0])
    tracemalloc.start()
    try:
        for start in range(0, values.size, 1 << 20):
            source.read(start, 1 << 20, layout[0].dtype)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 3 * (2 << 20)


def test_a_file_that_is_replaced_shrinks_or_lies_is_no_source(tmp_path: Path) -> None:
    dcp.save({"w": torch.zeros(64, 8)}, checkpoint_id=tmp_path / "c", no_dist=True)
    fit = PieceNames(Layout([TensorSpec("w", "F32", (64, 8))])).fit(dcp_pieces(tmp_path / "c"), complete=True)
    (path,) = (tmp_path / "c").glob("*.distcp")
    files = files_of(tmp_path / "c", archives=True)
    path.write_bytes(bytes(path.stat().st_size))
    with pytest.raises(SourceChanged, match="was changed while it was read") as caught:
        PiecedSource(files, fit.tensors[0]).read(0, 8, "F32")
    assert not isinstance(caught.value, ContentMismatch)
    with pytest.raises(ContentMismatch, match="does not hold the piece of w"):
        PiecedSource(files_of(tmp_path / "c", archives=True), fit.tensors[0]).read(0, 8, "F32")
    path.unlink()
    with pytest.raises(SourceChanged, match="was taken away"):
        PiecedSource(files, fit.tensors[0]).read(0, 8, "F32")


LAYOUT = Layout(
    [TensorSpec("model.a", "F32", (4,)), TensorSpec("model.b", "F32", (4,)), TensorSpec("top", "F32", (2,))]
)
SHAPES = {"model.a": (4,), "model.b": (4,), "top": (2,)}


def pieces(*names: str, dtype: str = "F32") -> list[Piece]:
    found = []
    for name in names:
        shape = next((shape for known, shape in SHAPES.items() if name.endswith(known)), (4,))
        found.append(Piece(name, shape, shape, (0,), dtype, "f", (0, 100)))
    return found


def fit(*names: str, complete: bool = True, ignore: tuple[str, ...] = ()) -> PieceFit:
    return PieceNames(LAYOUT, ignore).fit(pieces(*names), complete=complete)


@pytest.mark.parametrize("prefix", ["", "model.", "app.model.", "module.", "a.b.c."])
def test_a_prefix_is_found_whatever_it_is(prefix: str) -> None:
    given = fit(*(prefix + name for name in SHAPES), "optim.state.model.a.exp_avg", "step.model.x")
    assert {tensor.given.name for tensor in given.tensors} == SHAPES.keys()
    assert not given.mismatches
    assert not given.refusal


def test_a_compiled_model_s_names_are_its_names() -> None:
    given = fit("model.model._orig_mod.a", "model._orig_mod.model.b", "model.top")
    assert {tensor.given.name for tensor in given.tensors} == SHAPES.keys()


def test_a_model_beside_its_average_is_the_one_called_so() -> None:
    names = [prefix + name for prefix in ("ema.", "model.") for name in SHAPES]
    assert {part.piece.tensor for tensor in fit(*names).tensors for part in tensor.parts} == {
        f"model.{name}" for name in SHAPES
    }


def test_optimizer_states_alone_are_nothing_to_speak_of() -> None:
    assert fit("optimizer.state.model.a.exp_avg", "optim.model.a").no_model
    assert fit().no_model


def test_what_is_missing_is_waited_for_until_nothing_more_comes() -> None:
    assert fit("model.a", "top", complete=False).incomplete == "pieces of model.b"
    with pytest.raises(Incompatible, match=r"^step 1 does not fit the stream's layout: missing: model\.b"):
        fit("model.a", "top").check("step 1")


def test_one_error_lists_all_that_does_not_fit() -> None:
    retyped = Piece("model.a", (4,), (4,), (0,), "I32", "f", (0, 16))
    reshaped = Piece("model.b", (5,), (5,), (0,), "F32", "f", (0, 20))
    fitted = PieceNames(LAYOUT).fit([retyped, reshaped], complete=True)
    with pytest.raises(Incompatible) as refused:
        fitted.check("step 1")
    assert refused.value.message == (
        "step 1 does not fit the stream's layout: missing: top; "
        "reshaped: model.b (is [5], should be [4]); retyped: model.a (is I32, should be F32)"
    )


def test_pieces_of_several_dtypes_or_packed_ones_are_refused() -> None:
    half = Piece("model.a", (4,), (2,), (0,), "F32", "f", (0, 100))
    other = Piece("model.a", (4,), (2,), (2,), "BF16", "f", (100, 200))
    naming = PieceNames(LAYOUT)
    assert "have several dtypes" in naming.fit([half, other, *pieces("model.b", "top")], complete=True).refusal
    packed = Piece("model.a", (4,), (4,), (0,), "F32", "f", (0, 100), "zstd")
    assert "packed by zstd" in naming.fit([packed, *pieces("model.b", "top")], complete=True).refusal


def test_thousands_of_files_are_recorded_as_one_that_stands_for_all() -> None:
    """A seal has room for some thousands; a restart must know them all the same."""
    files = [FileIdentity(f"__{n}_0.distcp", n, 10 + n, 7 * n) for n in range(MAX_FILES_LISTED + 1)]
    table = FileIdentity(".metadata", 1, 2, 3)
    known = checkpoint_identity([*files, table], ".metadata")
    assert table in known
    (other,) = known - {table}
    assert is_digest(other)
    assert checkpoint_identity([table, *reversed(files)], ".metadata") == known
    files[5] = FileIdentity("__5_0.distcp", 6, 15, 35)
    assert checkpoint_identity([*files, table], ".metadata") != known

"""Checkpoints in pieces, as real training processes write them, become versions bit for bit; what contradicts itself,
changes or was not written by a trainer does not. (The ranks: tests/support/ranks/programs/piece_writers.py.)"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import pickle
import shutil
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.numpy import save_file
from support.events import RecordedEvents
from support.processes.background import going_on
from support.ranks.programs import piece_writers
from support.ranks.run import run_ranks
from support.streams.watched import until
from torch.distributed.tensor import Shard
from torch.distributed.tensor._utils import _compute_local_shape_and_global_offset
from torch.distributed.tensor.placement_types import _StridedShard

from dcr_daemon.checkpoint.directory import Checkpoint
from dcr_daemon.errors import Incompatible
from dcr_daemon.events import Aborted, Notice, Opened, Sealed
from dcr_daemon.projection.files.piece_map import SHARDING_INFO
from dcr_daemon.publish.watch.once import OnceReport
from dcr_daemon.publish.watch.pieces import tables
from dcr_daemon.publish.watch.pieces.reader import PiecedSource
from dcr_daemon.publish.watch.watcher import WatchOptions, run_watch
from dcr_daemon.store.file import FileStore
from dcr_daemon.subscribe.materialize import materialize

pytestmark = pytest.mark.filterwarnings(
    "ignore:torch.distributed is disabled", "ignore:Detected an existing checkpoint"
)


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("ranks")
    run_ranks(piece_writers.__name__, piece_writers.WORLD, out)
    return out


class Place:
    """A base, a watched directory, a bucket, and what the publisher said."""

    def __init__(self, root: Path, base: Path, watch: Path) -> None:
        self.root, self.base, self.watch = root, base, watch
        self.events = RecordedEvents()

    def store(self) -> FileStore:
        return FileStore(self.root / "bucket")

    async def publish(self, **more: Any) -> OnceReport:
        options = WatchOptions(
            **{
                "state": self.root / "state", "base": self.base, "create": True, "watch": self.watch, "workers": 2,
                "poll": 0.05, **more,
            }
        )  # fmt: skip
        return await run_watch(options, self.store(), emit=self.events)

    def once(self, **more: Any) -> None:
        """`dcr publish --once`; raises for checkpoints of another model alone."""
        report = asyncio.run(self.publish(once=True, **more))
        OnceReport(not_published=[one for one in report.not_published if one.cause == "misfit"]).check()

    def watching(self, **more: Any) -> AbstractAsyncContextManager[None]:
        return going_on(self.publish(**more))

    @property
    def steps(self) -> list[int | None]:
        return [event.step for event in self.events.of(Sealed)]

    @property
    def said(self) -> str:
        return "\n".join(event.what for event in self.events.of(Notice))

    def built(self, version: int) -> dict[str, bytes]:
        """What `dcr materialize` makes of a version."""
        out = self.root / f"built-{version}"
        asyncio.run(materialize(self.store(), version=version, out=out))
        return tensors(out)


def tensors(path: Path) -> dict[str, bytes]:
    with Checkpoint(path) as checkpoint:
        return {spec.name: checkpoint.bits(spec.name).tobytes() for spec in checkpoint.layout}


def test_what_fsdp_ranks_write_in_four_ways_is_published_bit_for_bit(ranks: Path, tmp_path: Path) -> None:
    """fp32 masters, uneven and empty shards, rows and columns; under `model.`, under no prefix, under `app.model.`, by
    an asynchronous save; optimizer states beside it; and safetensors of a sharded writer."""
    place = Place(tmp_path, ranks / "small/base", ranks / "small/watch")
    place.once()
    assert place.steps == [1, 2, 3, 4]
    for version in place.steps:
        assert version is not None
        assert place.built(version) == tensors(ranks / f"small/full/step_{version}"), version
    assert len({event.changed for event in place.events.of(Sealed)}) > 1
    place.once()
    assert place.steps == [1, 2, 3, 4], "what is in the chain is not published again"
    place.once(state=tmp_path / "another", take_over=True)
    assert place.steps == [1, 2, 3, 4], "nor by one that only has the seals"


def test_fused_experts_go_through_the_library_s_own_conversion(ranks: Path, tmp_path: Path) -> None:
    """Where accelerate writes them, with the optimizer in a directory of its own; and where torch's writer leaves the
    pieces of what it joins one level up."""
    place = Place(tmp_path, ranks / "experts/base", ranks / "experts/watch")
    place.once(select=("step_*/*",))
    assert place.steps == [1, 2], place.said
    for version in (1, 2):
        assert place.built(version) == tensors(ranks / f"experts/full/step_{version}"), version


def test_without_a_base_the_anchor_s_config_explains_the_names(ranks: Path, tmp_path: Path) -> None:
    place = Place(tmp_path, ranks / "experts/base", tmp_path / "watch")
    place.watch.mkdir()
    place.once()
    shutil.copytree(ranks / "experts/watch/step_1", place.watch / "step_1")
    place.once(base=None)
    assert place.built(1) == tensors(ranks / "experts/full/step_1")


def test_names_that_nothing_explains_are_refused_by_name(ranks: Path, tmp_path: Path) -> None:
    base = shutil.copytree(ranks / "experts/base", tmp_path / "base")
    (base / "config.json").unlink()
    place = Place(tmp_path, base, ranks / "experts/watch")
    with pytest.raises(Incompatible, match=r"added: .*experts\.gate_up_proj.* no config\.json") as caught:
        place.once()
    assert "--base" in caught.value.hint
    assert not place.events.of(Opened), "it is judged before an attempt is opened"


def test_sizes_that_neither_of_two_parallelisms_divides(ranks: Path, tmp_path: Path) -> None:
    place = Place(tmp_path, ranks / "uneven/base", ranks / "uneven/watch")
    place.once()
    assert place.built(1) == tensors(ranks / "uneven/full/step_1")


ROWS = np.arange(24, dtype=np.float32).reshape(4, 6)


@pytest.fixture
def place(tmp_path: Path) -> Place:
    """A model of two tensors, and a way to write it: `write`."""
    for name in ("base", "watch"):
        (tmp_path / name).mkdir()
    save_file({"a.w": ROWS * 0, "a.b": ROWS[0] * 0}, tmp_path / "base/model.safetensors")
    return Place(tmp_path, tmp_path / "base", tmp_path / "watch")


def write(path: Path, add: float = 1, **beside: Any) -> None:
    """A distributed checkpoint of this process, its weights `ROWS + add`."""
    weights = {"a.w": torch.from_numpy(ROWS + add), "a.b": torch.from_numpy(ROWS[0] + add)}
    dcp.save({"model": weights, **beside}, checkpoint_id=path, no_dist=True)


def expected(add: float = 1) -> dict[str, bytes]:
    return {"a.w": (ROWS + np.float32(add)).tobytes(), "a.b": (ROWS[0] + np.float32(add)).tobytes()}


def rewrite(path: Path, change: Callable[[Any], None]) -> None:
    """Another table in the checkpoint at `path`."""
    table = pickle.loads((path / ".metadata").read_bytes())  # noqa: S301 - written by this test
    change(table)
    (path / ".metadata").write_bytes(pickle.dumps(table))


def test_what_lies_beside_the_model_is_no_part_of_it(place: Place) -> None:
    write(place.watch / "step_1", optim={"a.w": torch.zeros(4, 6)}, ema={"a.w": torch.ones(4, 6), "a.b": torch.ones(6)})
    place.once()
    assert place.built(1) == expected()


def test_two_models_of_the_same_names_are_not_chosen_between(place: Place) -> None:
    weights = {"a.w": torch.zeros(4, 6), "a.b": torch.ones(6)}
    dcp.save({"actor": weights, "critic": weights}, checkpoint_id=place.watch / "step_1", no_dist=True)
    place.once()
    assert "behind actor., critic." in place.said
    place.once(ignore=("critic.*",))
    assert place.steps == [1]


def test_a_second_copy_is_dropped_and_a_stranger_is_named(place: Place) -> None:
    weights = {"a.w": torch.from_numpy(ROWS), "a.b": torch.from_numpy(ROWS[0]), "head": torch.from_numpy(ROWS)}
    dcp.save({"model": weights}, checkpoint_id=place.watch / "step_1", no_dist=True)
    place.once()
    assert place.steps == [1]
    weights["head"] = weights["head"] + 1
    dcp.save({"model": weights}, checkpoint_id=place.watch / "step_2", no_dist=True)
    with pytest.raises(Incompatible, match="added: head"):
        place.once()


def test_a_model_that_is_not_the_stream_s_is_named_before_an_attempt(place: Place) -> None:
    weights = {"a.w": torch.zeros(5, 6), "a.b": torch.zeros(6, dtype=torch.int32)}
    dcp.save({"model": weights}, checkpoint_id=place.watch / "step_1", no_dist=True)
    with pytest.raises(Incompatible, match=r"reshaped: a\.w \(is \[5, 6\], should be \[4, 6\]\)"):
        place.once()
    shutil.rmtree(place.watch / "step_1")
    weights["a.w"] = torch.zeros(4, 6)
    dcp.save({"model": weights}, checkpoint_id=place.watch / "step_1", no_dist=True)
    with pytest.raises(Incompatible, match=r"retyped: a\.b \(is I32, should be F32\)"):
        place.once()
    assert not place.events.of(Opened)


def test_pieces_that_overlap_or_leave_a_gap_are_refused_until_somebody_writes_them_again(place: Place) -> None:
    write(place.watch / "step_1")

    def shrink(table: Any) -> None:
        (chunk,) = table.state_dict_metadata["model.a.w"].chunks
        chunk.sizes = torch.Size((3, 6))

    def repeat(table: Any) -> None:
        chunks = table.state_dict_metadata["model.a.w"].chunks
        chunks.append(chunks[0])

    rewrite(place.watch / "step_1", shrink)
    place.once()
    assert "step_1 is refused: its pieces do not make whole tensors: a.w: elements [18, 24): missing" in place.said

    async def run() -> None:
        async with place.watching():
            write(place.watch / "step_1")
            rewrite(place.watch / "step_1", repeat)
            await until(lambda: "a.w: elements [0, 24): double" in place.said)
            write(place.watch / "step_1")
            await until(lambda: place.steps == [1])

    asyncio.run(run())
    assert len(place.events.of(Opened)) == 1
    assert place.built(1) == expected()


class Trap:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.path),)


def hostile(table: Any, kind: str, root: Path) -> None:
    entry = table.state_dict_metadata["model.a.w"]
    if kind == "code":
        entry.properties = Trap(root / "sprung")
    elif kind == "huge":
        entry.size, entry.chunks[0].sizes = torch.Size((1 << 40, 1 << 40)), torch.Size((1 << 40, 1 << 40))
    else:
        for info in table.storage_data.values():
            info.relative_path = str(root / "secret") if kind == "absolute" else "../../secret"


@pytest.mark.parametrize("kind", ["code", "huge", "absolute", "above"])
def test_a_hostile_table_is_refused_and_never_run(place: Place, kind: str) -> None:
    (place.root / "secret").write_bytes(bytes(1000))
    write(place.watch / "step_1")
    rewrite(place.watch / "step_1", lambda table: hostile(table, kind, place.root))
    write(place.watch / "step_2", 2)
    place.once()
    assert place.steps == [2], "it harms no other checkpoint"
    assert "step_1 is refused" in place.said
    assert not (place.root / "sprung").exists()


def test_an_archive_that_is_not_what_the_table_promises_is_tried_once(place: Place) -> None:
    write(place.watch / "step_1")
    file = next((place.watch / "step_1").glob("*.distcp"))
    whole, times = file.read_bytes(), (file.stat().st_atime_ns, file.stat().st_mtime_ns)
    file.write_bytes(bytes(len(whole)))
    os.utime(file, ns=times)

    async def run() -> None:
        async with place.watching():
            await until(lambda: "step_1 is refused" in place.said)
            write(place.watch / "step_2", 2)
            await until(lambda: place.steps == [2])

    asyncio.run(run())
    assert len(place.events.of(Aborted)) == 1
    assert "does not hold the piece of model.a" in place.said


@pytest.mark.parametrize("poll", [None, 0.05])
def test_a_checkpoint_is_complete_when_its_table_is_there(place: Place, poll: float | None) -> None:
    write(place.root / "made", 3)

    async def run() -> None:
        async with place.watching(poll=poll):
            (place.watch / "step_1").mkdir()
            for file in sorted((place.root / "made").glob("*.distcp")):
                shutil.copy2(file, place.watch / "step_1")
            await until(lambda: "step_1 is incomplete: .metadata: not there yet" in place.said)
            shutil.copy2(place.root / "made/.metadata", place.watch / "step_1/.metadata")
            await until(lambda: place.steps == [1])

    asyncio.run(run())
    assert place.built(1) == expected(3)


def test_a_checkpoint_rewritten_half_way_is_aborted_and_tried_again(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The table of the first writing lies over files of the second for a while: no mixture of both is published."""
    write(place.watch / "step_1", 1)
    read, reads = PiecedSource.read, 0

    def spoilt(source: PiecedSource, start: int, count: int, dtype: str) -> Any:
        nonlocal reads
        reads += 1
        if reads == 2:
            for file in (place.watch / "step_1").glob("*.distcp"):
                file.write_bytes(file.read_bytes())
        return read(source, start, count, dtype)

    monkeypatch.setattr(PiecedSource, "read", spoilt)

    async def run() -> None:
        async with place.watching(workers=1):
            await until(lambda: "newer than .metadata" in place.said)
            assert place.steps == []
            write(place.watch / "step_1", 2)
            await until(lambda: place.steps == [1])

    asyncio.run(run())
    assert any("was changed" in event.reason for event in place.events.of(Aborted))
    assert place.built(1) == expected(2)


def test_files_rewritten_under_the_table_of_a_version_wait_for_their_own(place: Place) -> None:
    """However long that takes, and in a publisher that was started meanwhile."""
    write(place.watch / "step_1", 1)
    place.once()
    write(place.root / "made", 2)
    for file in (place.root / "made").glob("*.distcp"):
        shutil.copy(file, place.watch / "step_1" / file.name)
    place.once()
    assert place.steps == [1]
    assert "that of a version, whose files are being rewritten" in place.said
    shutil.copy(place.root / "made/.metadata", place.watch / "step_1/.metadata")
    place.once()
    assert place.steps == [1, 1]
    assert place.built(2) == expected(2)


def test_a_copy_that_lost_its_times_is_taken_when_it_has_lain_still(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tables, "STALLED", 4)
    write(place.root / "made", 5)
    shutil.copytree(place.root / "made", place.watch / "step_1", copy_function=shutil.copy)
    for file in (place.watch / "step_1").glob("*.distcp"):
        os.utime(file, ns=(0, (place.watch / "step_1/.metadata").stat().st_mtime_ns + 1))

    async def run() -> None:
        async with place.watching():
            await until(lambda: place.steps == [1])

    asyncio.run(run())
    assert "being rewritten, or copied" in place.said
    assert place.built(1) == expected(5)


def test_a_directory_that_disappears_while_it_is_read_is_no_version(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(place.watch / "step_1", 1)
    read = PiecedSource.read

    def spoilt(source: PiecedSource, start: int, count: int, dtype: str) -> Any:
        shutil.rmtree(place.watch / "step_1", ignore_errors=True)
        return read(source, start, count, dtype)

    monkeypatch.setattr(PiecedSource, "read", spoilt)

    async def run() -> None:
        async with place.watching():
            await until(lambda: place.events.of(Aborted))
            write(place.watch / "step_2", 2)
            await until(lambda: len(place.events.of(Aborted)) > 1 or place.steps)

    asyncio.run(run())
    assert place.steps == [2]
    assert place.built(1) == expected(2)


def test_offsets_that_torch_gets_wrong_are_refused_by_name(place: Place) -> None:
    """13 rows by FSDP over TP, 3 x 2 ranks: a row is left out and another is written twice. If this fails, torch has
    mended it."""
    rows = np.arange(26, dtype=np.float32).reshape(13, 2)
    save_file({"w": rows * 0}, place.base / "model.safetensors")
    (place.watch / "step_1").mkdir()
    for n, at in enumerate(itertools.product(range(3), range(2))):
        shape, starts = _compute_local_shape_and_global_offset(
            (13, 2), (3, 2), at.__getitem__, [_StridedShard(0, split_factor=2), Shard(0)]
        )
        table = {SHARDING_INFO: json.dumps({"w": {"saved_offsets": starts}})}
        save_file({"w": rows[: shape[0]].copy()}, place.watch / f"step_1/shard-{n}.safetensors", table)
    place.once()
    assert "step_1 is refused: its pieces do not make whole tensors: w: elements [14, 16): double" in place.said
    assert not place.events.of(Opened)


def sharded(path: Path, cuts: list[tuple[int, int]], add: float = 1, *, column: bool = False) -> None:
    """Files of a sharded writer, one for each cut of the rows (or the columns)."""
    path.mkdir(exist_ok=True)
    for n, (start, stop) in enumerate(cuts, start=1):
        part = np.ascontiguousarray((ROWS[:, start:stop] if column else ROWS[start:stop]) + np.float32(add))
        offsets = {"a.w": {"saved_offsets": [0, start] if column else [start, 0]}}
        held = {"a.w": part}
        if n == 1:
            held["a.b"], offsets["a.b"] = ROWS[0] + np.float32(add), {"saved_offsets": [0]}
        name = f"shard-{n:05d}-model-00001-of-00001.safetensors"
        save_file(held, path / name, {SHARDING_INFO: json.dumps(offsets)})


@pytest.mark.parametrize("column", [False, True])
def test_a_sharded_checkpoint_is_taken_when_its_pieces_are_all_there(place: Place, column: bool) -> None:
    """No file says how many there will be: the layout does."""

    async def run() -> None:
        async with place.watching():
            sharded(place.watch / "step_1", [(0, 1), (1, 3)], column=column)
            await until(lambda: "step_1 is incomplete: pieces of a.w" in place.said)
            sharded(place.watch / "step_1", [(0, 1), (1, 3), (3, 6 if column else 4)], column=column)
            await until(lambda: place.steps == [1])

    asyncio.run(run())
    assert len(place.events.of(Opened)) == 1
    assert place.built(1) == expected()


def test_a_marker_ends_a_sharded_checkpoint_with_a_gap(place: Place) -> None:
    sharded(place.watch / "step_1", [(0, 1), (2, 4)])
    (place.watch / "step_1/STABLE").touch()
    place.once(marker="STABLE")
    assert "step_1 is refused: its pieces do not make whole tensors: a.w: elements [6, 12): missing" in place.said


def test_a_mixture_of_kinds_is_refused_by_name(place: Place) -> None:
    sharded(place.watch / "step_1", [(0, 4)])
    save_file({"c": ROWS}, place.watch / "step_1/model.safetensors")
    write(place.watch / "step_2")
    save_file({"c": ROWS}, place.watch / "step_2/model.safetensors")
    place.once()
    assert "step_1 is refused: model.safetensors hold whole tensors, its other files hold pieces" in place.said
    assert "step_2 is refused: it holds model.safetensors and a distributed checkpoint" in place.said
    (place.watch / "step_1/model.safetensors").unlink()
    (place.watch / "step_2/model.safetensors").unlink()
    place.once()
    assert place.steps == [1, 2]

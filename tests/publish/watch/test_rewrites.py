"""A directory that is written again: none of its states is mixed with another one."""

from __future__ import annotations

import json
import os
import shutil
from itertools import permutations
from pathlib import Path

import pytest
from support.streams.publish_world import PublishWorld, Weights, step_weights

from dcr_daemon.checkpoint.directory import INDEX
from dcr_daemon.checkpoint.safetensors import pack_safetensors
from dcr_daemon.publish.watch.file_identity import checkpoint_identity, identify
from dcr_daemon.publish.watch.file_stability import STABLE_SCANS_UNCLOSED
from dcr_daemon.publish.watch.scanner import CheckpointScanner

SHARDS = 3


class Directory:
    """`step_1` below a watched directory, written shard by shard, and what a scanner says of it."""

    def __init__(self, world: PublishWorld, root: Path, *, marker: str | None = None) -> None:
        self.world, self.path, self.marker = world, root / "w/step_1", marker
        self.path.mkdir(parents=True)
        self.restart()

    def restart(self) -> None:
        """A new scanner, which knows what was published and nothing else."""
        published = self.scanner._published.newest_at("step_1") if hasattr(self, "scanner") else frozenset()
        self.scanner = CheckpointScanner(self.path.parent, [], marker=self.marker)
        if published:
            self.scanner.mark_published("step_1", published)

    def body(self, weights: Weights, shard: int, of: int = SHARDS) -> bytes:
        specs = self.world.layout.specs[shard::of]
        return bytes(pack_safetensors([(spec, weights[spec.name]) for spec in specs]))

    def write(self, weights: Weights, *shards: int, of: int = SHARDS, replace: bool = False) -> None:
        """Write these shards, over the same inode or by a rename."""
        for shard in shards:
            path = self.path / f"model-{shard + 1:05d}-of-{of:05d}.safetensors"
            new = path.with_suffix(".new") if replace else path
            new.write_bytes(self.body(weights, shard, of))
            new.rename(path)
            self.scanner.files.closed(path)

    def why(self, scans: int = 2) -> str | None:
        """Why the checkpoint is not published; empty if it would be; None if there is nothing new."""
        layout = self.world.layout
        for _ in range(scans):
            found = self.scanner.scan(layout, True)
        return found["step_1"].why_incomplete(layout) if found else None

    def why_after_a_while(self) -> str | None:
        return self.why(STABLE_SCANS_UNCLOSED)

    def write_index(self, of: int = SHARDS) -> None:
        """What `save_pretrained` writes last."""
        homes = {
            spec.name: f"model-{shard + 1:05d}-of-{of:05d}.safetensors"
            for shard in range(of)
            for spec in self.world.layout.specs[shard::of]
        }
        (self.path / INDEX).write_text(json.dumps({"weight_map": homes}))

    def publish(self) -> None:
        files = filter(None, map(identify, self.path.glob("*.safetensors")))
        self.scanner.mark_published("step_1", checkpoint_identity(files))
        assert self.why() is None


@pytest.fixture
def states(world: PublishWorld) -> list[Weights]:
    return [step_weights(world.weights, seed=n) for n in range(3)]


@pytest.mark.parametrize("order", list(permutations(range(SHARDS))))
@pytest.mark.parametrize("replace", [False, True])
@pytest.mark.parametrize("restart", [False, True])
def test_a_version_that_is_rewritten_waits_for_its_last_file(
    world: PublishWorld, tmp_path: Path, states: list[Weights], *, order: list[int], replace: bool, restart: bool
) -> None:
    place = Directory(world, tmp_path)
    place.write(states[0], *range(SHARDS))
    assert place.why() == ""
    place.publish()
    for state in states[1:]:
        for shard in order[:-1]:
            place.write(state, shard, replace=replace)
            if restart:
                place.restart()
            assert "is being rewritten in place" in str(place.why())
        place.write(state, order[-1], replace=replace)
        assert "with the next index" in str(place.why())
        place.write_index()
        assert place.why() == ""
        place.publish()


def test_a_checkpoint_that_was_never_published_is_not_mixed_with_its_second_writing_either(
    world: PublishWorld, tmp_path: Path, states: list[Weights]
) -> None:
    place = Directory(world, tmp_path)
    place.write(states[0], 0, 1)
    assert "tensors" in str(place.why())
    place.write(states[1], 0, 2)  # the first writer died; the second has its shards written by several processes
    assert "model-00002-of-00003.safetensors: not written again yet" in str(place.why())
    place.write(states[1], 1)
    assert place.why_after_a_while() == ""
    place.write(states[2], 1)
    assert "00001-of-00003.safetensors, model-00003" in str(place.why()), (
        "the third state began before the second was read"
    )


def test_a_writer_that_begins_anew_has_its_own_files_left_over(
    world: PublishWorld, tmp_path: Path, states: list[Weights]
) -> None:
    place = Directory(world, tmp_path)
    place.write(states[0], *range(SHARDS))
    place.publish()
    for state, shards in ((states[1], (0, 1)), (states[2], (0, 2))):
        place.write(state, *shards)
        assert "is being rewritten in place" in str(place.why())
    place.write(states[2], 1)
    assert place.why_after_a_while() == ""


@pytest.mark.parametrize("restart", [False, True])
def test_a_directory_that_was_written_twice_unseen_is_not_taken_in_the_middle_of_the_second_time(
    world: PublishWorld, tmp_path: Path, states: list[Weights], *, restart: bool
) -> None:
    """Every file differs from that of the version, and they are of two states."""
    place = Directory(world, tmp_path)
    place.write(states[0], *range(SHARDS))
    place.write_index()
    assert place.why() == ""
    place.publish()
    place.write(states[1], *range(SHARDS))
    place.write_index()
    place.write(states[2], 0)
    if restart:
        place.restart()
    assert "model.safetensors.index.json: not newer" in str(place.why())
    place.write(states[2], *range(1, SHARDS))
    assert "is being rewritten in place" in str(place.why())
    place.write_index()
    assert place.why() == ""


def test_files_of_another_number_of_shards_wait_until_the_old_ones_are_gone(
    world: PublishWorld, tmp_path: Path, states: list[Weights]
) -> None:
    place = Directory(world, tmp_path)
    place.write(states[0], *range(SHARDS))
    place.publish()
    place.write(states[1], 0, 1, of=2)
    assert "is being rewritten in place" in str(place.why())
    for path in place.path.glob("*-of-00003*"):
        path.unlink()
    assert place.why_after_a_while() == ""


def test_files_taken_away_from_a_version_and_files_of_other_tensors_beside_it_are_no_new_checkpoint(
    world: PublishWorld, tmp_path: Path, states: list[Weights]
) -> None:
    place = Directory(world, tmp_path)
    place.write(states[0], *range(SHARDS))
    place.publish()
    (place.path / "optimizer.safetensors").write_bytes(pack_safetensors([]))
    assert place.why() is None
    (place.path / "optimizer.safetensors").unlink()
    (place.path / "model-00001-of-00003.safetensors").unlink()
    assert place.why() is None
    place.write(states[1], 0)
    assert "is being rewritten in place" in str(place.why())


def test_a_file_that_is_renamed_is_not_written_again(
    world: PublishWorld, tmp_path: Path, states: list[Weights]
) -> None:
    place = Directory(world, tmp_path)
    place.write(states[0], 0, 1)
    place.why()
    min(place.path.iterdir()).rename(place.path / "renamed.safetensors")
    place.write(states[0], 2)
    place.why()
    assert place.why() == ""


def test_a_file_copied_over_with_an_older_time_is_written_again(
    world: PublishWorld, tmp_path: Path, states: list[Weights]
) -> None:
    """`rsync --inplace --times`."""
    place = Directory(world, tmp_path)
    place.write(states[0], *range(SHARDS))
    place.publish()
    place.write(states[1], 0)
    os.utime(min(place.path.iterdir()), (1, 1))
    assert "is being rewritten in place" in str(place.why())


def test_a_touched_file_counts_as_written_again(world: PublishWorld, tmp_path: Path, states: list[Weights]) -> None:
    place = Directory(world, tmp_path)
    place.write(states[0], *range(SHARDS))
    place.publish()
    place.write(states[1], 0)
    assert "is being rewritten in place (touch what stays as it is)" in str(place.why())
    for path in sorted(place.path.iterdir())[1:]:
        path.touch()
    assert place.why_after_a_while() == ""


@pytest.mark.parametrize("restart", [False, True])
def test_a_marker_made_after_the_last_write_says_that_old_files_belong_to_it(
    world: PublishWorld, tmp_path: Path, states: list[Weights], *, restart: bool
) -> None:
    place = Directory(world, tmp_path, marker="STABLE")
    place.write(states[0], *range(SHARDS))
    assert place.why() == "its marker file"
    (place.path / "STABLE").touch()
    assert place.why() == ""
    place.publish()
    place.write(states[1], 0)
    if restart:
        place.restart()
    assert "not written again yet" in str(place.why()), "the marker is that of the state before"
    (place.path / "STABLE").touch()
    assert place.why() == ""
    place.publish()
    place.write(states[2], *range(SHARDS))
    assert "its marker file, made after the last write" in str(place.why())
    (place.path / "STABLE").unlink()
    (place.path / "STABLE").touch()
    assert place.why() == ""


def test_a_version_moved_to_another_disk_is_not_mixed_with_what_is_written_over_it(
    world: PublishWorld, tmp_path: Path, states: list[Weights]
) -> None:
    place = Directory(world, tmp_path)
    place.write(states[0], *range(SHARDS))
    place.publish()
    place.path.rename(tmp_path / "old")
    shutil.copytree(tmp_path / "old", place.path)
    place.write(states[1], 0)
    place.restart()
    assert "is being rewritten in place" in str(place.why())


def test_of_a_version_of_very_many_files_all_must_be_newer_than_its_newest(
    world: PublishWorld, tmp_path: Path, states: list[Weights], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its seal names no file, but the newest time of all."""
    monkeypatch.setattr("dcr_daemon.publish.watch.file_identity.MAX_FILES_LISTED", 2)
    place = Directory(world, tmp_path)
    place.write(states[0], *range(SHARDS))
    place.publish()
    for shard in range(SHARDS - 1):
        place.write(states[1], shard)
        place.restart()
        assert "is being rewritten in place" in str(place.why())
    place.write(states[1], SHARDS - 1)
    assert place.why_after_a_while() == ""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from support.streams.publish_world import PublishWorld

from dcr_daemon.checkpoint.safetensors import pack_safetensors
from dcr_daemon.publish.watch.file_identity import identify
from dcr_daemon.publish.watch.file_stability import STABLE_SCANS_UNCLOSED
from dcr_daemon.publish.watch.scanner import CheckpointScanner


def write(path: Path, body: bytes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(body)
    return path


def whole(world: PublishWorld) -> bytes:
    return bytes(pack_safetensors([(spec, world.weights[spec.name]) for spec in world.layout]))


def test_a_file_nobody_was_seen_closing_needs_two_timed_looks(world: PublishWorld, tmp_path: Path) -> None:
    scanner = CheckpointScanner(tmp_path / "w", [], marker=None)
    path = write(tmp_path / "w/step_1/model.safetensors", whole(world)[:-9])
    layout = world.layout
    assert "written" in scanner.scan(layout, True)["step_1"].why_incomplete(layout)
    write(path, whole(world))  # it grew: the first look is void
    assert scanner.scan(layout, True)["step_1"].why_incomplete(layout)
    assert scanner.scan(layout, False)["step_1"].why_incomplete(layout), "an untimed look must not count"
    assert not scanner.scan(layout, True)["step_1"].why_incomplete(layout)


def test_a_closed_file_is_complete_at_once_and_a_touched_one_not_any_more(world: PublishWorld, tmp_path: Path) -> None:
    scanner, layout = CheckpointScanner(tmp_path / "w", [], marker=None), world.layout
    path = write(tmp_path / "w/step_1/model.safetensors", whole(world))
    scanner.files.closed(path)
    assert not scanner.scan(layout, False)["step_1"].why_incomplete(layout)
    write(path, whole(world))
    scanner.files.written(path)
    assert scanner.scan(layout, False)["step_1"].why_incomplete(layout)
    scanner.files.closed(path)
    write(path, whole(world)[:-1])  # after the notice was taken it is another file
    scanner.scan(layout, False)
    assert "step_1" in scanner.scan(layout, False)


def test_a_closed_but_short_file_is_not_complete_and_says_why(world: PublishWorld, tmp_path: Path) -> None:
    scanner, layout = CheckpointScanner(tmp_path / "w", [], marker=None), world.layout
    path = write(tmp_path / "w/step_1/model.safetensors", whole(world)[:-1])
    scanner.files.closed(path)
    assert "truncated" in scanner.scan(layout, False)["step_1"].why_incomplete(layout)
    scanner.files.closed(write(path, b"\x80\x02torch pickle, renamed"))
    assert "not a safetensors file" in scanner.scan(layout, False)["step_1"].why_incomplete(layout)


def test_a_checkpoint_with_a_choice_of_indexes_waits_and_harms_no_other(world: PublishWorld, tmp_path: Path) -> None:
    scanner, layout = CheckpointScanner(tmp_path / "w", [], marker=None), world.layout
    for step in (1, 2):
        scanner.files.closed(write(tmp_path / f"w/step_{step}/model.safetensors", whole(world)))
    for name in ("a", "b"):
        write(tmp_path / f"w/step_1/{name}.safetensors.index.json", b"{}")
    found = scanner.scan(layout, False)
    assert "several indexes" in found["step_1"].why_incomplete(layout)
    assert not found["step_2"].why_incomplete(layout)


def test_a_file_seen_written_waits_for_its_writer_however_long_it_stalls(world: PublishWorld, tmp_path: Path) -> None:
    """Its length and header may be those of the whole file from the start, as with preallocation."""
    scanner, layout = CheckpointScanner(tmp_path / "w", [], marker=None), world.layout
    path = write(tmp_path / "w/step_1/model.safetensors", whole(world))
    scanner.files.created(path)
    scanner.files.written(path)
    for _ in range(STABLE_SCANS_UNCLOSED - 1):
        assert scanner.scan(layout, True)["step_1"].why_incomplete(layout)
    scanner.files.closed(path)
    assert not scanner.scan(layout, False)["step_1"].why_incomplete(layout)


def test_a_lost_notice_of_a_close_costs_looks_not_the_checkpoint(world: PublishWorld, tmp_path: Path) -> None:
    scanner, layout = CheckpointScanner(tmp_path / "w", [], marker=None), world.layout
    scanner.files.written(write(tmp_path / "w/step_1/model.safetensors", whole(world)))
    waits = [bool(scanner.scan(layout, True)["step_1"].why_incomplete(layout)) for _ in range(STABLE_SCANS_UNCLOSED)]
    assert waits == [True] * (STABLE_SCANS_UNCLOSED - 1) + [False]


def test_a_mode_or_an_older_time_set_after_the_close_is_no_write(world: PublishWorld, tmp_path: Path) -> None:
    """`shutil.copytree` ends each file so; the notice is the one of a write."""
    scanner, layout = CheckpointScanner(tmp_path / "w", [], marker=None), world.layout
    path = write(tmp_path / "w/step_1/model.safetensors", whole(world))
    scanner.files.closed(path)
    scanner.scan(layout, False)
    path.chmod(0o640)
    os.utime(path, (1, 1))
    scanner.files.written(path)
    assert not scanner.scan(layout, False)["step_1"].why_incomplete(layout)


def test_a_marker_that_was_there_first_ends_nothing_while_shards_are_to_come(
    world: PublishWorld, tmp_path: Path
) -> None:
    scanner, half = CheckpointScanner(tmp_path / "w", [], marker="STABLE"), world.layout.specs[: len(world.layout) // 2]
    body = bytes(pack_safetensors([(spec, world.weights[spec.name]) for spec in half]))
    write(tmp_path / "w/step_1/STABLE", b"")
    scanner.files.closed(write(tmp_path / "w/step_1/model-00001-of-00002.safetensors", body))
    assert not scanner.scan(world.layout, False)["step_1"].is_final(marker=True)
    (tmp_path / "w/step_1/model-00001-of-00002.safetensors").rename(tmp_path / "w/step_1/weights.safetensors")
    scanner.files.closed(tmp_path / "w/step_1/weights.safetensors")
    assert scanner.scan(world.layout, False)["step_1"].is_final(marker=True)


def test_only_a_file_that_may_be_complete_is_fresh(world: PublishWorld, tmp_path: Path) -> None:
    scanner, layout = CheckpointScanner(tmp_path / "w", [], marker=None), world.layout
    path = write(tmp_path / "w/step_1/model.safetensors", whole(world)[:-2])
    assert scanner.scan(layout, True)["step_1"].undetermined
    write(path, whole(world)[:-1])
    assert not scanner.scan(layout, True)["step_1"].undetermined, "it grows"
    scanner.files.written(path)
    scanner.scan(layout, True)
    assert not scanner.scan(layout, False)["step_1"].undetermined, "its writer is at it"
    scanner.files.closed(path)
    assert not scanner.scan(layout, True)["step_1"].undetermined


@pytest.mark.parametrize("odd", ["step_1\udcff/model.safetensors", "step_1/model\udcff.safetensors"])
def test_a_name_that_no_record_can_hold_waits_and_harms_no_other(world: PublishWorld, tmp_path: Path, odd: str) -> None:
    scanner, layout = CheckpointScanner(tmp_path / "w", [], marker=None), world.layout
    for name in (odd, "step_2/model.safetensors"):
        scanner.files.closed(write(tmp_path / "w" / name, whole(world)))
    found = scanner.scan(layout, False)
    unfinished = found.pop("step_1" + "\\udcff" * ("step_1\udcff" in odd))
    assert "is not UTF-8" in unfinished.why_incomplete(layout)
    assert not unfinished.files
    assert not found["step_2"].why_incomplete(layout)


def test_what_is_published_is_not_found_again_until_it_changes(world: PublishWorld, tmp_path: Path) -> None:
    scanner, layout = CheckpointScanner(tmp_path / "w", [], marker=None), world.layout
    path = write(tmp_path / "w/step_1/model.safetensors", whole(world))
    identity = identify(path)
    assert identity is not None
    scanner.mark_published("step_1", frozenset({identity}))
    assert not scanner.scan(layout, True)
    path.unlink()
    write(tmp_path / "w/step_1/other.safetensors", whole(world))
    assert set(scanner.scan(layout, True)) == {"step_1"}


def test_the_time_of_the_last_write_orders_and_a_step_only_what_was_written_at_one_time(
    world: PublishWorld, tmp_path: Path
) -> None:
    scanner, layout = CheckpointScanner(tmp_path / "w", [], marker=None), world.layout
    for name, written in (("step_900", 10), ("zeta", 20), ("step_10", 30), ("step_9", 30), ("alpha", 40)):
        path = write(tmp_path / f"w/{name}/model.safetensors", whole(world))
        os.utime(path, (written, written))
        scanner.files.closed(path)
    found = scanner.scan(layout, False)
    assert sorted(found, key=lambda name: found[name].order) == ["step_900", "zeta", "step_9", "step_10", "alpha"]

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from dcr_daemon.checkpoint.safetensors import pack_safetensors
from dcr_daemon.publish.watch.file_identity import identify, number_in
from dcr_daemon.publish.watch.scanner import LOOKS_AT_WRITTEN, CheckpointScanner


@pytest.mark.parametrize(
    ("path", "number"),
    [
        ("checkpoint-40", 40),
        ("global_step_7/actor/huggingface", 7),
        ("run2/step_0011", 11),
        ("epoch-3-step-12", 12),
        ("checkpoint-40/pytorch_model_fsdp_0", 40),
        ("final", None),
    ],
)
def test_the_last_integer_of_the_path_orders(path: str, number: int | None) -> None:
    assert number_in(path) == number


def write(path: Path, body: bytes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(body)
    return path


def whole(world: Any) -> bytes:
    return bytes(pack_safetensors([(spec, world.weights[spec.name]) for spec in world.layout]))


def test_a_file_nobody_was_seen_closing_needs_two_timed_looks(world: Any, tmp_path: Path) -> None:
    survey = CheckpointScanner(tmp_path / "w", [], None)
    path = write(tmp_path / "w/step_1/model.safetensors", whole(world)[:-9])
    layout = world.layout
    assert "written" in survey.look(layout, True)["step_1"].lacks(layout)
    write(path, whole(world))  # it grew: the first look is void
    assert survey.look(layout, True)["step_1"].lacks(layout)
    assert survey.look(layout, False)["step_1"].lacks(layout), "an untimed look must not count"
    assert not survey.look(layout, True)["step_1"].lacks(layout)


def test_a_closed_file_is_complete_at_once_and_a_touched_one_not_any_more(world: Any, tmp_path: Path) -> None:
    survey, layout = CheckpointScanner(tmp_path / "w", [], None), world.layout
    path = write(tmp_path / "w/step_1/model.safetensors", whole(world))
    survey.closed(path)
    assert not survey.look(layout, False)["step_1"].lacks(layout)
    write(path, whole(world))
    survey.touched(path)
    assert survey.look(layout, False)["step_1"].lacks(layout)
    survey.closed(path)
    write(path, whole(world)[:-1])  # after the notice was taken it is another file
    survey.look(layout, False)
    assert "step_1" in survey.look(layout, False)


def test_a_closed_but_short_file_is_not_complete_and_says_why(world: Any, tmp_path: Path) -> None:
    survey, layout = CheckpointScanner(tmp_path / "w", [], None), world.layout
    path = write(tmp_path / "w/step_1/model.safetensors", whole(world)[:-1])
    survey.closed(path)
    assert "truncated" in survey.look(layout, False)["step_1"].lacks(layout)
    survey.closed(write(path, b"\x80\x02torch pickle, renamed"))
    assert "not a safetensors file" in survey.look(layout, False)["step_1"].lacks(layout)


def test_a_checkpoint_with_a_choice_of_indexes_waits_and_harms_no_other(world: Any, tmp_path: Path) -> None:
    survey, layout = CheckpointScanner(tmp_path / "w", [], None), world.layout
    for step in (1, 2):
        survey.closed(write(tmp_path / f"w/step_{step}/model.safetensors", whole(world)))
    for name in ("a", "b"):
        write(tmp_path / f"w/step_1/{name}.safetensors.index.json", b"{}")
    found = survey.look(layout, False)
    assert "several indexes" in found["step_1"].lacks(layout)
    assert not found["step_2"].lacks(layout)


def test_a_file_seen_written_waits_for_its_writer_however_long_it_stalls(world: Any, tmp_path: Path) -> None:
    """Its length and header may be those of the whole file from the start, as with preallocation."""
    survey, layout = CheckpointScanner(tmp_path / "w", [], None), world.layout
    path = write(tmp_path / "w/step_1/model.safetensors", whole(world))
    survey.created(path)
    survey.touched(path)
    for _ in range(LOOKS_AT_WRITTEN - 1):
        assert survey.look(layout, True)["step_1"].lacks(layout)
    survey.closed(path)
    assert not survey.look(layout, False)["step_1"].lacks(layout)


def test_a_lost_notice_of_a_close_costs_looks_not_the_checkpoint(world: Any, tmp_path: Path) -> None:
    survey, layout = CheckpointScanner(tmp_path / "w", [], None), world.layout
    survey.touched(write(tmp_path / "w/step_1/model.safetensors", whole(world)))
    waits = [bool(survey.look(layout, True)["step_1"].lacks(layout)) for _ in range(LOOKS_AT_WRITTEN)]
    assert waits == [True] * (LOOKS_AT_WRITTEN - 1) + [False]


def test_a_mode_or_an_older_time_set_after_the_close_is_no_write(world: Any, tmp_path: Path) -> None:
    """`shutil.copytree` ends each file so; the notice is the one of a write."""
    survey, layout = CheckpointScanner(tmp_path / "w", [], None), world.layout
    path = write(tmp_path / "w/step_1/model.safetensors", whole(world))
    survey.closed(path)
    survey.look(layout, False)
    path.chmod(0o640)
    os.utime(path, (1, 1))
    survey.touched(path)
    assert not survey.look(layout, False)["step_1"].lacks(layout)


def test_a_marker_that_was_there_first_ends_nothing_while_shards_are_to_come(world: Any, tmp_path: Path) -> None:
    survey, half = CheckpointScanner(tmp_path / "w", [], "STABLE"), world.layout.specs[: len(world.layout) // 2]
    body = bytes(pack_safetensors([(spec, world.weights[spec.name]) for spec in half]))
    write(tmp_path / "w/step_1/STABLE", b"")
    survey.closed(write(tmp_path / "w/step_1/model-00001-of-00002.safetensors", body))
    assert not survey.look(world.layout, False)["step_1"].ended(marker=True)
    (tmp_path / "w/step_1/model-00001-of-00002.safetensors").rename(tmp_path / "w/step_1/weights.safetensors")
    survey.closed(tmp_path / "w/step_1/weights.safetensors")
    assert survey.look(world.layout, False)["step_1"].ended(marker=True)


def test_only_a_file_that_may_be_complete_is_fresh(world: Any, tmp_path: Path) -> None:
    survey, layout = CheckpointScanner(tmp_path / "w", [], None), world.layout
    path = write(tmp_path / "w/step_1/model.safetensors", whole(world)[:-2])
    assert survey.look(layout, True)["step_1"].fresh
    write(path, whole(world)[:-1])
    assert not survey.look(layout, True)["step_1"].fresh, "it grows"
    survey.touched(path)
    survey.look(layout, True)
    assert not survey.look(layout, False)["step_1"].fresh, "its writer is at it"
    survey.closed(path)
    assert not survey.look(layout, True)["step_1"].fresh


@pytest.mark.parametrize("odd", ["step_1\udcff/model.safetensors", "step_1/model\udcff.safetensors"])
def test_a_name_that_no_record_can_hold_waits_and_harms_no_other(world: Any, tmp_path: Path, odd: str) -> None:
    survey, layout = CheckpointScanner(tmp_path / "w", [], None), world.layout
    for name in (odd, "step_2/model.safetensors"):
        survey.closed(write(tmp_path / "w" / name, whole(world)))
    found = survey.look(layout, False)
    waiting = found.pop("step_1" + "\\udcff" * ("step_1\udcff" in odd))
    assert "is not UTF-8" in waiting.lacks(layout)
    assert not waiting.files
    assert not found["step_2"].lacks(layout)


def test_what_is_published_is_not_found_again_until_it_changes(world: Any, tmp_path: Path) -> None:
    survey, layout = CheckpointScanner(tmp_path / "w", [], None), world.layout
    path = write(tmp_path / "w/step_1/model.safetensors", whole(world))
    identity = identify(path)
    assert identity is not None
    survey.published("step_1", frozenset({identity}))
    assert not survey.look(layout, True)
    path.unlink()
    write(tmp_path / "w/step_1/other.safetensors", whole(world))
    assert set(survey.look(layout, True)) == {"step_1"}


def test_completion_orders_what_has_no_number(world: Any, tmp_path: Path) -> None:
    survey, layout = CheckpointScanner(tmp_path / "w", [], None), world.layout
    for name in ("zeta", "alpha"):
        survey.closed(write(tmp_path / f"w/{name}/model.safetensors", whole(world)))
        survey.look(layout, False)
    found = survey.look(layout, False)
    assert sorted(found, key=lambda name: found[name].order) == ["zeta", "alpha"]

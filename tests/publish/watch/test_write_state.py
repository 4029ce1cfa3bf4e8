"""A file that has its full size and is still being filled is not complete."""

from __future__ import annotations

import mmap
import os
from pathlib import Path

import pytest
from support.streams.publish_world import PublishWorld

from dcr_daemon.checkpoint.safetensors import pack_safetensors
from dcr_daemon.publish.watch.file_stability import STABLE_SCANS, STABLE_SCANS_UNCLOSED
from dcr_daemon.publish.watch.scanner import CheckpointScanner
from dcr_daemon.publish.watch.write_state import Writers, WriteState, file_system_of

SIZE = 1 << 16


@pytest.fixture
def kernel(tmp_path: Path) -> WriteState:
    state = WriteState(file_system_of(tmp_path))
    if not state.is_local:
        pytest.skip(f"the tests' directory is on {state.file_system}")
    return state


def test_a_file_has_a_writer_until_the_last_descriptor_and_map_are_closed(kernel: WriteState, tmp_path: Path) -> None:
    path = tmp_path / "file"
    with path.open("wb") as first, path.open("r+b") as second:
        first.write(bytes(SIZE))
        first.flush()
        assert kernel.writers(path) is Writers.SOME
        first.close()
        assert kernel.writers(path) is Writers.SOME
        mapped = mmap.mmap(second.fileno(), 0)
    assert kernel.writers(path) is Writers.SOME, "mapped for writing"
    mapped.close()
    with path.open("rb"):
        assert kernel.writers(path) is Writers.NONE, "a reader is no writer"


def test_a_file_can_be_opened_for_writing_while_it_is_asked_about(kernel: WriteState, tmp_path: Path) -> None:
    """No lease is kept; a broken one would be a signal that ends the process."""
    path = tmp_path / "file"
    path.write_bytes(b"x")
    for _ in range(200):
        assert kernel.writers(path) is Writers.NONE
        with path.open("r+b") as file:
            file.write(b"y")


def test_space_that_was_reserved_or_skipped_is_found_even_after_it_was_read(kernel: WriteState, tmp_path: Path) -> None:
    reserved, skipped, written = (tmp_path / name for name in ("reserved", "skipped", "written"))
    with reserved.open("wb", buffering=0) as file:
        os.posix_fallocate(file.fileno(), 0, SIZE)
        file.write(bytes(SIZE // 2))
    with skipped.open("wb", buffering=0) as file:
        file.seek(SIZE // 2)
        file.write(bytes(SIZE // 2))
    with written.open("wb", buffering=0) as file:
        os.posix_fallocate(file.fileno(), 0, SIZE)
        file.write(bytes(SIZE))  # zeros, and not on the disk yet
    for path in (reserved, skipped, written):
        path.read_bytes()
    assert kernel.first_unwritten(written) is None
    if kernel.first_unwritten(skipped) is None:
        pytest.skip(f"{kernel.file_system} does not tell")
    assert kernel.first_unwritten(skipped) == 0
    assert kernel.first_unwritten(reserved) == SIZE // 2


def test_the_type_of_a_file_system_is_found_by_its_longest_mount_point() -> None:
    assert file_system_of(Path("/proc/self/fd")) == "proc"
    assert not WriteState("nfs4").is_local
    assert not WriteState("fuse.juicefs").is_local
    assert not WriteState("").is_local


def whole(world: PublishWorld) -> bytes:
    return bytes(pack_safetensors([(spec, world.weights[spec.name]) for spec in world.layout]))


@pytest.mark.parametrize("closed", [False, True])
def test_a_file_with_its_full_size_waits_for_whoever_has_it_open(
    kernel: WriteState, world: PublishWorld, tmp_path: Path, closed: bool
) -> None:
    """Nobody was seen writing to it, or one of several writers was seen closing it."""
    path = tmp_path / "w/step_1/model.safetensors"
    path.parent.mkdir(parents=True)
    scanner, layout = CheckpointScanner(tmp_path / "w", [], marker=None, kernel=kernel), world.layout
    with path.open("wb") as file:
        file.write(whole(world))
        file.flush()
        if closed:
            scanner.files.closed(path)
        for _ in range(STABLE_SCANS_UNCLOSED + 1):
            found = scanner.scan(layout, True)
        assert found["step_1"].why_incomplete(layout) == "model.safetensors: somebody has it open for writing"
        assert not found["step_1"].undetermined, "it delays no other"
    assert not scanner.scan(layout, True)["step_1"].why_incomplete(layout)


def test_a_file_whose_middle_was_never_written_waits_until_it_is(
    kernel: WriteState, world: PublishWorld, tmp_path: Path
) -> None:
    """Its writers are gone: a download that somebody may resume."""
    path, body = tmp_path / "w/step_1/model.safetensors", whole(world)
    path.parent.mkdir(parents=True)
    head = 4096 * 2
    with path.open("wb", buffering=0) as file:
        os.posix_fallocate(file.fileno(), 0, len(body))
        file.write(body[:head])
    if kernel.first_unwritten(path) is None:
        pytest.skip(f"{kernel.file_system} does not tell")
    scanner, layout = CheckpointScanner(tmp_path / "w", [], marker=None, kernel=kernel), world.layout
    for _ in range(STABLE_SCANS_UNCLOSED + 1):
        found = scanner.scan(layout, True)
    assert f"its bytes from {head} on were never written" in found["step_1"].why_incomplete(layout)
    with path.open("r+b") as file:
        file.seek(head)
        file.write(body[head:])
    scanner.scan(layout, True)
    assert not scanner.scan(layout, True)["step_1"].why_incomplete(layout)


@pytest.mark.parametrize("said", Writers)
def test_a_file_in_a_directory_that_is_moved_in_is_complete_when_the_kernel_says_so(
    world: PublishWorld, tmp_path: Path, said: Writers
) -> None:
    """The rename says nothing of the files: one of them may still be written."""

    class Kernel(WriteState):
        def writers(self, path: Path) -> Writers:
            return said

    path = tmp_path / "w/step_1/model.safetensors"
    path.parent.mkdir(parents=True)
    path.write_bytes(whole(world))
    scanner, layout = CheckpointScanner(tmp_path / "w", [], marker=None, kernel=Kernel("ext4")), world.layout
    scanner.files.moved_in(path)
    waits = [bool(scanner.scan(layout, timed)["step_1"].why_incomplete(layout)) for timed in (False, True, True)]
    assert waits == [said is not Writers.NONE] * 3


@pytest.mark.parametrize("file_system", ["nfs4", "ext4"])
def test_where_the_kernel_cannot_tell_a_file_that_nobody_was_seen_closing_waits_longer(
    world: PublishWorld, tmp_path: Path, file_system: str
) -> None:
    class Blind(WriteState):
        def writers(self, path: Path) -> Writers:
            return Writers.UNKNOWN

    path = tmp_path / "w/step_1/model.safetensors"
    path.parent.mkdir(parents=True)
    path.write_bytes(whole(world))
    scanner, layout = CheckpointScanner(tmp_path / "w", [], marker=None, kernel=Blind(file_system)), world.layout
    scanner.files.created(path)  # in a directory that appeared a moment before: nobody was seen closing it
    found = [scanner.scan(layout, True)["step_1"] for _ in range(STABLE_SCANS_UNCLOSED)]
    assert [bool(one.why_incomplete(layout)) for one in found] == [True] * (STABLE_SCANS_UNCLOSED - 1) + [False]
    assert [one.undetermined for one in found[: STABLE_SCANS + 1]] == [True] * (STABLE_SCANS - 1) + [False] * 2
    assert ("other hosts" if file_system == "nfs4" else "belongs to another user") in scanner.blind_spot
    os.utime(path)
    scanner.files.closed(path)
    assert not scanner.scan(layout, False)["step_1"].why_incomplete(layout), "its writer was seen closing it"

"""Files that a checkpoint directory shares with others are replaced before they are written; the disk is reserved."""

from __future__ import annotations

import errno
import os
import subprocess
from pathlib import Path

import pytest
from support.events import RecordedEvents
from support.faults.full_disk import FullDisk, Tmpfs

from dcr_daemon.engine.directory import shards
from dcr_daemon.engine.directory.engine import DirectoryEngine
from dcr_daemon.engine.directory.shards import own_files
from dcr_daemon.errors import EngineRefused, ResourceExhausted
from dcr_daemon.events import Waiting, discard


@pytest.fixture
def scratch(tmp_path: Path) -> Path:
    (tmp_path / "current" / ".dcr").mkdir(parents=True)
    return tmp_path / "current" / ".dcr"


def link(tmp_path: Path, kind: str, name: str = "a.safetensors", body: bytes = b"weights") -> tuple[Path, Path]:
    """A file below `current`, and the foreign file that it is a link to."""
    foreign, path = tmp_path / f"blob of {name}", tmp_path / "current" / name
    foreign.write_bytes(body)
    match kind:
        case "hard":
            path.hardlink_to(foreign)
        case "relative":
            path.symlink_to(f"../{foreign.name}")
        case "chain":
            (tmp_path / "between").symlink_to(foreign)
            path.symlink_to(tmp_path / "between")
        case "absolute":
            path.symlink_to(foreign)
    return path, foreign


@pytest.mark.parametrize("kind", ["hard", "relative", "absolute", "chain"])
def test_a_link_becomes_a_file_of_its_own_with_the_same_content(tmp_path, scratch, kind):
    path, foreign = link(tmp_path, kind)
    foreign.chmod(0o444)
    assert own_files([path], scratch, emit=discard)
    assert not path.is_symlink()
    assert (path.stat().st_nlink, foreign.stat().st_nlink) == (1, 1)
    assert path.stat().st_mode & 0o777 == 0o644
    with path.open("r+b") as file:
        file.write(b"W")
    assert (path.read_bytes(), foreign.read_bytes()) == (b"Weights", b"weights")
    assert list(scratch.iterdir()) == []
    inode = path.stat().st_ino
    assert not own_files([path], scratch, emit=discard)
    assert path.stat().st_ino == inode, "what is its own is not copied again"


def test_space_for_all_copies_is_there_before_the_first_one_is_made(tmp_path, scratch, monkeypatch):
    files = [link(tmp_path, "hard", name, bytes(4096))[0] for name in ("a.safetensors", "b.safetensors")]
    monkeypatch.setattr(os, "statvfs", lambda _: os.statvfs_result((4096, 4096, 9, 1, 1, 9, 9, 9, 0, 255)))
    with pytest.raises(ResourceExhausted, match="copies of them need 8192 bytes, and 4096 are free"):
        own_files(files, scratch, emit=discard)
    assert [path.stat().st_nlink for path in files] == [2, 2]


@pytest.mark.parametrize("door", ["disk.shards.write", "disk.shards.sync", "engine.dir.copied", "engine.dir.owned"])
def test_a_disk_that_fails_on_the_way_leaves_every_file_with_its_content(tmp_path, scratch, full_disk: FullDisk, door):
    pairs = [link(tmp_path, "relative", name) for name in ("a.safetensors", "b.safetensors")]
    files = [path for path, _ in pairs]
    full_disk.shut(door, after=1, number=errno.EIO)
    with pytest.raises(ResourceExhausted):
        own_files(files, scratch, emit=discard)
    assert [path.read_bytes() for path in files] == [b"weights"] * 2
    full_disk.relieve()
    own_files(files, scratch, emit=discard)
    assert [path.is_symlink() for path in files] == [False, False]
    assert [foreign.read_bytes() for _, foreign in pairs] == [b"weights"] * 2


def test_a_file_that_changes_while_it_is_copied_is_not_taken(tmp_path, scratch, monkeypatch):
    path, foreign = link(tmp_path, "absolute")
    monkeypatch.setattr(shards, "_reflink", lambda *_: foreign.write_bytes(b"other weights") and False)
    with pytest.raises(EngineRefused, match="was changed while it was copied"):
        own_files([path], scratch, emit=discard)
    assert path.is_symlink()


def test_a_long_copy_says_how_far_it_is(tmp_path, scratch, monkeypatch):
    monkeypatch.setattr(shards, "REPORT", 0.0)
    monkeypatch.setattr(shards, "_BLOCK", 1000)
    events, (path, _) = RecordedEvents(), link(tmp_path, "hard", body=bytes(2500))
    own_files([path], scratch, emit=events)
    assert [event.what.rpartition(": ")[2] for event in events.of(Waiting)] == [
        f"{done} of 2500 bytes" for done in (1000, 2000, 2500)
    ]


def test_holes_are_reserved_and_a_full_disk_is_an_error(tmpfs: Tmpfs):
    path, scratch = tmpfs.path / "a.safetensors", tmpfs.path / ".dcr"
    scratch.mkdir()
    with path.open("wb") as file:
        file.truncate(1 << 20)
    tmpfs.fill(leave=64 << 10)
    with pytest.raises(ResourceExhausted, match="no space left"):
        own_files([path], scratch, emit=discard)
    tmpfs.relieve()
    assert not own_files([path], scratch, emit=discard)
    assert path.stat().st_blocks * 512 >= 1 << 20


async def test_a_sparse_checkpoint_on_a_full_disk_is_an_error_and_not_the_end_of_the_process(
    make_versions, tmp_path, tmpfs: Tmpfs
):
    """A map of a hole ends the process by SIGBUS if the disk is full: at a write, and on a tmpfs at a read too."""
    versions = make_versions()
    for bits in versions.values[0].values():
        bits[:] = 0
    versions.step(0.3)
    here = tmpfs.path / "current"
    _copy_sparse(versions.save(tmp_path / "dense", 0), here)
    tmpfs.fill(leave=48 << 10)
    engine = DirectoryEngine(here)
    await engine.attach(versions.facts())
    await engine.prove(0, versions.vector_file(0), "v0")
    with pytest.raises(ResourceExhausted, match="no space left"):
        await engine.prepare(versions.transaction(1))
    tmpfs.relieve()
    await engine.prepare(versions.transaction(1))
    assert (await engine.swap("to-1")).version == 1
    assert versions.version_of(here) == 1
    await engine.close()


async def test_the_next_change_is_of_the_copies_however_often_somebody_links_to_them(make_versions, tmp_path):
    """`cp -al` of a served directory is a snapshot, and stays one."""
    versions = make_versions(2, rate=0.3)
    here = versions.save(tmp_path / "current", 0, shard_bytes=20_000)
    engine = DirectoryEngine(here)
    await engine.attach(versions.facts())
    await engine.prove(0, versions.vector_file(0), "v0")
    for version in (1, 2):
        before, snapshot = tmp_path / f"before-{version}", tmp_path / f"between-{version}"
        _link_all(here, before)
        await engine.prepare(versions.transaction(version))
        _link_all(here, snapshot)
        assert (await engine.swap(f"to-{version}")).version == version
        assert [versions.version_of(path) for path in (here, before, snapshot)] == [version, version - 1, version - 1]
    assert (await engine.scrub(0)).differing == []
    await engine.close()


async def test_a_disk_that_fills_up_in_the_middle_of_a_change_takes_it_back(make_versions, tmp_path, full_disk):
    """As on a file system that needs space for every write, whatever was reserved."""
    versions = make_versions(1)
    here = versions.save(tmp_path / "current", 0)
    engine = DirectoryEngine(here)
    await engine.attach(versions.facts())
    await engine.prove(0, versions.vector_file(0), "v0")
    await engine.prepare(versions.transaction(1))
    writes, right = iter((True, True)), type(engine._state.checkout).write

    def write(checkout, journal, layout, *, back=False):
        if not back and next(writes, False):
            full_disk.shut("engine.dir.write", after=2)
        else:
            full_disk.relieve()
        right(checkout, journal, layout, back=back)

    engine._state.checkout.write = write.__get__(engine._state.checkout)
    with pytest.raises(ResourceExhausted, match="no space left"):
        await engine.swap("to-1")
    status = await engine.status()
    assert (status.version, versions.version_of(here)) == (0, 0)
    assert (here / "config.json").exists()
    await engine.prepare(versions.transaction(1, name="again"))
    assert (await engine.swap("again")).version == 1
    await engine.close()


def _copy_sparse(directory: Path, out: Path) -> None:
    subprocess.run(["cp", "-r", "--sparse=always", directory, out], check=True)


def _link_all(directory: Path, out: Path) -> None:
    out.mkdir()
    for path in directory.iterdir():
        if path.is_file():
            (out / path.name).hardlink_to(path)

"""A directory as a store: whole objects or none, whatever is killed when (musts L0, L4)."""

from __future__ import annotations

import errno
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from dcr_daemon.errors import Corrupt, Incompatible, ResourceExhausted, StoreUnavailable, UsageError
from dcr_daemon.store import Outcome, open_store
from dcr_daemon.store.file import TEMPORARIES, FileStore

WRITER = """
import asyncio, sys
from dcr_daemon.store import open_store
async def main(url):
    store = await open_store(url)
    for number in range(100_000):
        async def write(lane):
            body = f"{number:08d}{lane}".encode() * 300_000
            await store.create(f"data/{number}/{lane}", body)
        await asyncio.gather(*(write(lane) for lane in range(3)))
        print(number, flush=True)
asyncio.run(main(sys.argv[1]))
"""


def start_writer(url: str, **environ: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", WRITER, url], stdout=subprocess.PIPE, text=True, env={**os.environ, **environ}
    )


def temporaries(root: Path) -> list[Path]:
    return list((root / TEMPORARIES).iterdir())


@pytest.mark.crash
def test_a_killed_writer_leaves_only_whole_objects(tmp_path: Path) -> None:
    """Must L4: no empty or partial object under a final name, and its temporaries go with the next writer."""
    root = tmp_path / "stream"
    found = 0
    for kill in range(8):
        writer = start_writer(root.as_uri())
        assert writer.stdout is not None
        writer.stdout.readline()
        time.sleep(random.uniform(0, 0.1))
        writer.send_signal(signal.SIGKILL)
        writer.wait()
        for path in (root / "data").rglob("*"):
            if path.is_file():
                number, lane = int(path.parent.name), int(path.name)
                assert path.read_bytes() == f"{number:08d}{lane}".encode() * 300_000, (kill, path)
                found += 1
        for path in sorted((root / "data").rglob("*"), reverse=True):
            path.unlink() if path.is_file() else path.rmdir()
    assert found >= 8


@pytest.mark.crash
@pytest.mark.parametrize(("failpoint", "objects"), [("store.file.written", 0), ("store.file.linked", 1)])
async def test_a_kill_at_each_step_leaves_the_slot_free_or_the_object_whole(tmp_path, failpoint, objects) -> None:
    root = tmp_path / "stream"
    writer = start_writer(root.as_uri(), DCR_FAILPOINT=failpoint)
    assert writer.wait(60) == -signal.SIGKILL
    assert temporaries(root)
    store = await open_store(root.as_uri())
    listed = [entry async for entry in store.list("")]
    assert len(listed) >= objects
    assert all(entry.size == 9 * 300_000 for entry in listed)
    for lane in range(3):
        taken = f"data/0/{lane}" in {entry.key for entry in listed}
        assert await store.create(f"data/0/{lane}", b"x") is (Outcome.LOST if taken else Outcome.WON)
    assert temporaries(root) == []  # the dead writer's were swept, ours are gone
    await store.close()


async def test_a_living_writers_temporary_is_not_swept(tmp_path: Path) -> None:
    root = tmp_path / "stream"
    slow, other = FileStore(root), FileStore(root)
    with slow._temporary(b"in the making") as temporary:
        assert await other.create("data/a", b"x") is Outcome.WON
        assert temporary.read_bytes() == b"in the making"
    await slow.close()
    await other.close()


async def test_temporaries_do_not_show(tmp_path: Path) -> None:
    store = FileStore(tmp_path / "stream")
    with store._temporary(b"x"):
        assert [entry async for entry in store.list("")] == []
    await store.close()


@pytest.mark.parametrize(
    ("number", "error"),
    [
        (errno.ENOSPC, ResourceExhausted),
        (errno.EDQUOT, ResourceExhausted),
        (errno.EACCES, Incompatible),
        (errno.EROFS, Incompatible),
        (errno.EPERM, Incompatible),
        (errno.EOPNOTSUPP, Incompatible),
    ],
)
@pytest.mark.parametrize("step", ["write", "link"])
async def test_a_create_that_surely_failed_says_why(tmp_path, monkeypatch, number, error, step) -> None:
    store = FileStore(tmp_path / "stream")
    await store.create("data/before", b"x")

    def refuse(*_: object, **__: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, {"write": "fsync", "link": "link"}[step], refuse)
    with pytest.raises(error, match="data/a") as refused:
        await store.create("data/a", b"x")
    assert refused.value.hint
    monkeypatch.undo()
    assert temporaries(store.root) == []
    assert await store.create("data/a", b"x") is Outcome.WON
    await store.close()


async def test_a_create_whose_name_may_not_be_durable_is_unknown(tmp_path, monkeypatch) -> None:
    store = FileStore(tmp_path / "stream")
    await store.create("data/before", b"x")
    fsync = os.fsync

    def fail_on_directories(descriptor: int) -> None:
        if os.path.isdir(f"/proc/self/fd/{descriptor}"):  # noqa: PTH112
            raise OSError(errno.ENOSPC, "no space")
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", fail_on_directories)
    assert await store.create("data/a", b"x") is Outcome.UNKNOWN
    monkeypatch.undo()
    assert await store.create("data/a", b"x") is Outcome.LOST
    await store.close()


@pytest.mark.parametrize("number", [errno.EROFS, errno.EACCES, errno.EIO])
async def test_a_create_is_not_denied_by_a_temporary_that_stays(tmp_path, monkeypatch, number) -> None:
    """A disk that turns read-only after the name was given: to call that refused would be a lie (must L1)."""
    store = FileStore(tmp_path / "stream")

    def refuse(*_: object, **__: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "unlink", refuse)
    assert await store.create("data/a", b"x") is Outcome.WON
    monkeypatch.undo()
    assert await store.get("data/a", limit=1) == b"x"
    again = FileStore(tmp_path / "stream")
    await again.create("data/b", b"x")
    assert temporaries(again.root) == [], "swept by the next process"
    await store.close()
    await again.close()


async def test_every_directory_on_the_way_is_made_durable(tmp_path, monkeypatch) -> None:
    root = tmp_path / "a" / "b" / "stream"
    synced: set[str] = set()
    fsync = os.fsync

    def note(descriptor: int) -> None:
        synced.add(os.readlink(f"/proc/self/fd/{descriptor}"))  # noqa: PTH115
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", note)
    store = FileStore(root)
    assert await store.create("data/1/2/x", b"x") is Outcome.WON
    on_the_way = [tmp_path, tmp_path / "a", tmp_path / "a/b", root, root / "data", root / "data/1", root / "data/1/2"]
    assert {str(path) for path in on_the_way} <= synced
    await store.close()


async def test_a_passing_fault_of_a_read_is_tried_again_and_a_lasting_one_told(tmp_path, monkeypatch) -> None:
    store = FileStore(tmp_path / "stream")
    await store.create("data/a", b"x")
    really, left = os.open, [errno.ESTALE, errno.EMFILE]

    def stumble(path: object, *rest: int, **more: int) -> int:
        if left and str(path).endswith("data/a"):
            raise OSError(left.pop(), "stumbled")
        return really(path, *rest, **more)  # type: ignore[arg-type]

    monkeypatch.setattr(os, "open", stumble)
    assert await store.get("data/a", limit=9) == b"x"
    left.append(errno.EIO)
    with pytest.raises(StoreUnavailable, match="data/a"):
        await store.get("data/a", limit=9)
    await store.close()


async def test_nothing_but_plain_files_is_read(tmp_path: Path) -> None:
    store = FileStore(tmp_path)
    (tmp_path / "target").write_bytes(b"secret")
    (tmp_path / "data").mkdir()
    (tmp_path / "data/link").symlink_to(tmp_path / "target")
    os.mkfifo(tmp_path / "data/pipe")
    assert [entry.key async for entry in store.list("data/")] == []
    for key in ("data/link", "data/pipe"):
        with pytest.raises(Corrupt, match="not a regular file"):
            await store.get(key, limit=99)
    await store.close()


async def test_a_key_cannot_be_a_directory_too(tmp_path: Path) -> None:
    store = FileStore(tmp_path)
    await store.create("data/a/b", b"x")
    with pytest.raises(UsageError):
        await store.create("data/a", b"x")
    with pytest.raises(UsageError):
        await store.create("data/a/b/c", b"x")
    await store.close()


async def test_deleting_prunes_empty_directories_up_to_the_root(tmp_path: Path) -> None:
    store = FileStore(tmp_path / "stream")
    for key in ("data/1/2/a", "data/1/3/a"):
        await store.create(key, b"x")
    await store.delete(["data/1/2/a"])
    assert not (store.root / "data/1/2").exists()
    assert (store.root / "data/1/3").exists()
    await store.delete(["data/1/3/a"])
    assert not (store.root / "data").exists()
    assert store.root.exists()
    await store.close()

"""The staging directories of this host's subscribers: each has its own, and what a killed one left is removed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from dcr_daemon.errors import Incompatible
from dcr_daemon.subscribe.fetch import staging
from dcr_daemon.subscribe.fetch.staging import LOCK, default_staging, open_staging

#: a subscriber that has staged a chunk and waits
HOLDER = """
import sys, time
from pathlib import Path
from dcr_daemon.subscribe.fetch import staging
staging.SHARED = Path(sys.argv[1])
with staging.default_staging(Path(sys.argv[2])) as path:
    (path / "chunk").write_bytes(b"x")
    print(path, flush=True)
    time.sleep(600)
"""


@pytest.fixture
def shared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Stands for /dev/shm."""
    (tmp_path / "shm").mkdir()
    monkeypatch.setattr(staging, "SHARED", tmp_path / "shm")
    return tmp_path / "shm"


def test_a_staging_directory_is_for_one_user_only(tmp_path):
    made = open_staging(tmp_path / "a" / "b")
    assert made.stat().st_mode & 0o777 == 0o700
    assert open_staging(made) == made


def test_a_planted_link_is_refused(tmp_path):
    """Anybody may put a link into /dev/shm before we come."""
    (tmp_path / "theirs").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "theirs")
    with pytest.raises(Incompatible, match="somebody else"):
        open_staging(tmp_path / "link")


def test_every_state_directory_has_staging_of_its_own(tmp_path, shared):
    with default_staging(tmp_path / "x" / "r-1") as one, default_staging(tmp_path / "y" / "r-1") as two:
        assert one != two
        assert one.parent == two.parent == shared
        assert "r-1" in one.name


def test_what_a_killed_subscriber_left_is_removed_and_what_a_running_one_has_is_not(tmp_path, shared):
    holders = [
        subprocess.Popen([sys.executable, "-c", HOLDER, str(shared), str(tmp_path / name)], stdout=subprocess.PIPE)
        for name in ("killed", "running", "stopped")
    ]
    killed, _running, stopped = holders
    paths = [Path(holder.stdout.readline().decode().strip()) for holder in holders]
    stopped.send_signal(signal.SIGSTOP)
    killed.kill()
    killed.wait()
    try:
        with default_staging(tmp_path / "next") as path:
            assert set(shared.iterdir()) == {path, *paths[1:]}
        assert [(path / "chunk").exists() for path in paths] == [False, True, True]
    finally:
        for holder in holders:
            holder.kill()
            holder.wait()
            holder.stdout.close()
    with default_staging(tmp_path / "last") as path:
        assert list(shared.iterdir()) == [path]


def test_a_subscriber_that_starts_again_finds_what_it_has_staged(tmp_path, shared):
    with default_staging(tmp_path / "r1") as path:
        (path / "chunk").write_bytes(b"x")
    with default_staging(tmp_path / "r1") as again:
        assert again == path
        assert (again / "chunk").read_bytes() == b"x"


def test_two_containers_with_one_path_of_state_do_not_share_their_staging(tmp_path, shared):
    with default_staging(tmp_path / "r1") as one, default_staging(tmp_path / "r1") as two:
        assert one != two
        assert {entry.name for entry in shared.iterdir()} == {one.name, two.name}


def test_what_may_be_somebody_elses_is_left_alone(tmp_path, shared):
    (shared / "dcr-older-version").mkdir()
    (shared / "theirs").mkdir()
    (shared / "theirs" / LOCK).touch()
    (shared / "dcr-link").symlink_to(shared / "theirs")
    (shared / "dcr-file").touch()
    (shared / "dcr-linked-lock").mkdir()
    (shared / "dcr-linked-lock" / LOCK).symlink_to(shared / "theirs" / LOCK)
    if os.geteuid() == 0:
        (shared / "dcr-other-user").mkdir()
        (shared / "dcr-other-user" / LOCK).touch()
        os.chown(shared / "dcr-other-user", 12345, 12345)
    before = set(shared.rglob("*"))
    with default_staging(tmp_path / "r1"):
        assert before <= set(shared.rglob("*"))


def test_a_removal_that_was_killed_is_ended(tmp_path, shared):
    (shared / "dcr-_removed-0123" / "deep").mkdir(parents=True)
    with default_staging(tmp_path / "r1") as path:
        assert list(shared.iterdir()) == [path]


def test_a_replica_may_have_any_name_and_keeps_its_staging(tmp_path, shared):
    with default_staging(tmp_path / "removed-1") as path, default_staging(tmp_path / "r1"):
        assert path.exists()


def test_a_directory_that_another_subscriber_removes_meanwhile_is_made_anew(tmp_path, shared, monkeypatch):
    made = []

    def open_and_lose(path: Path) -> Path:
        made.append(open_staging(path))
        if len(made) == 1:
            path.rmdir()
        return path

    monkeypatch.setattr(staging, "open_staging", open_and_lose)
    with default_staging(tmp_path / "r1") as path:
        assert path.is_dir()


def test_without_a_shared_memory_directory_it_lies_with_the_state(tmp_path, monkeypatch):
    monkeypatch.setattr(staging, "SHARED", tmp_path / "absent")
    with default_staging(tmp_path / "r1") as path:
        assert path == tmp_path / "r1" / "staging"

from __future__ import annotations

import pytest

from dcr_daemon.errors import Incompatible, ResourceExhausted
from dcr_daemon.subscribe.fetch.files import file_digest, write_staged
from dcr_daemon.subscribe.fetch.stage import default_staging, open_staging


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


def test_every_state_directory_has_staging_of_its_own(tmp_path):
    one, two = default_staging(tmp_path / "x" / "r1"), default_staging(tmp_path / "y" / "r1")
    assert one != two
    assert "r1" in one.name


def test_files_appear_whole(tmp_path):
    path = tmp_path / "deep" / "file"
    write_staged(path, b"one")
    write_staged(path, b"two")
    assert path.read_bytes() == b"two"
    assert [entry.name for entry in path.parent.iterdir()] == ["file"]
    assert file_digest(tmp_path / "absent") == ""
    assert file_digest(path).startswith("3fc4ccfe")


def test_a_disk_that_takes_no_files_is_said_with_its_reason(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ResourceExhausted, match=r"cannot write .*deep: "):
        write_staged(tmp_path / "file" / "deep", b"one")

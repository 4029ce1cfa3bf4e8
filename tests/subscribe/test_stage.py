from __future__ import annotations

import pytest

from dcr_daemon.errors import ResourceExhausted
from dcr_daemon.subscribe.fetch.files import file_digest, write_staged


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

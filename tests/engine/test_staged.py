"""What an engine says of a staged file that it cannot read."""

from __future__ import annotations

import errno
import os
import socket
from pathlib import Path

import pytest

from dcr_daemon.engine.staged import read_staged
from dcr_daemon.errors import EngineRefused, ResourceExhausted


@pytest.mark.parametrize("number", [errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EIO])
def test_a_process_or_disk_in_trouble_refuses_no_version(monkeypatch, tmp_path, number):
    """Two refusals would poison the version (must P4)."""

    def fail(path: Path) -> bytes:
        raise OSError(number, os.strerror(number), str(path))

    monkeypatch.setattr(Path, "read_bytes", fail)
    with pytest.raises(ResourceExhausted, match=os.strerror(number)):
        read_staged(tmp_path / "chunk")


def test_a_file_that_the_engine_does_not_see_is_refused_with_a_hint(tmp_path):
    with pytest.raises(EngineRefused, match="cannot read") as refused:
        read_staged(tmp_path / "chunk")
    assert f"on {socket.gethostname()}: No such file" in refused.value.message
    assert "under the same path" in refused.value.hint

"""The high-water mark on disk (must T1): atomic, never lower, and refused when it is not one."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from dcr_daemon.errors import Corrupt, Incompatible, ResourceExhausted, UsageError
from dcr_daemon.ledger.fold import GENESIS, Tip
from dcr_daemon.ledger.high_water_mark import HighWaterMark


def tip(seq: int) -> Tip:
    return Tip("5ea1", seq, f"{seq:064x}", GENESIS)


def test_it_survives_and_never_goes_down(tmp_path: Path) -> None:
    path = tmp_path / "below" / "mark.json"
    memory = HighWaterMark(path)
    assert memory.mark is None
    assert memory.served is None
    memory.saw(tip(5))
    memory.saw(tip(3))
    assert memory.mark is not None
    assert memory.mark.tip == tip(5)
    memory.serves(2)
    memory.serves(1)
    memory.saw(tip(6))
    again = HighWaterMark(path)
    assert again.mark is not None
    assert again.mark.tip == tip(6)
    assert again.served == 2
    assert [entry.name for entry in path.parent.iterdir()] == ["mark.json"], "no temporary is left"


def test_what_has_seen_nothing_has_served_nothing(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="before its ledger was read"):
        HighWaterMark(tmp_path / "mark").serves(1)


@pytest.mark.parametrize("body", [b"", b"{}", b'{"format":1,"stream":"a"}', b"\xff", b"[" * 100_000])
def test_a_file_that_is_no_mark_is_refused(tmp_path: Path, body: bytes) -> None:
    (tmp_path / "mark").write_bytes(body)
    with pytest.raises(Corrupt, match="does not parse"):
        HighWaterMark(tmp_path / "mark")


def test_a_mark_that_cannot_be_read_is_not_taken_for_none(tmp_path: Path) -> None:
    with pytest.raises(Incompatible, match="cannot read the high-water mark"):
        HighWaterMark(tmp_path)


def test_a_newer_mark_is_refused(tmp_path: Path) -> None:
    memory = HighWaterMark(tmp_path / "mark")
    memory.saw(tip(1))
    fields = msgspec.json.decode((tmp_path / "mark").read_bytes()) | {"format": 2}
    (tmp_path / "mark").write_bytes(msgspec.json.encode(fields))
    with pytest.raises(Incompatible, match="format 2"):
        HighWaterMark(tmp_path / "mark")


def test_a_mark_that_cannot_be_written_is_an_error_and_changes_nothing(tmp_path: Path) -> None:
    memory = HighWaterMark(tmp_path / "mark")
    memory.saw(tip(1))
    (tmp_path / "mark").unlink()
    (tmp_path / "mark").mkdir()
    (tmp_path / "mark" / "in the way").touch()
    with pytest.raises(ResourceExhausted, match="cannot write the high-water mark"):
        memory.saw(tip(2))
    assert memory.mark is not None
    assert memory.mark.seq == 1
    assert [entry.name for entry in tmp_path.iterdir()] == ["mark"]

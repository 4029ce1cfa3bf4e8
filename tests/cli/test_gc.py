"""`dcr gc`: what it says is what it does. The --json fields are a contract: only ever added to."""

from __future__ import annotations

import errno
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from dcr_daemon.cli.app import run
from dcr_daemon.store.file import FileStore

FIELDS = {
    "stream", "head", "dry_run", "floor_before", "floor", "oldest", "held", "objects", "bytes", "kept", "kept_bytes",
    "unknown", "unexplained", "items", "refused",
}  # fmt: skip


@pytest.fixture
def anchored(own_stream: Any) -> Any:
    """Four versions; anchors of 0, 3 and 4."""
    bits = {name: tensor.view(torch.int16) + 1 for name, tensor in own_stream.weights[-1].items()}
    place = own_stream.watched / "step-9"
    place.mkdir()
    save_file({name: t.view(torch.bfloat16) for name, t in bits.items()}, place / "model.safetensors")
    assert own_stream.publish("--anchor-every", "1") == 0
    return own_stream


def said(capsys: pytest.CaptureFixture[str], *arguments: str, code: int = 0) -> Any:
    capsys.readouterr()
    assert run([*arguments, "--json"]) == code
    out, err = capsys.readouterr()
    return json.loads(out if code == 0 else err)


def objects(home: Path) -> set[str]:
    """Everything in the stream; a store in a directory keeps its temporaries in a hidden one."""
    found = (path.relative_to(home) for path in home.rglob("*") if path.is_file())
    return {path.as_posix() for path in found if not path.parts[0].startswith(".")}


def test_a_dry_run_says_what_gc_then_does(anchored: Any, capsys: pytest.CaptureFixture[str]) -> None:
    before = objects(anchored.home)
    plan = said(capsys, "gc", anchored.url, "--keep-versions", "1", "--dry-run")
    assert set(plan) >= FIELDS
    assert (plan["dry_run"], plan["floor_before"], plan["floor"], plan["head"]) == (True, 0, 4, 4)
    assert objects(anchored.home) == before, "nothing is written"
    assert {item["why"] for item in plan["items"]} == {"below the floor"}
    assert plan["bytes"] == sum((anchored.home / item["key"]).stat().st_size for item in plan["items"])
    done = said(capsys, "gc", anchored.url, "--keep-versions", "1")
    assert (done["dry_run"], done["items"], done["objects"]) == (False, plan["items"], len(plan["items"]))
    after = objects(anchored.home)
    assert before - after == {item["key"] for item in plan["items"]}
    assert {key.split("/")[0] for key in after - before} == {"ledger"}
    assert said(capsys, "gc", anchored.url, "--keep-versions", "1")["objects"] == 0


def test_a_person_reads_reasons_sizes_and_totals(anchored: Any, capsys: pytest.CaptureFixture[str]) -> None:
    (anchored.home / "data" / "notes.txt").write_text("mine")
    capsys.readouterr()
    assert run(["gc", anchored.url, "--keep-versions", "1", "--dry-run"]) == 0
    out = capsys.readouterr().out
    assert "data/ of versions 1 to 3" in out
    assert "anchors/ of versions 0, 3" in out
    assert "below the floor" in out
    assert "would be version 4, was 0" in out
    assert "data/notes.txt" in out


def test_what_is_held_back_is_said(own_stream: Any, capsys: pytest.CaptureFixture[str]) -> None:
    plan = said(capsys, "gc", own_stream.url, "--keep-versions", "1")
    assert (plan["floor"], plan["oldest"], plan["objects"]) == (0, 3, 0)
    assert plan["held"] == "versions 0 to 2 are the way from the anchor to version 3, the oldest to keep"


def test_a_stream_that_was_collected_still_works(
    anchored: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    said(capsys, "gc", anchored.url, "--keep-versions", "1")
    assert said(capsys, "verify", anchored.url)["damages"] == []
    assert said(capsys, "materialize", anchored.url, "--out", str(tmp_path / "out"))["version"] == 4
    gone = said(capsys, "materialize", anchored.url, "--version", "2", "--out", str(tmp_path / "old"), code=11)
    assert gone["error"]["hint"] == "version 4 is the oldest that can be had"
    assert anchored.publish() == 0, "and its publisher goes on under its name"


def test_the_log_does_not_offer_what_is_gone(anchored: Any, capsys: pytest.CaptureFixture[str]) -> None:
    said(capsys, "gc", anchored.url, "--keep-versions", "1")
    assert run(["log", anchored.url]) == 0
    rows = capsys.readouterr().out.splitlines()[1:]
    assert ["below the floor" in row for row in rows] == [True] * 4 + [False]


def test_a_stream_that_is_held_is_its_publishers_to_collect(anchored: Any, capsys: pytest.CaptureFixture[str]) -> None:
    last = max((anchored.home / "ledger").iterdir())
    assert b'"kind":"release"' in last.read_bytes()
    last.unlink()  # as if that publisher still ran
    refused = said(capsys, "gc", anchored.url, "--keep-versions", "1", code=12)
    assert "holds" in refused["error"]["message"]
    assert "--keep-versions" in refused["error"]["hint"]
    assert said(capsys, "gc", anchored.url)["objects"] == 0
    assert said(capsys, "gc", anchored.url, "--keep-versions", "1", "--take-over")["floor"] == 4


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (["--keep-versions", "0"], 2), (["--keep-hours", "-1"], 2), (["--take-over"], 2), (["--keep-hours", "nan"], 2),
    ],
)  # fmt: skip
def test_what_makes_no_sense_is_a_usage_error(
    streamed: Any, arguments: list[str], code: int, capsys: pytest.CaptureFixture[str]
) -> None:
    said(capsys, "gc", streamed.url, *arguments, code=code)


def test_there_must_be_a_stream(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    said(capsys, "gc", f"file://{tmp_path}/none", code=11)


def test_data_of_records_that_are_gone_is_told_and_kept(anchored: Any, capsys: pytest.CaptureFixture[str]) -> None:
    newest = max((anchored.home / "ledger").iterdir())
    for record in sorted((anchored.home / "ledger").iterdir())[5:]:
        record.unlink()
    assert newest.name != "0000000000000004.json"
    before = objects(anchored.home)
    capsys.readouterr()
    assert run(["gc", anchored.url, "--dry-run"]) == 13
    out, err = capsys.readouterr()
    assert "not in the ledger" in out
    assert "is damaged: it does not know of data/" in err
    for options in ([], ["--keep-versions", "1", "--take-over"]):
        error = said(capsys, "gc", anchored.url, *options, code=13)
        assert "does not know of" in str(error)
    assert objects(anchored.home) == before


def test_nothing_is_collected_while_a_record_is_missing(anchored: Any, capsys: pytest.CaptureFixture[str]) -> None:
    (anchored.home / "ledger" / "0000000000000004.json").unlink()
    before = objects(anchored.home)
    for options in ([], ["--dry-run"], ["--keep-versions", "1", "--take-over"]):
        assert "record 4 is missing" in str(said(capsys, "gc", anchored.url, *options, code=13))
    assert objects(anchored.home) == before


def test_what_the_store_does_not_let_us_delete_is_an_error_after_the_rest(
    anchored: Any, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    unlink = FileStore._unlink

    def guarded(self: FileStore, path: Path) -> None:
        if "data" in path.parts:
            raise PermissionError(errno.EACCES, "no")
        unlink(self, path)

    monkeypatch.setattr(FileStore, "_unlink", guarded)
    capsys.readouterr()
    assert run(["gc", anchored.url, "--keep-versions", "1", "--json"]) == 10
    out, err = capsys.readouterr()
    done = json.loads(out)
    deleted = {item["key"] for item in done["items"] if item["key"].startswith("anchors/")}
    assert done["refused"] == len(done["items"]) - len(deleted) > 0
    assert done["objects"] == len(deleted) > 0
    assert not deleted & objects(anchored.home)
    assert "cannot delete" in err

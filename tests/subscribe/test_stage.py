from __future__ import annotations

import pytest
from support.events import RecordedEvents

from dcr_daemon.errors import ResourceExhausted, StoreUnavailable
from dcr_daemon.ledger.objects import Objects
from dcr_daemon.runtime import Workers
from dcr_daemon.subscribe.fetch.files import file_digest, write_staged
from dcr_daemon.subscribe.fetch.stage import Stage


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


class TestFetching:
    """Room for what is fetched is taken before it comes, and what has come of it is kept."""

    async def open(self, make_stream, tmp_path):
        stream, workers = await make_stream(), Workers(1)
        return Stage(
            tmp_path / "staging",
            limit=100,
            objects=Objects(stream.store, floor=lambda: 0),
            stream=stream.ledger.stream,
            layout=stream.versions.layout,
            workers=workers,
            emit=RecordedEvents(),
        )

    async def fetch_some(self, stage, path):
        """30 of 80 bytes, then the store fails."""
        async with stage.fetching(path, 80) as keep:
            assert stage.used == 80
            await keep.append(b"x" * 30)
            raise StoreUnavailable("no answer")

    async def test_a_failure_keeps_what_came_and_gives_the_rest_of_the_room_back(self, make_stream, tmp_path):
        stage = await self.open(make_stream, tmp_path)
        path = stage.attempt_path(1, 2) / "a.dcr"
        with pytest.raises(StoreUnavailable):
            await self.fetch_some(stage, path)
        assert stage.used == 30
        assert not stage.has(path)
        async with stage.fetching(path, 80) as keep:
            assert await keep.load() == b"x" * 30
            await stage.write_chunk(path, b"x" * 80, keep)
        assert stage.used == 80
        assert [file.name for file in path.parent.iterdir()] == ["a.dcr"]

    async def test_a_restart_counts_what_has_come(self, make_stream, tmp_path):
        stage = await self.open(make_stream, tmp_path)
        path = stage.attempt_path(1, 2) / "a.dcr"
        with pytest.raises(StoreUnavailable):
            await self.fetch_some(stage, path)
        again = Stage(
            stage.path,
            limit=100,
            objects=stage.objects,
            stream=stage.stream,
            layout=stage.layout,
            workers=stage._workers,
            emit=RecordedEvents(),
        )
        assert again.used == 30
        again.forget_up_to(1)
        assert again.used == 0
        assert not path.parent.exists()

    async def test_the_limit_holds_for_what_is_on_its_way(self, make_stream, tmp_path):
        stage = await self.open(make_stream, tmp_path)
        place = stage.attempt_path(1, 2)
        async with stage.fetching(place / "a.dcr", 60):
            with pytest.raises(ResourceExhausted, match="full"):
                await self.fetch_some(stage, place / "b.dcr")

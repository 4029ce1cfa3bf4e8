"""Slow is not dead, stalled is not slow: what counts is bytes. Limits are scaled down; nothing here asserts a time."""

from __future__ import annotations

import asyncio
import dataclasses
import hashlib
import os
from pathlib import Path

import pytest
from support.faults.failing_requests import SmallWorld, parts, same

from dcr_daemon import runtime
from dcr_daemon.checkpoint.directory import Checkpoint
from dcr_daemon.errors import StoreUnavailable
from dcr_daemon.events import StoreRequest
from dcr_daemon.ledger.ledger import Ledger
from dcr_daemon.runtime import Workers
from dcr_daemon.store import Outcome, put_if_absent
from dcr_daemon.store.partial import PartialFile
from dcr_daemon.store.retry import RetryPolicy
from dcr_daemon.store.s3 import client, download
from dcr_daemon.store.s3.attempt import WINDOW_BYTES
from dcr_daemon.store.s3.link import FEWEST, SILENCE, STREAM_RATE, WINDOW, Link, Progress
from dcr_daemon.subscribe.materialize import materialize

QUICK = RetryPolicy(seconds=3.0, first=0.001, longest=0.002, stall=0.3)  #: stalls are found after 0.3 s
#: for faults that are no stalls: none is found because the machine is busy
CALM = RetryPolicy(seconds=30.0, first=0.001, longest=0.002, stall=10.0)
SIZE = 200_000


def begins(server) -> list[int]:
    """Where each GET began."""
    gets = [request for request in server.seen if request.method == "GET"]
    return [int(request.headers.get("range", "bytes=0-")[6:-1]) for request in gets]


# One object over a stream that stalls.


@pytest.mark.parametrize("fault", ["stall", "hang:0", "hang:150000", "drip:70000"])
async def test_a_stalled_try_is_replaced_and_goes_on_after_what_has_come(fake_s3, fault: str) -> None:
    whole = os.urandom(SIZE)
    async with fake_s3(objects={"run/data/a": whole}, patience=QUICK) as (server, store):
        server.faults.append(fault)
        assert await store.get("data/a", limit=8 << 20) == whole
        first, second = begins(server)
        assert first == 0
        assert second >= (int(fault[5:]) if ":" in fault else 0)


async def test_every_try_stalls_and_the_object_arrives_all_the_same(fake_s3) -> None:
    """Each try brings fewer bytes than a window asks for; they are progress for the whole, and are never lost."""
    whole, told = os.urandom(SIZE), list[StoreRequest]()
    async with fake_s3(objects={"run/data/a": whole}, patience=QUICK, always="hang:30000", emit=told.append) as (
        server,
        store,
    ):
        assert await store.get("data/a", limit=8 << 20) == whole
        assert begins(server) == list(range(0, SIZE, 30_000))
    requests = [event for event in told if isinstance(event, StoreRequest)]
    assert sum(event.bytes for event in requests) == SIZE


async def test_a_slow_stream_is_not_a_stalled_one(fake_s3) -> None:
    """It brings the bytes of a window in each window, and takes far longer than the patience in all."""
    whole = os.urandom(40 * WINDOW_BYTES)
    async with fake_s3(objects={"run/data/a": whole}, patience=QUICK, always="drip:0") as (server, store):
        server.drip = (WINDOW_BYTES, 0.1)
        assert await store.get("data/a", limit=8 << 20) == whole
        assert begins(server) == [0]


async def test_nothing_at_all_is_given_up(fake_s3) -> None:
    async with fake_s3(objects={"run/data/a": b"x" * SIZE}, patience=QUICK, always="hang:0") as (server, store):
        with pytest.raises(StoreUnavailable, match="without progress"):
            await store.get("data/a", limit=8 << 20)
        assert len(server.seen) > 2


# Bytes are kept over restarts.


class ToldPartialFile(PartialFile):
    """Tells when bytes have been kept."""

    def __init__(self, path: Path, *, workers: Workers) -> None:
        super().__init__(path, workers=workers)
        self.appended = asyncio.Event()

    async def append(self, data: bytes) -> None:
        await super().append(data)
        self.appended.set()


async def test_a_restart_goes_on_where_a_killed_download_was(fake_s3, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(download, "KEEP_SECONDS", 0.0)
    whole, workers = os.urandom(SIZE), Workers(1)
    async with fake_s3(objects={"run/data/a": whole}) as (server, store):
        server.faults.append("hang:120000")
        dying = ToldPartialFile(tmp_path / "a", workers=workers)
        reading = asyncio.create_task(store.get("data/a", limit=SIZE, keep=dying))
        await dying.appended.wait()
        kept = dying.kept
        reading.cancel()
        await asyncio.gather(reading, return_exceptions=True)
        assert await store.get("data/a", limit=SIZE, keep=PartialFile(tmp_path / "a", workers=workers)) == whole
        assert begins(server)[1] >= kept > 0
        # Nothing is asked for that is there.
        kept_file = PartialFile(tmp_path / "a", workers=workers)
        await kept_file.load()
        await kept_file.append(whole[kept_file.kept :])
        assert await store.get("data/a", limit=SIZE, keep=PartialFile(tmp_path / "a", workers=workers)) == whole
        assert len(server.seen) == 2


async def test_what_is_kept_of_a_longer_object_is_thrown_away(fake_s3, tmp_path: Path) -> None:
    workers = Workers(1)
    kept = PartialFile(tmp_path / "a", workers=workers)
    await kept.append(b"of an object that was longer")
    async with fake_s3(objects={"run/data/a": b"short"}) as (_, store):
        assert await store.get("data/a", limit=5, keep=PartialFile(tmp_path / "a", workers=workers)) == b"short"
        await kept.append(b"of an object that was longer")
        assert await store.get("data/a", limit=99, keep=PartialFile(tmp_path / "a", workers=workers)) == b"short"


async def test_a_disk_that_keeps_nothing_does_not_matter(fake_s3, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(download, "KEEP_SECONDS", 0.0)
    (tmp_path / "file").write_text("")
    whole, workers = os.urandom(SIZE), Workers(1)
    async with fake_s3(objects={"run/data/a": whole}) as (server, store):
        server.faults.append("cut:100000")
        keep = PartialFile(tmp_path / "file" / "a", workers=workers)
        assert await store.get("data/a", limit=SIZE, keep=keep) == whole
        assert begins(server)[1] > 0


# A whole build, with one fault at each of its requests in turn.


def bucket_of(home: Path) -> dict[str, bytes]:
    """A stream in a directory, as the objects of a bucket."""
    files = (path for path in home.rglob("*") if path.is_file() and not path.relative_to(home).parts[0].startswith("."))
    return {f"run/{path.relative_to(home).as_posix()}": path.read_bytes() for path in files}


@pytest.mark.parametrize("fault", ["hang:400", "drip:400", "stall", "cut:300", "drop-after", "slow-down"])
async def test_one_fault_at_any_request_costs_one_more_request(
    fake_s3, make_stream, tmp_path: Path, fault: str
) -> None:
    stream = await make_stream(2)
    await stream.anchor(0)
    await stream.publish(1, 2)
    objects = await asyncio.to_thread(bucket_of, stream.home)

    async def build(name: str, faults: list[str]) -> int:
        stalls = fault.startswith(("hang", "drip", "stall"))
        patience = dataclasses.replace(CALM, stall=1.5) if stalls else CALM
        async with fake_s3(objects=objects, patience=patience) as (server, store):
            server.faults.extend(faults)
            server.drip = (1, 0.05)
            await materialize(store, out=tmp_path / name)
            assert stream.versions.version_of(tmp_path / name) == 2
            return len(server.seen)

    clean = await build("clean", [])
    numbers = range(clean) if fault in ("cut:300", "drop-after") else range(0, clean, 3)
    for number in numbers:
        assert await build(f"at-{number}", ["ok"] * number + [fault]) <= clean + 1, number


# Uploads.


async def test_an_upload_that_stalls_is_unknown_and_put_again(fake_s3, monkeypatch) -> None:
    monkeypatch.setattr(client, "STALL_SECONDS", QUICK.stall)
    body = os.urandom(4 << 20)
    async with fake_s3(patience=QUICK, unread=1) as (server, store):
        await put_if_absent(store, "data/a", body, patience=QUICK)
        assert server.objects == {"run/data/a": body}
        assert [request.method for request in server.seen] == ["GET", "PUT"]  # the stalled PUT never arrived whole


async def test_a_slow_upload_is_not_given_up(fake_s3) -> None:
    """The store takes pieces at intervals; the whole takes longer than the patience of a single request."""
    body = os.urandom(3 << 20)
    async with fake_s3(patience=RetryPolicy(seconds=1.0, stall=0.5), slow_read=(64 << 10, 0.05)) as (server, store):
        assert await store.create("data/a", body) is Outcome.WON
        assert hashlib.sha256(server.objects["run/data/a"]).digest() == hashlib.sha256(body).digest()


@pytest.mark.parametrize(("fault", "part"), [
    pytest.param(fault, *part.values, marks=part.marks, id=f"{fault}-{part.id}")
    for fault in ("unread", "sip", "stall", "drop") for part in parts(4, quick=0)
] + [pytest.param("drop-after", (0, 1), id="drop-after")])  # fmt: skip
async def test_one_fault_at_any_request_of_a_publisher_is_survived(
    fake_s3, tmp_path: Path, monkeypatch, fault: str, part: tuple[int, int]
) -> None:
    """Create, claim, two versions, an anchor, release: whatever befalls one request, each version is there, once.

    A lost answer, the worst, at each upload; the others at every fourth, and at all of them in `make faults`.
    """
    monkeypatch.setattr(client, "STALL_SECONDS", 1.0)
    patience = dataclasses.replace(CALM, stall=1.0) if fault in ("unread", "stall") else CALM

    async def publish(name: str, faults: list[str]) -> list[str]:
        world = SmallWorld(tmp_path / name)
        async with fake_s3(patience=patience) as (server, store):
            server.faults.extend(faults)
            session = await world.open(store)
            for seed in (1, 2):
                await world.publish(session, world.draw(seed))
                await session.anchor_if_due()
            await session.close()
            methods = [request.method for request in server.seen]
            for version in (1, 2):
                out = tmp_path / f"{name}-{version}"
                await materialize(store, version=version, out=out, base=world.root / "base")
                with Checkpoint(out) as checkpoint:
                    assert same({name: checkpoint.bits(name).copy() for name in world.base}, world.draw(version))
            ledger = Ledger(store)
            assert (await ledger.read()).seal.version == 2
        return methods

    clean = await publish("clean", [])
    uploads = {number for number, method in enumerate(clean) if method == "PUT"}
    assert len(uploads) > 10
    others = set() if fault in ("unread", "stall") else set(range(0, len(clean), 5))
    for number in sorted(uploads | others)[part[0] :: part[1]]:
        try:
            await publish(f"at-{number}", ["ok"] * number + [fault])
        except BaseException as error:
            error.add_note(f"{fault} at request {number}, a {clean[number]}")
            raise


# How many requests a link carries.


async def test_requests_follow_the_goodput(clock) -> None:
    link = Link(32)
    async with link:
        for seconds in range(20):
            clock.time += 1.0
            link.moved(20 << 10)
            assert link.limit == FEWEST, seconds
        link.moved(int(10 * STREAM_RATE * WINDOW))  # a fast link is known at once
        assert link.limit >= 10
        for _ in range(10):
            clock.time += 1.0
            link.moved(1 << 20)
        assert link.limit == 32
        for _ in range(20):
            clock.time += 1.0
            link.moved(20 << 10)
        assert link.limit == FEWEST


async def test_an_idle_link_is_not_a_slow_one(clock) -> None:
    link = Link(32)
    async with link:
        link.moved(64 << 20)
    clock.time += 3600.0
    async with link:
        link.moved(1)
    assert link.limit == 32


async def test_a_lower_limit_lets_requests_end_and_begins_no_more(clock) -> None:
    link, most, running = Link(32), 0, 0
    async with link:
        link.moved(64 << 20)

    async def request() -> None:
        nonlocal most, running
        async with link:
            running += 1
            most = max(most, running)
            await asyncio.sleep(0)
            running -= 1

    await asyncio.gather(*(request() for _ in range(40)))
    assert most == 32
    async with link:
        clock.time += WINDOW
        link.moved(1)
    most = 0
    await asyncio.gather(*(request() for _ in range(40)))
    assert most == FEWEST


def test_neighbours_that_receive_keep_a_starved_request_alive_but_not_for_ever(clock: runtime.Runtime) -> None:
    link = Link(4)
    starved, served = Progress(link), Progress(link)
    seen = starved.bytes()
    served.moved(1000)
    assert starved.bytes() == seen + 1000
    clock.time += SILENCE  # type: ignore[attr-defined]
    served.moved(1000)
    assert starved.bytes() == seen + 1000
    starved.moved(1)
    assert starved.bytes() > seen + 1000

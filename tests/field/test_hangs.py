"""Waits that nobody could explain. Each has an end or says what it waits for, once, and goes on by itself."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Callable
from typing import Any
from urllib.parse import urlsplit

import pytest
from support.events import RecordedEvents
from support.streams.trainer import Gate, Trainer, until

from dcr_daemon.events import Event, Serving, Waiting
from dcr_daemon.observe import logs
from dcr_daemon.store.s3.store import S3Store


class Way:
    """A way to a server, which can be closed (`refuses`) or swallow everything in silence (`swallows`)."""

    def __init__(self, to: str) -> None:
        self._to = urlsplit(to)
        self._server: asyncio.Server | None = None
        self._open: set[asyncio.StreamWriter] = set()
        self._passes = asyncio.Event()
        self.port = 0

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[str]:
        self._passes.set()
        await self._listen()
        try:
            yield f"http://127.0.0.1:{self.port}"
        finally:
            await self.refuse()

    async def _listen(self) -> None:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", self.port)
        self.port = self._server.sockets[0].getsockname()[1]

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._open.add(writer)
        with contextlib.suppress(OSError, asyncio.CancelledError):  # a server's end is no news of its handlers
            back, forth = await asyncio.open_connection(self._to.hostname, self._to.port)
            self._open.add(forth)
            await asyncio.gather(self._pump(reader, forth), self._pump(back, writer))

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(1 << 16):
                await self._passes.wait()
                writer.write(data)
                await writer.drain()
        writer.close()

    async def refuse(self) -> None:
        if self._server:
            self._server.close()
        for writer in self._open:
            writer.transport.abort()
        self._open.clear()

    async def outage(self, kind: str, seconds: float) -> None:
        if kind == "swallows":
            self._passes.clear()
            await asyncio.sleep(seconds)
            self._passes.set()
        else:
            await self.refuse()
            await asyncio.sleep(seconds)
            await self._listen()


class Logged(RecordedEvents):
    """Events that are logged too, as in the daemon, under a name."""

    def __init__(self) -> None:
        super().__init__()
        self.log = logs.LogEvents()

    def __call__(self, event: Event) -> None:
        super().__call__(event)
        self.log(event)


def waits(text: str) -> list[str]:
    """What the log says is waited for or retried."""
    lines = [json.loads(line) for line in text.splitlines()]
    return [line["what"] for line in lines if line["event"] in ("waiting", "retrying")]


@pytest.mark.seaweed
@pytest.mark.parametrize(
    ("kind", "seconds"), [("refuses", 4.0), pytest.param("swallows", 60.0, marks=pytest.mark.slow)]
)
async def test_a_bucket_that_is_gone_for_a_while_is_one_line_and_then_goes_on(
    make_trainer: Callable[..., Trainer], seaweed: Any, s3_stream: str, capsys: Any, kind: str, seconds: float
) -> None:
    """A synchronisation hung without an error, and somebody had to log in to find out on what."""
    logs.configure("info", json=True)
    trainer = make_trainer(3)
    way = Way(seaweed.endpoint_url)
    async with way.running() as endpoint:
        bucket, _, prefix = s3_stream.removeprefix("s3://").partition("/")
        heard = Logged(), Logged()
        ends = [await S3Store.open(bucket, prefix, endpoint_url=endpoint, emit=events) for events in heard]
        trainer.bucket, trainer.events = ends[0], heard[0]
        replica = trainer.replica(at=0, events=heard[1])
        replica.store = ends[1]
        async with trainer.publishing(patience=600) as publisher:
            trainer.save(1)
            await until(lambda: trainer.sealed, publisher)
            async with replica.running() as subscriber:
                await until(lambda: [e for e in replica.events.of(Serving) if e.version == 1], subscriber)
                trainer.save(2)  # an update is under way when it happens
                capsys.readouterr()
                await way.outage(kind, seconds)
                said = waits(capsys.readouterr().err)
                await until(lambda: [e for e in replica.events.of(Serving) if e.version == 2], subscriber, 120)
                trainer.save(3)
                await until(lambda: [e for e in replica.events.of(Serving) if e.version == 3], subscriber, 120)
            assert not publisher.done()
        for store in ends:
            await store.close()
    assert trainer.versions.version_of(replica.directory) == 3
    about = [what for what in said if "s3://" in what or "bucket" in what]
    assert about, "nobody said what was waited for"
    assert len(said) <= 8, said


async def test_a_wait_for_the_trainer_or_for_a_stream_says_so_once(
    make_trainer: Callable[..., Trainer], capsys: Any
) -> None:
    """Silence looks the same whether nothing is to be done or something is stuck."""
    logs.configure("info", json=True)
    trainer = make_trainer(1)
    trainer.events = Logged()
    replica = trainer.replica(at=0, events=Logged())
    async with replica.running() as subscriber:
        await until(lambda: len(replica.events.of(Waiting)) >= 5, subscriber)
        async with trainer.publishing() as publisher:
            await until(lambda: replica.events.of(Serving), subscriber)
            await asyncio.sleep(0.5)
            assert not publisher.done()
    said = waits(capsys.readouterr().err)
    assert sum("there is no stream" in what for what in said) == 1
    assert sum("a checkpoint below" in what for what in said) == 1
    assert len(said) <= 3


async def test_a_seal_that_waits_for_its_answer_is_no_deadlock_for_the_next(
    make_trainer: Callable[..., Trainer],
) -> None:
    """A lost answer stopped everything behind it."""
    trainer = make_trainer(2)
    await trainer.publish(1)
    stuck = Gate(lambda operation, key: operation == "create" and key.startswith("ledger/") and bool(opened()))

    def opened() -> list[str]:
        return [key for operation, key in line.asked if operation == "create" and key.endswith(".part.json")]

    line = trainer.line(stuck)
    replica = trainer.replica(at=0)
    async with trainer.publishing(line) as publisher, replica.running() as subscriber:
        await until(lambda: [e for e in replica.events.of(Serving) if e.version == 1], subscriber)
        trainer.save(2)
        await asyncio.wait_for(stuck.reached.wait(), 60)
        assert [event.version for event in replica.events.of(Serving)][-1] == 1
        stuck.opened.set()
        await until(lambda: [e for e in replica.events.of(Serving) if e.version == 2], subscriber)
        assert not publisher.done()
    assert trainer.versions.version_of(replica.directory) == 2

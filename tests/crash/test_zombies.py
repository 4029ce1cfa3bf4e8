"""A stopped process (SIGSTOP) that wakes up after another has taken its place: fenced, down, and nothing of it counts.

The worst instants are those at which it is about to write what it had every right to write when it fell asleep.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import Callable
from pathlib import Path
from typing import ClassVar

import pytest
from support.faults.crash_scenes import LOOK, PublisherScene, SubscriberScene, replica_serves
from support.faults.crash_sites import SITES
from support.faults.sampling import parameters
from support.processes.fork_server import DEADLINE, ForkServer, Process
from support.streams.writer import StreamWriter

from dcr_daemon.ledger import names

pytestmark = pytest.mark.crash

FENCED = 12
HEAD_START = 1.0  #: seconds a second subscriber is given before the first, which may hold the directory, wakes
EVERY_TIME = 2  #: cases of each test in `make test`


def _sites(scene: type, without: tuple[str, ...]) -> list[str]:
    return [site.name for site in SITES if site.scene is scene and not site.once and not site.name.startswith(without)]


#: from open to anchor; an anchor's second pass is the one of version 1
PUBLISHER = [
    f"{name}:2" if "anchor" in name else name
    for name in _sites(PublisherScene, ("disk.", "store.", "ledger.abort", "publish.baseline.undone"))
]
#: from attach on: what stops before that attaches afterwards, and is then the one that took over
SUBSCRIBER = [
    *("engine.dir.claimed", "subscribe.attached", "subscribe.located", "subscribe.proved"),
    *_sites(SubscriberScene, ("disk.mark", "disk.staged", "subscribe.status")),
    *("subscribe.serving", "disk.staged.write:3", "disk.staged.rename:3"),
]


class StoppedPublisher(PublisherScene):
    """The second publisher of a stream. The first is stopped, and wakes when versions were sealed over its head."""

    name: ClassVar[str] = "p2"

    def __init__(self, fork_server: ForkServer, home: Path, url: str, stop: str) -> None:
        super().__init__(fork_server, home, url)
        self._stop = stop
        self.zombie: Process

    def origin(self) -> list[str]:
        return ["--base", str(self.base), "--take-over"]

    async def prepare(self) -> None:
        self.write(1)
        first = ["publish", "--to", self.url, "--watch", str(self.watch), "--state", str(self.home / "state-p1")]
        first += ["--create", "--base", str(self.base), "--name", "p1", "--anchor-every", "1", "--poll", "0.05"]
        self.zombie = self.fork_server.start(first, self.home / "zombie.log", DCR_FAILPOINT=f"{self._stop}=stop")
        await until_stopped(self.zombie)

    async def act(self) -> None:
        self.write(2)
        await self.until("version 2", lambda: self.sealed(2))
        self.zombie.send(signal.SIGCONT)
        self.write(3)
        assert await self.zombie.wait() == FENCED, self.zombie.said()
        await self.settled()

    async def check(self) -> None:
        await super().check()
        collector = self.fork_server.start(["gc", self.url], self.home / "gc.log")
        assert await collector.wait() == 0, collector.said()
        assert self._ledger is not None
        seals = await self._ledger.history.between(1)
        named = {names.attempt(seal.version, seal.attempt) for seal in seals} | {names.attempt(0, 0)}
        found = {entry.key.rpartition("/")[0] + "/" async for entry in self.store.list(names.DATA)}
        assert found == named, "what a zombie leaves behind can be collected"


class StoppedSubscriber(SubscriberScene):
    """The second subscriber of a directory. The first is stopped, and wakes when the directory is no longer its own."""

    replica: ClassVar[str] = "r2"
    last: ClassVar[int] = 3

    def __init__(self, fork_server: ForkServer, home: Path, url: str, stop: str) -> None:
        super().__init__(fork_server, home, url)
        self._stop = stop
        self.zombie: Process

    async def prepare(self) -> None:
        self.versions.save(self.directory, 0, shard_bytes=30_000)
        self.stream = StreamWriter(self.url, self.versions, self.store)
        await self.stream.create()
        await self.stream.publish(1)
        first = ["subscribe", "--from", self.url, "--engine", f"dir://{self.directory}", "--replica", "r1"]
        first += ["--state", str(self.home / "state-r1"), "--staging", str(self.home / "staging-r1"), "--poll", "0.05"]
        self.zombie = self.fork_server.start(first, self.home / "zombie.log", DCR_FAILPOINT=f"{self._stop}=stop")
        async with asyncio.timeout(DEADLINE):  # what it might fetch ahead comes only when it has attached
            while not (self.zombie.stopped or await replica_serves(self.store, "r1", self.directory, 1)):
                assert self.zombie.poll() is None, self.zombie.said()
                await asyncio.sleep(LOOK)
        self._chunks = await self.open(2)
        await until_stopped(self.zombie)

    async def act(self) -> None:
        with contextlib.suppress(TimeoutError):  # a lock that the zombie sleeps on keeps everybody out, and must
            async with asyncio.timeout(HEAD_START):
                await self.until_at(1)
        self.zombie.send(signal.SIGCONT)
        await self.until_at(1)
        assert await self.zombie.wait() == FENCED, self.zombie.said()
        await self.stream.seal(2, self._chunks)
        await self.until_at(2)
        await self.stream.publish(3)
        await self.settled()


async def until_stopped(process: Process) -> None:
    async with asyncio.timeout(DEADLINE):
        while not process.stopped:
            assert process.poll() is None, process.said()
            await asyncio.sleep(LOOK)


@pytest.mark.parametrize("stop", parameters(PUBLISHER, EVERY_TIME))
async def test_a_publisher_that_wakes_up_too_late_is_fenced(
    stop: str, fork_server: ForkServer, tmp_path: Path, s3_stream: str, record_property: Callable[[str, object], None]
) -> None:
    await StoppedPublisher(fork_server, tmp_path, s3_stream, stop).play()
    record_property("zombies", 1)


@pytest.mark.parametrize("stop", parameters(SUBSCRIBER, EVERY_TIME))
async def test_a_subscriber_that_wakes_up_too_late_is_fenced(
    stop: str, fork_server: ForkServer, tmp_path: Path, s3_stream: str, record_property: Callable[[str, object], None]
) -> None:
    await StoppedSubscriber(fork_server, tmp_path, s3_stream, stop).play()
    record_property("zombies", 1)

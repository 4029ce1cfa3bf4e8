"""Publisher and subscriber outlast what stores and networks do: no daemon dies of it, and afterwards all is right."""

from __future__ import annotations

import asyncio
import random
import signal
from collections.abc import Callable
from pathlib import Path
from typing import ClassVar

import pytest
from support.faults.crash_scenes import PublisherScene, replica_serves
from support.processes.fork_server import ForkServer, Process
from support.stores.faulty_proxy import BadNetwork, Fault
from support.stores.seaweed import Seaweed, SeaweedProcess, set_environment

pytestmark = [pytest.mark.crash, pytest.mark.seaweed]

SPELL = 5.0  #: seconds that bad weather lasts
WEATHERS = {
    "torn": {Fault.RESET_BEFORE: 0.15, Fault.RESET_AFTER: 0.25, Fault.TRUNCATE: 0.15},
    "refused": {Fault.UNAVAILABLE: 0.4, Fault.SLOW_DOWN: 0.4},
    "slow": {Fault.TRICKLE: 0.3, Fault.STALL: 0.1},
    "black": {Fault.BLACK_HOLE: 1.0},
}


class BothDaemons(PublisherScene):
    """A publisher, and a replica of what it publishes; neither may die."""

    steps: ClassVar[int] = 4

    def __init__(self, fork_server: ForkServer, home: Path, url: str, endpoint: str) -> None:
        super().__init__(fork_server, home, url)
        self._endpoint = ["--endpoint-url", endpoint]
        self.directory = home / "current"
        self.subscriber: Process

    def arguments(self) -> list[str]:
        return [*super().arguments(), *self._endpoint]

    async def prepare(self) -> None:
        self.write(1)
        places = ["--state", str(self.home / "state-r1"), "--staging", str(self.home / "staging")]
        subscribe = ["subscribe", "--from", self.url, "--engine", f"dir://{self.directory}", "--replica", "r1"]
        subscribe += [*places, *self._endpoint, "--poll", "0.05"]
        self.subscriber = self.fork_server.start(subscribe, self.home / "subscriber.log")

    async def served(self, version: int) -> bool:
        assert self.subscriber.poll() is None, self.subscriber.said()
        return await replica_serves(self.store, "r1", self.directory, version)

    async def until_served(self, version: int) -> None:
        await self.until(f"version {version} served", lambda: self.served(version))

    async def stop(self) -> None:
        self.subscriber.send(signal.SIGTERM)
        assert await self.subscriber.wait() == 0, self.subscriber.said()
        await super().stop()

    async def check(self) -> None:
        await super().check()
        assert len(self.lives) == 1
        assert self.versions.version_of(self.directory) == self.steps


class UnderWeather(BothDaemons):
    """A version in clear air, two in bad weather, one after it."""

    def __init__(self, fork_server: ForkServer, home: Path, url: str, network: BadNetwork, weather: str) -> None:
        super().__init__(fork_server, home, url, network.url)
        self._network, self._weather = network, WEATHERS[weather]

    async def act(self) -> None:
        await self.until_served(1)
        self._network.weather(self._weather)
        self.write(2)
        await asyncio.sleep(SPELL / 2)
        self.write(3)
        await asyncio.sleep(SPELL / 2)
        self._network.weather()
        await self.until_served(3)
        self.write(4)
        await self.until_served(4)
        await self.settled()
        assert all(self._network.seen[fault] for fault in self._weather), self._network.seen


class UnderKills(BothDaemons):
    """The store dies while each version is on its way, and comes back."""

    def __init__(self, fork_server: ForkServer, home: Path, url: str, weed: SeaweedProcess, seed: int) -> None:
        super().__init__(fork_server, home, url, weed.server.endpoint_url)
        self._weed, self._random = weed, random.Random(seed)

    async def act(self) -> None:
        await self.until_served(1)
        for version in range(2, self.steps + 1):
            self.write(version)
            await asyncio.sleep(self._random.random() * 0.5)
            self._weed.kill()
            await asyncio.sleep(self._random.random())
            await asyncio.to_thread(self._weed.restart)
            await self.until_served(version)
        await self.settled()


@pytest.mark.parametrize(
    "weather",
    [pytest.param(name, marks=[] if name == "torn" else pytest.mark.faults) for name in WEATHERS],
)
async def test_no_daemon_dies_of_bad_weather(
    weather: str,
    fork_server: ForkServer,
    tmp_path: Path,
    s3_stream: str,
    seaweed: Seaweed,
    record_property: Callable[[str, object], None],
) -> None:
    async with BadNetwork(seaweed.endpoint_url) as network:
        await UnderWeather(fork_server, tmp_path, s3_stream, network, weather).play()
        record_property("requests", sum(network.seen[fault] for fault in Fault))


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.faults) for seed in range(1, 6))])
async def test_a_store_that_is_killed_and_comes_back_costs_time_only(
    seed: int,
    fork_server: ForkServer,
    tmp_path: Path,
    own_seaweed: SeaweedProcess,
    monkeypatch: pytest.MonkeyPatch,
    record_property: Callable[[str, object], None],
) -> None:
    set_environment(monkeypatch, own_seaweed.server)
    await UnderKills(fork_server, tmp_path, own_seaweed.server.stream(), own_seaweed, seed).play()
    record_property("stores", UnderKills.steps - 1)

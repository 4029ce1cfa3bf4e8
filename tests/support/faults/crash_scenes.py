"""Two lives that a crash matrix cuts short: a publisher's beside a trainer, a subscriber's beside a publisher.

A scene plays to its end whatever happens to the process in it: whenever that one is killed by the failpoint it was
started with, it is started again with the same command line. At the end everything is compared bit for bit with
what was written. Scenes know processes, files and the bucket; nothing of the daemons' inside.
"""

from __future__ import annotations

import asyncio
import functools
import json
import shutil
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import ClassVar

import numpy as np

from dcr_daemon.canonical.fingerprint import Bits
from dcr_daemon.checkpoint.directory import write_checkpoint
from dcr_daemon.errors import KeyNotFound, NotFound
from dcr_daemon.ledger import names
from dcr_daemon.ledger.audit.verify import verify
from dcr_daemon.ledger.ledger import Ledger
from dcr_daemon.ledger.records import ChunkRef, State
from dcr_daemon.store import open_store
from dcr_daemon.store.port import Store
from dcr_daemon.subscribe.materialize import materialize
from dcr_daemon.subscribe.status import LIMIT
from support.processes.fork_server import DEADLINE, ForkServer, Process
from support.streams.versions import Versions
from support.streams.writer import StreamWriter

LOOK = 0.02  #: seconds between two looks of a scene
SHARD = 30_000  #: bytes; a version has a handful of shards


class Scene:
    """One daemon, started again after each kill. `failpoints` are what its first, second, ... life is armed with."""

    def __init__(self, fork_server: ForkServer, home: Path, url: str, failpoints: Sequence[str] = ()) -> None:
        self.fork_server, self.home, self.url = fork_server, home, url
        self.failpoints = list(failpoints)
        self.lives: list[Process] = []
        self.kills = 0
        self.environ: dict[str, str] = {}
        self.store: Store

    role: ClassVar[str]
    entry: ClassVar[str] = "dcr_daemon.cli:main"
    ends_by_itself: ClassVar[bool] = False

    def arguments(self) -> list[str]:
        raise NotImplementedError

    async def act(self) -> None:
        """What happens around the daemon, from its first start to the point where it may be told to stop."""
        raise NotImplementedError

    async def check(self) -> None:
        """What must be true afterwards."""
        raise NotImplementedError

    async def prepare(self) -> None:
        """What is there before the daemon's first start."""

    async def play(self) -> None:
        """Prepare, act, stop, check."""
        self.store = await open_store(self.url)
        try:
            await self.prepare()
            self.start()
            await self.act()
            await self.stop()
            assert self.kills == len(self.failpoints), f"{self.failpoints[self.kills :]} was never reached"
            await self.check()
            await self.check_bucket()
        finally:
            await self.store.close()

    @property
    def process(self) -> Process:
        return self.lives[-1]

    def start(self) -> None:
        n = len(self.lives)
        failpoint = self.failpoints[n] if n < len(self.failpoints) else ""
        log = self.home / f"{type(self).__name__}-{n}.log"
        environ = {"DCR_FAILPOINT": failpoint, **self.environ}
        self.lives.append(self.fork_server.start(self.arguments(), log, entry=self.entry, **environ))

    def revive(self) -> bool:
        """Start the daemon again if its failpoint killed it; tells whether. Any other end fails the test."""
        status = self.process.poll()
        if status is None or (status == 0 and self.ends_by_itself):
            return False
        killed = status == -signal.SIGKILL and self.kills < len(self.failpoints)
        assert killed, f"life {len(self.lives)} ended with {status}:\n{self.process.said()}"
        self.kills += 1
        self.start()
        return True

    async def until(self, what: str, condition: Callable[[], object]) -> None:
        """Wait for a condition, a plain or an asynchronous one, however often the daemon dies meanwhile."""
        try:
            async with asyncio.timeout(DEADLINE):
                while True:
                    self.revive()
                    found = condition()
                    if await found if asyncio.iscoroutine(found) else found:
                        return
                    await asyncio.sleep(LOOK)
        except TimeoutError:
            raise AssertionError(f"waited {DEADLINE} s for {what}:\n{self.process.said()}") from None

    async def stop(self) -> None:
        """SIGTERM, until it is the one that ends the daemon."""
        while True:
            self.process.send(signal.SIGTERM)
            if await self.process.wait() == 0:
                return
            self.revive()
            await self.settled()

    async def settled(self) -> None:
        """Wait until a daemon that was started again only to be stopped has done its work."""

    async def check_bucket(self) -> None:
        report = await verify(self.store)
        assert report.ok, report.damages


class PublisherScene(Scene):
    """Checkpoints appear one after another; one of them changes while it is read; the last start is stopped."""

    role = "publisher"
    name: ClassVar[str] = "p1"
    steps: ClassVar[int] = 3

    def __init__(self, fork_server: ForkServer, home: Path, url: str, failpoints: Sequence[str] = ()) -> None:
        super().__init__(fork_server, home, url, failpoints)
        self.versions = Versions(home)
        for _ in range(self.steps):
            self.versions.step()
        self.watch = home / "watch"
        self.watch.mkdir()
        self.base = self.versions.save(home / "base", 0, shard_bytes=SHARD)
        self._ledger: Ledger | None = None

    def arguments(self) -> list[str]:
        places = ["--to", self.url, "--watch", str(self.watch), "--state", str(self.home / f"state-{self.name}")]
        return ["publish", *places, *self.origin(), "--name", self.name, "--anchor-every", "1", "--poll", "0.05"]

    def origin(self) -> list[str]:
        return ["--create", "--base", str(self.base)]

    async def act(self) -> None:
        self.write(1)
        await self.until("version 1", lambda: self.anchored(1))
        await self.change_while_read(2)
        for step in range(2, self.steps + 1):
            self.write(step)
            await self.until(f"version {step}", lambda step=step: self.sealed(step))
        await self.settled()

    async def settled(self) -> None:
        await self.until("the last anchor", lambda: self.anchored(self.steps))
        await self.until("a claim", lambda: '"event":"claimed"' in self.process.said())

    def write(self, step: int) -> None:
        """The whole checkpoint of a step, under its name at once."""
        made = self.versions.save(self.home / f"made-{step}", step, shard_bytes=SHARD)
        for path in sorted(made.glob("*.safetensors")):  # in order: what was noise goes first
            path.rename(self._place(step) / path.name)
        shutil.rmtree(made)

    async def change_while_read(self, step: int) -> None:
        """A shard that is taken up, and then written anew: the attempt is aborted, its changes undone."""
        for values in (self._noise(1), self._noise(2)):
            await self._until_taken(step, self._put_first_shard(step, values))

    async def _until_taken(self, step: int, when: int) -> None:
        """Until an attempt stands that was opened after the shard was written."""

        async def taken() -> bool:
            state = await self._read()
            return state is not None and state.open is not None and state.open.seq > when

        await self.until(f"a part of step {step} taken up", taken)

    def _noise(self, seed: int) -> dict[str, Bits]:
        rng = np.random.default_rng(seed)
        return {name: rng.integers(0, 256, bits.nbytes, "u1").view(bits.dtype) for name, bits in self._last().items()}

    def _last(self) -> dict[str, Bits]:
        return self.versions.values[1]

    def _put_first_shard(self, step: int, values: dict[str, Bits]) -> int:
        """Returns the newest record before it."""
        made = self.home / "noise"
        write_checkpoint(made, self.versions.layout, bits_of=values.__getitem__, shard_bytes=SHARD)
        first = min(made.glob("*.safetensors"))
        tip = self._ledger.tip.seq if self._ledger else 0
        first.rename(self._place(step) / first.name)
        shutil.rmtree(made)
        return tip

    def _place(self, step: int) -> Path:
        place = self.watch / f"step_{step}"
        place.mkdir(exist_ok=True)
        return place

    async def _read(self) -> State | None:
        """The state at the tail; None while there is no stream."""
        ledger = self._ledger or Ledger(self.store)
        try:
            state = await ledger.read()
        except NotFound:
            return None
        self._ledger = ledger
        return state

    async def sealed(self, version: int) -> bool:
        state = await self._read()
        return state is not None and state.seal.version >= version

    async def anchored(self, version: int) -> bool:
        state = await self._read()
        return state is not None and state.anchor is not None and state.anchor.version >= version

    async def check(self) -> None:
        """Each checkpoint is exactly one version, and every version is its checkpoint, bit for bit."""
        state = await self._read()
        assert self._ledger is not None
        assert state is not None
        seals = await self._ledger.history.between(1)
        assert [seal.source["path"] for seal in seals] == [f"step_{n + 1}" for n in range(self.steps)]
        for seal in seals[max(state.floor - 1, 0) :]:
            out = self.home / f"v{seal.version}"
            await materialize(self.store, version=seal.version, out=out)
            assert self.versions.version_of(out) == seal.version


class RestoringScene(PublisherScene):
    """A publisher that has neither base nor memory goes on with a stream: anchor, chain, next version."""

    name: ClassVar[str] = "p2"
    steps: ClassVar[int] = 4

    def origin(self) -> list[str]:
        return []

    async def prepare(self) -> None:
        for step in range(1, self.steps):
            self.write(step)
        first = ["publish", "--to", self.url, "--watch", str(self.watch), "--state", str(self.home / "state-p1")]
        first += ["--create", "--base", str(self.base), "--anchor-every", "2", "--poll", "0.05", "--once"]
        process = self.fork_server.start(first, self.home / "first.log")
        assert await process.wait() == 0, process.said()

    async def act(self) -> None:
        self.write(self.steps)
        await self.settled()


class SpoolingScene(PublisherScene):
    """Tiny chunks, and no memory to keep them in until their fate is known."""

    entry: ClassVar[str] = "support.faults.crash_scenes:publish_small"


def publish_small() -> None:
    """`dcr publish` with constants that no option sets."""
    from dcr_daemon.cli.app import run
    from dcr_daemon.publish.watch import watcher

    watcher.WatchOptions = functools.partial(watcher.WatchOptions, chunk_bytes=2000, spool_memory=4000)  # type: ignore
    sys.exit(run(sys.argv[1:]))


class CollectingScene(PublisherScene):
    """Whatever the newest version does not need is deleted behind its seals."""

    def arguments(self) -> list[str]:
        return [*super().arguments(), "--keep-versions", "1"]

    async def check(self) -> None:
        await super().check()
        await self.collect()

    async def collect(self) -> None:
        """What a killed round has left is found by `dcr gc`, and it is all that was left."""
        policy = ["--keep-versions", "1", "--name", self.name]
        process = self.fork_server.start(["gc", self.url, *policy], self.home / "gc.log")
        assert await process.wait() == 0, process.said()
        await self.check_collected()

    async def check_collected(self) -> None:
        state = await self._read()
        assert state is not None
        assert state.floor == self.steps
        last = str(self.steps)
        assert await self._versions_below("anchors/") == {last}
        assert await self._versions_below("data/") == {"0", last}  # the vector that the first record names stays

    async def _versions_below(self, prefix: str) -> set[str]:
        return {entry.key.split("/")[1] async for entry in self.store.list(prefix)}


class CollectorScene(CollectingScene):
    """`dcr gc` on a stream whose publisher died in the middle of an attempt, went on, and has released it."""

    role = "gc"
    ends_by_itself = True

    async def prepare(self) -> None:
        for step in range(1, self.steps + 1):
            self.write(step)
        once = [*PublisherScene.arguments(self), "--once"]
        for failpoint, status in (("publish.part.put:2", -signal.SIGKILL), ("", 0)):
            process = self.fork_server.start(once, self.home / "publisher.log", DCR_FAILPOINT=failpoint)
            assert await process.wait() == status, process.said()

    def arguments(self) -> list[str]:
        return ["gc", self.url, "--keep-versions", "1", "--name", self.name]

    async def act(self) -> None:
        await self.until("the end of the collection", self.ended)

    def ended(self) -> bool:
        return self.process.poll() == 0

    async def stop(self) -> None:
        pass

    async def check(self) -> None:
        await PublisherScene.check(self)
        await self.check_collected()


async def replica_serves(store: Store, replica: str, directory: Path, version: int) -> bool:
    """Whether a directory's own mark says a version at least so new, and the replica's report that it is served."""
    try:
        report = json.loads(await store.get(names.replica(replica), limit=LIMIT))
        marker = json.loads((directory / ".dcr" / "version.json").read_bytes())
    except (KeyNotFound, FileNotFoundError):
        return False
    return report["serving"] and min(report["version"] or 0, marker["version"]) >= version


class SubscriberScene(Scene):
    """A directory at version 0 follows a stream that goes on, with an attempt that comes to nothing in between."""

    role = "subscriber"
    last: ClassVar[int] = 4
    replica: ClassVar[str] = "r1"

    def __init__(self, fork_server: ForkServer, home: Path, url: str, failpoints: Sequence[str] = ()) -> None:
        super().__init__(fork_server, home, url, failpoints)
        self.versions = Versions(home)
        for _ in range(self.last):
            self.versions.step()
        self.directory = home / "current"
        self.staging = home / "staging"
        self.stream: StreamWriter

    def arguments(self) -> list[str]:
        places = ["--state", str(self.home / f"state-{self.replica}"), "--staging", str(self.staging)]
        engine = ["--engine", f"dir://{self.directory}", "--replica", self.replica]
        return ["subscribe", "--from", self.url, *engine, *places, "--poll", "0.05"]

    async def prepare(self) -> None:
        self.versions.save(self.directory, 0, shard_bytes=SHARD)
        self.stream = StreamWriter(self.url, self.versions, self.store)
        await self.stream.create()
        await self.stream.publish(1)

    async def act(self) -> None:
        await self.until_at(1)
        chunks = await self.open(2)
        await self.until("a prefetch", lambda: len(self.staged()) == len(chunks))
        await self.stream.seal(2, chunks)
        await self.until_at(2)
        count = len(await self.open(3))
        await self.until("a prefetch", lambda: len(self.staged()) == count)
        await self.stream.abort(3)
        await self.until("the end of what was prefetched", lambda: not self.staged())
        await self.stream.publish(3)
        await self.until_at(3)
        await self.stream.publish(4)
        await self.settled()

    async def settled(self) -> None:
        await self.until_at(self.last)
        # A replica reports first: one that is stopped in between leaves the files to its next start.
        await self.until("the end of what was staged", lambda: not self.all_staged())

    def all_staged(self) -> list[Path]:
        return list(self.staging.glob("*/*-*/*.dcr"))

    async def open(self, version: int) -> list[ChunkRef]:
        await self.stream.open(version)
        return [await self.stream.put(version, chunk) for chunk in self.stream.chunks(version)]

    def staged(self) -> list[Path]:
        return list(self.staging.glob(f"*/*-{self.stream.attempt}/*.dcr"))

    async def until_at(self, version: int) -> None:
        """Until the directory's own mark says so, and the replica's report that it is served."""

        async def reported() -> bool:
            return await replica_serves(self.store, self.replica, self.directory, version)

        await self.until(f"version {version} served", reported)

    async def check(self) -> None:
        assert self.versions.version_of(self.directory) == self.last
        left = {path.name for path in (self.directory / ".dcr").iterdir()}
        assert left <= {"version.json", "owner.json"}
        assert not self.all_staged()


class LoadingScene(SubscriberScene):
    """An empty directory: an anchor, the chain from there, and then version by version."""

    async def prepare(self) -> None:
        self.stream = StreamWriter(self.url, self.versions, self.store)
        await self.stream.create()
        await self.stream.publish(1)
        await self.stream.anchor(1)
        await self.stream.publish(2)

    async def act(self) -> None:
        await self.until_at(2)
        await self.stream.publish(3, 4)
        await self.settled()

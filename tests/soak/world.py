"""One soak: a trainer that remembers every bit, two publishers in turn, three replicas, a real S3 server, bad links.

The publishers share one stream, which they take over from each other as docs/OPERATIONS.md allows: so each of them
meets what the other has left behind, and every version has one place in one history. The trainer's steps are numbered
through; a seal names its step, and so the bytes that its version must have.
"""

from __future__ import annotations

import asyncio
import shutil
from collections import Counter
from collections.abc import Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any, Self

from soak.daemons import Daemon, Failed, Library, Replica, Stream, Watcher
from support.processes.fork_server import ForkServer
from support.stores.faulty_proxy import BadNetwork
from support.stores.seaweed import SeaweedProcess
from support.streams.versions import Versions

from dcr_daemon.canonical.layout import Layout, TensorSpec
from dcr_daemon.errors import DcrError
from dcr_daemon.ledger.ledger import Ledger
from dcr_daemon.ledger.records import Seal, State
from dcr_daemon.store import open_store
from dcr_daemon.store.port import Store

LAYOUT = Layout(
    [
        TensorSpec("embed.weight", "BF16", (1031, 64)),
        TensorSpec("head.weight", "F32", (64, 133)),
        TensorSpec("layers.0.gate", "F64", (17,)),
        TensorSpec("layers.0.mlp", "BF16", (64, 760)),
        TensorSpec("layers.0.scale", "BF16", ()),
        TensorSpec("layers.1.experts", "U8", (8, 40, 133)),
        TensorSpec("layers.1.none", "BF16", (0, 4)),
    ]
)
SHARD = 90_000  #: bytes
KEEP = 3  #: newest checkpoints that the trainer leaves on its disk
LOOK = 0.05  #: seconds between two looks
HEAL = 150.0  #: seconds that anything may take once nothing is in its way


class World:
    """All processes and places of one soak, below `home`."""

    def __init__(
        self, home: Path, weed: SeaweedProcess, fork_server: ForkServer, *, seed: int, anchor_every: int, keep: int
    ) -> None:
        self.home, self.weed, self.fork_server = home, weed, fork_server
        home.mkdir(parents=True)
        self.truth = Versions(home, seed, LAYOUT)  #: by step
        self.stream = Stream(
            weed.server.stream(), self.truth.save(home / "base"), home / "watch", home / "inbox", anchor_every, keep
        )
        self.written: dict[int, str] = {}  #: who was given a step
        self.seals: dict[int, Seal] = {}
        self.served: dict[str, int] = {}  #: newest version that a replica has said that it serves
        self.told: Counter[str] = Counter()
        self.daemons: list[Daemon] = []
        self.store: Store
        self._ledger: Ledger | None = None  #: what was read of it so far
        self._stack = AsyncExitStack()

    async def __aenter__(self) -> Self:
        try:
            await self._open()
        except BaseException:
            await self.__aexit__()
            raise
        return self

    async def _open(self) -> None:
        for place in (self.stream.watch, self.stream.inbox):
            place.mkdir()
        self.store = await open_store(self.stream.url, endpoint_url=self.weed.server.endpoint_url)
        self._stack.push_async_callback(self.store.close)
        self.watcher = await self._daemon(Watcher, "watcher")
        self.library = await self._daemon(Library, "library")
        self.replicas = [await self._daemon(Replica, f"r{n}") for n in (1, 2, 3)]
        self.holder: Watcher | Library = self.watcher
        self.watcher.start()
        await self.until("the stream", self._created)
        for replica in self.replicas:
            replica.start()
        await self.settle()

    async def __aexit__(self, *_: object) -> None:
        try:
            self.fork_server.end()
        finally:
            for daemon in self.daemons:
                daemon.close()
            await self._stack.aclose()

    async def _daemon(self, kind: type[Any], name: str) -> Any:
        network = await self._stack.enter_async_context(BadNetwork(self.weed.server.endpoint_url))
        self.daemons.append(kind(name, self.home / name, self.stream, network, self.fork_server))
        return self.daemons[-1]

    async def _created(self) -> bool:
        return await self.state() is not None

    def daemon(self, name: str) -> Daemon:
        """A daemon by its name; `holder` is the publisher that holds the stream now."""
        return self.holder if name == "holder" else next(daemon for daemon in self.daemons if daemon.name == name)

    def look(self) -> None:
        """Judge and restart what has ended, and hear what all have said."""
        for daemon in self.daemons:
            daemon.look()
            for event in daemon.happened():
                self._hear(daemon, event)

    def _hear(self, daemon: Daemon, event: dict[str, Any]) -> None:
        self.told[event["type"]] += 1
        daemon.claimed = daemon.claimed or event["type"] == "Claimed"
        if event["type"] == "Serving":
            before = self.served.get(daemon.name, 0)
            if event["version"] < before:
                raise Failed(f"{daemon.name} served version {before}, and then version {event['version']}")
            self.served[daemon.name] = event["version"]

    async def until(self, what: str, condition: Callable[[], object], seconds: float = HEAL) -> None:
        """Wait for a condition, a plain or an asynchronous one, whoever dies meanwhile."""
        if not await self.within(seconds, condition):
            raise Failed(f"waited {seconds:g} s for {what}")

    async def within(self, seconds: float, condition: Callable[[], object]) -> bool:
        """Whether the condition came true in so many seconds."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + seconds
        while True:
            self.look()
            found = condition()
            if await found if asyncio.iscoroutine(found) else found:
                return True
            if loop.time() > deadline:
                return False
            await asyncio.sleep(LOOK)

    async def state(self) -> State | None:
        """The state at the tail, and all seals up to it; None while there is none that can be read."""
        ledger = self._ledger or Ledger(self.store)
        self._ledger = None
        try:
            state = await ledger.read()
            for seal in await ledger.history.between(len(self.seals) + 1):
                self.seals[seal.version] = seal
        except DcrError:
            return None
        self._ledger = ledger
        return state

    @property
    def head(self) -> int:
        return max(self.seals, default=0)

    def bits(self, version: int) -> dict[str, Any]:
        """The bytes that a version was made from, by tensor."""
        return self.truth.values[self.seals[version].step or 0 if version else 0]

    def write(self) -> int:
        """The trainer's next step, given to whoever holds the stream."""
        step = self.truth.step()
        self.written[step] = self.holder.name
        made = self.truth.save(self.home / f"made-{step}", step, shard_bytes=SHARD)
        made.rename(
            self.stream.watch / f"step_{step}" if self.holder is self.watcher else self.stream.inbox / str(step)
        )
        self._tidy()
        return step

    def _tidy(self) -> None:
        """The trainer deletes old checkpoints, once they are versions."""
        sealed = {seal.step for seal in self.seals.values()}
        for place in (self.stream.watch, self.stream.inbox):
            found = sorted(place.iterdir(), key=lambda path: int(path.name.removeprefix("step_")))
            for path in found[:-KEEP]:
                if int(path.name.removeprefix("step_")) in sealed:
                    shutil.rmtree(path)

    async def sealed(self) -> bool:
        """Whether every step that the holder was given is a version."""
        if await self.state() is None:
            return False
        sealed = {seal.step for seal in self.seals.values()}
        return all(step in sealed for step, name in self.written.items() if name == self.holder.name)

    async def arrived(self) -> bool:
        """Whether every replica has said that it serves the head, after all was sealed."""
        return await self.sealed() and all(self.served.get(r.name, -1) >= self.head for r in self.replicas)

    async def settle(self) -> None:
        """Wait until all that was written is sealed and served."""
        await self.until("the seals of " + str(sorted(self.written)[-4:]), self.sealed)
        await self.until(f"all replicas at version {self.head}: {self.served}", self.arrived)

    async def take_over(self) -> None:
        """The other publisher takes the stream. The former one may still run; it is ousted."""
        old, new = self.holder, self.library if self.holder is self.watcher else self.watcher
        old.ousted, old.holds = True, False
        # An operator makes sure that nothing is running whose command line would still take the stream.
        for daemon in (new, old) if not old.claimed else (new,):
            await self.end(daemon)
        new.ousted, new.holds = False, True
        self.holder = new
        new.start()
        await self.within(20.0, lambda: new.claimed)

    async def end(self, daemon: Daemon) -> None:
        """kill -9, and wait for its end; it stays down until it is started."""
        daemon.held = True
        daemon.kill()
        await self.until(f"the end of {daemon.name}", lambda: not daemon.running)
        self.look()

    async def anchor_now(self) -> None:
        """As docs/OPERATIONS.md says: an anchor of the newest version, and nothing is kept below it."""
        before = self.stream.anchor_every, self.stream.keep_versions
        await self._restart_holder(1, 1)
        step = self.write()
        await self.until(f"the seal of step {step}", self.sealed)
        await self.until(f"a floor at version {self.head}", self._all_collected)
        await self._restart_holder(*before)

    async def _restart_holder(self, anchor_every: int, keep_versions: int) -> None:
        holder = self.holder
        holder.terminate()
        await self.until(f"the end of {holder.name}", lambda: not holder.running)
        self.stream.anchor_every, self.stream.keep_versions = anchor_every, keep_versions
        holder.start()

    async def _all_collected(self) -> bool:
        state = await self.state()
        return state is not None and state.floor >= self.head

    async def heal(self) -> None:
        """Nothing is in anybody's way any more; who should run does."""
        self._ledger = None
        for daemon in self.daemons:
            daemon.network.clear()
            if daemon.disk:
                daemon.disk.relieve()
            daemon.resume()
            if not daemon.ousted and (daemon.wanted or daemon is self.holder):
                daemon.start()
        for daemon in self.daemons:
            if daemon.ousted:
                await self.until(f"the end of {daemon.name}", lambda daemon=daemon: not daemon.running)

    async def stop(self) -> None:
        """Ask everybody to end; each must, with exit code 0."""
        for daemon in self.daemons:
            if daemon.running:
                daemon.terminate()
        for daemon in self.daemons:
            await self.until(f"the end of {daemon.name}", lambda daemon=daemon: not daemon.running, 60.0)
        self.look()

"""Who acts: publishers, replicas, and those who start them again. All of it drives production code as its users do."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sim.clock import Process
from sim.engines import SimEngine, SimVllmEngine
from sim.trainer import Lanes, Trainer, save, sources

from dcr_daemon.engine.directory.engine import DirectoryEngine
from dcr_daemon.errors import DcrError, Fenced, StoreUnavailable
from dcr_daemon.events import Event
from dcr_daemon.ledger.ledger import Ledger
from dcr_daemon.ledger.retention.collector import collect
from dcr_daemon.ledger.retention.plan import RetentionPolicy
from dcr_daemon.publish.group.leader import Leader
from dcr_daemon.publish.group.opening import open_leader
from dcr_daemon.publish.options import PublishOptions
from dcr_daemon.publish.watch.watcher import WatchOptions, run_watch
from dcr_daemon.subscribe.daemon import SubscribeOptions, run_subscribe

if TYPE_CHECKING:
    from sim.invariants import Watch
    from sim.world import World

CHUNK = 512  #: bytes of a chunk: a version has several
SPOOL = 600  #: bytes held in memory: the rest is spooled to disk
RESTART = 2.0  #: seconds before a supervisor starts a dead actor again


class Actor:
    """An actor whose process a supervisor restarts, until `down`."""

    def __init__(self, world: World, watch: Watch, role: str, machine: str = "") -> None:
        self.world, self.watch, self.role = world, watch, role
        self.machine = world.machine(machine or role)
        self.down = False
        self.exits: list[BaseException | None] = []
        self.process: Process | None = None
        world.at_kill.append(self._killed)

    @property
    def alive(self) -> bool:
        return self.process is not None and not self.process.dead

    def main(self, process: Process) -> Coroutine[Any, Any, None]:
        raise NotImplementedError

    def start(self) -> None:
        """One more incarnation."""
        if self.alive or self.world.ended:
            return
        process = self.process = self.world.process(self.role, self.machine)
        self.world.note("started", process)
        task = process.main = self.world.loop.spawn(process, self.main(process))
        task.add_done_callback(lambda task: self._ended(process, task))

    def _ended(self, process: Process, task: asyncio.Task[None]) -> None:
        """Its main task is over: the process exits, or has died of an error."""
        if process.dead or self.world.ended:
            return
        process.dead = True
        error = None if task.cancelled() else task.exception()
        self.exits.append(error)
        self.world.note(f"exits: {type(error).__name__}: {error}" if error else "exits", process)
        if error is not None and not isinstance(error, DcrError):
            self.world.bug(error, process.name)
            return
        self.watch.exited(self, process, error)
        self._again(error)

    def _killed(self, process: Process) -> None:
        if process is self.process:
            self._again(None)

    def _again(self, error: BaseException | None) -> None:
        if isinstance(error, Fenced):
            self.down = True  # must P6, E3: its exit code keeps the supervisor from starting it again
        if not self.down:
            self.world.loop.world_later(RESTART * self.world.rng.uniform(0.5, 3.0), self._start_again)

    def _start_again(self) -> None:
        if not self.down:
            self.start()

    def emit(self, process: Process) -> Callable[[Event], None]:
        def tell(event: Event) -> None:
            self.watch.told(self, process, event)

        return tell


class SimPublisher(Actor):
    """A training process: drives a `Leader` as `publish.publisher.Publisher` does, without its thread.

    `updates`: how many it publishes in all its incarnations; `pause`: seconds of training between two.
    """

    def __init__(
        self, world: World, watch: Watch, trainer: Trainer, *, role: str = "pub1", name: str = "main", updates: int = 4,
        pause: float = 3.0, machine: str = "", **options: Any,
    ) -> None:  # fmt: skip
        super().__init__(world, watch, role, machine)
        self.trainer, self.name, self.left, self.pause = trainer, name, updates, pause
        self.options = options
        self.session: Leader | None = None
        base = self.machine.disk / "base"
        if not base.exists():
            save(trainer.base, base)
            self.machine.keep_all()

    def publish_options(self, **more: Any) -> dict[str, Any]:
        chosen: dict[str, Any] = {
            "state": self.machine.disk / "state", "base": self.machine.disk / "base", "create": True,
            "name": self.name, "chunk_bytes": CHUNK, "spool_memory": SPOOL, "upload_backlog": 2 * CHUNK, "uploads": 2,
            "patience": 30.0, "anchor_every": 3, "workers": 2, "scrub_rate": 60.0,
        }  # fmt: skip
        return {**chosen, **self.options, **more}

    async def main(self, process: Process) -> None:
        emit = self.emit(process)
        store = self.world.store(process, emit=emit)
        self.session = None
        session = self.session = await open_leader(PublishOptions(**self.publish_options()), store, emit=emit)
        self.watch.opened(self, process, session)
        try:
            while True:
                checks = asyncio.ensure_future(self._run_idle_checks(session))
                await asyncio.sleep(self.pause * self.world.rng.uniform(0.3, 1.5))
                checks.cancel()
                await asyncio.wait([checks])
                if self.left > 0:
                    await self._publish(process, session, self.trainer.next())
        finally:
            await session.close()

    async def _run_idle_checks(self, session: Leader) -> None:
        """Between updates; what goes wrong is met again by the next one."""
        with contextlib.suppress(DcrError):
            while True:
                await session.run_idle_checks()
                await session.repair()

    async def _publish(self, process: Process, session: Leader, lanes: Lanes) -> None:
        """One call of `publish`, and what runs behind it."""
        try:
            attempt = await session.begin(step=self.trainer.steps)
        except StoreUnavailable:
            return
        self.watch.gave(attempt.id, lanes)
        try:
            await attempt.diff(sources(lanes))
            await attempt.finish()
        except DcrError as error:
            with contextlib.suppress(StoreUnavailable):
                await session.abort_unless_sealed(error)
            if isinstance(error, Fenced):
                raise
            return
        try:
            await session.seal(attempt, metadata={"n": self.trainer.steps})
        except DcrError as error:
            if not await self._settle(session, error):
                return
        self.left -= 1
        with contextlib.suppress(StoreUnavailable):
            await session.anchor_if_due()
        self.watch.idle(self, process, session)

    async def _settle(self, session: Leader, error: DcrError) -> bool:
        """Whether it was sealed after all; being fenced ends the trainer."""
        if isinstance(error, Fenced):
            raise error
        try:
            return await session.abort_unless_sealed(error) is not None
        except StoreUnavailable:
            return False


class SimWatcher(SimPublisher):
    """`dcr publish --watch`: a trainer on the same machine writes checkpoints, the real watcher publishes them."""

    @property
    def place(self) -> Path:
        return self.machine.disk / "checkpoints"

    async def main(self, process: Process) -> None:
        writer = self.world.loop.create_task(self._train())
        try:
            await self._watch(process)
        finally:
            writer.cancel()

    async def _watch(self, process: Process) -> None:
        emit = self.emit(process)
        self.place.mkdir(exist_ok=True)
        options = WatchOptions(**self.publish_options(watch=self.place, poll=0.5))
        await run_watch(options, self.world.store(process, emit=emit), emit=emit)

    async def _train(self) -> None:
        """Write checkpoint after checkpoint, some of them rewritten or removed while they are read."""
        while True:
            await asyncio.sleep(self.pause * self.world.rng.uniform(0.5, 2.0))
            if self.left <= 0:
                continue
            lanes = self.trainer.next()
            name = f"checkpoint-{self.trainer.steps}"
            self.watch.wrote(name, lanes)
            out = self.place / name
            (self.place / f".{name}").mkdir(exist_ok=True)
            save(lanes, self.place / f".{name}" / "new")
            (self.place / f".{name}" / "new").rename(out)
            self.left -= 1


class Replica(Actor):
    """A subscriber over an engine. Restarted by its supervisor, as the engine is by its own."""

    def __init__(
        self, world: World, watch: Watch, role: str, *, engine: SimEngine | None, machine: str = "", lag: float = 0.0,
        **options: Any,
    ) -> None:  # fmt: skip
        super().__init__(world, watch, role, machine)
        self.engine, self.lag, self.options = engine, lag, options
        self.floor_at_start = 0
        watch.replicas.append(self)

    @property
    def directory(self) -> Path:
        return self.machine.disk / "current"

    async def main(self, process: Process) -> None:
        emit = self.emit(process)
        store = self.world.store(process, emit=emit, lag=self.lag)
        engine = SimVllmEngine(self.engine) if self.engine else DirectoryEngine(self.directory)
        chosen: dict[str, Any] = {
            "replica": self.role, "state": self.machine.disk / "state", "staging": self.machine.ram / "staging",
            "poll": 1.0,
        }  # fmt: skip
        self.watch.subscribing(self, process)
        try:
            await run_subscribe(SubscribeOptions(**{**chosen, **self.options}), store, engine=engine, emit=emit)
        finally:
            await engine.close()


class Collecting(Actor):
    """`dcr gc`, once."""

    def __init__(self, world: World, watch: Watch, *, keep: int | None, take_over: bool) -> None:
        super().__init__(world, watch, "gc1")
        self.down = True
        self._policy, self._take_over = RetentionPolicy.of(keep, None), take_over

    async def main(self, process: Process) -> None:
        ledger = Ledger(self.world.store(process))
        await collect(ledger, self._policy, take_over=self._take_over and self._policy.active)

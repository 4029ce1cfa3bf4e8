"""One world: a loop in virtual time, a bucket, machines, processes, and the faults that a scenario asked for.

Everything that is drawn comes from one generator, so a seed says all. Whatever happens is noted; the digest of the
notes is the same for the same seed.
"""

from __future__ import annotations

import errno
import gc
import hashlib
import os
import random
import shutil
import tempfile
from collections import Counter
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import Executor
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sim import disk
from sim.bucket import Bucket, Fault, SimStore
from sim.clock import Crashed, Inline, Loop, Process, running
from sim.disk import Machine

from dcr_daemon import runtime
from dcr_daemon.store.port import Entry, Store

if TYPE_CHECKING:
    from sim.engines import SimEngine

_SHARED = Path("/dev/shm")


@dataclass
class Trigger:
    """Something that happens at the `nth` time that `when` is passed by `role`: once.

    `when`: `point:<failpoint>`, `store:<operation>:<key prefix>`, `engine:<call>`, or `step`. `what`: kill, power,
    stop, full, terminate, or the name of a store or engine fault. `seconds`: how long a stopped or full one stays so.
    """

    role: str
    when: str
    what: str
    nth: int = 1
    seconds: float = 30.0
    seen: int = 0
    done: bool = False


RANK_FAULTS = ("fails", "balks", "half")


class Violation(AssertionError):
    """An invariant does not hold."""


@dataclass
class Outcome:
    """What a seed did. `violation` is empty if everything held."""

    seed: int
    scenario: str
    violation: str = ""
    trace: str = ""
    steps: int = 0
    requests: int = 0
    seconds: float = 0.0
    sealed: int = 0
    commits: int = 0
    faults: Counter[str] = field(default_factory=Counter)
    crashes: Counter[str] = field(default_factory=Counter)
    passed: Counter[str] = field(default_factory=Counter)

    @property
    def ok(self) -> bool:
        return not self.violation


class SimRuntime:
    """The world as `dcr_daemon.runtime` sees it."""

    def __init__(self, world: World) -> None:
        self.world = world

    def monotonic(self) -> float:
        return self.world.loop.time()

    def now(self) -> datetime:
        return datetime(2026, 1, 1, tzinfo=UTC) + timedelta(seconds=self.world.loop.time())

    async def sleep(self, seconds: float) -> None:
        import asyncio

        await asyncio.sleep(seconds)

    def nonce(self, size: int) -> str:
        return f"{self.world.rng.getrandbits(8 * size):0{2 * size}x}"

    def jitter(self) -> float:
        return self.world.rng.random()

    def failpoint(self, name: str) -> None:
        self.world.at_point(name)

    def synced(self, path: Path) -> None:
        process = running.get()
        if process is not None:
            process.machine.synced(path)

    def executor(self, count: int) -> Executor:
        return Inline(self.world.loop, self.world.pace)


class World:
    def __init__(self, seed: int, scenario: str, *, tracing: bool = False) -> None:
        self.rng = random.Random(f"{scenario}/{seed}")
        self.home = Path(tempfile.mkdtemp(prefix="dcr-sim-", dir=_SHARED if os.access(_SHARED, os.W_OK) else None))
        self.loop = Loop()
        self.loop.set_exception_handler(self._unhandled)
        self.outcome = Outcome(seed, scenario)
        self.bucket = Bucket(self)
        self.store: Callable[..., Store] = partial(SimStore, self)  #: a process's way to the bucket
        self.machines: dict[str, Machine] = {}
        self.processes: list[Process] = []
        self.triggers: list[Trigger] = []
        self.store_rates: dict[Fault, float] = {}
        self.engine_rate = 0.0  #: of lost and missing answers of engines
        self.rank_rate = 0.0  #: of failing ranks
        self.down_until = 0.0
        self.partitioned: dict[str, float] = {}
        self.stage_cap = 1 << 20
        self.ended = False
        self.healed = False
        self.tracing = tracing
        self.looked_at: Callable[[Any], None] = lambda engine: None
        self.at_kill: list[Callable[[Process], None]] = []
        self._digest = hashlib.blake2b(digest_size=16)
        self._failed = self.loop.create_future()

    # -- time, trace, end ----------------------------------------------------------------------------------------

    def pace(self) -> float:
        return self.rng.random() * 0.02 if self.rng.random() < 0.1 else 0.0

    def latency(self) -> float:
        return self.rng.expovariate(50.0) if self.rng.random() < 0.97 else self.rng.uniform(0.2, 2.0)

    def note(self, text: str, process: Process | None = None) -> None:
        line = f"{self.loop.time():.6f} {process.name if process else '-'} {text}".replace(str(self.home), "~")
        self._digest.update(line.encode())
        if self.tracing:
            print(line)

    def fail(self, invariant: str, text: str) -> None:
        """An invariant is violated: the first one counts, and the run ends."""
        if not self._failed.done() and not self.ended:
            self.note(f"VIOLATION {invariant}: {text}")
            self._failed.set_exception(Violation(f"{invariant}: {text}"))

    def bug(self, error: BaseException, where: str) -> None:
        """Something was raised that is no error of DCR."""
        if self.tracing:
            import traceback

            traceback.print_exception(error)
        self.fail("unforeseen", f"{where}: {type(error).__name__}: {error}")

    def _unhandled(self, loop: Any, context: dict[str, Any]) -> None:
        error = context.get("exception")
        if self.ended or isinstance(error, Crashed):
            return
        if error is not None:
            self.bug(error, str(context.get("message")))

    def run(self, scenario: Coroutine[Any, Any, None]) -> Outcome:
        """Play to its end, or to the first violation."""
        import asyncio

        async def main() -> None:
            task = self.loop.spawn(None, scenario)
            await asyncio.wait((task, self._failed), return_when=asyncio.FIRST_COMPLETED)
            if self._failed.done():
                self._failed.result()
            task.result()

        outcome = self.outcome
        disk.listen_for_locks(running.get)
        try:
            self.loop.run_until_complete(main())
        except Violation as violation:
            outcome.violation = str(violation)
        except Exception as error:
            self.bug(error, "the scenario")
            outcome.violation = f"{type(error).__name__}: {error}"
            if self.tracing:
                raise
        outcome.trace = self._digest.hexdigest()
        outcome.steps = sum(process.steps for process in self.processes)
        outcome.seconds = self.loop.time()
        return outcome

    def close(self) -> None:
        """Let every task end, so that nothing is left to the garbage collector's whim."""
        import asyncio

        self.ended = True
        for process in self.processes:
            disk.release_locks(process)
            process.dead = True
        tasks = asyncio.all_tasks(self.loop)
        for process in self.processes:
            process.dead = False
            process.watch_step = lambda process: None
            process.thaw(self.loop)
        for _ in range(40):
            for task in tasks:
                task.cancel()
            self.loop.run_until_complete(asyncio.wait(tasks, timeout=0.0) if tasks else asyncio.sleep(0))
            tasks = asyncio.all_tasks(self.loop)
            if not tasks:
                break
        self.loop.close()
        shutil.rmtree(self.home, ignore_errors=True)
        if self.outcome.seed % 16 == 0:
            gc.collect()

    # -- machines and processes ----------------------------------------------------------------------------------

    def machine(self, name: str) -> Machine:
        if name not in self.machines:
            self.machines[name] = Machine(name, self.home / name)
        return self.machines[name]

    def process(self, role: str, machine: Machine) -> Process:
        number = sum(process.role == role for process in self.processes)
        process = Process(role, machine, number)
        process.watch_step = self._at_step
        self.processes.append(process)
        return process

    def kill(self, process: Process, *, power: bool = False) -> None:
        """SIGKILL, or the whole machine. If it happens on the process's own stack, the caller raises `Crashed`."""
        machine = process.machine
        victims = [
            one for one in self.processes if not one.dead and (one is process or (power and one.machine is machine))
        ]
        self.note("power lost" if power else "killed", process)
        self.outcome.crashes["power" if power else "kill"] += 1
        inside = running.get() is process
        snapshot = machine.snapshot() if inside else None

        def finish(_: Process | None = None) -> None:
            process.unwound = None
            if snapshot is not None:
                machine.restore(snapshot)
            for victim in victims:
                disk.release_locks(victim)
            if power:
                self.outcome.faults["unsynced files lost"] += machine.lose_power(self.rng)

        for victim in victims:
            victim.dead = True
        if inside:
            process.unwound = finish
        else:
            finish()
        for victim in victims:
            for call in victim.on_death:
                call()
            for tell in self.at_kill:
                self.loop.world_later(0.0, tell, victim)

    def stop(self, process: Process, seconds: float) -> None:
        """SIGSTOP, and SIGCONT later."""
        if process.dead or process.stopped:
            return
        process.stopped = True
        self.note(f"stopped for {seconds:.1f} s", process)
        self.outcome.faults["stopped"] += 1
        self.loop.world_later(seconds, self.thaw, process)

    def thaw(self, process: Process) -> None:
        if process.stopped and not process.dead and not self.ended:
            self.note("continued", process)
            process.thaw(self.loop)

    def living(self, role: str) -> Process | None:
        return next((one for one in reversed(self.processes) if one.role == role and not one.dead), None)

    # -- faults ---------------------------------------------------------------------------------------------------

    def _fired(self, process: Process, when: str) -> Iterator[Trigger]:
        for trigger in self.triggers:
            if trigger.done or trigger.role not in (process.role, "*") or not when.startswith(trigger.when):
                continue
            trigger.seen += 1
            if trigger.seen >= trigger.nth:
                trigger.done = True
                yield trigger

    def _act(self, trigger: Trigger, process: Process) -> str:
        """Do to the process what the trigger says; what is left for the caller to do."""
        self.note(f"trigger {trigger.when} {trigger.what}", process)
        match trigger.what:
            case "kill" | "power":
                self.kill(process, power=trigger.what == "power")
                return "crash"
            case "stop":
                self.stop(process, trigger.seconds)
            case "full":
                process.machine.full = True
                self.outcome.faults["disk full"] += 1
                self.loop.world_later(trigger.seconds, self._room, process.machine)
            case "terminate":
                if process.main is not None:
                    self.loop.world_later(0.0, process.main.cancel)
            case "partition":
                self.partitioned[process.role] = self.loop.time() + trigger.seconds
                self.outcome.faults["partitioned"] += 1
            case "down":
                self.down_until = self.loop.time() + trigger.seconds
                self.outcome.faults["store down"] += 1
            case _:
                return trigger.what
        return ""

    @staticmethod
    def _room(machine: Machine) -> None:
        machine.full = False

    def at_point(self, name: str) -> None:
        """A failpoint is passed."""
        process = running.get()
        if process is None or self.ended:
            return
        if process.dead:
            raise Crashed
        role = process.role.rstrip("0123456789")
        self.outcome.passed[f"{role} {name}"] += 1
        for trigger in self._fired(process, f"point:{name}"):
            self.outcome.crashes[f"{role} {name} {trigger.what}"] += 1
            if self._act(trigger, process) == "crash":
                raise Crashed(name)
        if process.machine.full and name.startswith("disk.") and name.endswith(".write"):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def _at_step(self, process: Process) -> None:
        for trigger in self.triggers:
            if trigger.when == "step" and not trigger.done and trigger.role in (process.role, "*"):
                trigger.seen += 1
                if trigger.seen >= trigger.nth:
                    trigger.done = True
                    token = running.set(None)
                    self._act(trigger, process)
                    running.reset(token)

    def store_fault(self, process: Process, operation: str, key: str) -> Fault | None:
        """What happens to this request."""
        self.outcome.requests += 1
        if self.ended:
            raise Crashed
        fault: Fault | None = None
        for trigger in self._fired(process, f"store:{operation}:{key}"):
            left = self._act(trigger, process)
            if left == "crash":
                raise Crashed
            fault = next((one for one in Fault if one.name == left), fault)
        now = self.loop.time()
        if fault is None and now < self.down_until:
            fault = Fault.REFUSED if self.rng.random() < 0.5 else Fault.REQUEST_LOST
        if fault is None and now < self.partitioned.get(process.role, 0.0):
            fault = Fault.REQUEST_LOST
        if fault is None and self.store_rates and not self.healed:
            draw = self.rng.random()
            for one, rate in self.store_rates.items():
                draw -= rate
                if draw < 0:
                    fault = one
                    break
        if fault is Fault.DAMAGED and (
            operation != "get" or not key.startswith(("data/", "anchors/", "layouts/", "ledger/"))
        ):
            fault = None
        if fault is Fault.GHOST and operation not in ("create", "delete"):
            fault = Fault.ANSWER_LOST
        if fault is not None:
            self.outcome.faults[fault.value] += 1
        return fault

    def stale_list(self, process: Process, entries: list[Entry]) -> list[Entry]:
        """LIST is only a hint (must L6)."""
        if self.healed or not self.store_rates or self.rng.random() < 0.7:
            return entries
        self.outcome.faults["stale list"] += 1
        seen = [entry for entry in entries if self.rng.random() < 0.7]
        return sorted([*seen, *seen[:1]], key=lambda entry: entry.key)

    def engine_fault(self, engine: SimEngine, call: str) -> str:
        process = running.get()
        if self.ended:
            raise Crashed
        if process is not None:
            for trigger in self._fired(process, f"engine:{call}"):
                if self._act(trigger, process) == "crash":
                    raise Crashed
        for trigger in self._fired(engine.process, f"engine:{call}"):
            left = self._act(trigger, engine.process)
            if left != "crash" and left:
                self.outcome.faults[f"engine {left}"] += 1
                return left
        if not self.healed and self.engine_rate and self.rng.random() < self.engine_rate:
            fault = self.rng.choice(("request lost", "answer lost", "no answer"))
            self.outcome.faults[f"engine {fault}"] += 1
            return fault
        return ""

    def rank_fault(self, engine: SimEngine, rank: int, op: str) -> str:
        """`fails`: it does it and says that it could not. `balks`: it does not. `half`: it writes half. Else empty."""
        left = ""
        if not self.ended:
            for trigger in self._fired(engine.process, f"wire:{rank}:{op}"):
                left = self._act(trigger, engine.process)
                if left == "crash":
                    raise Crashed
            if (
                not left
                and not self.healed
                and self.rank_rate
                and op in ("apply", "commit", "rollback", "begin", "close")
            ):
                left = self.rng.choice(RANK_FAULTS) if self.rng.random() < self.rank_rate else ""
        if left in RANK_FAULTS:
            self.outcome.faults[f"rank {left} in {op}"] += 1
        return left


@contextmanager
def installed(world: World) -> Iterator[World]:
    """The world as this process's runtime, while the body runs."""
    runtime.install(SimRuntime(world))
    try:
        yield world
    finally:
        world.close()
        runtime.install(runtime.SystemRuntime())

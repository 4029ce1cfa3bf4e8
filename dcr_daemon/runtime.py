"""Single access point for the clock, random numbers, threads and failpoints.

Lint forbids every other module (vllm_plugin excepted) to import `time`, `random`, `secrets`, `uuid` or `threading`.
The simulation installs its own `Runtime` and is deterministic. No decision may depend on a clock (must L8): times are
for logs, metrics, back-off and waits.
"""

from __future__ import annotations

import asyncio
import errno
import os
import secrets
import signal
import threading
import time
from collections.abc import Callable, Coroutine
from concurrent.futures import Executor, Future, ThreadPoolExecutor, wait
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

T = TypeVar("T")


class Runtime(Protocol):
    def monotonic(self) -> float: ...
    def now(self) -> datetime: ...
    async def sleep(self, seconds: float) -> None: ...
    def nonce(self, size: int) -> str: ...
    def jitter(self) -> float: ...
    def failpoint(self, name: str) -> None: ...
    def synced(self, path: Path) -> None: ...
    def executor(self, count: int) -> Executor: ...


class Failpoints:
    """Armed failpoints, as `name[:n][=action]` joined by commas: the action at the n-th pass (default: the first).

    `*` counts the passes of all failpoints: `*:40` is the fortieth of any name. Actions: `kill` (SIGKILL, the default),
    `stop` (SIGSTOP, for a process that hangs and may be continued), `enospc` and `eio` (that `OSError`, from this pass
    on), `raise` (a `RuntimeError`, as of a bug, from this pass on).
    """

    def __init__(self, text: str) -> None:
        self._lock = threading.Lock()
        self._armed: dict[str, tuple[int, str]] = {}
        for entry in filter(None, text.split(",")):
            place, _, action = entry.partition("=")
            name, _, count = place.partition(":")
            self._armed[name] = (int(count or 1), action or "kill")

    def hit(self, name: str) -> None:
        for armed in (name, "*"):
            if armed in self._armed:
                self._pass(armed, name)

    def _pass(self, armed: str, name: str) -> None:
        with self._lock:
            left, action = self._armed[armed]
            self._armed[armed] = (left - 1, action)
        if left > 1:
            return
        match action:
            case "kill" | "stop" if left == 1:
                os.kill(os.getpid(), signal.SIGKILL if action == "kill" else signal.SIGSTOP)
            case "enospc" | "eio":
                number = errno.ENOSPC if action == "enospc" else errno.EIO
                raise OSError(number, os.strerror(number))
            case "raise":
                raise RuntimeError(f"failpoint {name}")


class SystemRuntime:
    """Real clock, real randomness, real threads. `DCR_FAILPOINT` arms failpoints, as `Failpoints` reads them."""

    def __init__(self) -> None:
        self._failpoints = Failpoints(os.environ.get("DCR_FAILPOINT", ""))

    def monotonic(self) -> float:
        return time.monotonic()

    def now(self) -> datetime:
        return datetime.now(UTC)

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)

    def nonce(self, size: int) -> str:
        return secrets.token_hex(size)

    def jitter(self) -> float:
        return secrets.randbelow(1 << 20) / (1 << 20)

    def failpoint(self, name: str) -> None:
        self._failpoints.hit(name)

    def synced(self, path: Path) -> None:
        pass

    def executor(self, count: int) -> Executor:
        return ThreadPoolExecutor(count, thread_name_prefix="dcr-bytes")


_current: Runtime = SystemRuntime()


def install(runtime: Runtime) -> None:
    """Replace the runtime of this process (simulation only)."""
    global _current
    _current = runtime


def monotonic() -> float:
    """Seconds on a clock that never goes back; only differences mean anything."""
    return _current.monotonic()


def now() -> datetime:
    """Wall time in UTC, for people to read."""
    return _current.now()


async def sleep(seconds: float) -> None:
    await _current.sleep(seconds)


async def wait_event(event: asyncio.Event, seconds: float) -> bool:
    """Wait until `event` is set, `seconds` at most; returns whether it is set."""
    await run_until_first(event.wait(), sleep(seconds))
    return event.is_set()


async def run_until_first(*works: Coroutine[Any, Any, Any]) -> Any:
    """Run coroutines side by side until one of them ends or fails; the others are cancelled and have ended then.

    Returns what the one that ended returned, or raises what it raised. Of several that ended at once, one that failed
    goes before one that returned, then the first in the order given.
    """
    tasks = [asyncio.ensure_future(work) for work in works]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    ended = [task for task in tasks if task in done]
    failed = [task for task in ended if task.cancelled() or task.exception()]
    return (failed or ended)[0].result()


def nonce(size: int = 8) -> str:
    """`2 * size` random lower-case hex digits, unique in practice."""
    return _current.nonce(size)


def jitter() -> float:
    """Uniform in [0, 1), for back-off."""
    return _current.jitter()


def failpoint(name: str) -> None:
    """A named point at which a crash test may kill or stop the process, or make the disk fail (`OSError`)."""
    _current.failpoint(name)


def synced(path: Path) -> None:
    """Report that a file, or the names in a directory, are durable now. A simulated crash loses everything else."""
    _current.synced(path)


class Workers:
    """A thread pool for byte work, whose kernels release the GIL. `count` 0: one thread per core, 16 at most."""

    def __init__(self, count: int = 0) -> None:
        self.count = count or max(1, min(16, len(os.sched_getaffinity(0))))
        self._pool = _current.executor(self.count)

    async def run(self, function: Callable[..., T], *args: object) -> T:
        """Run `function(*args)` on the pool and await its result."""
        return await asyncio.get_running_loop().run_in_executor(self._pool, function, *args)

    async def run_uncancellable(self, function: Callable[..., T], *args: object) -> T:
        """As `run`, but a cancelled caller first waits until the thread has ended. For work that writes to memory
        which is reused afterwards."""
        job = self._pool.submit(function, *args)
        try:
            return await asyncio.wrap_future(job)
        except asyncio.CancelledError:
            if not job.cancel():
                await asyncio.wait([asyncio.wrap_future(job)])
            raise

    def close(self) -> None:
        self._pool.shutdown(wait=True, cancel_futures=True)


class ThreadLocal(Generic[T]):
    """One value per thread, made by `make` at the thread's first `get`."""

    def __init__(self, make: Callable[[], T]) -> None:
        self._make = make
        self._local = threading.local()

    def get(self) -> T:
        try:
            return self._local.value
        except AttributeError:
            self._local.value = self._make()
            return self._local.value


class LoopThread:
    """An event loop on its own thread, for synchronous callers (`Publisher`).

    The thread is a daemon thread, so that a script which ends without `close` does not hang. A forked process does not
    have the thread: there `here` is False, and no other method may be called.
    """

    def __init__(self, name: str) -> None:
        self._process = os.getpid()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._serve, name=name, daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_forever()

    @property
    def here(self) -> bool:
        """Whether this is the process that created the loop."""
        return os.getpid() == self._process

    def start(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        """Run `work` on the loop; the caller may wait for the future or not."""
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def call(self, work: Coroutine[Any, Any, T]) -> T:
        """Run `work` on the loop and wait for its result. Not to be called on the loop's own thread.

        If the caller is interrupted (Ctrl-C), `work` is cancelled and has ended when this raises.
        """
        ended: Future[T] = Future()
        tasks: list[asyncio.Task[T]] = []

        def begin() -> None:
            task = self._loop.create_task(work)
            tasks.append(task)
            task.add_done_callback(lambda task: _hand_over(task, ended))

        self._loop.call_soon_threadsafe(begin)
        try:
            return ended.result()
        except BaseException:
            if not ended.done():
                self._loop.call_soon_threadsafe(lambda: [task.cancel() for task in tasks])
                wait([ended])
            raise

    def close(self) -> None:
        """Cancel the tasks that still run, then end the thread."""
        self.call(_cancel_all())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


def _hand_over(task: asyncio.Task[T], to: Future[T]) -> None:
    if task.cancelled():
        to.set_exception(asyncio.CancelledError())
    elif error := task.exception():
        to.set_exception(error)
    else:
        to.set_result(task.result())


async def _cancel_all() -> None:
    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)

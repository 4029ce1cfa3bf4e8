"""Installs `Core` in vLLM's EngineCore: wraps three methods and adds one; replaces nothing.

Runs in the EngineCore process; `register` calls `install`. It wraps `run_busy_loop`, `resume_scheduler` and the
executor's `collective_rpc`, and adds `dcr_core`. The wrapped `run_busy_loop` starts paused with the guards in place,
before the first request is taken (must E2). The wrapped `resume_scheduler` asks the core, whoever calls it (must E1).
The wrapped `collective_rpc` checks for external writes (must F1). `dcr_core` is a utility call like vLLM's own. vLLM
loads a plugin *inside* `EngineCore.__init__`, so nothing can be done there; the core is made when the loop starts.
"""

from __future__ import annotations

import functools
import logging
import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any

from dcr_daemon.engine import messages
from dcr_daemon.engine.messages import Answer
from dcr_daemon.errors import UsageError
from dcr_daemon.vllm_plugin import calls, compat
from dcr_daemon.vllm_plugin.compat import UnsupportedVllm
from dcr_daemon.vllm_plugin.core.engine_core import Core
from dcr_daemon.vllm_plugin.core.worker_group import WorkerGroup
from dcr_daemon.vllm_plugin.job_flags import JobFlags
from dcr_daemon.vllm_plugin.settings import Settings

log = logging.getLogger("vllm.dcr")
EXIT_HOPELESS = 87  #: exit status of an engine process that ended itself (must E5)
METHOD = "dcr_core"


def install() -> None:
    """Put the core into this process's EngineCore classes. Repeatable. Raises `UnsupportedVllm`."""
    compat.require(compat.ENGINE_NAMES)
    from vllm.v1.engine import core

    if METHOD in vars(core.EngineCore):
        return
    for loops in (core.EngineCoreProc, core.DPEngineCoreProc):
        loops.run_busy_loop = _starting_paused(vars(loops)["run_busy_loop"])
    for resumes in (core.EngineCore, core.DPEngineCoreProc):
        resumes.resume_scheduler = _guarded(vars(resumes)["resume_scheduler"])
    setattr(core.EngineCore, METHOD, dcr_core)


def _starting_paused(run_busy_loop: Callable[[Any], Any]) -> Callable[[Any], Any]:
    def run(engine: Any) -> Any:
        engine.dcr = make_core(engine, Settings.read())
        engine.dcr.start_paused()
        return run_busy_loop(engine)

    return run


def _guarded(resume_scheduler: Callable[[Any], Any]) -> Callable[[Any], Any]:
    def resume(engine: Any) -> Any:
        core: Core | None = getattr(engine, "dcr", None)
        reason = (
            core.state.why_not_resume()
            if core
            else "this engine has no dcr core (in-process engines are not supported)"
        )
        if reason:
            raise RuntimeError(f"dcr: resume refused: {reason}")
        return resume_scheduler(engine)

    return resume


def dcr_core(engine: Any, record: bytes) -> bytes | Future[bytes]:
    """A call of the engine's socket, as a utility call of EngineCore: an encoded call in, an encoded answer out."""
    try:
        call = messages.decode_call(record)
    except UsageError as error:
        return messages.encode(messages.refused("", error))
    answer = engine.dcr.handle(call)
    if not isinstance(answer, Future):
        return messages.encode(answer)
    encoded: Future[bytes] = Future()

    def encode(done: Future[Answer]) -> None:
        error = done.exception()
        if error is None:
            encoded.set_result(messages.encode(done.result()))
        else:
            encoded.set_exception(error)

    answer.add_done_callback(encode)
    return encoded


def make_core(engine: Any, settings: Settings) -> Core:
    """The core of an engine. Raises `UnsupportedVllm` if its workers lack the worker extension."""
    if not engine.vllm_config.parallel_config.worker_extension_cls:
        raise UnsupportedVllm(
            "dcr: DCR_SOCKET is set, but the workers lack DCR's extension. "
            "Start vLLM with --worker-extension-cls dcr_daemon.vllm_plugin.WorkerExtension, or unset DCR_SOCKET."
        )
    host = EngineHost(engine, settings)
    transport = ExecutorTransport(engine.model_executor, Watchdog(settings.watchdog, host.end))
    core = Core(host, WorkerGroup(transport, flags=_job_flags()), settings)
    engine.model_executor.collective_rpc = _detecting_writes(engine.model_executor.collective_rpc, core)
    return core


def _job_flags() -> JobFlags | None:
    try:
        return JobFlags.create()
    except OSError as error:
        log.warning("dcr: no shared memory, so the workers are polled, which costs generation more: %s", error)
        return None


def _detecting_writes(collective_rpc: Callable[..., Any], core: Core) -> Callable[..., Any]:
    """Check for external writes after each RPC that makes the workers write, before the model's next step (must F1)."""

    @functools.wraps(collective_rpc)
    def call(method: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return collective_rpc(method, *args, **kwargs)
        finally:
            if method in calls.WRITERS:
                core.state.poll_external_writes()

    return call


class EngineHost:
    """`state.Host` over vLLM's EngineCore."""

    def __init__(self, engine: Any, settings: Settings) -> None:
        from vllm.v1.core.sched.interface import PauseState

        self._engine = engine
        self._settings = settings
        self._states = PauseState

    @property
    def running(self) -> bool:
        return bool(self._engine.scheduler.pause_state == self._states.UNPAUSED)

    def pause(self) -> Future[Any] | None:
        # In an engine that is paused already, `wait` would let the paused requests run on and `abort` would end them.
        mode = self._settings.pause if self.running else "keep"
        rest: Future[Any] | None = self._engine.pause_scheduler(mode=mode, clear_cache=self._settings.caches == "reset")
        return rest

    def state(self) -> Any:
        return self._engine.scheduler.pause_state

    def restore(self, state: Any) -> None:
        if state == self._states.UNPAUSED:
            self.resume()
        else:
            self._engine.scheduler.set_pause_state(state)

    def resume(self) -> None:
        self._engine.resume_scheduler()

    def halt(self) -> None:
        self._engine.scheduler.set_pause_state(self._states.PAUSED_ALL)

    def label(self, text: str) -> None:
        self._engine.set_weight_version(text)

    def end(self, reason: str) -> None:
        """Kill the workers first: a worker that hangs would outlive its parent."""
        log.critical("dcr: ending the engine: %s", reason)
        for worker in getattr(self._engine.model_executor, "workers", None) or ():
            process = getattr(worker, "proc", None)
            if process is not None:
                process.kill()
        os._exit(EXIT_HOPELESS)


class ExecutorTransport:
    """`WorkerTransport` over vLLM's executor. An error in a queue is a reply to an earlier call, not to ours."""

    def __init__(self, executor: Any, watchdog: Watchdog) -> None:
        self._executor = executor
        self._watchdog = watchdog

    @property
    def unsupported(self) -> str:
        """An executor of several workers must have queues, from which replies to earlier calls can be skipped."""
        from vllm.v1.executor.uniproc_executor import UniProcExecutor

        if isinstance(self._executor, UniProcExecutor) or hasattr(self._executor, "response_mqs"):
            return ""
        return (
            f"the replies of {type(self._executor).__name__} cannot be told apart (must E3); use "
            "--distributed-executor-backend mp, or with ray VLLM_USE_RAY_V2_EXECUTOR_BACKEND=1"
        )

    def send(self, call: dict[str, Any]) -> Sequence[Any] | None:
        with self._watchdog.watching(str(call["op"])):
            try:
                return list(self._executor.collective_rpc(calls.METHOD, args=(call,)))
            except RuntimeError as error:
                if getattr(self._executor, "is_failed", False):
                    raise
                log.warning("dcr: a worker answered with an error of an earlier call: %s", error)
                return None

    def next_reply(self, rank: int) -> Any:
        queues = getattr(self._executor, "response_mqs", None)
        if queues is None:
            raise RuntimeError("dcr: a worker replied to another call, and this executor has no queues to read further")
        with self._watchdog.watching("stale reply"):
            _, result = queues[rank].dequeue()
        return result


class Watchdog:
    """Ends the engine when a call to the workers does not return (must E5).

    One thread for the life of the process, so that no swap waits for a thread to start. `limit` in seconds; 0: off.
    """

    def __init__(self, limit: float, end: Callable[[str], None]) -> None:
        self._limit = limit
        self._end = end
        self._changed = threading.Condition()
        self._operation = ""
        self._count = 0
        if limit:
            threading.Thread(target=self._watch, name="dcr-watchdog", daemon=True).start()

    def watching(self, operation: str) -> Watchdog:
        self._operation = operation
        return self

    def __enter__(self) -> None:
        with self._changed:
            self._count += 1
            self._changed.notify()

    def __exit__(self, *_: object) -> None:
        with self._changed:
            self._count += 1
            self._changed.notify()

    def _watch(self) -> None:
        """An odd count means that a call is under way; it is late if the count does not change within the limit."""
        with self._changed:
            while True:
                seen = self._count
                in_time = self._changed.wait_for(partial(self._moved_on, seen), self._limit if seen % 2 else None)
                if not in_time:
                    self._end(f"a worker did not return from {self._operation} within {self._limit:.0f} s")
                    return

    def _moved_on(self, seen: int) -> bool:
        return self._count != seen

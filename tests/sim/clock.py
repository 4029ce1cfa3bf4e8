"""Time that passes only when nobody has anything to do, and processes that can be stopped or killed between two steps.

Public asyncio only: a selector whose `select(timeout)` adds the timeout to the clock, and a loop that reads it. Every
callback of a process passes its gate, so a stopped one does nothing and a killed one runs no clean-up: its tasks are
simply never resumed, as those of a process after SIGKILL.
"""

from __future__ import annotations

import asyncio
import itertools
import selectors
from collections import deque
from collections.abc import Callable, Coroutine
from concurrent.futures import Executor, Future
from contextvars import Context, ContextVar, copy_context
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sim.disk import Machine

#: the process whose code runs now; None for the world itself (the network, the bucket, the scenario)
running: ContextVar[Process | None] = ContextVar("running", default=None)


class Crashed(BaseException):
    """Unwinds the stack of a process that has just been killed. No `except Exception` may stop it."""


class Deadlock(AssertionError):
    """Nobody will ever do anything again, and the scenario has not ended."""


class Process:
    """One incarnation of one actor. `role` names the actor, over all its incarnations."""

    def __init__(self, role: str, machine: Machine, number: int) -> None:
        self.role, self.machine, self.number = role, machine, number
        self.name = f"{role}.{number}"
        self.dead = self.stopped = False
        self.steps = 0
        self.main: asyncio.Task[None] | None = None
        self.on_death: list[Callable[[], object]] = []
        self.watch_step: Callable[[Process], None] = lambda process: None
        self.unwound: Callable[[Process], None] | None = None
        self._backlog: deque[Step] = deque()

    def __repr__(self) -> str:
        return self.name

    def take(self, step: Step) -> None:
        """Run one callback of this process, unless it is dead or stopped."""
        if self.dead or self.stopped:
            self._backlog.append(step)
            return
        self.steps += 1
        self.watch_step(self)
        if self.dead or self.stopped:
            self._backlog.append(step)
            return
        step.callback(*step.args)
        if self.unwound:
            self.unwound(self)

    def thaw(self, loop: Loop) -> None:
        """What was due while it was stopped (or, at the very end of the world, dead) happens now."""
        self.stopped = False
        while self._backlog:
            step = self._backlog.popleft()
            loop.call_soon(step, context=step.context)


class Step:
    """A callback on its way through the gate of its process; one that is cancelled while it waits does nothing."""

    __slots__ = ("args", "callback", "context", "handle", "process")

    def __init__(
        self, process: Process, callback: Callable[..., object], args: tuple[Any, ...], context: Context
    ) -> None:
        self.process, self.callback, self.args, self.context = process, callback, args, context
        self.handle: asyncio.Handle | None = None

    def __call__(self) -> None:
        if self.handle is not None and not self.handle.cancelled():
            self.process.take(self)


class _Selector(selectors.SelectSelector):
    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is None:
            raise Deadlock(f"nothing is due after {self.now:.3f} s")
        self.now += max(0.0, timeout)
        return []


class _Task(asyncio.Task[Any]):
    """Tasks lie in sets, whose order must not depend on where in memory they happen to be."""

    def __init__(self, work: Coroutine[Any, Any, Any], *, loop: Loop, context: Context | None) -> None:
        self.order = next(loop.order)  # first: it is hashed as soon as it is made
        super().__init__(work, loop=loop, context=context)

    def __hash__(self) -> int:
        return self.order


class _Future(asyncio.Future[Any]):
    def __init__(self, *, loop: Loop) -> None:
        self.order = next(loop.order)
        super().__init__(loop=loop)

    def __hash__(self) -> int:
        return self.order


class Loop(asyncio.SelectorEventLoop):
    """An event loop in virtual time."""

    def __init__(self) -> None:
        self._clock = _Selector()
        self.order = itertools.count()
        super().__init__(self._clock)
        self.set_task_factory(self._make_task)

    def _make_task(self, loop: Any, work: Any, context: Context | None = None) -> asyncio.Task[Any]:
        return _Task(work, loop=self, context=context)

    def create_future(self) -> asyncio.Future[Any]:
        return _Future(loop=self)

    def time(self) -> float:
        return self._clock.now

    def call_soon(self, callback: Any, *args: Any, context: Context | None = None) -> asyncio.Handle:
        context = copy_context() if context is None else context  # an empty one is falsy
        process = context.get(running)
        if process is None or isinstance(callback, Step):
            return super().call_soon(callback, *args, context=context)
        step = Step(process, callback, args, context)
        step.handle = super().call_soon(step, context=context)
        return step.handle

    def call_soon_threadsafe(self, callback: Any, *args: Any, context: Context | None = None) -> asyncio.Handle:
        return self.call_soon(callback, *args, context=context)

    def call_at(self, when: float, callback: Any, *args: Any, context: Context | None = None) -> asyncio.TimerHandle:
        context = copy_context() if context is None else context
        process = context.get(running)
        if process is None:
            return super().call_at(when, callback, *args, context=context)
        step = Step(process, callback, args, context)
        step.handle = super().call_at(when, step, context=context)
        return step.handle

    def spawn(self, process: Process | None, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        """A task of `process`, or of the world."""
        context = Context()
        context.run(running.set, process)
        return self.create_task(work, context=context)

    def world_later(self, delay: float, callback: Callable[..., object], *args: Any) -> asyncio.TimerHandle:
        """A call in the world's own context, whoever asks for it: what is on the wire does not stop with its sender."""
        return self.call_later(delay, callback, *args, context=Context())


class Inline(Executor):
    """Byte work runs now, in place; its caller learns it a little later, so that others get their turn."""

    def __init__(self, loop: Loop, pace: Callable[[], float]) -> None:
        self._loop, self._pace = loop, pace

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()
        future.set_running_or_notify_cancel()
        try:
            result, error = fn(*args, **kwargs), None
        except BaseException as raised:  # noqa: BLE001  it is raised where it is awaited, a crash nowhere
            result, error = None, raised
        pace = self._pace()
        if pace:
            self._loop.call_later(pace, _settle, future, result, error)
        else:
            self._loop.call_soon(_settle, future, result, error)
        return future


def _settle(future: Future[Any], result: Any, error: BaseException | None) -> None:
    if error is None:
        future.set_result(result)
    else:
        future.set_exception(error)

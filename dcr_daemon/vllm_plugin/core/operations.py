"""Work that takes more than one call: a generator that advances one step at each poll.

Runs in the EngineCore process; `Core` starts operations and polls them. A step never waits. An operation yields `None`
("poll me again": a job runs in the workers) or a `Future` ("go on when this is done": the engine is coming to rest),
and returns its result. So a long prepare costs generation nothing but a few short calls, and a swap that found the
engine idle is over in one.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from concurrent.futures import Future
from typing import Any, TypeVar

from dcr_daemon.engine.messages import Answer, Pending, done, refused
from dcr_daemon.engine.port import EngineGone
from dcr_daemon.errors import DcrError

T = TypeVar("T")
JobSteps = Generator[Future[Any] | None, None, T]
Steps = JobSteps[Any]


class Operation:
    """One running call. `kind`: the call's name, for messages. An operation with `so_far` can be preempted by any other
    call; its answer is then what `so_far` returns."""

    def __init__(self, call_id: str, kind: str, steps: Steps, so_far: Callable[[], object] | None = None) -> None:
        self.id = call_id
        self.kind = kind
        self.answer: Answer | None = None
        self._steps = steps
        self._so_far = so_far

    @property
    def live(self) -> bool:
        return self.answer is None

    def advance(self) -> Answer | Future[Answer]:
        """Take the next step. An operation that has ended returns its answer again."""
        return self._step(lambda: next(self._steps))

    def end(self, error: DcrError) -> None:
        """End the operation with an error; its clean-up runs now."""
        self._close(refused(self.id, error))

    @property
    def preemptible(self) -> bool:
        return self._so_far is not None

    def preempt(self) -> None:
        """End a preemptible operation; its answer is the work done so far."""
        if self._so_far is not None:
            self._close(done(self.id, self._so_far()))

    def _close(self, answer: Answer) -> None:
        if self.live:
            self.answer = answer
            self._steps.close()

    def _step(self, advance: Callable[[], Future[Any] | None]) -> Answer | Future[Answer]:
        if self.answer is not None:
            return self.answer
        try:
            waits_for = advance()
        except StopIteration as stop:
            self.answer = done(self.id, stop.value)
            return self.answer
        except DcrError as error:
            self.answer = refused(self.id, error)
            return self.answer
        except Exception as error:
            # The next poll gets this answer, and the next call does not find a busy engine.
            gone = EngineGone(f"{self.kind} failed: {error}", hint="attach again; see the server's log")
            self.answer = refused(self.id, gone)
            raise
        if waits_for is None:
            return Pending(id=self.id)
        return self._after(waits_for)

    def _after(self, waits_for: Future[Any]) -> Future[Answer]:
        """Continue when the future is done; its error is thrown into the operation."""
        outer: Future[Answer] = Future()

        def proceed(rested: Future[Any]) -> None:
            error = rested.exception()
            try:
                answer = self._step(lambda: self._steps.throw(error) if error else next(self._steps))
            except Exception as unforeseen:  # noqa: BLE001  a future swallows what its callback raises
                outer.set_exception(unforeseen)
                return
            if isinstance(answer, Future):
                answer.add_done_callback(lambda inner: outer.set_result(inner.result()))
            else:
                outer.set_result(answer)

        waits_for.add_done_callback(proceed)
        return outer

"""Sends a small download or a LIST a second time, on another connection, when it is silent for longer than others were.

A stalled connection would cost a small request its whole window without progress, and many of them are made one after
another. But slow is not dead: what counts is the time without a byte, against what others of its kind have waited for
their first one lately; a request that was slow and was answered makes the next ones wait longer. Whatever happens, at
most `SHARE` of all are sent again, and `SAVED` in a row.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from dcr_daemon import runtime
from dcr_daemon.store.retry import Transient

T = TypeVar("T")

FIRST = 1.0  #: seconds of silence before the second request, while nothing is known about the store
LEAST = 0.3  #: seconds; no silence is shorter
MOST = 3  #: requests for the same at a time; each waits twice as long as the one before it
SHARE = 0.25  #: second requests that each answered one allows,
SAVED = 8.0  #: and how many of them are saved up
LOOKS = 4  #: at the progress during a silence; a process that was itself held up has looked once only


class Answer:
    """When one of the requests has heard from the store."""

    def __init__(self) -> None:
        self.began = runtime.monotonic()
        self.waited: float | None = None  #: seconds until its first byte, or its end if it has none
        self.moved = False  #: since somebody looked last

    def heard(self) -> None:
        """Bytes have come, or the answer that there are none."""
        self.moved = True
        if self.waited is None:
            self.waited = runtime.monotonic() - self.began


Send = Callable[[Answer], Coroutine[Any, Any, T]]


class Hedge:
    """What requests of one kind have waited for their first byte, and how many more may be sent twice.

    The estimate is that of TCP's retransmission timer (RFC 6298): the mean and four times the mean deviation.
    """

    def __init__(self) -> None:
        self._mean: float | None = None
        self._deviation = 0.0
        self._allowed = SAVED

    @property
    def silence(self) -> float:
        """Seconds of silence after which a second request is sent."""
        return FIRST if self._mean is None else max(LEAST, self._mean + 4 * self._deviation)

    async def race(self, send: Send[T]) -> T:
        """What the first request to be answered returns or raises; the others are cancelled.

        `send` tells its `Answer` of each byte that arrives. It raises `Transient` where a request was not answered:
        that is raised if all of them do.
        """
        requests = dict[asyncio.Task[T], Answer]()
        failure: Transient | None = None
        sent, silence, looks = 0, self.silence, 0
        try:
            while True:
                if not sent or (looks >= LOOKS and not failure and self._may_send(sent)):
                    answer = Answer()
                    requests[asyncio.create_task(send(answer))] = answer
                    sent, looks, silence = sent + 1, 0, silence * (2 if sent else 1)
                done, _ = await asyncio.wait(requests, timeout=silence / LOOKS, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    answer = requests.pop(task)
                    try:
                        return self._answered(task, answer)
                    except Transient as error:
                        failure = failure or error
                if failure and not requests:
                    raise failure
                looks = 0 if any(answer.moved for answer in requests.values()) else looks + 1
                for answer in requests.values():
                    answer.moved = False
        finally:
            for task in requests:
                task.cancel()
            await asyncio.gather(*requests, return_exceptions=True)

    def _may_send(self, sent: int) -> bool:
        if sent >= MOST or self._allowed < 1.0:
            return False
        self._allowed -= 1.0
        return True

    def _answered(self, task: asyncio.Task[T], answer: Answer) -> T:
        """What `task` returns or raises; an error that the store has answered with is an answer too."""
        if not isinstance(task.exception(), Transient):
            answer.heard()
            self._learn(answer.waited or 0.0)
            self._allowed = min(SAVED, self._allowed + SHARE)
        return task.result()

    def _learn(self, waited: float) -> None:
        if self._mean is None:
            self._mean, self._deviation = waited, waited / 2
        else:
            self._deviation += (abs(waited - self._mean) - self._deviation) / 4
            self._mean += (waited - self._mean) / 8

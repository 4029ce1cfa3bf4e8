"""Downloads one object, over as many tries as it takes.

The bytes that have arrived are kept when a connection breaks, and a range request continues after them as long as the
store says that it is the same object (ETag); otherwise it starts again. Never holds more than the limit.
"""

from __future__ import annotations

import asyncio
import io
from dataclasses import dataclass
from typing import Any

from dcr_daemon.errors import Corrupt
from dcr_daemon.store.instrumented import Request
from dcr_daemon.store.retry import PROGRESS_BYTES, Transient
from dcr_daemon.store.s3.faults import SDK_ERRORS, Unranged, translate

PIECE = 256 << 10  #: bytes read at once from an answer


@dataclass(frozen=True, slots=True)
class Try:
    """One request in flight: what is told about it, and its deadline of `seconds` without progress."""

    request: Request
    clock: asyncio.Timeout
    seconds: float

    def renew(self) -> None:
        self.clock.reschedule(asyncio.get_running_loop().time() + self.seconds)


class Download:
    """Reads `place` (bucket and key) into memory, at most `limit` bytes. `where` names it for people."""

    def __init__(self, client: Any, place: dict[str, str], *, where: str, limit: int) -> None:
        self._client = client
        self._place = place
        self._where = where
        self._limit = limit
        self._etag: str | None = None
        self._data = io.BytesIO()
        self.arrived = 0  #: bytes over all tries; never falls

    async def run(self, attempt: Try) -> bytes:
        """One try. Raises `Transient` when the next one may go on, and what `translate` makes of other errors."""
        have = self._data.tell()
        ranged = {"Range": f"bytes={have}-"} if have else {}
        try:
            answer = await self._client.get_object(**self._place, **ranged)
        except SDK_ERRORS as error:
            fault = translate(error, key=self._place["Key"], where=self._where)
            if not isinstance(fault, Unranged):
                raise
            self._restart()
            raise Transient("the object shrank while it was read") from error
        body = answer["Body"]
        async with body:
            await self._drain(body, attempt, self._total(answer, have))
        return self._data.getvalue()

    def _total(self, answer: dict[str, Any], have: int) -> int:
        """Size of the whole object; starts over if the answer is not the continuation that was asked for."""
        begin, _, size = str(answer.get("ContentRange", "")).removeprefix("bytes ").partition("/")
        etag = answer.get("ETag")
        if have and (begin.partition("-")[0] != str(have) or etag != self._etag):
            self._restart()
            if begin:
                raise Transient("the object changed while it was read")
        if begin and not size.isdecimal():  # "*": what is there is of no use, the next try asks for the whole
            self._restart()
            raise Transient("the answer does not tell the size of the object")
        if "ContentLength" not in answer:
            raise Transient("the answer does not tell its length, so that a cut could not be seen")
        self._etag = etag
        total = int(size) if begin else int(answer["ContentLength"])
        if total > self._limit:
            raise Corrupt(
                f"{self._where} has {total} bytes, at most {self._limit} were expected",
                hint="the object was damaged or is not what its name says",
            )
        return total

    async def _drain(self, body: Any, attempt: Try, total: int) -> None:
        milestone = self.arrived + PROGRESS_BYTES
        while piece := await body.read(PIECE):
            self._data.write(piece)
            self.arrived += len(piece)
            attempt.request.bytes += len(piece)
            if self._data.tell() > total:
                raise Corrupt(f"{self._where}: more bytes came than the {total} that the store announced")
            if self.arrived >= milestone:
                milestone = self.arrived + PROGRESS_BYTES
                attempt.renew()
        if self._data.tell() != total:  # a clean end, but too early: proxies do that
            raise Transient(f"the answer ended after {self._data.tell()} of {total} bytes")

    def _restart(self) -> None:
        self._data = io.BytesIO()
        self._etag = None

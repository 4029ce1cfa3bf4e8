"""Downloads one object, over as many tries as it takes.

The bytes that have arrived are kept when a connection breaks, and a range request continues after them as long as the
store says that it is the same object (ETag); otherwise it starts again. With a `PartialFile` they are kept over
restarts of the process too; what an earlier process kept has no ETag, and is right if the object's digest is. Never
holds more than the limit.
"""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any

from dcr_daemon import runtime
from dcr_daemon.errors import Corrupt
from dcr_daemon.store.partial import PartialFile
from dcr_daemon.store.retry import Transient
from dcr_daemon.store.s3.attempt import Try
from dcr_daemon.store.s3.faults import SDK_ERRORS, Unranged, translate

PIECE = 256 << 10  #: bytes read at once from an answer
KEEP_SECONDS = 5.0  #: a process that is killed loses what arrived in the last so many seconds


class Download:
    """Reads `place` (bucket and key) into memory, at most `limit` bytes.

    Args:
        where: names it for people.
        told: called with the number of bytes, whenever some have arrived.
    """

    def __init__(
        self,
        client: Any,
        place: dict[str, str],
        *,
        where: str,
        limit: int,
        told: Callable[[int], None],
        keep: PartialFile | None = None,
    ) -> None:
        self._client = client
        self._place = place
        self._where = where
        self._limit = limit
        self._told = told
        self._file = keep
        self._etag: str | None = None
        self._data = io.BytesIO()
        self._restarts = 0
        self._kept_at = runtime.monotonic()

    def branch(self, told: Callable[[int], None]) -> Download:
        """Another download of the object that goes on after what has arrived so far; nothing of it is kept on disk."""
        branch = Download(self._client, self._place, where=self._where, limit=self._limit, told=told)
        branch._etag, branch._restarts = self._etag, self._restarts
        branch._data.write(self.body)
        return branch

    @property
    def progress(self) -> tuple[int, int]:
        """How far it has come, to compare branches: how often it has begun anew, and the bytes that have arrived."""
        return self._restarts, self._data.tell()

    async def resume(self) -> bool:
        """Continue after what an earlier process kept. Returns whether that is all that the limit allows."""
        if self._file:
            self._data.write(await self._file.load())
        if self._data.tell() > self._limit:
            await self._restart()
        return bool(self._data.tell()) and self._data.tell() == self._limit

    @property
    def body(self) -> bytes:
        """What has arrived."""
        return self._data.getvalue()

    async def run(self, attempt: Try) -> bytes:
        """One try. Raises `Transient` when the next one may go on, and what `translate` makes of other errors."""
        have = self._data.tell()
        ranged = {"Range": f"bytes={have}-"} if have else {}
        try:
            answer = await self._client.get_object(**self._place, **ranged)
        except SDK_ERRORS as error:
            fault = translate(error, operation="get", key=self._place["Key"], where=self._where)
            if not isinstance(fault, Unranged):
                raise
            await self._restart()
            raise Transient("the object shrank while it was read") from error
        body = answer["Body"]
        async with body:
            total = await self._total(answer, have)
            try:
                await self._drain(body, attempt, total)
            except BaseException:
                await self._keep()
                raise
        return self.body

    async def _total(self, answer: dict[str, Any], have: int) -> int:
        """Size of the whole object; starts over if the answer is not the continuation that was asked for."""
        begin, _, size = str(answer.get("ContentRange", "")).removeprefix("bytes ").partition("/")
        etag = answer.get("ETag")
        if have and (begin.partition("-")[0] != str(have) or self._etag not in (None, etag)):
            await self._restart()
            if begin:
                raise Transient("the object changed while it was read")
        if begin and not size.isdecimal():  # "*": what is there is of no use, the next try asks for the whole
            await self._restart()
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
        while piece := await body.read(PIECE):
            self._data.write(piece)
            self._told(len(piece))
            attempt.moved(len(piece))
            if self._data.tell() > total:
                raise Corrupt(f"{self._where}: more bytes came than the {total} that the store announced")
            if runtime.monotonic() - self._kept_at >= KEEP_SECONDS:
                await self._keep()
        if self._data.tell() != total:  # a clean end, but too early: proxies do that
            raise Transient(f"the answer ended after {self._data.tell()} of {total} bytes")

    async def _keep(self) -> None:
        """Keep on disk what has arrived since the last time."""
        self._kept_at = runtime.monotonic()
        if self._file and self._data.tell() > self._file.kept:
            await self._file.append(bytes(self._data.getbuffer()[self._file.kept :]))

    async def _restart(self) -> None:
        self._data = io.BytesIO()
        self._restarts += 1
        self._etag = None
        if self._file:
            await self._file.clear()

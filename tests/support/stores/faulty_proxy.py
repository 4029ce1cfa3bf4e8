"""An HTTP proxy in front of a store that misbehaves as networks and stores do, by a seed.

It lives in the loop of the test that made it and passes requests on byte for byte, Host and signature included.
`weather` says what may happen to a request, and how often; it may change at any time. `plan` says what happens to
one request, chosen by its method, its path and its number.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import socket
import struct
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Self


class Fault(Enum):
    UNAVAILABLE = "503 ServiceUnavailable, not passed on"
    SLOW_DOWN = "503 SlowDown, not passed on"
    RESET_BEFORE = "the connection is reset before the store sees the request"
    RESET_AFTER = "the store does what it is asked; its answer is lost"
    TRUNCATE = "the answer breaks off in the middle"
    STALL = "the answer stops in the middle, until the weather changes"
    TRICKLE = "the answer comes at 400 bytes a second, until the weather changes"
    BLACK_HOLE = "nothing goes anywhere, until the weather changes"


RATE = 400  #: bytes per second
NAMES = {Fault.UNAVAILABLE: "ServiceUnavailable", Fault.SLOW_DOWN: "SlowDown"}
Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]


@dataclass(kw_only=True)
class Planned:
    """What befalls requests `nth` to `nth + times - 1` of those whose method and path `matches` accepts.

    `fault`: as in the weather. `before`, `after`: called before the store sees the request, and when it has answered
    but the client does not know. `edit`: makes another body of the answer's, of the same length.
    """

    matches: Callable[[str, str], bool] = lambda method, path: True
    nth: int = 1
    times: int = 1
    fault: Fault | None = None
    before: Callable[[], None] = lambda: None
    after: Callable[[], None] = lambda: None
    edit: Callable[[bytes], bytes] = bytes
    seen: int = 0

    @property
    def met(self) -> bool:
        """Whether it has befallen a request."""
        return self.seen >= self.nth

    def takes(self, method: str, path: str) -> bool:
        if not self.matches(method, path):
            return False
        self.seen += 1
        return self.nth <= self.seen < self.nth + self.times


class Closed(Exception):
    """One end of a connection has gone."""


class BadNetwork:
    """A proxy on a port of its own; `seen` counts what it did to requests."""

    def __init__(self, upstream: str, seed: int = 0) -> None:
        self._host, _, port = upstream.removeprefix("http://").partition(":")
        self._port = int(port)
        self._random = random.Random(seed)
        self._weather: dict[Fault, float] = {}
        self._changed = asyncio.Event()
        self._connections: set[asyncio.Task[None]] = set()
        self._planned: list[Planned] = []
        self.seen: Counter[Fault | None] = Counter()
        self.url = ""

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0, limit=1 << 20)
        self.url = f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()
        for task in self._connections:
            task.cancel()
        await asyncio.gather(*self._connections, return_exceptions=True)

    def weather(self, faults: Mapping[Fault, float] | None = None) -> None:
        """From now on each request meets each of `faults` with this probability; what was held up by others ends."""
        self._weather = dict(faults or {})
        self._changed.set()
        self._changed = asyncio.Event()

    def plan(self, planned: Planned) -> Planned:
        """From now on `planned` counts requests; the weather does not touch the ones that it takes."""
        self._planned.append(planned)
        return planned

    def clear(self) -> None:
        """Nothing is planned any more, the weather is good, and what was held up ends."""
        self._planned.clear()
        self.weather()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._connections.add(task)
        try:
            with contextlib.suppress(Closed, OSError, asyncio.IncompleteReadError, asyncio.CancelledError):
                while True:
                    await self._request((reader, writer), await _read_message(reader))
        finally:
            self._connections.discard(task)
            _reset(writer)

    async def _request(self, client: Streams, request: bytes) -> None:
        planned = self._taken(*request.split(b" ", 2)[:2])
        fault = planned.fault if planned else self._draw()
        self.seen[fault] += 1
        if planned:
            planned.before()
        changed = self._changed
        if fault is Fault.RESET_BEFORE:
            raise Closed
        if fault is Fault.BLACK_HOLE:
            await changed.wait()
            raise Closed
        if fault in NAMES:
            client[1].write(_refusal(NAMES[fault]))
            return
        async with self._upstream() as (reader, writer):
            writer.write(request)
            answer = await _read_message(reader, bodiless=request.startswith(b"HEAD "))
        if planned:
            planned.after()
            answer = _edited(answer, planned.edit)
        if fault is Fault.RESET_AFTER:
            raise Closed
        await self._answer(client[1], answer, fault, changed)

    def _taken(self, method: bytes, path: bytes) -> Planned | None:
        """The first plan that takes this request; all of them count it."""
        takers = [planned for planned in self._planned if planned.takes(method.decode(), path.decode())]
        return takers[0] if takers else None

    def _draw(self) -> Fault | None:
        at = self._random.random()
        for fault, share in self._weather.items():
            if at < share:
                return fault
            at -= share
        return None

    @contextlib.asynccontextmanager
    async def _upstream(self) -> AsyncIterator[Streams]:
        reader, writer = await asyncio.open_connection(self._host, self._port, limit=1 << 20)
        try:
            yield reader, writer
        finally:
            writer.close()

    async def _answer(
        self, writer: asyncio.StreamWriter, answer: bytes, fault: Fault | None, changed: asyncio.Event
    ) -> None:
        half = len(answer) // 2
        if fault is Fault.TRUNCATE:
            writer.write(answer[:half])
            await writer.drain()
            raise Closed
        if fault is Fault.STALL:
            writer.write(answer[:half])
            await changed.wait()
            answer = answer[half:]
        while fault is Fault.TRICKLE and answer and not changed.is_set():
            writer.write(answer[: RATE // 10])
            answer = answer[RATE // 10 :]
            await asyncio.sleep(0.1)
        writer.write(answer)
        await writer.drain()


async def _read_message(reader: asyncio.StreamReader, *, bodiless: bool = False) -> bytes:
    """One request or answer, head and body, as it came. Raises `Closed` at the end of the connection."""
    head = await reader.readuntil(b"\r\n\r\n")
    fields = dict(line.lower().split(b":", 1) for line in head.split(b"\r\n")[1:] if b":" in line)
    if bodiless or head.split(None, 2)[1] in (b"204", b"304"):
        return head
    if b"chunked" in fields.get(b"transfer-encoding", b""):
        return head + await _read_chunks(reader)
    return head + await reader.readexactly(int(fields.get(b"content-length", b"0")))


async def _read_chunks(reader: asyncio.StreamReader) -> bytes:
    body = b""
    while True:
        line = await reader.readuntil(b"\r\n")
        size = int(line.split(b";")[0], 16)
        body += line + await reader.readexactly(size + 2)
        if size == 0:
            return body


def _edited(answer: bytes, edit: Callable[[bytes], bytes]) -> bytes:
    """The answer with another body, if it is a whole object."""
    head, end, body = answer.partition(b"\r\n\r\n")
    return head + end + edit(body) if body and head.startswith(b"HTTP/1.1 20") else answer


def _refusal(code: str) -> bytes:
    body = f"<Error><Code>{code}</Code><Message>try again</Message></Error>".encode()
    head = f"HTTP/1.1 503 {code}\r\nContent-Type: application/xml\r\nContent-Length: {len(body)}\r\n\r\n"
    return head.encode() + body


def _reset(writer: asyncio.StreamWriter) -> None:
    """Close with a RST where data may still be under way: no polite end."""
    connection = writer.get_extra_info("socket")
    if connection is not None and connection.fileno() >= 0:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()

"""A tiny HTTP server for probes and Prometheus: GET /metrics, /livez, /readyz.

It runs in the daemon's own loop, so an answer to /livez proves that the loop turns. One request per connection,
bounded in bytes and seconds; nothing of it is meant for the open internet.
"""

from __future__ import annotations

import asyncio
import contextlib
import json

from dcr_daemon.errors import UsageError
from dcr_daemon.observe.health import Health
from dcr_daemon.observe.metrics import CONTENT_TYPE, Metrics

_HEAD_LIMIT = 8192  #: bytes of a request head
_PATIENCE = 5.0  #: seconds for a request to arrive
_REASONS = {200: "OK", 400: "Bad Request", 404: "Not Found", 405: "Method Not Allowed", 503: "Service Unavailable"}
Page = tuple[int, str, bytes]


class ProbeServer:
    """Serve until `close`. `listen` is `HOST:PORT`; port 0 takes a free one, `port` tells which."""

    def __init__(self, listen: str, health: Health, metrics: Metrics) -> None:
        self._host, self._wanted = parse_listen(listen)
        self._health, self._metrics = health, metrics
        self._server: asyncio.Server | None = None
        self.port = 0

    async def start(self) -> None:
        """Raises `UsageError` when the address cannot be bound."""
        try:
            self._server = await asyncio.start_server(self._serve, self._host, self._wanted, limit=_HEAD_LIMIT)
        except OSError as error:
            raise UsageError(
                f"cannot listen on {self._host}:{self._wanted}: {error.strerror or error}",
                hint="choose another --listen",
            ) from error
        self.port = self._server.sockets[0].getsockname()[1]

    async def close(self) -> None:
        if self._server:
            self._server.close()
            await self._server.wait_closed()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError, TimeoutError, asyncio.IncompleteReadError):
            async with asyncio.timeout(_PATIENCE):
                status, kind, body = self._answer(await _request_line(reader))
                head = (
                    f"HTTP/1.1 {status} {_REASONS[status]}\r\nContent-Type: {kind}\r\nContent-Length: {len(body)}\r\n"
                )
                writer.write(f"{head}Cache-Control: no-store\r\nConnection: close\r\n\r\n".encode() + body)
                await writer.drain()
        writer.close()

    def _answer(self, line: str) -> Page:
        match line.split():
            case ["GET" | "HEAD", target, version] if version.startswith("HTTP/"):
                return self._page(target.partition("?")[0])
            case [_, _, version] if version.startswith("HTTP/"):
                return _text(405, "only GET")
        return _text(400, "not an HTTP request")

    def _page(self, path: str) -> Page:
        match path:
            case "/metrics":
                return 200, CONTENT_TYPE, self._metrics.exposition()
            case "/livez":
                return _text(200, "live")
            case "/readyz":
                body = json.dumps({"ready": self._health.ready, "status": self._health.status}).encode() + b"\n"
                return (200 if self._health.ready else 503), "application/json", body
        return _text(404, "try /metrics, /livez or /readyz")


def _text(status: int, text: str) -> Page:
    return status, "text/plain; charset=utf-8", text.encode() + b"\n"


async def _request_line(reader: asyncio.StreamReader) -> str:
    """The first line; the rest of the head is read and dropped. Empty when the head is over the limit."""
    try:
        head = await reader.readuntil(b"\r\n\r\n")
    except asyncio.LimitOverrunError:
        return ""
    return head.split(b"\r\n", 1)[0].decode("latin-1")


def parse_listen(listen: str) -> tuple[str, int]:
    """`HOST:PORT` into its parts; brackets around an IPv6 host. Raises `UsageError`."""
    host, colon, port = listen.rpartition(":")
    if not colon or not port.isdigit() or int(port) > 65535:
        raise UsageError(f"--listen {listen} is not HOST:PORT", hint="for example 127.0.0.1:9464")
    return host.strip("[]") or "127.0.0.1", int(port)

"""The HTTP server of a daemon's probes and metrics: GET /metrics, /livez, /readyz, /status.

It runs in the daemon's own event loop, so an answer to /livez proves that the loop runs. Every connection is closed
after one answer, and after 5 seconds in any case. The server has no access control: bind it to an address that only
the machine or its cluster reaches.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Mapping
from typing import Any

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError

import dcr_daemon
from dcr_daemon.errors import UsageError
from dcr_daemon.observe.health import Health
from dcr_daemon.observe.metrics import CONTENT_TYPE, Metrics

_TIMEOUT = 5.0  #: seconds until a connection is closed, also one on which no request or only a part of one has come
_SHUTDOWN = 1.0  #: seconds for answers under way when the daemon ends

_logger = logging.getLogger(__name__)


class _NotFromRequests(logging.Filter):
    """Drops what aiohttp logs, with a traceback, about requests that are not HTTP: a port scan is no error of ours."""

    def filter(self, record: logging.LogRecord) -> bool:
        return not (record.exc_info and isinstance(record.exc_info[1], HttpProcessingError))


_logger.addFilter(_NotFromRequests())


class ProbeServer:
    """Serves from `start` to `close`. `listen` is `HOST:PORT`; with port 0, `port` is the free one that was taken.

    `info` (stream, replica) is part of the answer to /status.
    """

    def __init__(self, listen: str, health: Health, *, metrics: Metrics, info: Mapping[str, str] | None = None) -> None:
        self._host, self._wanted = parse_listen(listen)
        self._health, self._metrics, self._info = health, metrics, dict(info or {})
        self._runner: web.AppRunner | None = None
        self._listener: asyncio.Server | None = None
        self.port = 0

    async def start(self) -> None:
        """Raises `UsageError` when the address cannot be bound."""
        app = web.Application()
        app.on_response_prepare.append(_close_after)
        app.router.add_get("/metrics", self._exposition)
        app.router.add_get("/livez", self._live)
        app.router.add_get("/readyz", self._ready)
        app.router.add_get("/status", self._status)
        app.router.add_get("/{other:.*}", self._unknown)
        self._runner = web.AppRunner(app, access_log=None, logger=_logger, shutdown_timeout=_SHUTDOWN)
        await self._runner.setup()
        try:
            loop = asyncio.get_running_loop()
            self._listener = await loop.create_server(self._connection, self._host, self._wanted)
        except OSError as error:
            await self.close()
            raise UsageError(
                f"cannot listen on {self._host}:{self._wanted}: {error.strerror or error}",
                hint="choose another --listen",
            ) from error
        self.port = self._listener.sockets[0].getsockname()[1]

    async def close(self) -> None:
        if self._listener:
            self._listener.close()
        if self._runner:
            await self._runner.cleanup()

    def _connection(self) -> web.RequestHandler:
        """The protocol of one connection. aiohttp by itself waits for a first request without limit."""
        assert self._runner is not None, "start makes it"
        assert self._runner.server is not None, "start makes it"
        connection = self._runner.server()
        asyncio.get_running_loop().call_later(_TIMEOUT, connection.force_close)
        return connection

    async def _exposition(self, request: web.Request) -> web.Response:
        return web.Response(body=self._metrics.exposition(), headers={"Content-Type": CONTENT_TYPE})

    async def _live(self, request: web.Request) -> web.Response:
        return web.Response(text="live\n")

    async def _ready(self, request: web.Request) -> web.Response:
        state = {"ready": self._health.ready, "status": self._health.status}
        return _json(state, 200 if self._health.ready else 503)

    async def _status(self, request: web.Request) -> web.Response:
        return _json(self._info | self._health.report() | {"daemon_version": dcr_daemon.__version__})

    async def _unknown(self, request: web.Request) -> web.Response:
        return web.Response(text="try /metrics, /livez, /readyz or /status\n", status=404)


def _json(value: dict[str, Any], status: int = 200) -> web.Response:
    return web.Response(body=json.dumps(value).encode() + b"\n", status=status, content_type="application/json")


async def _close_after(request: web.Request, response: web.StreamResponse) -> None:
    response.headers["Cache-Control"] = "no-store"
    response.force_close()


def parse_listen(listen: str) -> tuple[str, int]:
    """`HOST:PORT` as host and port; an IPv6 host may stand in brackets. Raises `UsageError`."""
    host, colon, port = listen.rpartition(":")
    if not colon or not port.isdigit() or int(port) > 65535:
        raise UsageError(f"--listen {listen} is not HOST:PORT", hint="for example 127.0.0.1:9464")
    return host.strip("[]") or "127.0.0.1", int(port)

"""The engine's private socket, and the gate before its public port.

Runs in the API server, which loads `Endpoint` as an endpoint plugin and calls `init_state` before it listens. The
subscriber's calls (`engine.messages`) come in over the socket, go to every EngineCore as utility calls, and the merged
answer goes back. `EngineGroup` sets two fields: `at_least` of an `Attach`, so that all engines give the same token, and
`hold` of a `Swap` or `FinishAdopted` when there are several engines, so that they commit together or not at all. It
also polls long operations.

Promises: one socket per engine group, opened by the API server with client index 0, mode 0600, in a private directory;
a live socket is never replaced (must E3). The port stays shut until the engine is proved and serves (must E2), and
`/health` answers 503 whenever the engine is dead or holds no known version. A call that has arrived runs to its end
even if its client disconnects.
"""

from __future__ import annotations

import asyncio
import fcntl
import logging
import os
import socket
import stat
import time
from argparse import Namespace
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import msgspec

from dcr_daemon.engine import messages
from dcr_daemon.engine.messages import AnyAnswer, AnyCall, Attach, Pending
from dcr_daemon.engine.port import EngineGone, EngineStatus
from dcr_daemon.errors import DcrError, UsageError
from dcr_daemon.vllm_plugin import compat
from dcr_daemon.vllm_plugin.compat import UnsupportedVllm
from dcr_daemon.vllm_plugin.core.hooks import METHOD
from dcr_daemon.vllm_plugin.data_parallel import JointDecision, after_both_rounds, joint_verdict, merge
from dcr_daemon.vllm_plugin.settings import Settings

log = logging.getLogger("vllm.dcr")
POLL_FIRST, POLL = 0.005, 0.03  #: seconds between polls of an operation; a shorter interval would slow generation
SCRUB_POLL = 0.5  #: seconds between polls of a scrub, which nobody waits for
WATCH = 0.25  #: seconds between polls of the engine's status
CONNECTIONS = 64  #: clients at once; a subscriber needs one


class Endpoint:
    """The endpoint plugin of one API-server process."""

    name = "dcr"
    required_tasks = None

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._ready = False
        self._watcher: asyncio.Task[None] | None = None
        self._server: SocketServer | None = None

    def attach_router(self, app: Any) -> None:
        """Replace GET /health by one that also checks whether the weights are a known version."""
        if self._settings.socket is None:
            return
        from fastapi import Response

        async def health() -> Any:
            return Response(status_code=200 if await self._healthy(app.state) else 503)

        app.add_api_route("/health", health, methods=["GET"])

    async def init_state(self, engine_client: Any, state: Any, args: Namespace) -> None:  # vLLM passes them by position
        """Open the socket, then wait until the engine serves (unless `DCR_GATE=health`).

        Raises `UnsupportedVllm` if the socket cannot be opened safely, or the general plugin was not loaded.
        """
        if engine_client is None or self._settings.socket is None:
            return
        compat.require_start(os.environ)
        engines = EngineGroup(engine_client.engine_core)
        if engine_client.engine_core.client_index == 0:
            self._server = SocketServer(self._settings.socket, engines)
            await self._server.open()
        if self._settings.gate == "port":
            log.info("dcr: the port stays shut until %s has brought a proved version", self._settings.socket)
            await self._wait_served(engines)
            log.info("dcr: the engine is proved and serves; the port opens")
        self._watcher = asyncio.create_task(self._watch(engines), name="dcr-watch")

    async def _wait_served(self, engines: EngineGroup) -> None:
        """Raises `EngineGone` if the engine dies first, which ends the server."""
        status = await engines.status()
        while not status.serving or status.version is None:
            await asyncio.sleep(WATCH)
            status = await engines.status()

    async def _watch(self, engines: EngineGroup) -> None:
        """Keep `_ready` up to date: a pause does not end readiness, an unknown version does."""
        try:
            while True:
                status = await engines.status()
                self._ready = status.version is not None and (self._ready or status.serving)
                await asyncio.sleep(WATCH)
        finally:
            self._ready = False

    async def _healthy(self, state: Any) -> bool:
        from vllm.v1.engine.exceptions import EngineDeadError

        try:
            await state.engine_client.check_health()
        except EngineDeadError:
            return False
        return self._ready


class EngineGroup:
    """All engines behind one API server, called as one."""

    def __init__(self, core_client: Any) -> None:
        self._client = core_client
        self._count = 1  #: number of engines that answered the last call
        self._tokens = 0
        self._status_calls = 0

    async def call(self, call: AnyCall) -> AnyAnswer:
        """Carry out one call to its end. Raises `EngineGone` if the engine process is dead."""
        if isinstance(call, Attach):
            # Every attach passes here, so all engines get the same token.
            self._tokens += 1
            call = msgspec.structs.replace(call, at_least=self._tokens)
        if isinstance(call, messages.Swap | messages.FinishAdopted) and self._count > 1:
            return await self._call_jointly(call)
        return merge(call, await self._run_to_end(call))

    async def _call_jointly(self, call: messages.Swap | messages.FinishAdopted) -> AnyAnswer:
        """Commit on all engines or on none: each writes, verifies and holds; then all commit or all roll back (must
        E9).

        If this process dies in between, the engines stay begun and paused, and the next owner finishes them jointly.
        """
        began = time.monotonic()
        held = await self._run_to_end(msgspec.structs.replace(call, hold=True))
        decision = joint_verdict(held)
        if decision is None:
            return merge(call, held)
        end = messages.FinishAdopted(
            id=f"{call.id}-end",
            txn=call.txn,
            token=call.token,
            incarnation=call.incarnation,
            back=decision is JointDecision.ROLL_BACK,
        )
        ended = merge(call, await self._run_to_end(end))
        return after_both_rounds(ended, held, pause=time.monotonic() - began)

    async def _run_to_end(self, call: AnyCall) -> list[AnyAnswer]:
        """The answer of every engine, polled until none is pending."""
        answers = await self._call_all(call)
        interval, longest = POLL_FIRST, SCRUB_POLL if isinstance(call, messages.Scrub) else POLL
        while any(isinstance(answer, Pending) for answer in answers):
            await asyncio.sleep(interval)
            interval = min(longest, interval * 2)
            answers = await self._call_all(messages.Poll(id=call.id))
        return answers

    async def status(self) -> EngineStatus:
        self._status_calls += 1
        answer = await self.call(messages.Status(id=f"status-{self._status_calls}"))
        return messages.result_of(answer, EngineStatus)

    async def _call_all(self, call: AnyCall) -> list[AnyAnswer]:
        from vllm.v1.engine.exceptions import EngineDeadError

        try:
            records = await self._client.call_utility_all_async(METHOD, messages.encode(call))
        except EngineDeadError as error:
            raise EngineGone("the engine process is dead", hint="restart the server") from error
        self._count = len(records)
        return [messages.decode_answer(record) for record in records]


class Connection:
    """One client. `active` while one of its calls is carried out; only then it may not be closed. So a client that
    sends nothing, or half a call, or does not read its answer, blocks nobody."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.active = False
        self._reader = reader
        self._writer = writer

    async def serve(self, answer: Callable[[bytes], Awaitable[AnyAnswer]]) -> None:
        """Answer one call after the other, until the client disconnects or is dropped."""
        try:
            while (body := await messages.read_frame(self._reader)) is not None:
                # The call goes on if the client disconnects; the client can ask for its outcome later (`Outcome`).
                self.active = True
                try:
                    answered = await answer(body)
                finally:
                    self.active = False
                self._writer.write(messages.frame(messages.encode(answered)))
                await self._writer.drain()
        except (OSError, asyncio.IncompleteReadError, UsageError) as error:
            log.info("dcr: a client of the socket disconnected: %s", error)
        finally:
            self._writer.close()

    def drop(self) -> None:
        """Close the connection at once, even if the client has not read everything."""
        self._writer.transport.abort()


class SocketServer:
    """The private unix socket. One task per connection, one call at a time on each. At most `CONNECTIONS`: for a new
    one the oldest connection without a call under way is closed."""

    def __init__(self, path: Path, engines: EngineGroup) -> None:
        self._path = path
        self._engines = engines
        self._connections: list[Connection] = []
        self._server: asyncio.Server | None = None
        self._lock = -1

    async def open(self) -> None:
        """Bind and serve. Raises `UnsupportedVllm` if the directory is not private or a live server has the socket."""
        private_directory(self._path.parent)
        self._lock = take_lock(self._path)
        self._server = await asyncio.start_unix_server(self._connected, sock=bind_private(self._path))
        log.info("dcr: listening on %s", self._path)

    async def close(self) -> None:
        """Stop listening and release the path for the next server."""
        if self._server is not None:
            self._server.close()
            self._path.unlink(missing_ok=True)
            os.close(self._lock)
            self._server = None

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connection = Connection(reader, writer)
        if len(self._connections) >= CONNECTIONS:
            idle = next((other for other in self._connections if not other.active), None)
            if idle is None:
                log.warning("dcr: %d calls are under way; a new client is refused", CONNECTIONS)
                connection.drop()
                return
            self._connections.remove(idle)
            idle.drop()
        self._connections.append(connection)
        try:
            await connection.serve(self._answer)
        finally:
            if connection in self._connections:
                self._connections.remove(connection)

    async def _answer(self, body: bytes) -> AnyAnswer:
        """Decode, carry out, and turn every error into an answer."""
        call_id = ""
        try:
            call = messages.decode_call(body)
            call_id = call.id
            if isinstance(call, messages.Poll):
                raise UsageError("a client may not poll: the server polls until a call has ended")
            return await self._engines.call(call)
        except DcrError as error:
            return messages.refused(call_id, error)
        except Exception as error:  # vLLM raises untyped errors for a utility call
            # Usually a worker has just died and the engine will end. In any case its state must be read again.
            log.exception("dcr: a call failed in the engine")
            return messages.refused(
                call_id, EngineGone(f"the engine failed: {error}", hint="attach again; see the server's log")
            )


def private_directory(path: Path) -> None:
    """Make the socket's directory, mode 0700, or check that an existing one belongs to this user alone."""
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    found = path.stat()
    if found.st_uid != os.geteuid() or stat.S_IMODE(found.st_mode) & 0o077:
        raise UnsupportedVllm(
            f"dcr: the socket's directory {path} is open to others (mode {stat.S_IMODE(found.st_mode):04o}, "
            f"owner {found.st_uid}). Give DCR_SOCKET a directory of its own, owned by this user, mode 0700."
        )


def take_lock(path: Path) -> int:
    """Hold `PATH.lock` for the life of this process, so that a live server's socket is never replaced."""
    lock = os.open(f"{path}.lock", os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(lock)
        raise UnsupportedVllm(
            f"dcr: another live server has the socket {path}. Give every server a DCR_SOCKET of its own."
        ) from None
    return lock


def bind_private(path: Path) -> socket.socket:
    """A bound unix socket, mode 0600 from the start. The caller holds the lock, so an existing socket file is stale."""
    if path.exists() and not path.is_socket():
        raise UnsupportedVllm(f"dcr: {path} exists and is not a socket")
    path.unlink(missing_ok=True)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    mask = os.umask(0o177)
    try:
        listener.bind(str(path))
    finally:
        os.umask(mask)
    listener.setblocking(False)
    return listener

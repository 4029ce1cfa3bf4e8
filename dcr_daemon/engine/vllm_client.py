"""A running vLLM server as an engine: the client of its plugin's private socket.

Each call uses a connection of its own, so a call that is given up leaves nothing behind that a later one could read
(must E3). The call itself goes on inside the server, and `outcome` tells how it ended. The owner is known by the token
and the incarnation that `attach` returned, not by the connection. Any number of instances may exist: the engine decides
which one owns it.
"""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path
from typing import TypeVar

from dcr_daemon import runtime
from dcr_daemon.engine import messages
from dcr_daemon.engine.messages import RankChecksums, Report
from dcr_daemon.engine.port import (
    Attached,
    EngineGone,
    EngineStatus,
    Prepared,
    Scrubbed,
    StreamFacts,
    Swapped,
    Transaction,
)
from dcr_daemon.errors import Fenced, UsageError

T = TypeVar("T")
ANSWER_TIMEOUT = 1800.0  #: seconds that a caller waits for one answer; the call goes on inside the server


class VllmEngine:
    """The engine port over a unix socket.

    Args:
        socket_path: the path that `DCR_SOCKET` names on the server.
        timeout: seconds after which waiting for an answer ends with `EngineGone`.
    """

    def __init__(self, socket_path: Path | str, *, timeout: float = ANSWER_TIMEOUT) -> None:
        self.path = Path(socket_path)
        self._timeout = timeout
        self._nonce = runtime.nonce()
        self._calls = 0
        self._token = 0
        self._incarnation = ""

    async def attach(self, facts: StreamFacts) -> Attached:
        call = messages.Attach(id=self._id(), facts=facts, token=self._token, incarnation=self._incarnation)
        # If the answer is lost, the engine may have given a new token, and this client's old one says nothing any more.
        self._token, self._incarnation = 0, ""
        try:
            attached = await self._call(call, Attached)
        except Fenced:
            self._token, self._incarnation = call.token, call.incarnation
            raise
        self._token, self._incarnation = attached.token, attached.incarnation
        return attached

    async def prove(self, version: int, vector: str, label: str, loaded: str = "") -> None:
        call = messages.Prove(
            id=self._id(),
            version=version,
            vector=vector,
            label=label,
            loaded=loaded,
            token=self._owner(),
            incarnation=self._incarnation,
        )
        await self._call(call, None)

    async def serve(self) -> None:
        await self._call(messages.Serve(id=self._id(), token=self._owner(), incarnation=self._incarnation), None)

    async def prepare(self, txn: Transaction) -> Prepared:
        call = messages.Prepare(id=self._id(), txn=txn, token=self._owner(), incarnation=self._incarnation)
        return await self._call(call, Prepared)

    async def swap(self, txn: str) -> Swapped:
        call = messages.Swap(id=self._id(), txn=txn, token=self._owner(), incarnation=self._incarnation)
        return await self._call(call, Swapped)

    async def outcome(self, txn: str) -> Swapped:
        return await self._call(messages.Outcome(id=self._id(), txn=txn), Swapped)

    async def finish_adopted(self, txn: str) -> Swapped:
        call = messages.FinishAdopted(id=self._id(), txn=txn, token=self._owner(), incarnation=self._incarnation)
        return await self._call(call, Swapped)

    async def drop(self) -> None:
        await self._call(messages.Drop(id=self._id(), token=self._owner(), incarnation=self._incarnation), None)

    async def load(self, version: int, files: list[str], vector: str, label: str) -> Swapped:
        call = messages.Load(
            id=self._id(),
            version=version,
            files=files,
            vector=vector,
            label=label,
            token=self._owner(),
            incarnation=self._incarnation,
        )
        return await self._call(call, Swapped)

    async def inspect(self) -> Report:
        """Sum the live weights again, and report where every tensor lies; generation goes on meanwhile."""
        call = messages.Inspect(id=self._id(), token=self._owner(), incarnation=self._incarnation)
        return await self._call(call, Report)

    async def checksums(self) -> list[RankChecksums]:
        """SHA-256 of every parameter and buffer of every rank; generation waits while they are computed."""
        return await self._call(messages.Checksums(id=self._id()), list[RankChecksums])

    async def scrub(self, rate: float, first: int = 0) -> Scrubbed:
        call = messages.Scrub(id=self._id(), rate=rate, first=first, token=self._owner(), incarnation=self._incarnation)
        return await self._call(call, Scrubbed)

    async def status(self) -> EngineStatus:
        call = messages.Status(id=self._id(), token=self._token, incarnation=self._incarnation)
        return await self._call(call, EngineStatus)

    async def close(self) -> None:
        """Nothing is held between calls."""

    def _id(self) -> str:
        self._calls += 1
        return f"{self._nonce}-{self._calls}"

    def _owner(self) -> int:
        if not self._incarnation:
            raise UsageError(
                "this client has not attached", hint="call attach() before anything that changes the engine"
            )
        return self._token

    async def _call(self, call: messages.Call, kind: type[T] | None) -> T:
        """Send one call, wait for its answer, raise the error it carries.

        Raises `EngineGone` when no server listens at the socket, it goes away, or the timeout ends.
        """
        body = messages.frame(messages.encode(call))
        try:
            async with asyncio.timeout(self._timeout):
                answer = messages.decode_answer(await self._exchange(body))
        except TimeoutError:
            raise EngineGone(
                f"{self.path}: no answer to {messages.name_of(call)} within {self._timeout:.0f} s",
                hint="the call may still be running; attach again and ask for the outcome",
            ) from None
        except (OSError, asyncio.IncompleteReadError) as error:
            raise EngineGone(
                f"{self.path}: the engine does not answer: {str(error) or type(error).__name__}",
                hint="start vLLM with DCR_SOCKET naming this path, or wait until it has loaded its weights",
            ) from error
        if answer.id != call.id:
            raise EngineGone(f"{self.path}: an answer to another call arrived", hint="attach again")
        return messages.result_of(answer, kind)  # type: ignore[arg-type]  # None decodes msgpack nil

    async def _exchange(self, body: bytes) -> bytes:
        reader, writer = await asyncio.open_unix_connection(str(self.path))
        try:
            writer.write(body)
            await writer.drain()
            answer = await messages.read_frame(reader)
        finally:
            writer.close()
            with contextlib.suppress(OSError):
                await writer.wait_closed()
        if answer is None:
            raise ConnectionResetError("it closed the connection without an answer")
        return answer

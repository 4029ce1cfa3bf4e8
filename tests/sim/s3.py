"""The S3 store of production code over the simulated bucket, with streams that stall in the middle of a body.

`SimClient` answers like the S3 client, as far as `S3Store` uses it. Requests and answers travel as those of `SimStore`;
the bodies of data and anchors arrive, or leave, piece by piece.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING, Any, NoReturn

from botocore.exceptions import ClientError
from sim.bucket import PATIENCE, SimStore, hash_of

from dcr_daemon.events import Emit, discard
from dcr_daemon.store.port import Entry, Outcome
from dcr_daemon.store.retry import RetryPolicy
from dcr_daemon.store.s3.store import S3Store

if TYPE_CHECKING:
    from sim.clock import Process
    from sim.world import World

PREFIX = "stream"
PIECES = 6  #: of a body


class Stalls:
    """Which streams of which objects stall. `down` and `up`: the share of the objects with such streams.

    Each download of such an object stalls when it has brought a third of it: only one that goes on by range arrives.
    The first upload of such an object stalls in the middle, at every process.
    """

    def __init__(self, world: World, *, down: float, up: float) -> None:
        self._world, self._down, self._up = world, down, up
        self._sent: set[tuple[str, str]] = set()

    def download(self, key: str, begin: int, size: int) -> int:
        """Where a download that begins at `begin` stalls; `size` if it does not."""
        if not self._among(key, self._down):
            return size
        return min(size, begin + size // 3 + 1)

    def upload(self, key: str, size: int, by: Process) -> int:
        """How much of an upload is taken before it stalls; `size` if it does not."""
        if (by.name, key) in self._sent or not self._among(f"upload {key}", self._up):
            return size
        self._sent.add((by.name, key))
        return size // 2

    def _among(self, what: str, share: float) -> bool:
        concerned = what.removeprefix("upload ").startswith(("data/", "anchors/"))
        return concerned and not self._world.healed and hash_of(what) % 100 < 100 * share


class SimClient:
    """The client of one process. `wire` carries its requests."""

    def __init__(self, world: World, process: Process, wire: SimStore, stalls: Stalls) -> None:
        self._world, self._process, self._wire, self._stalls = world, process, wire, stalls
        self.meta = _Meta()

    async def get_object(self, *, Bucket: str, Key: str, Range: str = "bytes=0-") -> dict[str, Any]:  # noqa: N803
        key = Key.removeprefix(f"{PREFIX}/")
        found: bytes | None = await self._wire.send("get", key)
        if found is None:
            _refuse("NoSuchKey", 404)
        begin = int(Range.removeprefix("bytes=").removesuffix("-"))
        if begin >= max(len(found), 1):
            _refuse("InvalidRange", 416)
        end = self._stalls.download(key, begin, len(found))
        if end < len(found):
            self._world.outcome.faults["download stalled"] += 1
        ranged = {"ContentRange": f"bytes {begin}-{len(found) - 1}/{len(found)}"} if begin else {}
        body = _Body(found, begin, end, pause=self._world.latency)
        return {"Body": body, "ETag": str(hash_of(found.hex())), "ContentLength": len(found) - begin, **ranged}

    async def put_object(self, *, Bucket: str, Key: str, Body: Any, IfNoneMatch: str = "", **_: Any) -> None:  # noqa: N803
        key = Key.removeprefix(f"{PREFIX}/")
        size = len(Body.getbuffer())
        Body.begin()
        sent, most = bytearray(), self._stalls.upload(key, size, self._process)
        while len(sent) < most:
            sent += Body.read(min(size // PIECES + 1, most - len(sent)))
            await asyncio.sleep(self._world.latency())
        if most < size:
            self._world.outcome.faults["upload stalled"] += 1
            await _never()
        outcome = await self._wire.send("create" if IfNoneMatch else "overwrite", key, bytes(sent))
        if outcome is Outcome.LOST:
            _refuse("PreconditionFailed", 412)

    async def list_objects_v2(self, *, Bucket: str, Prefix: str) -> dict[str, Any]:  # noqa: N803
        found: list[Entry] = await self._wire.send("list", Prefix.removeprefix(f"{PREFIX}/"))
        shown = self._world.stale_list(self._process, found)
        return {"Contents": [{"Key": f"{PREFIX}/{entry.key}", "Size": entry.size} for entry in shown]}

    async def delete_object(self, *, Bucket: str, Key: str) -> None:  # noqa: N803
        await self._wire.send("delete", Key.removeprefix(f"{PREFIX}/"))

    async def delete_objects(self, *, Bucket: str, Delete: dict[str, Any]) -> dict[str, Any]:  # noqa: N803
        for one in Delete["Objects"]:
            await self.delete_object(Bucket=Bucket, Key=one["Key"])
        return {}

    async def get_bucket_versioning(self, **_: Any) -> NoReturn:
        _refuse("AccessDenied", 403)

    async def get_bucket_lifecycle_configuration(self, **_: Any) -> NoReturn:
        _refuse("AccessDenied", 403)


class _Meta:
    endpoint_url = "http://sim"


class _Body:
    """The body of an answer: from `begin` on, until it stalls at `end`."""

    def __init__(self, body: bytes, begin: int, end: int, *, pause: Callable[[], float]) -> None:
        self._body, self._at, self._end, self._pause = body, begin, end, pause

    async def __aenter__(self) -> _Body:
        return self

    async def __aexit__(self, *_: object) -> None:
        pass

    async def read(self, _: int) -> bytes:
        await asyncio.sleep(self._pause())
        if self._at == self._end < len(self._body):
            await _never()
        piece = self._body[self._at : min(self._end, self._at + len(self._body) // PIECES + 1)]
        self._at += len(piece)
        return piece


async def _never() -> NoReturn:
    """Nothing comes any more; who waits has to give up."""
    await asyncio.get_running_loop().create_future()
    raise AssertionError("nobody sets it")


def _refuse(code: str, status: int) -> NoReturn:
    raise ClientError({"Error": {"Code": code}, "ResponseMetadata": {"HTTPStatusCode": status}}, "request")


def open_stalling_store(
    world: World, stalls: Stalls, process: Process, *, emit: Emit = discard, lag: float = 0.0
) -> S3Store:
    client = SimClient(world, process, SimStore(world, process, lag=lag), stalls)
    patience = RetryPolicy(3 * PATIENCE)
    return S3Store(client, AsyncExitStack(), "sim", PREFIX, concurrency=8, patience=patience, emit=emit)

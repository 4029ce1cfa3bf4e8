"""A stream in an S3-compatible bucket: `s3://bucket/prefix`.

Promises: `create` is one plain PUT with If-None-Match: * that nobody repeats (must L0), and its answer is never
guessed: what is not a clear yes or a clear 412 is `UNKNOWN`. Everything else is repeated by `retry.retry`, and a
large object that breaks off or stalls is continued where it stopped. Large requests in flight are bounded by what the
link carries, in each direction; small ones have a queue of their own, so that a ledger record never waits behind a
hundred chunks. `probe` finds a store that ignores If-None-Match.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import hashlib
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from typing import Any, TypeVar

from dcr_daemon.errors import Incompatible, KeyNotFound
from dcr_daemon.events import Emit, discard
from dcr_daemon.store.instrumented import instrumented
from dcr_daemon.store.keys import check_key, check_prefix, is_key
from dcr_daemon.store.partial import PartialFile
from dcr_daemon.store.port import Entry, Outcome, raise_refused
from dcr_daemon.store.retry import RetryPolicy, Transient, retry
from dcr_daemon.store.s3.attempt import Try, UploadBody
from dcr_daemon.store.s3.client import Addressing, open_client
from dcr_daemon.store.s3.deletes import DELETE_BATCH, Deletes
from dcr_daemon.store.s3.download import Download
from dcr_daemon.store.s3.faults import SDK_ERRORS, Occupied, Unranged, translate
from dcr_daemon.store.s3.hedge import MOST as MOST_HEDGED
from dcr_daemon.store.s3.hedge import Answer, Hedge
from dcr_daemon.store.s3.link import Link, Progress
from dcr_daemon.store.s3.rules import lifecycle_warnings, versioning_warnings

T = TypeVar("T")

CONCURRENCY = 32  #: large requests in flight in each direction, on a link that carries so many
SMALL_CONCURRENCY = 8  #: requests of at most `SMALL_BYTES` in flight, beside the large ones
SMALL_BYTES = 1 << 20
LARGE_BYTES = 32 << 20
SLOWEST = 16 << 10  #: bytes per second at which we wait for the end of an upload that nobody sees:
UNSEEN = 256 << 10  #: bytes of it that may still be on their way,
UNSEEN_TLS = 1 << 20  #: and over TLS, which has a buffer of its own
RULES_SECONDS = 20.0  #: for reading the bucket's rules, which only warn


class S3Store:
    """A `Store` in a bucket. Make it with `S3Store.open`; it belongs to the event loop that made it."""

    def __init__(
        self,
        client: Any,
        stack: AsyncExitStack,
        bucket: str,
        prefix: str,
        *,
        concurrency: int,
        patience: RetryPolicy,
        emit: Emit,
    ) -> None:
        self.url = f"s3://{bucket}/{prefix}"
        self._client = client
        self._stack = stack
        self._bucket = bucket
        self._root = f"{prefix}/"
        self._patience = patience
        self._emit = emit
        self._accepted = False  # whether the store has accepted our credentials before
        self._down, self._up = Link(concurrency), Link(concurrency)
        self._deletes = Deletes(client, bucket, self._root, url=self.url, request=self._request)
        self._small = asyncio.Semaphore(SMALL_CONCURRENCY)
        self._gets, self._lists = Hedge(), Hedge()

    @classmethod
    async def open(
        cls,
        bucket: str,
        prefix: str,
        *,
        endpoint_url: str | None = None,
        region: str | None = None,
        profile: str | None = None,
        addressing: Addressing = "auto",
        concurrency: int = CONCURRENCY,
        patience: RetryPolicy | None = None,
        emit: Emit = discard,
    ) -> S3Store:
        """Make the client; no request is sent yet. Raises `UsageError` for an unknown profile."""
        async with AsyncExitStack() as stack:
            client = await open_client(
                stack,
                endpoint_url=endpoint_url,
                region=region,
                profile=profile,
                addressing=addressing,
                connections=2 * concurrency + MOST_HEDGED * SMALL_CONCURRENCY,
            )
            return cls(
                client,
                stack.pop_all(),
                bucket,
                prefix,
                concurrency=concurrency,
                patience=patience or RetryPolicy(),
                emit=emit,
            )

    async def close(self) -> None:
        await self._stack.aclose()

    async def get(self, key: str, *, limit: int, keep: PartialFile | None = None) -> bytes:
        if keep is None and limit <= SMALL_BYTES:
            return await self._get_small(key, limit)
        progress = Progress(self._down)
        download = self._download(key, limit=limit, told=progress.moved, keep=keep)
        if await download.resume():
            return download.body

        async def attempt(seconds: float) -> bytes:
            return await self._send("get", key, call=download.run, seconds=seconds)

        return await self._retry_get(key, attempt, gate=self._down, progress=progress.bytes)

    async def _get_small(self, key: str, limit: int) -> bytes:
        """Each try may be several requests on different connections; the next one goes on after the most they bring."""
        progress = Progress(None)
        most = self._download(key, limit=limit, told=progress.moved)

        async def attempt(seconds: float) -> bytes:
            async def send(answer: Answer) -> bytes:
                nonlocal most

                def told(count: int) -> None:
                    answer.heard()
                    progress.moved(count)

                download = most.branch(told)
                try:
                    return await self._send("get", key, call=download.run, seconds=seconds)
                finally:
                    most = max(most, download, key=lambda one: one.progress)

            return await self._gets.race(send)

        return await self._retry_get(key, attempt, gate=self._small, progress=progress.bytes)

    def _download(
        self, key: str, *, limit: int, told: Callable[[int], None], keep: PartialFile | None = None
    ) -> Download:
        place = self._object(key)
        return Download(self._client, place, where=f"{self.url}/{key}", limit=limit, told=told, keep=keep)

    async def _retry_get(
        self,
        key: str,
        attempt: Callable[[float], Awaitable[bytes]],
        *,
        gate: AbstractAsyncContextManager[Any],
        progress: Callable[[], int],
    ) -> bytes:
        return await retry(
            attempt,
            what=f"get {self.url}/{key}",
            patience=self._patience,
            gate=gate,
            progress=progress,
            emit=self._emit,
        )

    async def create(self, key: str, body: bytes | memoryview) -> Outcome:
        place, data = self._object(key), bytes(body)
        link = self._up if len(data) > SMALL_BYTES else None

        async def put(attempt: Try) -> Outcome:
            await self._client.put_object(
                **place, **await self._integrity(data), Body=self._body(data, attempt, Progress(link)), IfNoneMatch="*"
            )
            attempt.request.outcome = "won"
            return Outcome.WON

        async with link or self._small:
            try:
                return await self._send("create", key, call=put, seconds=self._upload_window(data))
            except Occupied:
                return Outcome.LOST
            except (Transient, KeyNotFound, Unranged):
                return Outcome.UNKNOWN

    async def overwrite(self, key: str, body: bytes) -> None:
        place = self._object(key)

        async def put(attempt: Try) -> None:
            await self._client.put_object(**place, Body=self._body(body, attempt, Progress(None)))

        await self._request("overwrite", key, put)

    async def delete(self, keys: Iterable[str]) -> None:
        left, refused = [check_key(key) for key in keys], dict[str, Incompatible]()
        for start in range(0, len(left), DELETE_BATCH):
            refused |= await self._deletes.delete(left[start : start + DELETE_BATCH])
        raise_refused(refused)

    async def list(self, prefix: str) -> AsyncIterator[Entry]:
        start = self._root + check_prefix(prefix)
        token: str | None = None

        async def page(_: Try) -> dict[str, Any]:
            more = {"ContinuationToken": token} if token else {}
            found: dict[str, Any] = await self._client.list_objects_v2(Bucket=self._bucket, Prefix=start, **more)
            return found

        entries = []
        while True:
            found = await self._request("list", prefix, page, hedge=self._lists)
            for line in found.get("Contents", ()):
                key = line["Key"].removeprefix(self._root)
                if is_key(key):  # objects that others put under the prefix are not listed
                    entries.append(Entry(key, line["Size"]))
            token = found.get("NextContinuationToken")
            if not found.get("IsTruncated") or not token:
                break
        # Not every server lists in key order: SeaweedFS walks directories, "a/b" before "a-b".
        for entry in sorted(entries, key=lambda entry: entry.key):
            yield entry

    async def inspect(self) -> tuple[str, ...]:
        """Rules of the bucket that would hurt a stream, one sentence each; empty where reading them is denied."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(RULES_SECONDS):
                return (
                    *await versioning_warnings(self._client, self._bucket),
                    *await lifecycle_warnings(self._client, self._bucket, root=self._root),
                )
        return ()

    async def _integrity(self, data: bytes) -> dict[str, str]:
        """How a large body is protected on its way without holding up the loop.

        A signature covers the body by its SHA-256, which the SDK computes on the event loop: fine for a chunk, a
        second of silence for an anchor file. Over TLS it accepts an MD5 instead, and that we compute on a thread.
        """
        if len(data) < LARGE_BYTES or not self._client.meta.endpoint_url.startswith("https:"):
            return {}
        digest = await asyncio.to_thread(hashlib.md5, data, usedforsecurity=False)
        return {"ContentMD5": base64.b64encode(digest.digest()).decode()}

    def _object(self, key: str) -> dict[str, str]:
        return {"Bucket": self._bucket, "Key": self._root + check_key(key)}

    def _body(self, data: bytes, attempt: Try, progress: Progress) -> UploadBody:
        def taken(count: int) -> None:
            progress.moved(count)
            attempt.moved(count, 1)

        return UploadBody(data, taken)

    def _upload_window(self, body: bytes) -> float:
        """Seconds for which an upload may show no progress, with what is still on its way when all of it was taken."""
        unseen = UNSEEN_TLS if self._client.meta.endpoint_url.startswith("https:") else UNSEEN
        return self._patience.window(0) + min(len(body), unseen) / SLOWEST

    async def _request(
        self,
        operation: str,
        key: str,
        call: Callable[[Try], Awaitable[T]],
        *,
        what: str = "",
        hedge: Hedge | None = None,
    ) -> T:
        """Send a small request until it is answered.

        Args:
            what: it in words, unless it is about `key`.
            hedge: of requests like it, which may be sent twice. Its progress cannot be seen, and a page of many names
                takes long over a slow link: after a stall it has the link for itself.
        """

        async def attempt(seconds: float) -> T:
            async def send(_: Answer | None = None) -> T:
                return await self._send(operation, key, call=call, seconds=seconds)

            if hedge and seconds <= self._patience.window(0):
                return await hedge.race(send)
            return await send()

        return await retry(
            attempt,
            what=what or f"{operation} {self.url}/{key}",
            patience=self._patience,
            gate=self._small,
            emit=self._emit,
        )

    async def _send(self, operation: str, key: str, *, call: Callable[[Try], Awaitable[T]], seconds: float) -> T:
        """Send one request that may get nowhere for `seconds`, with its error translated and its event emitted."""
        with instrumented(self._emit, operation) as request:
            try:
                async with asyncio.timeout(seconds) as clock:
                    attempt = Try(request, clock, seconds)
                    try:
                        result = await call(attempt)
                    except SDK_ERRORS as error:
                        where = f"{operation} {self.url}/{key}"
                        meant = translate(error, operation=operation, key=key, where=where, accepted=self._accepted)
                        self._accepted = self._accepted or isinstance(meant, KeyNotFound | Occupied)
                        raise meant from error
                    self._accepted = True
                    return result
            except TimeoutError:
                request.outcome = "unknown" if operation == "create" else "transient"
                raise Transient(f"no answer within {seconds:.1f} s", stalled=attempt.stalled) from None
            except Transient:
                request.outcome = "unknown" if operation == "create" else "transient"
                raise
            except Occupied:
                request.outcome = "lost"
                raise

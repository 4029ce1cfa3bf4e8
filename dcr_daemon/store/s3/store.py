"""A stream in an S3-compatible bucket: `s3://bucket/prefix`.

Promises: `create` is one plain PUT with If-None-Match: * that nobody repeats (must L0), and its answer is never
guessed: what is not a clear yes or a clear 412 is `UNKNOWN`. Everything else is repeated by `retry.retry`, and a
large object that breaks off is continued where it stopped. Requests in flight are bounded in two queues, so that a
ledger record never waits behind a hundred chunks. `probe` finds a store that ignores If-None-Match.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import io
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from contextlib import AsyncExitStack
from typing import Any, TypeVar

from dcr_daemon.errors import KeyNotFound
from dcr_daemon.events import Emit, discard
from dcr_daemon.store.instrumented import instrumented
from dcr_daemon.store.keys import check_key, check_prefix, is_key
from dcr_daemon.store.port import Entry, Outcome
from dcr_daemon.store.retry import RetryPolicy, Transient, retry
from dcr_daemon.store.s3.client import Addressing, open_client
from dcr_daemon.store.s3.download import Download, Try
from dcr_daemon.store.s3.faults import SDK_ERRORS, Occupied, Unranged, refused_keys, translate
from dcr_daemon.store.s3.rules import lifecycle_warnings, versioning_warnings

T = TypeVar("T")

CONCURRENCY = 32  #: large requests in flight
SMALL_CONCURRENCY = 8  #: requests of at most `SMALL_BYTES` in flight, beside the large ones
SMALL_BYTES = 1 << 20
LARGE_BYTES = 32 << 20
SLOWEST = 16 << 10  #: bytes per second: an upload slower than this is given up
DELETE_BATCH = 1000


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
        self._large = asyncio.Semaphore(concurrency)
        self._small = asyncio.Semaphore(SMALL_CONCURRENCY)

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
                connections=concurrency + SMALL_CONCURRENCY,
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

    async def get(self, key: str, *, limit: int) -> bytes:
        download = Download(self._client, self._object(key), where=f"{self.url}/{key}", limit=limit)

        async def attempt(seconds: float) -> bytes:
            return await self._send("get", key, call=download.run, seconds=seconds)

        return await retry(
            attempt,
            what=f"get {self.url}/{key}",
            patience=self._patience,
            gate=self._queue(limit),
            progress=lambda: download.arrived,
            emit=self._emit,
        )

    async def create(self, key: str, body: bytes | memoryview) -> Outcome:
        place, data = self._object(key), bytes(body)

        async def put(attempt: Try) -> Outcome:
            attempt.request.bytes = len(data)
            await self._client.put_object(
                **place, **await self._integrity(data), Body=io.BytesIO(data), IfNoneMatch="*"
            )
            attempt.request.outcome = "won"
            return Outcome.WON

        async with self._queue(len(data)):
            try:
                return await self._send("create", key, call=put, seconds=self._upload_seconds(data))
            except Occupied:
                return Outcome.LOST
            except (Transient, KeyNotFound, Unranged):
                return Outcome.UNKNOWN

    async def overwrite(self, key: str, body: bytes) -> None:
        place = self._object(key)

        async def put(attempt: Try) -> None:
            attempt.request.bytes = len(body)
            await self._client.put_object(**place, Body=io.BytesIO(body))

        async def attempt(seconds: float) -> None:
            await self._send("overwrite", key, call=put, seconds=max(seconds, self._upload_seconds(body)))

        await self._retry(attempt, f"overwrite {self.url}/{key}", len(body))

    async def delete(self, keys: Iterable[str]) -> None:
        left = [check_key(key) for key in keys]
        for start in range(0, len(left), DELETE_BATCH):
            await self._delete_batch(left[start : start + DELETE_BATCH])

    async def _delete_batch(self, keys: Sequence[str]) -> None:
        waiting = set(keys)

        async def remove(_: Try) -> None:
            objects = [{"Key": self._root + key} for key in sorted(waiting)]
            answer = await self._client.delete_objects(Bucket=self._bucket, Delete={"Objects": objects, "Quiet": True})
            failed = refused_keys(answer.get("Errors", ()), where=self.url)
            waiting.intersection_update(name.removeprefix(self._root) for name in failed)
            if waiting:
                raise Transient(f"{len(waiting)} of {len(objects)} objects were not deleted")

        async def attempt(seconds: float) -> None:
            await self._send("delete", keys[0], call=remove, seconds=seconds)

        await self._retry(attempt, f"delete {len(keys)} objects below {self.url}")

    async def list(self, prefix: str) -> AsyncIterator[Entry]:
        start = self._root + check_prefix(prefix)
        token: str | None = None

        async def page(_: Try) -> dict[str, Any]:
            more = {"ContinuationToken": token} if token else {}
            found: dict[str, Any] = await self._client.list_objects_v2(Bucket=self._bucket, Prefix=start, **more)
            return found

        async def attempt(seconds: float) -> dict[str, Any]:
            return await self._send("list", prefix, call=page, seconds=seconds)

        entries = []
        while True:
            found = await self._retry(attempt, f"list {self.url}/{prefix}")
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
        return (
            *await versioning_warnings(self._client, self._bucket),
            *await lifecycle_warnings(self._client, self._bucket, root=self._root),
        )

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

    def _queue(self, size: int) -> asyncio.Semaphore:
        return self._small if size <= SMALL_BYTES else self._large

    def _upload_seconds(self, body: bytes) -> float:
        return self._patience.seconds + len(body) / SLOWEST

    async def _retry(self, attempt: Callable[[float], Awaitable[T]], what: str, size: int = 0) -> T:
        return await retry(attempt, what=what, patience=self._patience, gate=self._queue(size), emit=self._emit)

    async def _send(self, operation: str, key: str, *, call: Callable[[Try], Awaitable[T]], seconds: float) -> T:
        """Send one request, bounded in time, with its error translated and its event emitted."""
        with instrumented(self._emit, operation) as request:
            try:
                async with asyncio.timeout(seconds) as clock:
                    try:
                        result = await call(Try(request, clock, seconds))
                    except SDK_ERRORS as error:
                        where = f"{operation} {self.url}/{key}"
                        meant = translate(error, key=key, where=where, accepted=self._accepted)
                        self._accepted = self._accepted or isinstance(meant, KeyNotFound | Occupied)
                        raise meant from error
                    self._accepted = True
                    return result
            except TimeoutError:
                request.outcome = "unknown" if operation == "create" else "transient"
                raise Transient(f"no answer within {seconds:.1f} s") from None
            except Transient:
                request.outcome = "unknown" if operation == "create" else "transient"
                raise
            except Occupied:
                request.outcome = "lost"
                raise

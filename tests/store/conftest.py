"""A small S3 server that fails on command, for what a real one cannot be asked to do."""

from __future__ import annotations

import asyncio
import hashlib
import re
import shutil
import socket
import ssl
import subprocess
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import parse_qs, unquote, urlsplit
from xml.sax.saxutils import escape

import pytest

from dcr_daemon import runtime
from dcr_daemon.store.retry import RetryPolicy
from dcr_daemon.store.s3.store import S3Store

ERRORS = {
    "internal": (500, "InternalError"),
    "slow-down": (503, "SlowDown"),
    "conflict": (409, "ConditionalRequestConflict"),
    "denied": (403, "AccessDenied"),
    "bad-key": (403, "SignatureDoesNotMatch"),
    "expired": (400, "ExpiredToken"),
    "archived": (403, "InvalidObjectState"),
    "no-bucket": (404, "NoSuchBucket"),
    "not-implemented": (501, "NotImplemented"),
    "moved": (301, "PermanentRedirect"),
    "bad-digest": (400, "BadDigest"),
    "invalid": (400, "InvalidArgument"),
}
CONFIGURATION = {"versioning", "lifecycle"}


@dataclass
class Seen:
    method: str
    key: str
    query: dict[str, list[str]]
    headers: dict[str, str]
    body: bytes


@dataclass
class FakeS3:
    """Objects of one bucket, and what shall go wrong.

    `faults` is consumed from the left, one per request: a name of `ERRORS`, or
    `ok`; `drop` (the request never arrives); `drop-after` (it takes effect, the answer is lost); `cut:N` (the answer
    breaks off after N bytes of body); `html` (a proxy's 404 page); `stall` (no answer at all);
    `no-range` (ignores Range); `no-size` (answers a range, but not of how much); `no-length` (chunked answer);
    `trickle` (headers, then silence); `hang:N` (N bytes of body, then silence); `drip:N` (N bytes at once, then `drip`:
    so many bytes, so many seconds apart); `unread` (the body is never read); `sip` (the body is read slowly).
    """

    objects: dict[str, bytes] = field(default_factory=dict)
    faults: deque[str] = field(default_factory=deque)
    always: str = "ok"
    honest: bool = True  #: False: ignores If-None-Match
    atomic: bool = True  #: False: looks, waits, then writes
    page: int = 1000
    bulk: str = ""  #: a name of `ERRORS`: the answer to every multi-object delete
    undeletable: dict[str, list[str]] = field(default_factory=dict)
    configuration: dict[str, str] = field(default_factory=dict)
    seen: list[Seen] = field(default_factory=list)
    connections: int = 0
    busy: int = 0
    busiest: int = 0
    pause: float = 0.0
    drip: tuple[int, float] = (100, 0.1)
    sent: int = 0  #: bytes of bodies that were written
    unread: int = 0  #: bodies of this many requests, from now on, are never read
    slow_read: tuple[int, float] = (1 << 30, 0.0)  #: a body is read so many bytes at a time, so many seconds apart
    url: str = ""
    moved: asyncio.Condition = field(default_factory=asyncio.Condition)

    async def until(self, reached: Callable[[], bool]) -> None:
        """Wait for something that comes about when a request arrives or ends."""
        async with self.moved:
            await self.moved.wait_for(reached)

    async def _tell(self) -> None:
        async with self.moved:
            self.moved.notify_all()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        try:
            while await self._one(reader, writer):
                pass
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()

    async def _one(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        head = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
        method, target, _ = head[0].split(" ")
        headers = {name.lower(): value for name, value in (line.split(": ", 1) for line in head[1:] if line)}
        fault = self.faults.popleft() if self.faults else self.always
        body = await self._body(reader, method, int(headers.get("content-length", 0)), fault)
        parts = urlsplit(target)
        request = Seen(
            method, unquote(parts.path).removeprefix("/bucket").lstrip("/"), parse_qs(parts.query, True), headers, body
        )
        self.seen.append(request)
        self.busy += 1
        self.busiest = max(self.busiest, self.busy)
        await self._tell()
        try:
            await asyncio.sleep(self.pause)
            return await self._answer(request, writer, fault)
        finally:
            self.busy -= 1
            await self._tell()

    async def _body(self, reader: asyncio.StreamReader, method: str, size: int, fault: str) -> bytes:
        if method == "PUT" and (self.unread or fault == "unread"):
            self.unread -= fault != "unread"
            await asyncio.sleep(3600)
        body, (piece, pause) = b"", (100, 0.02) if fault == "sip" else self.slow_read
        while left := size - len(body):
            body += await reader.readexactly(min(left, piece))
            await asyncio.sleep(pause)
        return body

    async def _answer(self, request: Seen, writer: asyncio.StreamWriter, fault: str) -> bool:
        if fault == "drop":
            return False
        if fault == "stall":
            await asyncio.sleep(3600)
        if request.method == "HEAD":  # the SDK looks for the bucket's region after a redirect
            return await self._send(writer, 404, b"")
        if request.method == "POST" and self.bulk:
            fault = self.bulk
        if fault in ERRORS:
            status, code = ERRORS[fault]
            return await self._send(writer, status, _error(code))
        if fault == "html":
            return await self._send(writer, 404, b"<html>no such host</html>", {"content-type": "text/html"})
        status, body, more = await self._effect(request, ranges=fault != "no-range")
        if fault == "no-size" and "content-range" in more:
            more["content-range"] = more["content-range"].partition("/")[0] + "/*"
        if fault == "drop-after":
            return False
        return await self._send(writer, status, body, more, fault)

    async def _effect(self, request: Seen, *, ranges: bool) -> tuple[int, bytes, dict[str, str]]:
        if topic := CONFIGURATION & set(request.query):
            body = self.configuration.get(topic.pop())
            return (200, body.encode(), {}) if body else (404, _error("NoSuchLifecycleConfiguration"), {})
        if request.method == "PUT":
            taken = self.honest and "if-none-match" in request.headers and request.key in self.objects
            if not self.atomic:
                await asyncio.sleep(0.05)
            if taken:
                return 412, _error("PreconditionFailed"), {}
            self.objects[request.key] = request.body
            return 200, b"", {"etag": _etag(request.body)}
        if request.method == "DELETE":
            if codes := self.undeletable.get(request.key):
                return 403, _error(codes.pop(0)), {}
            self.objects.pop(request.key, None)
            return 204, b"", {}
        if request.method == "POST":
            return 200, self._delete(request.body.decode()), {}
        if not request.key:
            return 200, self._list(request.query), {}
        if request.key not in self.objects:
            return 404, _error("NoSuchKey"), {}
        whole = self.objects[request.key]
        more = {"etag": _etag(whole)}
        if ranges and (wanted := request.headers.get("range")):
            begin = int(wanted.removeprefix("bytes=").rstrip("-"))
            if begin >= len(whole):
                return 416, _error("InvalidRange"), {}
            more["content-range"] = f"bytes {begin}-{len(whole) - 1}/{len(whole)}"
            return 206, whole[begin:], more
        return 200, whole, more

    def _delete(self, body: str) -> bytes:
        answer = ""
        for key in re.findall("<Key>(.*?)</Key>", body):
            if codes := self.undeletable.get(key):
                answer += f"<Error><Key>{escape(key)}</Key><Code>{codes.pop(0)}</Code></Error>"
            else:
                self.objects.pop(key, None)
        return f"<DeleteResult>{answer}</DeleteResult>".encode()

    def _list(self, query: dict[str, list[str]]) -> bytes:
        after = query.get("continuation-token", [""])[0]
        found = sorted(key for key in self.objects if key.startswith(query["prefix"][0]) and key > after)
        lines = "".join(
            f"<Contents><Key>{escape(key)}</Key><Size>{len(self.objects[key])}</Size></Contents>"
            for key in found[: self.page]
        )
        more = found[self.page :] != []
        token = f"<NextContinuationToken>{found[self.page - 1]}</NextContinuationToken>" if more else ""
        inside = f"<IsTruncated>{str(more).lower()}</IsTruncated>{token}{lines}"
        return f"<ListBucketResult>{inside}</ListBucketResult>".encode()

    async def _send(
        self,
        writer: asyncio.StreamWriter,
        status: int,
        body: bytes,
        more: dict[str, str] | None = None,
        fault: str = "",
    ) -> bool:
        lines = [f"HTTP/1.1 {status} X", *(f"{name}: {value}" for name, value in (more or {}).items())]
        lines.append("transfer-encoding: chunked" if fault == "no-length" else f"content-length: {len(body)}")
        writer.write("\r\n".join([*lines, "", ""]).encode())
        if fault == "no-length":
            writer.write(f"{len(body):x}\r\n".encode() + body + b"\r\n0\r\n\r\n")
        elif fault == "trickle":
            await writer.drain()
            await asyncio.sleep(3600)
        elif fault.startswith(("hang:", "drip:")):
            await self._slowly(writer, body, fault)
        else:
            writer.write(body[: int(fault[4:])] if fault.startswith("cut:") else body)
        await writer.drain()
        return not fault.startswith("cut:")

    async def _slowly(self, writer: asyncio.StreamWriter, body: bytes, fault: str) -> None:
        at = int(fault[5:])
        writer.write(body[:at])
        while at < len(body) or fault.startswith("hang:"):
            self.sent += at
            await writer.drain()
            await self._tell()
            if fault.startswith("hang:") and at < len(body):
                await asyncio.sleep(3600)
            if at >= len(body):
                return
            piece, pause = self.drip
            await asyncio.sleep(pause)
            writer.write(body[at : at + piece])
            at += piece


def _etag(body: bytes) -> str:
    return f'"{hashlib.sha256(body).hexdigest()[:32]}"'


def _error(code: str) -> bytes:
    return f"<Error><Code>{code}</Code><Message>as told</Message></Error>".encode()


@pytest.fixture
def unused_endpoint() -> Iterator[str]:
    """A port that is taken but not listened on."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        yield f"http://127.0.0.1:{taken.getsockname()[1]}"


OpenFake = Callable[..., "asynccontextmanager[tuple[FakeS3, S3Store]]"]


@pytest.fixture
def fake_s3(monkeypatch: pytest.MonkeyPatch) -> OpenFake:
    """`async with fake_s3(concurrency=…, **FakeS3 fields) as (server, store)`."""
    for name, value in {"AWS_ACCESS_KEY_ID": "a", "AWS_SECRET_ACCESS_KEY": "s", "AWS_CONFIG_FILE": "/dev/null"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("AWS_PROFILE", raising=False)

    @asynccontextmanager
    async def start(
        *,
        concurrency: int = 8,
        patience: RetryPolicy = RetryPolicy(seconds=20, first=0.001, longest=0.002),  # noqa: B008 (frozen)
        emit: Callable[[object], None] = lambda _: None,
        tls: ssl.SSLContext | None = None,
        host: str = "127.0.0.1",
        **fields: object,
    ) -> AsyncIterator[tuple[FakeS3, S3Store]]:
        fake = FakeS3(**fields)  # type: ignore[arg-type]
        server = await asyncio.start_server(fake.serve, host, 0, limit=1 << 20, ssl=tls)
        authority = f"[{host}]" if ":" in host else host
        fake.url = f"{'https' if tls else 'http'}://{authority}:{server.sockets[0].getsockname()[1]}"
        store = await S3Store.open(
            "bucket", "run", endpoint_url=fake.url, concurrency=concurrency, patience=patience, emit=emit
        )
        try:
            yield fake, store
        finally:
            await store.close()
            server.close()

    return start


@pytest.fixture
def tls(tmp_path: Path) -> tuple[ssl.SSLContext, Path]:
    """A server's context, and the file of the authority that a client must trust."""
    if shutil.which("openssl") is None:
        pytest.skip("needs the openssl command to make a certificate")
    certificate, key = tmp_path / "certificate.pem", tmp_path / "key.pem"
    subprocess.run(
        [
            *("openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=fake"),
            *("-addext", "subjectAltName=IP:127.0.0.1", "-keyout", str(key), "-out", str(certificate)),
        ],
        check=True,
        capture_output=True,
    )
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    return context, certificate


class VirtualRuntime(runtime.SystemRuntime):
    """A clock that moves only when somebody sleeps."""

    def __init__(self) -> None:
        super().__init__()
        self.time = 0.0
        self.slept: list[float] = []

    def monotonic(self) -> float:
        return self.time

    async def sleep(self, seconds: float) -> None:
        self.time += seconds
        self.slept.append(seconds)

    def jitter(self) -> float:
        return 0.5


@pytest.fixture
def clock() -> AsyncIterator[VirtualRuntime]:
    """The virtual clock of this test."""
    virtual = VirtualRuntime()
    real = runtime._current
    runtime.install(virtual)
    yield virtual
    runtime.install(real)

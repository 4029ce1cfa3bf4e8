"""Endpoints with an IPv6 address, and proxies of the environment: read as the AWS SDK reads them."""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from pathlib import Path
from typing import Any

import pytest

from dcr_daemon.errors import StoreUnavailable
from dcr_daemon.store.port import Outcome
from dcr_daemon.store.retry import RetryPolicy
from dcr_daemon.store.s3.store import S3Store

SHORT = RetryPolicy(seconds=0.2, first=0.01, longest=0.02)


@pytest.fixture
def proxy(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Sets the proxy of the environment and the hosts that it is not for."""

    def use(url: str, *, but: str = "") -> None:
        for name, value in {"HTTP_PROXY": url, "HTTPS_PROXY": url, "NO_PROXY": but}.items():
            for spelled in (name, name.lower()):
                monkeypatch.setenv(spelled, value)

    use("")
    return use


async def works(store: S3Store) -> bool:
    won = await store.create("key", b"body") is Outcome.WON
    return won and await store.get("key", limit=10) == b"body" and [one.key async for one in store.list("")] == ["key"]


@pytest.mark.parametrize(("host", "exempt"), [("::1", ""), ("::1", "[::1]"), ("127.0.0.1", "127.0.0.1"), ("::1", "*")])
async def test_an_endpoint_is_reached_over_ipv6_and_past_a_proxy_that_it_is_exempt_from(
    fake_s3: Any, proxy: Any, unused_endpoint: str, host: str, exempt: str
) -> None:
    if exempt:
        proxy(unused_endpoint, but=exempt)
    async with fake_s3(host=host) as (_, store):
        assert await works(store)


async def test_requests_go_through_the_proxy_of_the_environment(fake_s3: Any, proxy: Any) -> None:
    async with fake_s3() as (server, _):
        proxy(server.url)
        store = await S3Store.open("bucket", "run", endpoint_url="http://store.invalid")
        try:
            assert await works(store)
        finally:
            await store.close()
    assert {request.headers["host"] for request in server.seen} == {"store.invalid"}


async def test_a_store_with_tls_is_reached_through_a_tunnel(
    fake_s3: Any, proxy: Any, tls: tuple[ssl.SSLContext, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The proxy of many clusters: it opens a connection, and sees nothing of what goes over it."""
    monkeypatch.setenv("AWS_CA_BUNDLE", str(tls[1]))
    tunnels, tasks = list[str](), set[asyncio.Task[None]]()

    async def copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError):
            while piece := await reader.read(1 << 16):
                writer.write(piece)
                await writer.drain()
        writer.close()

    async def connect(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        method, place, _ = head.split(" ", 2)
        tunnels.append(f"{method} {place}")
        host, _, port = place.rpartition(":")
        there = await asyncio.open_connection(host, int(port))
        writer.write(b"HTTP/1.1 200 Connection established\r\n\r\n")
        for ends in ((reader, there[1]), (there[0], writer)):
            tasks.add(asyncio.create_task(copy(*ends)))

    server = await asyncio.start_server(connect, "127.0.0.1", 0)
    proxy(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}")
    async with fake_s3(tls=tls[0]) as (fake, store):
        assert await works(store)
        assert set(tunnels) == {f"CONNECT {fake.url.removeprefix('https://')}"}
        assert len(fake.seen) >= 3
    server.close()
    await asyncio.gather(*tasks, return_exceptions=True)


async def test_a_proxy_that_does_not_answer_is_named(fake_s3: Any, proxy: Any, unused_endpoint: str) -> None:
    proxy(unused_endpoint)
    async with fake_s3(patience=SHORT) as (server, store):
        with pytest.raises(StoreUnavailable, match=f"proxy URL: .{unused_endpoint}"):
            await store.get("key", limit=10)
    assert not server.seen

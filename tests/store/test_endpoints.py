"""Endpoints with an IPv6 address, and proxies of the environment: read as the AWS SDK reads them."""

from __future__ import annotations

from typing import Any

import pytest

from dcr_daemon.errors import StoreUnavailable
from dcr_daemon.store.port import Outcome
from dcr_daemon.store.retry import RetryPolicy
from dcr_daemon.store.s3.store import S3Store

SHORT = RetryPolicy(seconds=0.2, first=0.01, longest=0.02)


@pytest.fixture
def proxy(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Sets the proxy of the environment for plain HTTP, and the hosts that it is not for."""

    def use(url: str, *, but: str = "") -> None:
        for name, value in {"HTTP_PROXY": url, "NO_PROXY": but}.items():
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


async def test_a_proxy_that_does_not_answer_is_named(fake_s3: Any, proxy: Any, unused_endpoint: str) -> None:
    proxy(unused_endpoint)
    async with fake_s3(patience=SHORT) as (server, store):
        with pytest.raises(StoreUnavailable, match=f"proxy URL: .{unused_endpoint}"):
            await store.get("key", limit=10)
    assert not server.seen

"""Probes answer from the daemon's own loop, and survive what is not HTTP."""

from __future__ import annotations

import asyncio
import json

import pytest

from dcr_daemon import events as e
from dcr_daemon.errors import UsageError
from dcr_daemon.observe import server as server_module
from dcr_daemon.observe.health import Health
from dcr_daemon.observe.metrics import Metrics
from dcr_daemon.observe.server import ProbeServer, parse_listen


async def ask(port: int, request: bytes) -> tuple[int, bytes]:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(request)
    answer = await reader.read()
    writer.close()
    head, _, body = answer.partition(b"\r\n\r\n")
    return int(head.split()[1]), body


def get(path: str) -> bytes:
    return f"GET {path} HTTP/1.1\r\nHost: x\r\n\r\n".encode()


def serve(health: Health, *requests: bytes) -> list[tuple[int, bytes]]:
    async def main() -> list[tuple[int, bytes]]:
        server = ProbeServer("127.0.0.1:0", health, metrics=Metrics())
        await server.start()
        try:
            return [await ask(server.port, request) for request in requests]
        finally:
            await server.close()

    return asyncio.run(main())


def test_not_ready_is_503_and_says_why() -> None:
    health = Health("subscriber")
    health(e.Waiting(what="the stream"))
    ((status, body), (live, _)) = serve(health, get("/readyz"), get("/livez"))
    assert (status, live) == (503, 200)
    assert body.endswith(b"}\n")
    assert json.loads(body) == {"ready": False, "status": "waiting: the stream"}


def test_ready_is_200() -> None:
    health = Health("subscriber")
    health(e.Serving(version=3))
    assert serve(health, get("/readyz"))[0][0] == 200


def test_the_status_is_json_whether_ready_or_not() -> None:
    health = Health("subscriber")
    health(e.LedgerPolled(head=4))
    ((status, body),) = serve(health, get("/status"))
    found = json.loads(body)
    assert (status, found["ready"], found["head"], found["served"], found["lag"]) == (200, False, 4, None, None)
    assert found["ledger_read_at"].startswith("20")


def test_metrics_are_exposed() -> None:
    ((status, body),) = serve(Health("publisher"), get("/metrics?x=1"))
    assert status == 200
    assert b"dcr_build_info" in body


@pytest.mark.parametrize(
    ("request_bytes", "status"),
    [
        (b"POST /metrics HTTP/1.1\r\nHost: x\r\n\r\n", 405),
        (get("/etc/passwd"), 404),
        (b"\x16\x03\x01\x02\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\nX: " + b"a" * 10000 + b"\r\n\r\n", 400),
    ],
)
def test_what_is_not_a_probe_is_refused_and_not_logged(
    request_bytes: bytes, status: int, caplog: pytest.LogCaptureFixture
) -> None:
    assert serve(Health("publisher"), request_bytes)[0][0] == status
    assert not caplog.records


@pytest.mark.parametrize("sent", [b"", b"GET /livez HTTP/1.1\r\nHost"], ids=["nothing", "half a request"])
def test_a_connection_without_a_request_is_closed(sent: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_module, "_TIMEOUT", 0.05)

    async def main() -> bytes:
        server = ProbeServer("127.0.0.1:0", Health("publisher"), metrics=Metrics())
        await server.start()
        try:
            reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
            writer.write(sent)
            async with asyncio.timeout(60):  # a test that fails must end
                answer = await reader.read()
            writer.close()
            return answer
        finally:
            await server.close()

    assert asyncio.run(main()) == b""


@pytest.mark.parametrize("listen", ["9464", "host:", "host:99999", "host:http", ""])
def test_a_bad_listen_address_is_named(listen: str) -> None:
    with pytest.raises(UsageError, match="HOST:PORT"):
        parse_listen(listen)


def test_an_ipv6_address_may_stand_in_brackets() -> None:
    assert parse_listen("[::1]:80") == ("::1", 80)


def test_a_taken_port_is_a_usage_error() -> None:
    async def main() -> None:
        first = ProbeServer("127.0.0.1:0", Health("publisher"), metrics=Metrics())
        await first.start()
        try:
            with pytest.raises(UsageError, match="cannot listen"):
                await ProbeServer(f"127.0.0.1:{first.port}", Health("publisher"), metrics=Metrics()).start()
        finally:
            await first.close()

    asyncio.run(main())

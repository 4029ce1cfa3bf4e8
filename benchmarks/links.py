"""How much of a slow link the S3 store uses: bytes that arrived, against what the link could have carried in that time.

    python benchmarks/links.py [--seconds 120] [--rates 20 100 1000] [--stalled 0 0.1] [--objects 24] [--json]

A small S3 server in this process sends over one shared link of so many KB per second, a few bytes of each stream in
turn. A share of the answers (0.1: every tenth) stalls half-way for ever. As many objects as the link carries in
`--seconds` are read, eight at a time, as a replica reads chunks. Prints the ratio of the goodput to the link's rate,
the number of requests, and the bytes that were sent twice.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import time
from collections import deque
from functools import partial
from typing import Any

from dcr_daemon.store.s3.store import S3Store
from dcr_daemon.subscribe.fetch.stage import CONCURRENCY
from dcr_daemon.task_limiter import run_limited


class SlowServer:
    """Answers GETs of `body`, which is every object, over a link of `rate` bytes per second."""

    def __init__(self, body: bytes, rate: float, stalled: float) -> None:
        self._body, self._rate, self._stalled = body, rate, stalled
        self._streams: deque[tuple[memoryview, int, asyncio.StreamWriter, asyncio.Event]] = deque()
        self.requests = self.stalls = self.sent = 0

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
                await self._answer(head, writer)
        except (asyncio.IncompleteReadError, ConnectionError, asyncio.CancelledError):
            writer.close()

    async def _answer(self, head: str, writer: asyncio.StreamWriter) -> None:
        self.requests += 1
        begin = int(head.split("range: bytes=")[1].split("-")[0]) if "range: bytes=" in head else 0
        size, rest = len(self._body), memoryview(self._body)[begin:]
        status = f"206 P\r\ncontent-range: bytes {begin}-{size - 1}/{size}" if begin else "200 OK"
        writer.write(f'HTTP/1.1 {status}\r\netag: "one"\r\ncontent-length: {len(rest)}\r\n\r\n'.encode())
        stops = self._stalled > 0 and self.requests % round(1 / self._stalled) == 5
        self.stalls += stops
        done = asyncio.Event()
        self._streams.append((rest, len(rest) // 2 if stops else 0, writer, done))
        await done.wait()

    async def carry(self) -> None:
        """The link: what it sends in a fiftieth of a second, one stream after the other."""
        started, quantum = time.monotonic(), max(256, int(self._rate / 50))
        credit = 0.0
        while True:
            await asyncio.sleep(0.02)
            now = time.monotonic()
            credit, started = min(credit + (now - started) * self._rate, 4 * quantum), now
            while credit >= quantum and self._streams:
                credit -= self._send(quantum)

    def _send(self, quantum: int) -> int:
        rest, stop, writer, done = self._streams.popleft()
        if writer.is_closing():
            done.set()
            return 0
        piece = rest[:quantum]
        writer.write(bytes(piece))
        self.sent += len(piece)
        rest = rest[len(piece) :]
        if len(rest) > stop:
            self._streams.append((rest, stop, writer, done))
        elif not stop:
            done.set()
        return len(piece)


async def measure(rate: float, stalled: float, *, seconds: float, objects: int) -> dict[str, Any]:
    """Read `objects` objects over a link of `rate` bytes per second."""
    body = os.urandom(max(1, int(rate * seconds / objects)))
    slow = SlowServer(body, rate, stalled)
    server = await asyncio.start_server(slow.serve, "127.0.0.1", 0)
    link = asyncio.create_task(slow.carry())
    url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    store = await S3Store.open("bucket", "run", endpoint_url=url)
    began = time.monotonic()
    try:
        # As chunks are asked for: a limit above `SMALL_BYTES`.
        works = (partial(store.get, f"data/{n}", limit=64 << 20) for n in range(objects))
        found = await run_limited(works, CONCURRENCY)
        took = time.monotonic() - began
        assert all(one == body for one in found)
    finally:
        link.cancel()
        await store.close()
        server.close()
    total = len(body) * objects
    return {
        "rate": rate,
        "stalled": stalled,
        "ratio": total / (rate * took),
        "requests": slow.requests,
        "stalls": slow.stalls,
        "sent_twice": slow.sent - total,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=120.0)
    parser.add_argument("--rates", type=float, nargs="+", default=[20, 100, 1000], help="KB per second")
    parser.add_argument("--stalled", type=float, nargs="+", default=[0.0, 0.1], help="share of the answers")
    parser.add_argument("--objects", type=int, default=24)
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    os.environ.update(AWS_ACCESS_KEY_ID="a", AWS_SECRET_ACCESS_KEY="s", AWS_CONFIG_FILE="/dev/null")
    if not given.json:
        print(f"{'KB/s':>6} {'stalled':>8} {'goodput':>8} {'requests':>9} {'stalls':>7} {'sent twice':>11}")
    for rate in given.rates:
        for stalled in given.stalled:
            row = asyncio.run(measure(rate * 1000, stalled, seconds=given.seconds, objects=given.objects))
            if given.json:
                print(json.dumps(row))
            else:
                print(
                    f"{rate:6g} {stalled:8g} {row['ratio']:8.3f} {row['requests']:9d} {row['stalls']:7d} "
                    f"{row['sent_twice']:11d}"
                )


if __name__ == "__main__":
    main()

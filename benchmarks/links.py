"""How much of a slow link DCR uses: bytes that arrived, against what the link could have carried in that time.

    python benchmarks/links.py [--seconds 120] [--rates 20 100 1000] [--stalled 0 0.1] [--objects 24] [--json]
    python benchmarks/links.py --versions 100 --rates 25000 --delay 0.05 --seconds 10 [--stalled 0]

A small S3 server in this process sends over one shared link of so many KB per second, a few bytes of each stream in
turn. A share of the answers (0.1: every tenth) stalls half-way for ever, and each begins `--delay` seconds after its
request. As many bytes as the link carries in `--seconds` are read: by the S3 store as objects, eight at a time, as a
replica reads chunks; or, with `--versions`, by `dcr subscribe --once --engine dir://`, as so many versions of a
generated model, from its first request until it has ended. Prints the ratio of the goodput to the link's rate, the
same until the last byte of data had come (without what the engine does afterwards), the number of requests, and the
bytes that were sent twice.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import numpy as np
import torch

from dcr_daemon import Publisher
from dcr_daemon.canonical.layout import Layout, TensorSpec
from dcr_daemon.checkpoint.directory import write_checkpoint
from dcr_daemon.store.s3.store import S3Store
from dcr_daemon.subscribe.fetch.stage import CONCURRENCY
from dcr_daemon.task_limiter import run_limited


class SlowServer:
    """A bucket of `objects`, by key, behind a link of `rate` bytes per second."""

    def __init__(self, objects: dict[str, bytes], rate: float, *, stalled: float, delay: float) -> None:
        self.objects, self.rate, self._stalled, self._delay = objects, rate, stalled, delay
        self.first: float | None = None  #: when the first request came,
        self.fetched = 0.0  #: and when the last byte of data was sent
        self.read: set[str] = set()
        self._streams: deque[tuple[memoryview, int, asyncio.StreamWriter, asyncio.Event]] = deque()
        self.requests = self.stalls = self.sent = 0

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode()
                size = re.search(r"(?i)content-length: (\d+)", head)
                body = await reader.readexactly(int(size[1]) if size else 0)
                self.first = self.first or time.monotonic()
                self.requests += 1
                await asyncio.sleep(self._delay)
                await self._answer(head, body, writer)
        except (asyncio.IncompleteReadError, ConnectionError, asyncio.CancelledError):
            writer.close()

    async def _answer(self, head: str, body: bytes, writer: asyncio.StreamWriter) -> None:
        method, target, _ = head.split(" ", 2)
        key, _, query = target.removeprefix("/bucket").lstrip("/").partition("?")
        if method == "PUT":
            self.objects[key] = body
            await self._reply("200 OK", b"", writer)
        elif not key:
            prefix = unquote(query.partition("prefix=")[2].partition("&")[0])
            found = [name for name in sorted(self.objects) if name.startswith(prefix)]
            lines = "".join(f"<Contents><Key>{n}</Key><Size>{len(self.objects[n])}</Size></Contents>" for n in found)
            await self._reply("200 OK", f"<ListBucketResult>{lines}</ListBucketResult>".encode(), writer)
        elif key not in self.objects:
            await self._reply("404 N", b"<Error><Code>NoSuchKey</Code></Error>", writer)
        else:
            self.read.add(key)
            begin = int((re.search(r"(?i)range: bytes=(\d+)-", head) or (0, 0))[1])
            whole = self.objects[key]
            more = f"206 P\r\ncontent-range: bytes {begin}-{len(whole) - 1}/{len(whole)}" if begin else "200 OK"
            await self._reply(more, whole[begin:], writer)
            if "/data/" in key:
                self.fetched = time.monotonic()

    async def _reply(self, status: str, body: bytes, writer: asyncio.StreamWriter) -> None:
        rest = memoryview(body)
        writer.write(f'HTTP/1.1 {status}\r\netag: "one"\r\ncontent-length: {len(rest)}\r\n\r\n'.encode())
        stops = self._stalled > 0 and self.requests % round(1 / self._stalled) == 5 and len(rest) > 1
        self.stalls += stops
        if not rest:
            return
        done = asyncio.Event()
        self._streams.append((rest, len(rest) // 2 if stops else 0, writer, done))
        await done.wait()

    async def carry(self) -> None:
        """The link: what it sends in a fiftieth of a second, one stream after the other."""
        started, quantum = time.monotonic(), max(256, int(self.rate / 50))
        credit = 0.0
        while True:
            await asyncio.sleep(0.02)
            now = time.monotonic()
            credit, started = min(credit + (now - started) * self.rate, 4 * quantum), now
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


async def measure(slow: SlowServer, read: Callable[[str], Awaitable[None]]) -> dict[str, Any]:
    """Serve while `read(endpoint URL)` reads."""
    server = await asyncio.start_server(slow.serve, "127.0.0.1", 0)
    link = asyncio.create_task(slow.carry())
    try:
        await read(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}")
        assert slow.first is not None, "nothing was asked for"
        took, fetched = time.monotonic() - slow.first, slow.fetched - slow.first
    finally:
        link.cancel()
        server.close()
    total = sum(len(slow.objects[key]) for key in slow.read)
    return {
        "seconds": took,
        "bytes": total,
        "ratio": total / (slow.rate * took),
        "fetched": total / (slow.rate * fetched),
        "requests": slow.requests,
        "stalls": slow.stalls,
        "sent_twice": max(0, slow.sent - total),
    }


async def read_objects(url: str, count: int) -> None:
    """Read the objects `data/0`, `data/1`, … as a replica reads chunks."""
    store = await S3Store.open("bucket", "run", endpoint_url=url)
    try:  # a limit above `SMALL_BYTES`, as chunks have
        await run_limited((partial(store.get, f"data/{n}", limit=64 << 20) for n in range(count)), CONCURRENCY)
    finally:
        await store.close()


async def subscribe(url: str, home: Path) -> None:
    """Bring a copy of the base to the newest version, in a process of its own."""
    shutil.rmtree(home / "replica", ignore_errors=True)
    shutil.copytree(home / "base", home / "replica" / "current")
    command = [
        sys.executable,
        "-m",
        "dcr_daemon",
        "subscribe",
        "--from",
        "s3://bucket/run",
        "--endpoint-url",
        url,
        "--once",
    ]
    command += ["--engine", f"dir://{home}/replica/current", "--state", f"{home}/replica/state"]
    process = await asyncio.create_subprocess_exec(*command, stderr=subprocess.PIPE)
    _, errors = await process.communicate()
    if process.returncode:
        raise SystemExit(f"dcr subscribe ended with {process.returncode}: {errors.decode()[-2000:]}")


def publish(home: Path, versions: int, size: int) -> dict[str, bytes]:
    """A stream of so many versions whose chunks have about `size` bytes together; its objects."""
    shutil.rmtree(home, ignore_errors=True)
    changed = max(1, size // (3 * versions))  # elements; a change takes about three bytes
    random, layout = np.random.default_rng(1), Layout([TensorSpec("weight", "BF16", (8 * changed,))])
    bits = random.integers(0, 1 << 16, 8 * changed, np.uint16)
    write_checkpoint(home / "base", layout, bits_of=lambda name: bits, side_files={"config.json": b"{}"})
    options: dict[str, Any] = {"create": True, "upload_base": False, "anchor_share": None}
    with Publisher(f"file://{home}/bucket", base=home / "base", state=home / "state", **options) as publisher:
        for _ in range(versions):
            bits[random.integers(0, bits.size, changed)] ^= random.integers(1, 1 << 16, changed, np.uint16)
            publisher.publish({"weight": torch.from_numpy(bits).view(torch.bfloat16)}).wait_sealed(600)
    bucket = home / "bucket"
    files = (path for path in bucket.rglob("*") if path.is_file() and path.relative_to(bucket).parts[0][0] != ".")
    return {f"run/{path.relative_to(bucket).as_posix()}": path.read_bytes() for path in files}


async def run(rate: float, stalled: float, given: argparse.Namespace) -> dict[str, Any]:
    size = int(rate * given.seconds)
    if not given.versions:
        objects = {f"run/data/{n}": os.urandom(max(1, size // given.objects)) for n in range(given.objects)}
        slow = SlowServer(objects, rate, stalled=stalled, delay=given.delay)
        return await measure(slow, partial(read_objects, count=given.objects))
    with tempfile.TemporaryDirectory(prefix="dcr-links-") as home:
        objects = await asyncio.to_thread(publish, Path(home) / "run", given.versions, size)
        slow = SlowServer(objects, rate, stalled=stalled, delay=given.delay)
        return await measure(slow, partial(subscribe, home=Path(home) / "run"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=120.0)
    parser.add_argument("--rates", type=float, nargs="+", default=[20, 100, 1000], help="KB per second")
    parser.add_argument("--stalled", type=float, nargs="+", default=[0.0, 0.1], help="share of the answers")
    parser.add_argument("--objects", type=int, default=24)
    parser.add_argument("--versions", type=int, default=0, help="by `dcr subscribe`, as so many versions")
    parser.add_argument("--delay", type=float, default=0.0, help="seconds from a request to its answer")
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    os.environ.update(AWS_ACCESS_KEY_ID="a", AWS_SECRET_ACCESS_KEY="s", AWS_CONFIG_FILE="/dev/null")
    if not given.json:
        print(
            f"{'KB/s':>6} {'stalled':>8} {'goodput':>8} {'fetched':>8} {'requests':>9} {'stalls':>7} {'sent twice':>11}"
        )
    for rate in given.rates:
        for stalled in given.stalled:
            row = {"rate": rate * 1000, "stalled": stalled} | asyncio.run(run(rate * 1000, stalled, given))
            if given.json:
                print(json.dumps(row))
            else:
                print(
                    f"{rate:6g} {stalled:8g} {row['ratio']:8.3f} {row['fetched']:8.3f} {row['requests']:9d} "
                    f"{row['stalls']:7d} {row['sent_twice']:11d}"
                )


if __name__ == "__main__":
    main()

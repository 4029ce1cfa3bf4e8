"""A link of its own for one process: a TCP proxy with a rate in each direction and a round-trip time, in user space.

    python benchmarks/rig/link.py LISTEN TARGET --mbit 200 --rtt 0.05

All connections share the rate. What is read is paced, and delivered half a round trip later; a new connection waits for
one round trip first, as its handshake would. Bytes are those of the streams, without TCP's and IP's headers.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib

PIECE = 64 << 10  #: bytes read at a time
AHEAD = 0.01  #: seconds that a connection may read ahead of the link


class Link:
    """Both directions of one link. `rate` in bytes per second, `rtt` in seconds."""

    def __init__(self, target: int, *, rate: float, rtt: float) -> None:
        self._target, self._rate, self._rtt = target, rate, rtt
        self._free = {"up": 0.0, "down": 0.0}  #: when all that was accepted has been sent
        self._window = int(max(256 << 10, rate * rtt))  #: bytes of a connection that may be under way

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            far_reader, far_writer = await asyncio.open_connection("127.0.0.1", self._target)
        except OSError:
            writer.close()
            return
        connected = asyncio.get_running_loop().time() + self._rtt
        await asyncio.gather(
            self._carry(reader, far_writer, "up", connected),
            self._carry(far_reader, writer, "down", 0.0),
            return_exceptions=True,
        )
        for one in (writer, far_writer):
            one.close()

    async def _carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, way: str, since: float) -> None:
        loop = asyncio.get_running_loop()
        pieces: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue()
        room, under_way = asyncio.Event(), 0
        room.set()

        async def deliver() -> None:
            nonlocal under_way
            while True:
                due, data = await pieces.get()
                if not data:
                    with contextlib.suppress(OSError):
                        writer.write_eof()
                    return
                await asyncio.sleep(max(0.0, due - loop.time()))
                writer.write(data)
                under_way -= len(data)
                if under_way < self._window:
                    room.set()
                await writer.drain()

        delivery = asyncio.create_task(deliver())
        with contextlib.suppress(OSError):
            while True:
                await room.wait()
                data = await reader.read(PIECE)
                if not data:
                    break
                now = loop.time()
                self._free[way] = max(now, self._free[way], since) + len(data) / self._rate
                under_way += len(data)
                if under_way >= self._window:
                    room.clear()
                pieces.put_nowait((self._free[way] + self._rtt / 2, data))
                if self._free[way] - now > 2 * AHEAD:  # the link is busy: others have their turn
                    await asyncio.sleep(self._free[way] - now - AHEAD)
        pieces.put_nowait((0.0, b""))
        with contextlib.suppress(OSError):
            await delivery


async def main(listen: int, target: int, *, rate: float, rtt: float) -> None:
    link = Link(target, rate=rate, rtt=rtt)
    server = await asyncio.start_server(link.serve, "127.0.0.1", listen, limit=1 << 20)
    async with server:
        await server.serve_forever()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("listen", type=int)
    parser.add_argument("target", type=int)
    parser.add_argument("--mbit", type=float, default=200.0)
    parser.add_argument("--rtt", type=float, default=0.05)
    given = parser.parse_args()
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(main(given.listen, given.target, rate=given.mbit * 125_000, rtt=given.rtt))

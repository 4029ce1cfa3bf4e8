"""One of several processes that create the same keys at the same instant; run by test_store.py.

Reads a key per line from stdin, creates it with bytes of its own, reads the slot, prints the outcome and what it read.
"""

from __future__ import annotations

import asyncio
import sys

from dcr_daemon.store import open_store


async def main(url: str, me: str) -> None:
    store = await open_store(url)
    loop = asyncio.get_running_loop()
    print("ready", flush=True)
    while key := (await loop.run_in_executor(None, sys.stdin.readline)).strip():
        body = f"{me} wrote {key} ".encode() * 200
        outcome = await store.create(key, body)
        seen = await store.get(key, limit=1 << 20)
        whose = seen.split(b" ", 1)[0].decode()
        assert seen == f"{whose} wrote {key} ".encode() * 200, "torn object"
        print(outcome.value, whose, flush=True)
    await store.close()


asyncio.run(main(*sys.argv[1:]))

"""Keeps completions in flight against a server, as a process of its own, and says how every one ended.

    python -m dcr_demo.traffic URL --clients 2 --tokens 24 --out requests.jsonl

Runs until SIGTERM or SIGINT, lets what is in flight finish, and exits 0. One JSON line per request: `start` and
`end` (monotonic seconds), `tokens`, `finish` (the server's reason), `longest_gap` (seconds between two tokens),
`error` (null if it ended well).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import signal
from pathlib import Path
from typing import IO, Any

from dcr_daemon import runtime

PROMPTS = (
    "The sea at night is",
    "A short story about a train:",
    "My favourite season is",
    "The capital of France is",
)


async def drive(url: str, out: IO[str], *, clients: int, tokens: int) -> None:
    """Run `clients` loops of streamed requests until a signal; returns when the last one has ended."""
    import aiohttp

    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    async with (
        aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=None)) as session,
        asyncio.TaskGroup() as group,
    ):
        for client in range(clients):
            group.create_task(_client(session, url, out, stop, client, tokens))


async def _client(session: Any, url: str, out: IO[str], stop: asyncio.Event, client: int, tokens: int) -> None:
    count = client
    while not stop.is_set():
        result = await _request(session, url, PROMPTS[count % len(PROMPTS)], tokens)
        out.write(json.dumps(result) + "\n")
        out.flush()
        count += 1
        if result["error"]:
            await runtime.sleep(0.2)


async def _request(session: Any, url: str, prompt: str, tokens: int) -> dict[str, Any]:
    """One streamed completion of exactly `tokens` tokens."""
    import aiohttp

    body = {
        "model": "m", "prompt": prompt, "max_tokens": tokens, "min_tokens": tokens, "temperature": 1.0,
        "ignore_eos": True, "stream": True,
    }  # fmt: skip
    start = last = runtime.monotonic()
    gap, count, finish, error = 0.0, 0, None, None
    try:
        async with session.post(f"{url}/v1/completions", json=body) as answer:
            answer.raise_for_status()
            async for line in answer.content:
                text = line.decode().strip().removeprefix("data: ")
                if not text or text == "[DONE]":
                    continue
                now = runtime.monotonic()
                gap, last, count = max(gap, now - last if count else 0.0), now, count + 1
                finish = json.loads(text)["choices"][0]["finish_reason"] or finish
    except (aiohttp.ClientError, ConnectionError, ValueError, KeyError) as problem:
        error = f"{type(problem).__name__}: {problem}"
    if error is None and finish != "length":
        error = f"ended with {finish}"
    end = runtime.monotonic()
    return {"start": start, "end": end, "tokens": count, "finish": finish, "longest_gap": gap, "error": error}


def main() -> None:
    parser = argparse.ArgumentParser(description="Keep completions in flight until SIGTERM.")
    parser.add_argument("url")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--clients", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=24)
    given = parser.parse_args()
    with given.out.open("a") as out:
        asyncio.run(drive(given.url, out, clients=given.clients, tokens=given.tokens))


if __name__ == "__main__":
    main()

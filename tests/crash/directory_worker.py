"""A process that brings a checkpoint directory from version to version until it is killed or at the last one.

    python directory_worker.py DIRECTORY PLAN

PLAN is JSON: `facts`, `vectors` (files by version), `transactions` (by base version), `anchor` (files of the last
version, or none). It prints `ready` before the first change, so that a killer knows when to start counting.
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import msgspec

from dcr_daemon.engine.directory.engine import DirectoryEngine
from dcr_daemon.engine.port import StreamFacts, Transaction


class Plan(msgspec.Struct):
    facts: StreamFacts
    vectors: list[str]
    transactions: list[Transaction]
    anchor: list[str] = []


async def work(directory: Path, plan: Plan) -> None:
    engine = DirectoryEngine(directory, shard_bytes=20_000)
    attached = await engine.attach(plan.facts)
    version = attached.version
    if version is None and not plan.anchor:
        version = next(n for n, path in enumerate(plan.vectors) if read(path) == attached.vector)
        await engine.prove(version, plan.vectors[version], f"v{version}")
    print("ready", version, flush=True)
    if plan.anchor:
        last = len(plan.vectors) - 1
        await engine.load(last, plan.anchor, plan.vectors[last], f"v{last}")
        return
    for txn in plan.transactions[version:]:
        await engine.prepare(txn)
        await engine.swap(txn.id)
    await engine.close()


def read(path: str) -> bytes:
    return Path(path).read_bytes()


if __name__ == "__main__":
    asyncio.run(work(Path(sys.argv[1]), msgspec.json.decode(Path(sys.argv[2]).read_bytes(), type=Plan)))

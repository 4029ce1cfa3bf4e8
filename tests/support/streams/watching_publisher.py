"""A watching publisher in this process, two checkpoints for it, and what must be true when it is through."""

from __future__ import annotations

import asyncio
from pathlib import Path

import numpy as np

from dcr_daemon.canonical.fingerprint import Bits, fingerprint
from dcr_daemon.canonical.layout import Layout, TensorSpec
from dcr_daemon.checkpoint.blocks import BlockSet
from dcr_daemon.checkpoint.directory import Checkpoint, write_checkpoint
from dcr_daemon.ledger.ledger import Ledger
from dcr_daemon.publish.baseline.baseline import Baseline
from dcr_daemon.publish.options import stream_state
from dcr_daemon.publish.watch.watcher import WatchOptions, run_watch
from dcr_daemon.runtime import Workers
from dcr_daemon.store.file import FileStore
from dcr_daemon.subscribe.materialize import materialize
from support.events import RecordedEvents

LAYOUT = Layout([TensorSpec("a", "BF16", (64, 64)), TensorSpec("b", "F32", (100,)), TensorSpec("c", "BF16", (5000,))])


class Publishing:
    """A base, two checkpoints to publish, and whatever state there is."""

    def __init__(self, root: Path) -> None:
        self.root, self.events = root, RecordedEvents()
        rng = np.random.default_rng(0)
        first = {s.name: rng.integers(0, 256, s.nbytes, dtype="u1").view(f"<u{s.width}") for s in LAYOUT}
        self.chain: list[dict[str, Bits]] = [first]
        self._write("base", first)
        for n in (1, 2):
            last = self.chain[-1]
            moved = {name: bits + (rng.random(bits.size) < 0.1).astype(bits.dtype) for name, bits in last.items()}
            self.chain.append(moved)
            self._write(f"watch/step_{n}", moved)

    def _write(self, name: str, weights: dict[str, Bits]) -> None:
        write_checkpoint(self.root / name, LAYOUT, bits_of=weights.__getitem__)

    def store(self) -> FileStore:
        return FileStore(self.root / "bucket")

    def run(self, *, once: bool = True) -> None:
        """`dcr publish --watch --once` in this process."""
        asyncio.run(self.publish(once=once))

    async def publish(self, *, once: bool) -> None:
        options = WatchOptions(
            state=self.root / "state", base=self.root / "base", create=True, watch=self.root / "watch", once=once,
            poll=0.02, anchor_every=1, chunk_bytes=300, spool_memory=0, upload_backlog=1000, workers=2, name="p",
        )  # fmt: skip
        store = self.store()
        try:
            await run_watch(options, store, emit=self.events)
        finally:
            await store.close()

    def check(self) -> None:
        """Two versions, bit for bit, and a baseline that is the newest."""
        asyncio.run(self._check())

    async def _check(self) -> None:
        store = self.store()
        ledger = Ledger(store)
        await ledger.read()
        seals = await ledger.history.between(1)
        assert [seal.source["path"] for seal in seals if seal.source] == ["step_1", "step_2"]
        for version in (1, 2):
            out = self.root / f"built-{version}"
            await materialize(store, version=version, out=out)
            with Checkpoint(out) as checkpoint:
                assert all(np.array_equal(checkpoint.bits(name), bits) for name, bits in self.chain[version].items())
        workers = Workers(1)
        baseline = Baseline(
            stream_state(self.root / "state", store.url), BlockSet.whole(LAYOUT), ledger.stream.stream, workers
        )
        proved = fingerprint(LAYOUT, [self.chain[2][spec.name] for spec in LAYOUT])
        hint = baseline.hint()
        assert np.array_equal(await baseline.fingerprint(), proved)
        assert hint is None or (hint[0] == 2 and np.array_equal(hint[1], proved))
        baseline.close()
        workers.close()
        await store.close()

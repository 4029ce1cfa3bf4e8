"""Anchors: a complete version in the bucket, as safetensors files (must L5).

Order: every file durable -> its fingerprint, summed over the very bytes that were put, adds up to the seal's vector
-> the `anchor` record. The baseline is not to move meanwhile: the session writes anchors between attempts only.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from dcr_daemon import runtime
from dcr_daemon.canonical.fingerprint import MASK, Vector, sum_run, total
from dcr_daemon.canonical.layout import Layout
from dcr_daemon.checkpoint.directory import INDEX
from dcr_daemon.checkpoint.pieces import Piece, piece_metadata, plan_files
from dcr_daemon.checkpoint.safetensors import SafetensorsBytes, pack_safetensors
from dcr_daemon.events import AnchorPut, Emit
from dcr_daemon.ledger import names, records
from dcr_daemon.ledger.ledger import Ledger
from dcr_daemon.ledger.records import Anchor, AnchorIndex, ObjectRef
from dcr_daemon.publish.baseline import Baseline, check_vector
from dcr_daemon.publish.restore import total_of
from dcr_daemon.runtime import Workers
from dcr_daemon.store.keys import is_key
from dcr_daemon.store.once import create_once
from dcr_daemon.store.retry import Patience

FILE_BYTES = 256 << 20  #: of tensors in one file: what `CONCURRENCY` of them may cost in memory
CONCURRENCY = 2
INDEX_NAME = "index.json"  #: of an anchor's own index; a side file of this name stays behind


@dataclass(frozen=True, slots=True)
class AnchorPolicy:
    """When the next anchor is due: after `every` versions, or when the chain since the last one outweighs `share` of
    a dense checkpoint. None switches either off."""

    every: int | None
    share: float | None

    @property
    def active(self) -> bool:
        return self.every is not None or self.share is not None

    def due(self, versions: int, chain_bytes: int, dense_bytes: int) -> bool:
        """`versions` and `chain_bytes` count from the last anchor (or version 0)."""
        if versions == 0:
            return False
        by_count = self.every is not None and versions >= self.every
        return by_count or (self.share is not None and chain_bytes > self.share * dense_bytes)


class SinceAnchor:
    """The versions since the newest anchor, as far as the ledger was read.

    They are asked about after every version, so what they add up to is carried along, and no seal is read twice.
    """

    def __init__(self, ledger: Ledger, policy: AnchorPolicy, dense_bytes: int) -> None:
        self._ledger, self._policy, self._dense_bytes = ledger, policy, dense_bytes
        self._anchor: int | None = None
        self._version = self._bytes = 0
        self._after = ""
        self._broken = False

    async def due(self) -> bool:
        """Whether they ask for another one: by policy, or because no chain leads over them.

        A version made from a stray baseline says so: its `before` is not the `after` of the version before it.
        """
        state, history = self._ledger.state, self._ledger.history
        anchor = state.anchor.version if state.anchor else 0
        if anchor != self._anchor:
            self._anchor = self._version = anchor
            self._bytes, self._broken = 0, False
            self._after = total_of(self._ledger.stream if anchor == 0 else await history.seal(anchor))
        for seal in await history.between(self._version + 1):
            self._broken |= seal.before != self._after
            self._version, self._after = seal.version, seal.after
            self._bytes += seal.bytes
        return self._broken or self._policy.due(self._version - anchor, self._bytes, self._dense_bytes)


async def write_anchor(
    ledger: Ledger,
    baseline: Baseline,
    extras: Mapping[str, bytes],
    workers: Workers,
    patience: float,
    emit: Emit,
) -> Anchor:
    """Upload the baseline's version and record it as an anchor.

    Raises:
        Fenced: another publisher owns the stream.
        Corrupt: the uploaded bytes are not the version; nothing is recorded.
        StoreUnavailable: the bucket did not answer; nothing is recorded, or the record's fate is open.
    """
    version = baseline.version
    assert version is not None
    await ledger.read()
    ledger.check_held()  # its number would pass for one of the new owner's (must L5), and the upload is long
    started = runtime.monotonic()
    # The seq of the newest record: never repeated by another process, since each claims first (must L0). One anchor is
    # written at a time, so retention knows by the number which ones have ended (must L5).
    prefix = names.anchor(version, ledger.tip.seq)
    writer = _Writer(ledger, baseline, prefix, workers, patience)
    files, vector = await writer.put_files()
    check_vector(
        baseline.vector, vector, baseline.layout, f"anchor of version {version} in {ledger.store.url}",
        "the publisher's memory is damaged; restart it, it rebuilds its baseline from the bucket",
    )  # fmt: skip
    side = [
        await writer.put(name, body) for name, body in sorted(extras.items()) if is_key(name) and name != INDEX_NAME
    ]
    index = AnchorIndex(stream=ledger.stream.stream, version=version, files=files, extras=side)
    place = await writer.put(INDEX_NAME, records.encode(index))
    runtime.failpoint("publish.anchor.put")
    size = sum(file.size for file in [*files, *side])
    record = await ledger.append(
        lambda header: Anchor(
            **header.fields, version=version, index=place, total=records.show_u64(total(vector)), bytes=size
        )
    )
    emit(AnchorPut(version=version, bytes=size, seconds=runtime.monotonic() - started))
    return record


class _Writer:
    """Puts the objects of one anchor, a few at a time."""

    def __init__(self, ledger: Ledger, baseline: Baseline, prefix: str, workers: Workers, patience: float) -> None:
        self._store, self._baseline, self._prefix = ledger.store, baseline, prefix
        self._workers, self._patience = workers, Patience(patience)
        self._sums = [0] * len(baseline.layout)

    async def put(self, name: str, body: bytes | bytearray) -> ObjectRef:
        key = f"{self._prefix}{name}"
        await create_once(self._store, key, memoryview(body), patience=self._patience)
        return ObjectRef(key, len(body), await self._workers.run(records.digest, memoryview(body)))

    async def put_files(self) -> tuple[list[ObjectRef], Vector]:
        """All tensors; the references of their files, and the fingerprint of what was put."""
        plan = plan_files(self._baseline.layout, FILE_BYTES)
        slots = asyncio.Semaphore(CONCURRENCY)

        async def put_file(n: int, pieces: list[Piece]) -> ObjectRef:
            async with slots:
                body, sums = await self._workers.run(_pack, self._baseline, pieces)
                for tensor, value in sums:
                    self._sums[tensor] = (self._sums[tensor] + value) & MASK
                file = await self.put(_file_name(n, len(plan)), body)
                runtime.failpoint("publish.anchor.file")
                return file

        tasks = [asyncio.create_task(put_file(n, pieces)) for n, pieces in enumerate(plan)]
        try:
            files = await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        await self._put_hf_index(plan)
        return files, np.array(self._sums, dtype=np.uint64)

    async def _put_hf_index(self, plan: list[list[Piece]]) -> None:
        """For people who copy the prefix with other tools; readers of DCR go by `index.json` alone."""
        layout = self._baseline.layout
        if len(plan) > 1 and all(piece.whole(layout) for pieces in plan for piece in pieces):
            homes = {p.entry.name: _file_name(n, len(plan)) for n, pieces in enumerate(plan) for p in pieces}
            table = {"metadata": {"total_size": layout.nbytes}, "weight_map": homes}
            await self.put(INDEX, json.dumps(table, sort_keys=True).encode())


def _file_name(n: int, count: int) -> str:
    return f"model-{n + 1:05d}-of-{count:05d}.safetensors" if count > 1 else "model.safetensors"


def _pack(baseline: Baseline, pieces: list[Piece]) -> tuple[bytearray, list[tuple[int, int]]]:
    """The bytes of one file, and `(tensor, sum)` of each piece, read back from those bytes."""
    layout = baseline.layout
    items = [(p.entry, baseline.read(p.tensor, p.start, p.count)) for p in pieces]
    body = pack_safetensors(items, piece_metadata(layout, pieces))
    packed = SafetensorsBytes(body, "anchor")
    return body, [(p.tensor, _sum(packed, p, layout)) for p in pieces]


def _sum(packed: SafetensorsBytes, piece: Piece, layout: Layout) -> int:
    return sum_run(packed.bits(piece.entry.name), int(layout.keys[piece.tensor]), piece.start)

"""Anchors: a complete version in the bucket, as safetensors files (must L5).

Order: every file durable -> its fingerprint, summed over the very bytes that were put, adds up to the seal's vector
-> the `anchor` record. The baseline is not to move meanwhile: a leader writes anchors between attempts only.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Protocol

import numpy as np

from dcr_daemon import runtime
from dcr_daemon.canonical.box import Box
from dcr_daemon.canonical.dtypes import bits_dtype
from dcr_daemon.canonical.fingerprint import MASK, Bits, Vector, sum_box, total
from dcr_daemon.canonical.layout import Layout
from dcr_daemon.checkpoint.contents import Contents, join_tables
from dcr_daemon.checkpoint.directory import INDEX
from dcr_daemon.checkpoint.pieces import Piece, piece_metadata, plan_boxes, plan_files
from dcr_daemon.checkpoint.safetensors import SafetensorsBytes, pack_safetensors
from dcr_daemon.errors import Corrupt
from dcr_daemon.events import AnchorPut
from dcr_daemon.ledger import names, records
from dcr_daemon.ledger.listed import read_listed
from dcr_daemon.ledger.objects import CONTENTS_LIMIT
from dcr_daemon.ledger.records import Anchor, AnchorIndex, AnchorShare, ObjectRef, Seal
from dcr_daemon.publish.baseline.baseline import check_vector
from dcr_daemon.publish.group.context import RankContext
from dcr_daemon.publish.resources import RankResources
from dcr_daemon.store.keys import is_key
from dcr_daemon.store.put_if_absent import put_if_absent
from dcr_daemon.store.retry import RetryPolicy
from dcr_daemon.task_limiter import run_limited

FILE_BYTES = 256 << 20  #: of tensors in one file: what `CONCURRENCY` of them may cost in memory
CONCURRENCY = 2
SHARES_AT_ONCE = 16  #: of other ranks, read by rank 0
INDEX_NAME = "index.json"  #: of an anchor's own index; a side file of this name stays behind
CONTENTS_NAME = "contents"  #: of what says what is in the files; likewise


class BoxSource(Protocol):
    """What an anchor is written from: a baseline, or the checkpoint that a stream begins with."""

    layout: Layout

    def read_box(self, tensor: int, box: Box) -> Bits:
        """The bits of a box that is held, in the box's row-major order; called on any thread."""
        ...


_REBUILDS = "the publisher's memory is damaged; restart it, it rebuilds its baseline from the bucket"


async def write_anchor(
    resources: RankResources, source: BoxSource, *, version: int, vector: Vector, side_files: Mapping[str, bytes]
) -> Anchor:
    """Upload a version that `source` has whole, and record it as an anchor.

    Args:
        vector: the fingerprint of the version.

    Raises:
        Fenced: another publisher owns the stream.
        Corrupt: the uploaded bytes are not the version; nothing is recorded.
        StoreUnavailable: the bucket did not answer; nothing is recorded, or the record's fate is open.
    """
    ledger = resources.ledger
    await ledger.read()
    ledger.check_held()  # its number would pass for one of the new owner's (must L5), and the upload is long
    # The seq of the newest record: never repeated by another process, since each claims first (must L0). One anchor is
    # written at a time, so retention knows by the number which ones have ended (must L5).
    prefix = names.anchor(version, ledger.tip.seq)
    writer = _Writer(resources, source, prefix)
    plan = plan_files(source.layout, FILE_BYTES)
    files, found = await writer.put_files(plan, lambda n: prefix + _file_name(n, len(plan)))
    await writer.put_hf_index(plan)
    table = await resources.workers.run(_contents, plan)
    what = f"anchor of version {version} in {ledger.store.url}"
    check_vector(vector, found, layout=source.layout, what=what, hint=_REBUILDS)
    return await writer.record(version, files, vector=vector, side_files=side_files, tables=[table])


async def write_share(context: RankContext, seal: Seal) -> AnchorShare:
    """Upload what this rank holds of a version that was just sealed, for an anchor (all ranks do; `join_anchor`).

    Raises:
        StoreUnavailable: the bucket did not answer.
        Corrupt: the uploaded bytes are not what the baseline should hold.
    """
    rank, baseline = context.rank, context.baseline
    writer = _Writer(context.resources, baseline, names.anchor(seal.version, seal.seq))

    def key(name: Callable[..., str], **more: int) -> str:
        return name(seal.version, seal.seq, group=rank.group, rank=rank.number, nonce=rank.nonce, **more)

    boxes = [(block.tensor, block.box) for block in baseline.blocks]
    plan = plan_boxes(baseline.layout, boxes, limit=FILE_BYTES)
    if rank.leads:  # nobody has an element of an empty tensor
        plan.append([Piece(t, None, spec) for t, spec in enumerate(baseline.layout) if not spec.elements])
    plan = [pieces for pieces in plan if pieces]
    files, vector = await writer.put_files(plan, lambda n: key(names.anchor_file, n=n))
    what = f"share of {rank} in the anchor of version {seal.version}"
    check_vector(baseline.vector, vector, layout=baseline.layout, what=what, hint=_REBUILDS)
    sums = await writer.put(key(names.anchor_sums), vector.astype("<u8").tobytes())
    share = AnchorShare(
        stream=seal.stream, group=rank.group, version=seal.version, rank=rank.number, nonce=rank.nonce, files=files,
        sums=sums, contents=await context.workers.run(_contents, plan),
    )  # fmt: skip
    runtime.failpoint("publish.anchor.shared")
    await writer.put(key(names.anchor_share), records.encode(share))
    return share


async def join_anchor(
    context: RankContext,
    seal: Seal,
    *,
    own: AnchorShare,
    keys: Mapping[int, str],
    side_files: Mapping[str, bytes],
) -> Anchor:
    """All ranks' shares as one anchor, whose fingerprint is the seal's (must L5).

    Args:
        keys: of the other ranks' shares.

    Raises:
        as `write_anchor`.
    """
    size = 8 * len(context.layout)
    writer = _Writer(context.resources, context.baseline, names.anchor(seal.version, seal.seq))
    shares: dict[int, AnchorShare] = {0: own}
    vector = context.baseline.vector  # what its own files were proved to hold

    async def take(number: int, key: str) -> None:
        share = shares[number] = await _read_share(context, key, seal=seal, number=number)
        sums = await context.objects.read(share.sums, seal.version, limit=size)
        if len(sums) != size:
            raise Corrupt(f"{share.sums.key} does not hold a vector of {len(context.layout)} tensors")
        np.add(vector, np.frombuffer(sums, "<u8"), out=vector)

    await run_limited((partial(take, number, key) for number, key in keys.items()), SHARES_AT_ONCE)
    want = await context.restorer.vector(seal.version)
    what = f"anchor of version {seal.version} in {context.ledger.store.url}"
    check_vector(want, vector, layout=context.layout, what=what, hint=_REBUILDS)
    files = [file for _, share in sorted(shares.items()) for file in share.files]
    tables = [share.contents for _, share in sorted(shares.items())]
    return await writer.record(seal.version, files, vector=vector, side_files=side_files, tables=tables)


async def _read_share(context: RankContext, key: str, *, seal: Seal, number: int) -> AnchorShare:
    body = await read_listed(context.ledger.store, key, limit=records.PART_LIMIT, patience=context.options.patience)
    try:
        share = records.decode_anchor_share(body)
    except ValueError as error:
        raise Corrupt(f"{key} is no share of an anchor: {error}") from error
    found = (share.stream, share.group, share.version, share.rank)
    if found != (seal.stream, context.rank.group, seal.version, number):
        raise Corrupt(f"{key} is a share of another anchor: {found}")
    return share


def _contents(plan: Sequence[list[Piece]]) -> bytes | None:
    """A table of what is in the planned files."""
    return Contents.of([[(p.tensor, p.box) for p in pieces if p.box] for pieces in plan]).pack()


class _Writer:
    """Puts the objects of one anchor, a few at a time, all of them below `prefix`."""

    def __init__(self, resources: RankResources, source: BoxSource, prefix: str) -> None:
        self._ledger, self._emit, self._store = resources.ledger, resources.emit, resources.store
        self._source, self._prefix, self._began = source, prefix, runtime.monotonic()
        self._workers, self._patience = resources.workers, RetryPolicy(resources.options.patience)
        self._sums = [0] * len(source.layout)

    async def record(
        self,
        version: int,
        files: list[ObjectRef],
        *,
        vector: Vector,
        side_files: Mapping[str, bytes],
        tables: list[bytes | None],
    ) -> Anchor:
        """Every file is durable: put the side files and the index, and append the record that names them.

        Args:
            tables: say what is in the files; if one is None, none is put.
        """
        fit = [name for name in sorted(side_files) if is_key(name) and name not in (INDEX_NAME, CONTENTS_NAME)]
        side = [await self.put(self._prefix + name, side_files[name]) for name in fit]
        known = [table for table in tables if table is not None]
        contents = None
        if len(known) == len(tables) and sum(map(len, known)) + 4 * len(known) <= CONTENTS_LIMIT:
            contents = await self.put(self._prefix + CONTENTS_NAME, join_tables(known))
            runtime.failpoint("publish.anchor.contents")
        stream = self._ledger.stream.stream
        index = AnchorIndex(stream=stream, version=version, files=files, extras=side, contents=contents)
        place = await self.put(self._prefix + INDEX_NAME, records.encode(index))
        runtime.failpoint("publish.anchor.put")
        size = sum(file.size for file in [*files, *side])
        record = await self._ledger.append(
            lambda header: Anchor(
                **header.fields, version=version, index=place, total=records.show_u64(total(vector)), bytes=size
            )
        )
        self._emit(AnchorPut(version=version, bytes=size, seconds=runtime.monotonic() - self._began))
        return record

    async def put(self, key: str, body: bytes | bytearray) -> ObjectRef:
        await put_if_absent(self._store, key, memoryview(body), patience=self._patience)
        return ObjectRef(key, len(body), await self._workers.run(records.digest, memoryview(body)))

    async def put_files(self, plan: Sequence[list[Piece]], key: Callable[[int], str]) -> tuple[list[ObjectRef], Vector]:
        """The references of the planned files, and the fingerprint of what was put. `key` gives the key of the n-th."""

        async def put_file(n: int, pieces: list[Piece]) -> ObjectRef:
            body, sums = await self._workers.run(_pack, self._source, pieces)
            for tensor, value in sums:
                self._sums[tensor] = (self._sums[tensor] + value) & MASK
            file = await self.put(key(n), body)
            runtime.failpoint("publish.anchor.file")
            return file

        files = await run_limited((partial(put_file, n, pieces) for n, pieces in enumerate(plan)), CONCURRENCY)
        return files, np.array(self._sums, dtype=np.uint64)

    async def put_hf_index(self, plan: Sequence[list[Piece]]) -> None:
        """For people who copy the prefix with other tools; readers of DCR go by `index.json` alone."""
        layout = self._source.layout
        if len(plan) > 1 and all(piece.whole(layout) for pieces in plan for piece in pieces):
            homes = {p.entry.name: _file_name(n, len(plan)) for n, pieces in enumerate(plan) for p in pieces}
            table = {"metadata": {"total_size": layout.nbytes}, "weight_map": homes}
            await self.put(self._prefix + INDEX, json.dumps(table, sort_keys=True).encode())


def _file_name(n: int, count: int) -> str:
    return f"model-{n + 1:05d}-of-{count:05d}.safetensors" if count > 1 else "model.safetensors"


def _pack(source: BoxSource, pieces: list[Piece]) -> tuple[bytearray, list[tuple[int, int]]]:
    """The bytes of one file, and `(tensor, sum)` of each piece, read back from those bytes."""
    layout = source.layout
    empty = {p.tensor: np.empty(0, bits_dtype(layout[p.tensor].width)) for p in pieces if not p.box}
    items = [(p.entry, source.read_box(p.tensor, p.box) if p.box else empty[p.tensor]) for p in pieces]
    body = pack_safetensors(items, piece_metadata(layout, pieces))
    packed = SafetensorsBytes(body, "anchor")
    keys = layout.keys
    return body, [
        (p.tensor, sum_box(packed.bits(p.entry.name), p.box, key=int(keys[p.tensor]))) for p in pieces if p.box
    ]

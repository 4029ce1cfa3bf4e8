"""Records of a small publisher, written through the real `Ledger` without any weights."""

from __future__ import annotations

from typing import Any

import numpy as np

from dcr_daemon.canonical.layout import Layout, TensorSpec
from dcr_daemon.ledger import records
from dcr_daemon.ledger.ledger import Header, Ledger
from dcr_daemon.ledger.records import Abort, Anchor, Floor, ObjectRef, Open, Seal

LAYOUT = Layout([TensorSpec("a.weight", "BF16", (4, 4)), TensorSpec("b.bias", "F32", (4,))])


def ref(key: str = "data/1/2/x", body: bytes = b"") -> ObjectRef:
    return ObjectRef(key, len(body), records.digest(body))


class RecordWriter:
    """Appends the records of a small publisher through a `Ledger`; sums and objects are made up."""

    layout = LAYOUT
    vector = np.array([7, 8], dtype=np.uint64)

    def __init__(self, ledger: Ledger) -> None:
        self.ledger = ledger

    async def create(self) -> None:
        await self.ledger.create_stream(self.layout, self.vector)

    async def open(self, call: int = 0) -> Open:
        return await self.ledger.append(lambda header: make_open(header, call))

    async def seal(self, size: int = 100) -> Seal:
        return await self.ledger.append(lambda header: make_seal(header, size))

    async def version(self, size: int = 100) -> Seal:
        await self.open()
        return await self.seal(size)

    async def abort(self) -> Abort:
        return await self.ledger.append(make_abort)

    async def anchor(self, version: int, size: int = 1000) -> Anchor:
        return await self.ledger.append(lambda header: make_anchor(header, version, size))

    async def floor(self, floor: int) -> Floor:
        return await self.ledger.append(lambda header: Floor(**header.fields, floor=floor))


def make_open(header: Header, call: int = 0, **changes: Any) -> Open:
    base = header.state.seal.version
    return Open(**header.fields, **{"version": base + 1, "base": base, "group": "g", "call": call} | changes)


def make_seal(header: Header, size: int = 100, **changes: Any) -> Seal:
    state = header.state
    attempt = state.open.seq if state.open else 0
    values: dict[str, Any] = {
        "version": state.seal.version + 1, "base": state.seal.version, "attempt": attempt, "parts": [ref()],
        "fingerprint": ref("data/1/2/fingerprint.bin"), "before": "0" * 16, "after": "0" * 16,
        "previous": state.seal.seq, "changed": 1, "elements": 20, "bytes": size, "dense_bytes": 48,
    }  # fmt: skip
    return Seal(**header.fields, **values | changes)


def make_abort(header: Header) -> Abort:
    assert header.state.open
    return Abort(
        **header.fields, attempt=header.state.open.seq, version=header.state.open.version, reason="the trainer said so"
    )


def make_anchor(header: Header, version: int, size: int = 1000) -> Anchor:
    index = ref(f"anchors/{version}/{header.seq}/index.json")
    return Anchor(**header.fields, version=version, index=index, total="0" * 16, bytes=size)

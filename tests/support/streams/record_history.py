"""Long histories, quickly: thousands of versions written as records, without a publisher."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

from dcr_daemon.canonical.fingerprint import Vector, total
from dcr_daemon.canonical.layout import Layout, TensorSpec
from dcr_daemon.ledger import names, records
from dcr_daemon.ledger.fold import Tip, begin, fold
from dcr_daemon.ledger.records import Abort, Anchor, AnchorIndex, Epoch, Floor, ObjectRef, Open, Record, Release, Seal
from dcr_daemon.ledger.records import Stream as StreamRecord
from support.stores.memory import MemoryStore

LAYOUT = Layout([TensorSpec("a", "BF16", (4,)), TensorSpec("b", "BF16", (4,))])


def vector_of(version: int) -> Vector:
    """Made-up sums, other ones for every version."""
    return np.array([version + 1, 7], dtype=np.uint64)


class HistoryWriter:
    """Writes records into a `MemoryStore` as a lawful publisher would, each checked by the fold.

    `vectors`: what the sums of a version are; `size`: bytes that a delta is said to have; `digests`: whether records
    prove themselves, or are as 0.1.0 wrote them.
    """

    def __init__(
        self, store: MemoryStore, layout: Layout = LAYOUT, vectors: Any = vector_of, size: int = 100,
        *, digests: bool = True,
    ) -> None:  # fmt: skip
        self.digests = digests
        self.store, self.layout, self.vectors, self.size = store, layout, vectors, size
        self.bytes_of_anchor = 50 * size
        sums = self._object(names.vector(0, 0), self.sums(0))
        place = ObjectRef(names.layout(layout.digest), len(layout.encoded), layout.digest)
        store.objects[place.key] = layout.encoded
        first = StreamRecord(
            stream="5ea1" * 4, seq=0, prev=records.NO_RECORD, state=None, nonce="0", at="2026-01-01T00:00:00+00:00",
            layout=place, fingerprint=sums, total=self.total(0),
        )  # fmt: skip
        body = self._encoded(first)
        store.objects[names.record(0)] = body
        self.tip: Tip = begin(body)[0]
        self.epoch = 0

    def sums(self, version: int) -> bytes:
        return self.vectors(version).astype("<u8").tobytes()

    def total(self, version: int) -> str:
        return records.show_u64(total(self.vectors(version)))

    def _object(self, key: str, body: bytes) -> ObjectRef:
        self.store.objects[key] = body
        return ObjectRef(key, len(body), records.digest(body))

    def _encoded(self, record: Record) -> bytes:
        return records.encode_record(record) if self.digests else records.encode(record)

    def append(self, kind: type[Record], *, at: str = "2026-01-01T00:00:00+00:00", **fields: Any) -> Any:
        seq = self.tip.seq + 1
        common = {
            "stream": self.tip.stream, "seq": seq, "prev": self.tip.digest, "state": self.tip.state,
            "nonce": f"{seq:x}", "at": at, "epoch": seq if kind is Epoch else self.epoch,
        }  # fmt: skip
        body = self._encoded(kind(**common, **fields))
        step = fold(self.tip, body)
        assert step.record is not None, step.void
        self.store.objects[names.record(seq)] = body
        self.tip = step.tip
        return step.record

    def claim(self, name: str = "trainer") -> None:
        self.epoch = self.append(Epoch, name=name, take_over=True).seq

    def release(self) -> None:
        self.append(Release)

    def open(self) -> Open:
        base = self.tip.state.seal.version
        return self.append(Open, version=base + 1, base=base, group="g", call=0)

    def abort(self) -> None:
        opened = self.tip.state.open
        self.append(Abort, attempt=opened.seq, version=opened.version, reason="test")

    def seal(self, at: str = "2026-01-01T00:00:00+00:00", source: dict[str, object] | None = None) -> Seal:
        opened = self.tip.state.open
        sums = self._object(names.vector(opened.version, opened.seq), self.sums(opened.version))
        return self.append(
            Seal, at=at, version=opened.version, base=opened.base, attempt=opened.seq, parts=[], fingerprint=sums,
            before=self.total(opened.base), after=self.total(opened.version), previous=self.tip.state.seal.seq,
            changed=0, elements=sum(s.elements for s in self.layout), bytes=self.size, dense_bytes=self.layout.nbytes,
            source=source,
        )  # fmt: skip

    def version(self, at: str = "2026-01-01T00:00:00+00:00", source: dict[str, object] | None = None) -> Seal:
        self.open()
        return self.seal(at, source)

    def versions(self, count: int, *, anchors_every: int = 0) -> None:
        for _ in range(count):
            version = self.version().version
            if anchors_every and version % anchors_every == 0:
                self.anchor(version)

    def anchor(self, version: int, files: Iterable[tuple[str, bytes]] = (("model.safetensors", b"weights"),)) -> Anchor:
        prefix = names.anchor(version, self.tip.seq)
        refs = [self._object(prefix + name, body) for name, body in files]
        index = AnchorIndex(stream=self.tip.stream, version=version, files=refs)
        place = self._object(f"{prefix}index.json", records.encode(index))
        size = self.bytes_of_anchor
        return self.append(Anchor, version=version, index=place, total=self.total(version), bytes=size)

    def floor(self, version: int) -> Floor:
        return self.append(Floor, floor=version)

    def put(self, key: str, body: bytes = b"x") -> str:
        """Some object."""
        self.store.objects[key] = body
        return key

"""Valid inputs that targets start from: a small stream in memory, its records and objects, files, messages.

Everything is made by the project's own writers from fixed numbers, so that a corpus means the same tomorrow.
"""

from __future__ import annotations

import functools
import json
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np
from support.chunks.malformed import EditableChunk, sample_chunk, sample_layout
from support.stores.memory import MemoryStore

from dcr_daemon.canonical.fingerprint import Vector, advance, fingerprint, total
from dcr_daemon.checkpoint.pieces import piece_metadata, plan_files
from dcr_daemon.checkpoint.safetensors import pack_safetensors
from dcr_daemon.codec.chunk import Codec
from dcr_daemon.codec.decode import open_chunk
from dcr_daemon.engine import messages
from dcr_daemon.engine.port import (
    Attached,
    EngineStatus,
    Prepared,
    StreamFacts,
    Swapped,
    Transaction,
    Verdict,
    VersionDelta,
)
from dcr_daemon.ledger import names, records
from dcr_daemon.ledger.fold import Tip, begin, fold
from dcr_daemon.ledger.records import Abort, Anchor, AnchorIndex, ChunkRef, Epoch, Floor, ObjectRef, Open, Part, Seal
from dcr_daemon.subscribe.status import ReplicaStatus
from dcr_daemon.vllm_plugin import calls

LAYOUT = sample_layout()
STREAM = "0123456789abcdef"
CODECS = [(codec, rate) for codec in Codec for rate in (2, 40)]


@functools.cache
def chunks() -> list[bytes]:
    """Chunks of the sample layout, every codec, dense and sparse."""
    return [sample_chunk(codec, rate)[0].data for codec, rate in CODECS]


@functools.cache
def undo_bytes() -> list[bytes]:
    return [sample_chunk(codec, rate)[0].undo for codec, rate in CODECS]


@functools.cache
def values() -> tuple[np.ndarray, ...]:
    """The sample layout's tensors before the change; the same for every codec."""
    return tuple(sample_chunk(Codec.AUTO, 2)[1])


@dataclass
class SampleStream:
    """A ledger of eight records in memory: version 1 sealed, an anchor, a floor, version 2 open."""

    store: MemoryStore = field(default_factory=MemoryStore)
    tips: list[Tip] = field(default_factory=list)
    bodies: list[bytes] = field(default_factory=list)
    seal: Seal | None = None
    anchor: Anchor | None = None
    values: list[np.ndarray] = field(default_factory=list)  #: of version 1

    def put(self, key: str, body: bytes) -> ObjectRef:
        self.store.objects[key] = body
        return ObjectRef(key, len(body), records.digest(body))

    def append(self, record: records.Record) -> None:
        body = records.encode(record)
        if self.tips:
            step = fold(self.tips[-1], body)
            assert step.record is not None, step.void
            self.tips.append(step.tip)
        else:
            self.tips.append(begin(body)[0])
        self.bodies.append(body)
        self.store.objects[names.record(len(self.bodies) - 1)] = body

    def head(self, epoch: int = 1) -> dict[str, Any]:
        tip = self.tips[-1]
        seq = tip.seq + 1
        state = tip.state
        return {"stream": STREAM, "seq": seq, "prev": tip.digest, "state": state, "nonce": f"{seq:016x}", "at": "now",
                "epoch": epoch}  # fmt: skip


def _vector_bytes(vector: Vector) -> bytes:
    return vector.astype("<u8").tobytes()


@functools.cache
def stream() -> SampleStream:
    """Built once; targets copy what they change."""
    s = SampleStream()
    before = fingerprint(LAYOUT, list(values()))
    layout = s.put(names.layout(LAYOUT.digest), LAYOUT.encoded)
    base = s.put(names.vector(0, 0), _vector_bytes(before))
    s.append(
        records.Stream(
            stream=STREAM, seq=0, prev=records.NO_RECORD, state=None, nonce="0", at="now", layout=layout,
            fingerprint=base, total=records.show_u64(total(before)),
        )
    )  # fmt: skip
    s.append(Epoch(**s.head(1), name="p"))
    s.append(Open(**s.head(), version=1, base=0, group="g1", call=1))
    _seal(s, before)
    s.append(Open(**s.head(), version=2, base=1, group="g1", call=2, step=-3))
    s.append(Abort(**s.head(), attempt=4, version=2, reason="a reason"))
    _anchor(s)
    s.append(Floor(**s.head(), floor=1))
    s.append(Open(**s.head(), version=2, base=1, group="g1", call=3))
    return s


def _seal(s: SampleStream, before: Vector) -> None:
    forged = EditableChunk.of(chunks()[0])
    forged.header |= {"attempt": 2, "base": 0, "version": 1}
    data = forged.build()
    chunk = open_chunk(data, LAYOUT)
    after = advance(before, chunk.segments)
    changed = sum(segment.changed for segment in chunk.segments)
    address = (1, 2, "g1", 2, "n0nce")
    ref = s.put(names.chunk(*address, 5), data)
    sums = s.put(names.sums(*address), _vector_bytes(before))
    part = Part(
        stream=STREAM, group="g1", call=1, attempt=2, base=0, version=1, rank=2, nonce="n0nce", sums=sums,
        chunks=[ChunkRef(ref.key, ref.size, ref.sha256, len(chunk.segments), changed)], changed=changed, bytes=ref.size,
    )  # fmt: skip
    s.append(
        Seal(
            **s.head(), version=1, base=0, attempt=2, parts=[s.put(names.part(*address), records.encode(part))],
            fingerprint=s.put(names.vector(1, 2), _vector_bytes(after)), before=records.show_u64(total(before)),
            after=records.show_u64(total(after)), previous=0, changed=changed,
            elements=sum(spec.elements for spec in LAYOUT), bytes=ref.size, dense_bytes=LAYOUT.nbytes, step=10,
            source={"path": "step_10", "files": [["model.safetensors", 5, 6, 7]]}, metadata={"loss": 0.5, "l": [{}]},
        )
    )  # fmt: skip
    s.seal = records.decode_record(s.bodies[-1])  # type: ignore[assignment]
    bits = [array.copy() for array in values()]
    for n, segment in enumerate(chunk.segments):
        changes = chunk.changes(n)
        at = segment.box.canonical(changes.positions)
        bits[segment.tensor][at] = changes.resolve(bits[segment.tensor][at])
    s.values = bits


def _anchor(s: SampleStream) -> None:
    prefix, files = names.anchor(1, 6), []
    for n, pieces in enumerate(plan_files(LAYOUT, 2500)):
        files.append(s.put(f"{prefix}model-{n}.safetensors", pack_pieces(s.values, pieces)))
    index = AnchorIndex(stream=STREAM, version=1, files=files, extras=[s.put(f"{prefix}config.json", b"{}")])
    place = s.put(f"{prefix}index.json", records.encode(index))
    assert s.seal is not None
    s.append(Anchor(**s.head(), version=1, index=place, total=s.seal.after, bytes=sum(ref.size for ref in files)))
    s.anchor = records.decode_record(s.bodies[-1])  # type: ignore[assignment]


def pack_pieces(bits: Any, pieces: Any) -> bytes:
    items = [(p.entry, bits[p.tensor][p.run]) for p in pieces]
    return bytes(pack_safetensors(items, piece_metadata(LAYOUT, pieces)))


@functools.cache
def safetensors_files() -> list[bytes]:
    """One whole file, one of pieces, one empty."""
    whole = bytes(pack_safetensors(list(zip(LAYOUT, values(), strict=True)), {"format": "pt"}))
    return [whole, pack_pieces(values(), plan_files(LAYOUT, 2500)[0]), bytes(pack_safetensors([]))]


@functools.cache
def call_records() -> list[messages.Call]:
    hop = VersionDelta(version=2, base=1, attempt=7, chunks=["/tmp/a.dcr"], before="/tmp/b", after="/tmp/c")
    owner = {"token": 3, "incarnation": "i1"}
    return [
        messages.Attach(id="a-1", facts=StreamFacts(stream=STREAM, layout="/tmp/l", layout_digest="d")),
        messages.Prove(id="a-2", version=1, vector="/tmp/v", label="1", **owner),
        messages.Serve(id="a-3", **owner),
        messages.Prepare(id="a-4", txn=Transaction(id="t", hops=[hop, hop], label="2"), **owner),
        messages.Swap(id="a-5", txn="t", **owner),
        messages.Load(id="a-6", version=2, files=["/tmp/f"], vector="/tmp/v", label="2", **owner),
        messages.Outcome(id="a-7", txn="t"),
        messages.Status(id="a-8"),
    ]


@functools.cache
def answers() -> list[messages.Answer]:
    attached = Attached(token=1, incarnation="i", adopted=None, version=1, serving=True, vector=b"\0" * 8, classes=[])
    swapped = Swapped(txn="t", verdict=Verdict.COMMITTED, version=2, serving=True)
    return [
        messages.done("a-1", attached),
        messages.done("a-2", None),
        messages.done("a-4", Prepared(txn="t", changed=5, fits=1)),
        messages.done("a-5", swapped),
        messages.done("a-8", EngineStatus(incarnation="i", version=None, serving=False)),
        messages.Refused(id="a-9", kind="Fenced", message="m", hint="h"),
        messages.Pending(id="a-9"),
    ]


@functools.cache
def plugin_calls() -> list[dict[str, Any]]:
    """Envelopes as EngineCore sends them to a worker."""
    hop = calls.HopFiles(version=2, base=1, attempt=7, chunks=["/c"])
    arguments = {
        "attach": calls.Attach(layout="/l", layout_digest="d", cap=1 << 20, cpus=[0]),
        "start": calls.Start(id="j", kind=calls.JobKind.PREPARE, hops=[hop]),
        "poll": calls.JobRef(id="j"),
        "join": calls.JobRef(id="j"),
        "begin": calls.Begin(txn="t"),
        "apply": calls.TxnRef(txn="t"),
        "status": None,
    }
    return [
        calls.plain(calls.Call(op=op, call="c-1", token=2, arg={} if arg is None else calls.plain(arg)))
        for op, arg in arguments.items()
    ]


def report() -> dict[str, Any]:
    status = ReplicaStatus(id="r1", stream=STREAM, incarnation="i1", counter=3, at="now", state="serving", version=1)
    return json.loads(msgspec.json.encode(status))


def document(body: bytes) -> Any:
    return json.loads(body)

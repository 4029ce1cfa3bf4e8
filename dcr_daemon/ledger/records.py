"""The records of the ledger, exactly as they lie in the bucket (FORMATS 3).

One JSON object per seq, created once. Every record repeats the stream id, the digest of the record before it
and the folded state before it, so that a cold reader can start at the tail and a sequential reader compares.
u64 values are 16 hex digits: other JSON readers lose bits above 2^53.
"""

from __future__ import annotations

import hashlib
from typing import Any

import msgspec

FORMAT = 1
RECORD_LIMIT = 1 << 20  #: bytes; a larger record is void


class ObjectRef(msgspec.Struct, frozen=True, forbid_unknown_fields=False):
    """An immutable object: key relative to the stream, size in bytes, SHA-256 in hex."""

    key: str
    size: int
    sha256: str


class EpochRef(msgspec.Struct, frozen=True):
    seq: int
    name: str
    released: bool = False


class OpenRef(msgspec.Struct, frozen=True):
    """The attempt under construction; `seq` is its id."""

    seq: int
    version: int
    base: int
    group: str
    call: int


class SealRef(msgspec.Struct, frozen=True):
    seq: int
    version: int


class AnchorRef(msgspec.Struct, frozen=True):
    seq: int
    version: int


class State(msgspec.Struct, frozen=True):
    """The folded state: everything a writer or reader must know, of fixed size."""

    seal: SealRef
    epoch: EpochRef | None = None
    open: OpenRef | None = None
    anchor: AnchorRef | None = None
    floor: int = 0
    keys: int | None = None


class Record(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", omit_defaults=False):
    """Fields that every record carries. `epoch` is the seq of its writer's claim; 0 in `stream`."""

    format: int = FORMAT
    stream: str
    seq: int
    prev: str
    state: State | None
    nonce: str
    at: str
    epoch: int = 0


class Stream(Record, frozen=True, tag="stream"):
    """Seq 0, and the seal of version 0."""

    layout: ObjectRef
    fingerprint: ObjectRef
    total: str
    model: str = ""


class Keys(Record, frozen=True, tag="keys"):
    keys: list[str]


class Epoch(Record, frozen=True, tag="epoch"):
    """A publisher's claim; its epoch is this record's seq."""

    name: str
    take_over: bool = False


class Release(Record, frozen=True, tag="release"):
    pass


class Open(Record, frozen=True, tag="open"):
    version: int
    base: int
    group: str
    call: int
    step: int | None = None


class Seal(Record, frozen=True, tag="seal"):
    """The commit point of a version. `before` and `after` are fingerprint totals; `previous` the seal before it."""

    version: int
    base: int
    attempt: int
    parts: list[ObjectRef]
    fingerprint: ObjectRef
    before: str
    after: str
    previous: int
    changed: int
    elements: int
    bytes: int
    dense_bytes: int
    step: int | None = None
    source: dict[str, Any] | None = None
    metadata: dict[str, Any] = {}


class Abort(Record, frozen=True, tag="abort"):
    attempt: int
    version: int
    reason: str


class Anchor(Record, frozen=True, tag="anchor"):
    """A complete version; `index` names its files (`AnchorIndex`)."""

    version: int
    index: ObjectRef
    total: str
    bytes: int


class Floor(Record, frozen=True, tag="floor"):
    floor: int


AnyRecord = Stream | Keys | Epoch | Release | Open | Seal | Abort | Anchor | Floor


class ChunkRef(msgspec.Struct, frozen=True):
    key: str
    size: int
    sha256: str
    segments: int
    changed: int


class Part(msgspec.Struct, frozen=True, kw_only=True):
    """What one rank contributed to one attempt (must P2: everything is repeated and compared)."""

    format: int = FORMAT
    stream: str
    group: str
    call: int
    attempt: int
    base: int
    version: int
    rank: int
    nonce: str
    chunks: list[ChunkRef]
    sums: ObjectRef
    changed: int
    bytes: int


class AnchorIndex(msgspec.Struct, frozen=True, kw_only=True):
    """`files` are safetensors, `extras` the model's small side files (config, tokenizer); key, size and digest each."""

    format: int = FORMAT
    stream: str
    version: int
    files: list[ObjectRef]
    extras: list[ObjectRef] = []


_encoder = msgspec.json.Encoder()
_decoder = msgspec.json.Decoder(AnyRecord)


def encode(value: msgspec.Struct) -> bytes:
    return _encoder.encode(value)


def decode_record(body: bytes) -> AnyRecord:
    """Raises `msgspec.MsgspecError` for anything that is not one record."""
    return _decoder.decode(body)


def digest(body: bytes | memoryview) -> str:
    """SHA-256 in hex, the only digest of the format."""
    return hashlib.sha256(body).hexdigest()

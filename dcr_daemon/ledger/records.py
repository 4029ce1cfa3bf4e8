"""The records of the ledger, exactly as they are in the bucket (docs/FORMAT.md 3).

One JSON object per seq, created once. Every record repeats the stream id, the digest of the record before it
and the folded state before it, so that a cold reader can start at the tail and a sequential reader compares.
u64 values are 16 hex digits: other JSON readers lose bits above 2^53. The constraints below are checked when a
record is decoded, never when one is built: a reader trusts no writer, and a writer reads what it wrote.

A record proves itself (must L2): its last field, `digest`, is the SHA-256 of all bytes before it. Writers up to 0.1
wrote none; such a record is read too, but nothing in it shows whether it was damaged.
"""

from __future__ import annotations

import hashlib
import re
from datetime import UTC, datetime
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from dcr_daemon.untrusted import decode_json

FORMAT = 1
RECORD_LIMIT = 1 << 20  #: bytes; a larger record is void
PART_LIMIT = 64 << 20  #: bytes of a part or an anchor index
MAX_DEPTH = 32  #: nesting of user data in a record; fixed, since a parser's own limit differs from host to host
LEAST, MOST = -(1 << 63), (1 << 64) - 1  #: integers in user data; how many digits a parser takes is the host's choice

Count = Annotated[int, Meta(ge=0, le=(1 << 63) - 1)]
Label = Annotated[int, Meta(ge=-(1 << 63), le=(1 << 63) - 1)]
Id = Annotated[str, Meta(pattern=r"\A[a-z0-9]{1,32}\Z")]
_NAME = r"\A[A-Za-z0-9][A-Za-z0-9._-]{0,63}\Z"
#: a publisher is called as its unit, pod or host is; the name is never part of a key
Name = Annotated[str, Meta(pattern=_NAME)]
Hex64 = Annotated[str, Meta(pattern=r"\A[0-9a-f]{16}\Z")]
Bytes = bytes  #: in base64; a name that no field has
Sha256 = Annotated[str, Meta(pattern=r"\A[0-9a-f]{64}\Z")]
#: relative to the stream; the same grammar as `store.keys`, so that no record can name anything outside the stream
Key = Annotated[
    str, Meta(pattern=r"\A[A-Za-z0-9_][A-Za-z0-9._-]{0,199}(/[A-Za-z0-9_][A-Za-z0-9._-]{0,199})*\Z", max_length=512)
]


class ObjectRef(msgspec.Struct, frozen=True, forbid_unknown_fields=False):
    """An immutable object: key relative to the stream, size in bytes, SHA-256 in hex."""

    key: Key
    size: Count
    sha256: Sha256


class EpochRef(msgspec.Struct, frozen=True):
    seq: Count
    name: Name
    released: bool = False


class OpenRef(msgspec.Struct, frozen=True):
    """The attempt under construction; `seq` is its id."""

    seq: Count
    version: Count
    base: Count
    group: Id
    call: Count


class SealRef(msgspec.Struct, frozen=True):
    seq: Count
    version: Count


class AnchorRef(msgspec.Struct, frozen=True):
    seq: Count
    version: Count


class State(msgspec.Struct, frozen=True):
    """The folded state: everything a writer or reader must know, of fixed size."""

    seal: SealRef
    epoch: EpochRef | None = None
    open: OpenRef | None = None
    anchor: AnchorRef | None = None
    floor: Count = 0
    keys: Count | None = None


class Record(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", omit_defaults=False):
    """Fields that every record carries. `epoch` is the seq of its writer's claim; 0 in `stream`."""

    format: Count = FORMAT
    stream: Id
    seq: Count
    prev: Sha256
    state: State | None
    nonce: Id
    at: str
    epoch: Count = 0


class Stream(Record, frozen=True, tag="stream"):
    """Seq 0, and the seal of version 0."""

    layout: ObjectRef
    fingerprint: ObjectRef
    total: Hex64
    model: str = ""


class Keys(Record, frozen=True, tag="keys"):
    keys: list[str]


class Epoch(Record, frozen=True, tag="epoch"):
    """A publisher's claim; its epoch is this record's seq."""

    name: Name
    take_over: bool = False


class Release(Record, frozen=True, tag="release"):
    pass


class Open(Record, frozen=True, tag="open"):
    version: Count
    base: Count
    group: Id
    call: Count
    step: Label | None = None


class Seal(Record, frozen=True, tag="seal"):
    """The commit point of a version. `before` and `after` are fingerprint totals; `previous` the seal before it.

    `anchor`: every rank writes its share of an anchor of this version next.
    """

    version: Count
    base: Count
    attempt: Count
    parts: list[ObjectRef]
    fingerprint: ObjectRef
    before: Hex64
    after: Hex64
    previous: Count
    changed: Count
    elements: Count
    bytes: Count
    dense_bytes: Count
    step: Label | None = None
    source: dict[str, Any] | None = None
    metadata: dict[str, Any] = {}
    anchor: bool = False


def version_of(record: Stream | Seal) -> int:
    """The version that a record sealed; the stream record seals version 0."""
    return 0 if isinstance(record, Stream) else record.version


def written_at(record: Record) -> datetime | None:
    """When its writer's clock says that it was made; None if that cannot be parsed. It decides nothing (L8)."""
    try:
        at = datetime.fromisoformat(record.at)
    except ValueError:
        return None
    return at if at.tzinfo else at.replace(tzinfo=UTC)


def total_of(record: Stream | Seal) -> str:
    """The total of a version's fingerprint, in the record that sealed it."""
    return record.total if isinstance(record, Stream) else record.after


class Abort(Record, frozen=True, tag="abort"):
    """`rebuild`: what the ranks hold does not add up; each builds its baseline anew, from the bucket alone."""

    attempt: Count
    version: Count
    reason: str
    rebuild: bool = False


class Anchor(Record, frozen=True, tag="anchor"):
    """A complete version; `index` names its files (`AnchorIndex`)."""

    version: Count
    index: ObjectRef
    total: Hex64
    bytes: Count


class Floor(Record, frozen=True, tag="floor"):
    floor: Count


AnyRecord = Stream | Keys | Epoch | Release | Open | Seal | Abort | Anchor | Floor


class ChunkRef(msgspec.Struct, frozen=True):
    key: Key
    size: Count
    sha256: Sha256
    segments: Count
    changed: Count


class Part(msgspec.Struct, frozen=True, kw_only=True):
    """What one rank contributed to one attempt (must P2: everything is repeated and compared).

    `stray`: the rank diffed from bytes that are not the base's (must P4). `anchor`: it asks for an anchor. `contents`:
    what each of the chunks touches, a table of `checkpoint.contents`; none from a process that has the model alone.
    """

    format: Count = FORMAT
    stream: Id
    group: Id
    call: Count
    attempt: Count
    base: Count
    version: Count
    rank: Count
    nonce: Id
    chunks: list[ChunkRef]
    sums: ObjectRef
    changed: Count
    bytes: Count
    stray: bool = False
    anchor: bool = False
    contents: Bytes | None = None


class Fail(msgspec.Struct, frozen=True, kw_only=True):
    """Why a rank gives an attempt up: rank 0 aborts it (must P7)."""

    format: Count = FORMAT
    stream: Id
    group: Id
    call: Count
    attempt: Count
    rank: Count
    nonce: Id
    reason: str


class AnchorShare(msgspec.Struct, frozen=True, kw_only=True):
    """What one rank contributed to an anchor: its files, `sums`, the vector over what is in them, and `contents`, a
    table of `checkpoint.contents` that says where they lie."""

    format: Count = FORMAT
    stream: Id
    group: Id
    version: Count
    rank: Count
    nonce: Id
    files: list[ObjectRef]
    sums: ObjectRef
    contents: Bytes | None = None


class AnchorIndex(msgspec.Struct, frozen=True, kw_only=True):
    """`files` are safetensors, `extras` the model's small side files (config, tokenizer); key, size and digest each.

    `contents`: tables that say what is in the files, one after the other; early writers gave none.
    """

    format: Count = FORMAT
    stream: Id
    version: Count
    files: list[ObjectRef]
    extras: list[ObjectRef] = []
    contents: ObjectRef | None = None

    @property
    def all(self) -> list[ObjectRef]:
        """Every object that the index names."""
        return [*self.files, *self.extras, *([self.contents] if self.contents else [])]


class Oversized(bytes):
    """What readers take an object above `RECORD_LIMIT` for: no writer puts one, so it never was a record.

    It has no bytes, so that all readers compute the same digest.
    """


NO_RECORD = "0" * 64  #: `prev` of the first record


class _Head(msgspec.Struct):
    """What a record of any format must show before its own format may matter."""

    format: Count
    stream: str
    seq: Count


#: the end of a record that proves itself; what it covers is all that is before it
_PROOF = re.compile(rb',"digest":"([0-9a-f]{64})"\}\Z')

_encoder = msgspec.json.Encoder()
_records = msgspec.json.Decoder(AnyRecord)
_heads = msgspec.json.Decoder(_Head)
_fields = msgspec.json.Decoder(dict[str, msgspec.Raw])
_parts = msgspec.json.Decoder(Part)
_indexes = msgspec.json.Decoder(AnchorIndex)
_fails = msgspec.json.Decoder(Fail)
_shares = msgspec.json.Decoder(AnchorShare)


def encode(value: msgspec.Struct) -> bytes:
    return _encoder.encode(value)


def encode_record(record: Record) -> bytes:
    """A record as it is written, with the digest that proves it."""
    content = encode(record)[:-1]
    return content + b',"digest":"%s"}' % digest(content).encode()


def proves_itself(body: bytes) -> bool:
    """Whether `body` ends with the digest of what is before it: then its writer wrote exactly these bytes."""
    proof = _PROOF.search(body)
    return proof is not None and digest(memoryview(body)[: proof.start()]).encode() == proof[1]


def is_sound(body: bytes) -> bool:
    """Whether `body` proves itself, or is a record of a writer that wrote no digests."""
    if proves_itself(body):
        return True
    try:
        decode_record(body)
    except ValueError:
        return False
    return True


def decode_record(body: bytes) -> AnyRecord:
    """One record, every field within its constraint; raises `ValueError` for anything else.

    Without a digest it must have no field that is unknown: one changed byte in the name `digest` would be one.
    """
    record: AnyRecord = decode_json(_records, body)
    if not proves_itself(body):
        unknown = decode_json(_fields, body).keys() - {"kind", *record.__struct_fields__}
        if unknown:
            raise ValueError("its digest is not that of its content" if "digest" in unknown else "it has no digest")
    if isinstance(record, Seal):
        _check_user_data(record.source)
        _check_user_data(record.metadata)
    return record


def decode_head(body: bytes) -> tuple[int, str, int]:
    """Format, stream id and seq of a record of any format; raises `ValueError` if it does not show them."""
    head: _Head = decode_json(_heads, body)
    return head.format, head.stream, head.seq


def decode_part(body: bytes) -> Part:
    """Raises `ValueError` for anything that is not one part of this format."""
    part: Part = decode_json(_parts, body)
    return part


def decode_fail(body: bytes) -> Fail:
    """Raises `ValueError` for anything that is not one fail object of this format."""
    fail: Fail = decode_json(_fails, body)
    return fail


def decode_anchor_share(body: bytes) -> AnchorShare:
    """Raises `ValueError` for anything that is not one share of an anchor of this format."""
    share: AnchorShare = decode_json(_shares, body)
    return share


def decode_anchor_index(body: bytes) -> AnchorIndex:
    """Raises `ValueError` for anything that is not one anchor index of this format."""
    index: AnchorIndex = decode_json(_indexes, body)
    return index


def _check_user_data(value: object) -> None:
    """Level by level: a hostile record must not exhaust this reader's stack."""
    level = [value]
    for _ in range(MAX_DEPTH + 1):
        if any(type(x) is int and not LEAST <= x <= MOST for x in level):
            raise ValueError("an integer in user data has more than 64 bits")
        inner = [x for x in level if isinstance(x, dict | list)]
        if not inner:
            return
        level = [child for x in inner for child in (x.values() if isinstance(x, dict) else x)]
    raise ValueError(f"user data is nested deeper than {MAX_DEPTH}")


def digest(body: bytes | memoryview) -> str:
    """SHA-256 in hex, the only digest of the format."""
    return hashlib.sha256(body).hexdigest()


def is_name(text: str) -> bool:
    """Whether a publisher may be called so."""
    return re.search(_NAME, text) is not None


def show_u64(value: int) -> str:
    """A u64 as records carry it: 16 hex digits."""
    return f"{value:016x}"

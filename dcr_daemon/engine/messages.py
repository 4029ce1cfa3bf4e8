"""The records that cross an engine's private socket, and their frames.

`VllmEngine` sends calls and gets answers; the plugin's endpoint and EngineCore are on the other side. A frame is a
4-byte big-endian length and one msgpack record; a frame above `FRAME_LIMIT` is refused before anything is allocated. A
call carries an id that is unique over processes, and an answer counts only under that id (must E3). Every call that
changes something also carries the owner's token and the engine's incarnation. Paths in records are local to the
machine: bulk bytes never cross the socket. Nothing is pickled: a record is a tagged msgspec struct, or it is refused.

`Poll` and `Pending` stay inside the server: its process polls the workers' jobs, so that a client waits on one call.
"""

from __future__ import annotations

import asyncio
import struct
from typing import TypeVar

import msgspec

from dcr_daemon.engine.port import EngineGone, EngineUnsupported, StreamFacts, Transaction
from dcr_daemon.errors import Corrupt, DcrError, EngineRefused, Fenced, Incompatible, ResourceExhausted, UsageError
from dcr_daemon.untrusted import decode

PROTOCOL = 1
FRAME_LIMIT = 64 << 20  #: bytes of one record
_LENGTH = struct.Struct(">I")
T = TypeVar("T")


class Call(msgspec.Struct, frozen=True, kw_only=True, tag_field="op", omit_defaults=False):
    """`id` is unique over processes; `protocol` is the version of this socket protocol that the caller uses."""

    id: str
    protocol: int = PROTOCOL


class Attach(Call, frozen=True, tag="attach"):
    """`at_least` keeps the tokens of data parallel engines equal; clients leave it at 0.

    `token` and `incarnation` are those of the caller's last attach, if it has made one. The caller is refused if it is
    no longer the owner of that incarnation: it must not fence its successor.
    """

    facts: StreamFacts
    at_least: int = 0
    token: int = 0
    incarnation: str = ""


class Owned(Call, frozen=True):
    """A call that only the present owner may make (must E3)."""

    token: int
    incarnation: str


class Prove(Owned, frozen=True, tag="prove"):
    version: int
    vector: str
    label: str
    loaded: str = ""


class Serve(Owned, frozen=True, tag="serve"):
    pass


class Prepare(Owned, frozen=True, tag="prepare"):
    txn: Transaction


class Swap(Owned, frozen=True, tag="swap"):
    """`hold`: write and verify, but stay begun and paused until `FinishAdopted` ends it: one verdict over several data
    parallel engines (must E9). Inside the server only."""

    txn: str
    hold: bool = False


class FinishAdopted(Owned, frozen=True, tag="settle"):  # the tag is that of socket protocol 1
    """`hold` as in `Swap`. `back`: roll back, because another data parallel engine cannot commit. Both are used inside
    the server only."""

    txn: str
    hold: bool = False
    back: bool = False


class Drop(Owned, frozen=True, tag="drop"):
    pass


class Load(Owned, frozen=True, tag="load"):
    version: int
    files: list[str]
    vector: str
    label: str


class Outcome(Call, frozen=True, tag="outcome"):
    txn: str


class Status(Call, frozen=True, tag="status"):
    """Needs no ownership. With an `incarnation` the caller asks as the owner, and is refused if it no longer is."""

    token: int = 0
    incarnation: str = ""


class Scrub(Owned, frozen=True, tag="scrub"):
    """`rate`: bytes per second that each rank may read, 0 for no limit. `first`: layout index of the first tensor."""

    rate: float
    first: int = 0


class Inspect(Owned, frozen=True, tag="inspect"):
    """Sum the live weights again, and report where each tensor lies."""


class Checksums(Call, frozen=True, tag="checksums"):
    """Compute SHA-256 of every parameter and buffer; generation waits meanwhile."""


class Poll(Call, frozen=True, tag="poll"):
    """Ask whether the job that the call of this id started is done. Inside the server only."""


AnyCall = (
    Attach | Prove | Serve | Prepare | Swap | FinishAdopted | Drop | Load | Scrub
    | Outcome | Status | Inspect | Checksums | Poll
)  # fmt: skip


class Answer(msgspec.Struct, frozen=True, kw_only=True, tag_field="is"):
    id: str


class Done(Answer, frozen=True, tag="done"):
    """`result` is the msgpack of what the engine port returns for this call."""

    result: msgspec.Raw


class Refused(Answer, frozen=True, tag="refused"):
    """`kind` names an error class of `ERRORS`. `lasting`: it is an `EngineUnsupported`."""

    kind: str
    message: str
    hint: str = ""
    lasting: bool = False


class Pending(Answer, frozen=True, tag="pending"):
    """A job is running in the workers: poll with the same id. Inside the server only."""


AnyAnswer = Done | Refused | Pending

#: Errors that keep their class over the socket; any other one arrives as the nearest of its base classes.
ERRORS: dict[str, type[DcrError]] = {
    kind.kind: kind
    for kind in (EngineRefused, Fenced, EngineGone, UsageError, Incompatible, Corrupt, ResourceExhausted, DcrError)
}


class TensorReport(msgspec.Struct, frozen=True, kw_only=True):
    """One canonical tensor as the engine holds it. `kind`: its `TensorClass`. `held`: the number of its elements on
    each rank. `sum`: its live fingerprint in hex, empty unless the class is exact."""

    name: str
    kind: str
    held: list[int]
    sum: str
    reason: str = ""


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """Answer to `Inspect`: the live tensors, in layout order, and where they lie."""

    incarnation: str
    version: int | None
    serving: bool
    tensors: list[TensorReport]


class RankChecksums(msgspec.Struct, frozen=True, kw_only=True):
    """SHA-256 in hex of raw bytes in row-major order, by the name the model gives."""

    rank: int
    parameters: dict[str, str]
    buffers: dict[str, str]


_encoder = msgspec.msgpack.Encoder()
_calls = msgspec.msgpack.Decoder(AnyCall)
_answers = msgspec.msgpack.Decoder(AnyAnswer)


def name_of(call: Call) -> str:
    """The name of a call for messages: its tag on the wire."""
    return str(call.__struct_config__.tag)


def encode(record: msgspec.Struct) -> bytes:
    return _encoder.encode(record)


def decode_call(body: bytes) -> AnyCall:
    """Raises `UsageError` for anything that is not a call of this protocol."""
    try:
        call = decode(_calls, body)
    except ValueError as error:
        raise UsageError(
            f"this is not a call that this engine knows: {error}",
            hint="run the same version of dcr-daemon on both sides",
        ) from error
    if call.protocol != PROTOCOL:
        raise UsageError(
            f"the caller uses socket protocol {call.protocol}, this engine uses {PROTOCOL}",
            hint="run the same version of dcr-daemon on both sides",
        )
    return call


def decode_answer(body: bytes) -> AnyAnswer:
    """Raises `UsageError` for anything that is not an answer."""
    try:
        return decode(_answers, body)
    except ValueError as error:
        raise _strange(error) from error


def _strange(error: ValueError) -> UsageError:
    return UsageError(
        f"the engine's socket returned an answer that is not of this protocol: {error}",
        hint="check that the socket belongs to a vLLM server with the dcr plugin of the same version",
    )


def done(call_id: str, result: object) -> Done:
    return Done(id=call_id, result=msgspec.Raw(_encoder.encode(result)))


def refused(call_id: str, error: DcrError) -> Refused:
    """An error as an answer; its kind is the nearest class that may cross."""
    kind = next(base.kind for base in type(error).__mro__ if issubclass(base, DcrError) and base.kind in ERRORS)
    lasting = isinstance(error, EngineUnsupported)
    return Refused(id=call_id, kind=kind, message=error.message, hint=error.hint, lasting=lasting)


def result_of(answer: AnyAnswer, kind: type[T]) -> T:
    """The result inside an answer, or the error it carries, raised; `UsageError` if it is of another kind."""
    match answer:
        case Done():
            try:
                return decode(msgspec.msgpack.Decoder(kind), answer.result)
            except ValueError as error:
                raise _strange(error) from error
        case Refused():
            kind_of_error = EngineUnsupported if answer.lasting else ERRORS.get(answer.kind, DcrError)
            raise kind_of_error(answer.message, hint=answer.hint)
    raise UsageError("the engine left a call pending", hint="report this as a bug")


def frame(body: bytes) -> bytes:
    """A record with its length before it. Raises `UsageError` above `FRAME_LIMIT`."""
    if len(body) > FRAME_LIMIT:
        raise UsageError(f"a record of {len(body)} bytes is over the socket's limit of {FRAME_LIMIT}")
    return _LENGTH.pack(len(body)) + body


async def read_frame(reader: asyncio.StreamReader) -> bytes | None:
    """The next record, or None at a clean end.

    Raises:
        UsageError: the announced length is over the limit (nothing was read).
        asyncio.IncompleteReadError, OSError: the peer went away inside a record.
    """
    head = await reader.read(1)
    if not head:
        return None
    (length,) = _LENGTH.unpack(head + await reader.readexactly(_LENGTH.size - 1))
    if length > FRAME_LIMIT:
        raise UsageError(f"a record of {length} bytes is over the socket's limit of {FRAME_LIMIT}")
    return await reader.readexactly(length)

"""The fold: which records count, and the state that they lead to (must L2). Pure; the same for every reader.

A reader's position is a `Tip`: everything up to `seq` has been folded into `state`. `fold(tip, body)` takes the bytes
of the next slot and returns the next tip and a verdict. Bytes that do not parse, do not verify, belong to a
stale epoch or break a rule are *void*: they occupy their seq, change nothing, and the reader raises an alarm.

`fold` alone decides for bytes that follow the tip or prove themselves. For others, which may be a record that was
damaged, the record after them decides: `fold_decided` stops before those that no record has decided yet.

Three decisions and their reasons:

- *Claims are judged here* (must P6), not only by the writer: name, release and take-over all stand in the state and
  the record, so every reader decides alike, and an unlawful claim then fences nobody instead of a living publisher.
- *`open` while another attempt stands is void* (must P7). If it superseded, an attempt would be decided by a record
  that does not name it, and retention (must L5) could not tell a dead attempt from one still uploading. An attempt
  ends by its seal, its abort, a release, or a newer epoch.
- *A record of a newer format is not void but ends the reader* (`Incompatible`): voiding it would give old and new
  readers different histories.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace

import msgspec

from dcr_daemon.errors import Corrupt, Incompatible
from dcr_daemon.ledger import records
from dcr_daemon.ledger.records import (
    FORMAT,
    Abort,
    Anchor,
    AnchorRef,
    AnyRecord,
    Epoch,
    EpochRef,
    Floor,
    Keys,
    Open,
    OpenRef,
    Release,
    Seal,
    SealRef,
    State,
    Stream,
)

#: the state of a stream right after its `stream` record, which is the seal of version 0
GENESIS = State(seal=SealRef(seq=0, version=0))


@dataclass(frozen=True, slots=True)
class Tip:
    """How far a reader has read: the slots up to `seq` are folded into `state`; `digest` is that of the last body.

    `proved`: that body was read, and is what the writer of its slot wrote.
    """

    stream: str
    seq: int
    digest: str
    state: State
    proved: bool = field(default=False, compare=False)


@dataclass(frozen=True, slots=True)
class Step:
    """The effect of one slot. `record` is the record if it counts; if not it is None and `void` says why.

    `foreign`: no writer that had read the records before can have written these bytes; either they or a record before
    them were damaged. `damaged`: it is not proved that both are what was written to their slots.
    `decided`: whether readers go past the slot; only `Tail.walk` gives steps of which this is False.
    """

    tip: Tip
    record: AnyRecord | None
    void: str = ""
    foreign: bool = False
    damaged: bool = False
    decided: bool = True


def begin(body: bytes) -> tuple[Tip, Stream]:
    """Fold slot 0. Without a good `stream` record there is no stream, so this raises instead of voiding.

    Raises:
        Incompatible: the stream is of a newer format.
        Corrupt: the bytes are not a stream record.
    """
    _refuse_newer(body, None, 0)
    try:
        record = records.decode_record(body)
    except ValueError as error:
        raise Corrupt(f"record 0 is not a stream record: {error}", hint="is this the prefix of a stream?") from error
    if not isinstance(record, Stream) or record.seq or record.prev != records.NO_RECORD or record.state is not None:
        raise Corrupt("record 0 is not a stream record", hint="is this the prefix of a stream?")
    return Tip(record.stream, 0, records.digest(body), GENESIS, records.proves_itself(body)), record


def fold(tip: Tip, body: bytes) -> Step:
    """Fold the bytes of slot `tip.seq + 1`. Raises `Incompatible` for a newer format, nothing else."""
    seq = tip.seq + 1
    _refuse_newer(body, tip.stream, seq)
    after = Tip(tip.stream, seq, records.digest(body), tip.state)
    try:
        record = records.decode_record(body)
    except ValueError as error:
        after = replace(after, proved=isinstance(body, records.Oversized))
        return Step(after, None, f"it does not parse: {error}", foreign=True, damaged=_may_be_damaged(after))
    after = replace(after, proved=_is_original(tip, record, body))
    if mismatch := _mismatch(tip, record):
        return Step(after, None, mismatch, foreign=True, damaged=_may_be_damaged(tip, after))
    if void := judge(tip.state, record):
        return Step(after, None, void)
    return Step(replace(after, state=_apply(tip.state, record)), record)


def fold_decided(tip: Tip, bodies: Iterable[bytes]) -> list[Step]:
    """Fold the slots after `tip`, up to the last one that is decided.

    Damaged bytes are void if a record after them follows them: its writer has read these bytes, and its state shows
    that they changed nothing. Until then they may be a record that somebody else has read whole.
    """
    steps, decided = list[Step](), 0
    for body in bodies:
        step = fold(tip, body)
        tip = step.tip
        if not step.foreign or (decided == len(steps) and not step.damaged):
            decided = len(steps) + 1
        steps.append(step)
    return steps[:decided]


def tip_before(stream: str, seq: int, *, body: bytes) -> Tip | None:
    """The tip that the writer of slot `seq` says it started from; None if the body shows none of this stream."""
    _refuse_newer(body, stream, seq)
    try:
        record = records.decode_record(body)
    except ValueError:
        return None
    if record.stream != stream or record.seq != seq or record.state is None:
        return None
    return Tip(stream, seq - 1, record.prev, record.state)


def judge(state: State, record: AnyRecord) -> str:
    """Why `record` would not count after `state`; empty if it counts."""
    if isinstance(record, Stream):
        return "a stream begins once"
    if isinstance(record, Epoch):
        return _judge_claim(state, record)
    if state.epoch is None or record.epoch != state.epoch.seq:
        newest = state.epoch.seq if state.epoch else None
        return f"epoch {record.epoch} is stale: the newest is {newest}"
    if state.epoch.released:
        return f"epoch {record.epoch} was released"
    match record:
        case Open():
            return _judge_open(state, record)
        case Seal():
            return _judge_seal(state, record)
        case Abort():
            named = (record.attempt, record.version)
            return "" if state.open and named == (state.open.seq, state.open.version) else _not_open(record.attempt)
        case Anchor():
            newest = state.anchor.version if state.anchor else state.floor
            lawful = newest <= record.version <= state.seal.version
            return "" if lawful else f"an anchor of version {record.version} outside {newest} to {state.seal.version}"
        case Floor():
            highest = state.anchor.version if state.anchor else 0
            lawful = state.floor <= record.floor <= highest
            return "" if lawful else f"a floor of {record.floor} outside {state.floor} to {highest}"
        case _:
            return ""


def _judge_claim(state: State, record: Epoch) -> str:
    if record.epoch != record.seq:
        return f"a claim's epoch is its seq, not {record.epoch}"
    holder = state.epoch
    if holder is None or holder.released or holder.name == record.name or record.take_over:
        return ""
    return f"{record.name} may not claim from {holder.name}, which has not released, without taking over"


def _judge_open(state: State, record: Open) -> str:
    if state.open:
        return f"attempt {state.open.seq} is undecided"
    if record.base != state.seal.version or record.version != record.base + 1:
        return f"version {record.version} on {record.base} does not follow version {state.seal.version}"
    return ""


def _judge_seal(state: State, record: Seal) -> str:
    if state.open is None or record.attempt != state.open.seq:
        return _not_open(record.attempt)
    if (record.version, record.base) != (state.open.version, state.open.base):
        return f"attempt {record.attempt} was opened for version {state.open.version} on {state.open.base}"
    if record.base != state.seal.version or record.version != record.base + 1:
        return f"version {record.version} on {record.base} does not follow version {state.seal.version}"
    if record.previous != state.seal.seq:
        return f"the seal before it is record {state.seal.seq}, not {record.previous}"
    return ""


def _not_open(attempt: int) -> str:
    return f"attempt {attempt} is not open"


def _apply(state: State, record: AnyRecord) -> State:
    """The state after a record that counts."""
    match record:
        case Epoch():
            # A newer epoch voids the attempt of the one before: its publisher can never seal it (must L2).
            return msgspec.structs.replace(state, epoch=EpochRef(record.seq, record.name), open=None)
        case Release():
            assert state.epoch is not None
            return msgspec.structs.replace(state, epoch=msgspec.structs.replace(state.epoch, released=True), open=None)
        case Open():
            opened = OpenRef(record.seq, record.version, record.base, record.group, record.call)
            return msgspec.structs.replace(state, open=opened)
        case Seal():
            return msgspec.structs.replace(state, seal=SealRef(record.seq, record.version), open=None)
        case Abort():
            return msgspec.structs.replace(state, open=None)
        case Anchor():
            return msgspec.structs.replace(state, anchor=AnchorRef(record.seq, record.version))
        case Floor():
            return msgspec.structs.replace(state, floor=record.floor)
        case Keys():
            return msgspec.structs.replace(state, keys=record.seq)
        case _:
            return state


def _mismatch(tip: Tip, record: AnyRecord) -> str:
    """Why `record` was not written by somebody who had read exactly what `tip` has (musts L0, L2, T1)."""
    if record.format != FORMAT:
        return f"format {record.format} is unknown"
    if record.stream != tip.stream:
        return f"it belongs to stream {record.stream}"
    if record.seq != tip.seq + 1:
        return f"it says it is record {record.seq}"
    if record.prev != tip.digest:
        return "it does not follow the record before it"
    if record.state != tip.state:
        return "its writer had folded another state"
    return ""


def _may_be_damaged(*tips: Tip) -> bool:
    """Whether one of the slots that the tips end with may hold something else than what was first put there."""
    return not all(tip.proved for tip in tips)


def _is_original(tip: Tip, record: AnyRecord, body: bytes) -> bool:
    """Whether these bytes are what was first put into the slot after `tip`, and not damage or another slot's record."""
    return (record.stream, record.seq) == (tip.stream, tip.seq + 1) and records.proves_itself(body)


def _refuse_newer(body: bytes, stream: str | None, seq: int) -> None:
    try:
        format_, of, at = records.decode_head(body)
    except ValueError:
        return
    if format_ > FORMAT and at == seq and of == (stream or of) and records.proves_itself(body):
        raise Incompatible(
            f"record {seq} has format {format_}; this version of DCR reads up to {FORMAT}",
            hint="upgrade DCR here before the publisher",
        )

"""A stream's ledger as one process sees it: reads to the tail, appends with a known outcome, follows.

It promises: what it reports has been read in order, folded by `fold` and remembered on disk before anybody sees it
(must T1); it appends only at the last read seq + 1, having read all before (must L0); it reports an append as failed
only if another record was *read* in its slot (must L1); and it writes nothing for a publisher that has been fenced. One
asyncio loop owns it; calls may overlap and are carried out one at a time.
"""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from dcr_daemon import runtime
from dcr_daemon.canonical.fingerprint import Vector
from dcr_daemon.canonical.layout import Layout
from dcr_daemon.errors import Corrupt, Fenced, Incompatible, NotFound, UsageError
from dcr_daemon.events import Alarm, Claimed, Emit, FencedOut, discard
from dcr_daemon.ledger import records
from dcr_daemon.ledger.create import create_stream
from dcr_daemon.ledger.fold import Step, Tip, begin, fold, judge
from dcr_daemon.ledger.follow import Follower, Polling
from dcr_daemon.ledger.high_water_mark import HighWaterMark
from dcr_daemon.ledger.history import History
from dcr_daemon.ledger.holes import REACH, find_above, find_holes, missing_records
from dcr_daemon.ledger.records import Epoch, Record, Release, Seal, State, Stream
from dcr_daemon.ledger.slot import TRIES, judge_slot, occupy, read_slot
from dcr_daemon.ledger.tail import Tail
from dcr_daemon.store.port import Store

R = TypeVar("R", bound=Record)

SEQUENTIAL = 64  #: records read one by one from a remembered tip before jumping to the tail


@dataclass(frozen=True, slots=True)
class Header:
    """What a new record starts from: the state before it, its seq, and the fields that every record repeats.

    `Open(**header.fields, version=..., ...)` is a complete record. If another record takes the slot, the writer is
    called again with a new header and decides anew.
    """

    state: State
    seq: int
    fields: dict[str, Any]


@dataclass(frozen=True, slots=True)
class _Sent:
    seq: int
    body: bytes
    record: Record


class Ledger:
    """The ledger of the stream in `store`.

    Args:
        mark: the file of the high-water mark; None only for observers, which act on nothing.
        emit: gets `Alarm` for void records, `Retrying`, `Claimed`, `FencedOut`.
        polling: how `follow` waits.
    """

    def __init__(
        self, store: Store, *, mark: Path | None = None, emit: Emit = discard, polling: Polling | None = None
    ) -> None:
        self.store = store
        self.high_water_mark = HighWaterMark(mark) if mark else None
        self.history = History(store, lambda: self.tip)
        self._emit = emit
        self._polling = polling or Polling()
        self._lock = asyncio.Lock()
        self._tip: Tip | None = None
        self._stream: Stream | None = None
        self._epoch: int | None = None
        self._fenced_epoch: int | None = None
        self._name = ""
        self._sent: _Sent | None = None
        self._resolved: Record | None = None
        self._unpublished: list[Step] = []
        self._followers: weakref.WeakSet[Follower] = weakref.WeakSet()
        self._found_empty = False
        self._looked_above = False

    @property
    def tip(self) -> Tip:
        """How far the ledger was read. Raises `UsageError` before the first `read`."""
        if self._tip is None:
            raise UsageError(f"the ledger of {self.store.url} was not read yet", hint="call read() first")
        return self._tip

    @property
    def state(self) -> State:
        """The folded state at the tip."""
        return self.tip.state

    @property
    def stream(self) -> Stream:
        """The stream record: id, layout, and the fingerprint of version 0."""
        if self._stream is None:
            raise UsageError(f"the ledger of {self.store.url} was not read yet", hint="call read() first")
        return self._stream

    async def version_record(self, version: int) -> Stream | Seal:
        """The record that sealed `version`; for 0 that is the stream record itself. Raises `NotFound`."""
        return self.stream if version == 0 else await self.history.seal(version)

    @property
    def epoch(self) -> int | None:
        """This process's own claim; None if it made none."""
        return self._epoch

    @property
    def holds(self) -> bool:
        """Whether this process's claim is the newest, as far as the ledger was read."""
        epoch = self.state.epoch
        return epoch is not None and epoch.seq == self._epoch

    @property
    def undecided(self) -> bool:
        """A record was sent and its outcome is not known: call `resolve` before anything depends on it (must L1)."""
        return self._sent is not None

    async def create_stream(self, layout: Layout, vector: Vector, *, model: str = "") -> Stream:
        """Create the stream if the prefix is empty; if it exists already, read it and compare nothing.

        Raises:
            Corrupt: this process has seen a stream here before, and the ledger is gone (must T1).
            UsageError: the prefix holds other objects.
        """
        async with self._lock:
            try:
                await self._open()
            except NotFound:
                await create_stream(self.store, layout, vector=vector, model=model, emit=self._emit)
                await self._open()
            await self._read_to_tail()
        return self.stream

    async def read(self) -> State:
        """Read to the tail, from what was seen before or from the start, and return the state there.

        Raises:
            NotFound: there is no stream.
            Corrupt: the ledger does not extend what was seen, or has a hole.
            Incompatible: it is another stream than the remembered one, or of a newer format.
        """
        async with self._lock:
            await self._open()
            await self._read_to_tail()
        return self.state

    async def read_whole(self) -> State:
        """The same as `read`, and raise `Corrupt` if any record below the newest is missing (must L2).

        Whoever is about to claim or to delete calls it: it lists all records, one request per thousand.
        """
        await self.read()
        if holes := await find_holes(self.store, self.tip.seq):
            raise missing_records(self.store.url, holes)
        return self.state

    async def append(self, make: Callable[[Header], R]) -> R:
        """Append the record that `make` builds, and return it once it is known to be in the ledger.

        If another record takes the slot, everything up to the tail is read and `make` is called again; it may raise
        to give up. A record that an earlier call left undecided is resolved first.

        Raises:
            Undecided: the outcome is not known and the record is kept; call `resolve`.
            Fenced: a newer epoch owns the stream, or a claim is not lawful (must P6).
            UsageError: the record would not count; nothing was sent.
        """
        async with self._lock:
            await self._open()
            while True:
                await self._decide_sent()
                record = make(self._header())
                self._sent = _Sent(self.tip.seq + 1, self._checked(record), record)
                if await self._decide_sent() is record:
                    self._resolved = None
                    return record
                await self._read_on()

    async def resolve(self) -> Record | None:
        """Resolve the record that an `append` left undecided: returns it if it is in the ledger, else None.

        Raises:
            Undecided: still not known.
        """
        async with self._lock:
            await self._decide_sent()
            if self._unpublished:
                self._publish()  # an earlier call took it, and failed to remember it
            resolved, self._resolved = self._resolved, None
            return resolved

    async def claim(self, name: str, *, take_over: bool = False) -> int:
        """Claim the stream as publisher `name` and return the epoch. Afterwards everything up to it has been read.

        Raises:
            Fenced: another name holds the stream and has not released it (must P6).
            Corrupt: a record is missing; the claim might stand in its place.
            UsageError: `name` may not stand in a record.
        """
        if not records.is_name(name):
            raise UsageError(
                f"not a publisher's name: {name!r}", hint="at most 64 ASCII letters, digits, '.', '_' and '-'"
            )
        await self.read_whole()

        def make(header: Header) -> Epoch:
            return Epoch(**{**header.fields, "epoch": header.seq}, name=name, take_over=take_over)

        record = await self.append(make)
        self._epoch, self._name = record.seq, name
        before = record.state.epoch if record.state else None
        self._emit(Claimed(epoch=record.seq, name=name, ousted=before.name if before and not before.released else None))
        return record.seq

    async def release(self) -> None:
        """Give the claim up, so that any publisher may claim next."""
        await self.append(lambda header: Release(**header.fields))
        self._epoch = None

    def check_held(self) -> None:
        """Raise `Fenced` if, as far as the ledger was read, a newer claim than this process's owns the stream."""
        if self._epoch is None or self.holds:
            return
        epoch = self.state.epoch
        owner, now = (epoch.name, epoch.seq) if epoch else ("nobody", 0)
        if self._fenced_epoch != self._epoch:  # emitted once, however many callers meet it
            self._fenced_epoch = self._epoch
            self._emit(FencedOut(what=self.store.url, by=owner))
        hint = "this publisher must stay down; only one may publish to a stream"
        if owner == self._name:
            hint = (
                f"two processes run as publisher {owner!r}, and the later claim wins: this one must stay down; "
                "give each its own stream, and its own --name"
            )
        raise Fenced(
            f"publisher {owner} has claimed {self.store.url} since (epoch {now}; ours was {self._epoch})", hint=hint
        )

    def follow(self) -> Follower:
        """Every record that counts from the present tip on, as an endless async iterator."""
        follower = Follower(self._poll, self.check_gap, polling=self._polling, emit=self._emit, url=self.store.url)
        self._followers.add(follower)
        return follower

    async def check_gap(self, turn: int | None = None) -> None:
        """Raise `Corrupt` if records exist above a free slot at the tail: something deleted one (must L2).

        Args:
            turn: look at one distance only, another one at each turn: that is one request. None: at all of them.
        """
        async with self._lock:
            await self._check_above(by_list=False, doublings=range(REACH) if turn is None else [turn % REACH])

    async def _poll(self) -> bool:
        """Read the next slot; returns whether it was occupied."""
        async with self._lock:
            await self._open()
            return await self._read_next()

    async def _open(self) -> None:
        """Read slot 0 and the remembered slot, once; a first reader without a mark jumps to the tail."""
        if self._tip is not None:
            return
        mark = self.high_water_mark.mark if self.high_water_mark else None
        body = await read_slot(self.store, 0)
        if body is None:
            if mark:
                raise self._not_extended(mark.seq, "its first record is gone")
            if not self._found_empty and await find_above(self.store, -1) and await read_slot(self.store, 0) is None:
                raise missing_records(self.store.url, [0])
            self._found_empty = True
            raise NotFound(f"there is no stream at {self.store.url}", hint="a publisher makes one with --create")
        tip, stream = begin(body)
        if mark and mark.stream != tip.stream:
            raise Incompatible(
                f"{self.store.url} holds stream {tip.stream}; this state directory has seen stream {mark.stream} there",
                hint="somebody replaced the stream: point to the right one, or give this one its own --state",
            )
        if mark:
            await self._check_mark(mark.tip)
        self._stream = stream
        await self._jump(mark.tip if mark else tip, patience=SEQUENTIAL if mark else 0)

    async def _check_mark(self, tip: Tip) -> None:
        body = await read_slot(self.store, tip.seq)
        if body is None:
            raise self._not_extended(tip.seq, "that record is gone")
        if records.digest(body) != tip.digest:
            raise self._not_extended(tip.seq, "another record stands there now")

    async def _jump(self, tip: Tip, *, patience: int) -> None:
        """Set the tip at the tail, folding every record if at most `patience` were added since `tip`."""
        tail = Tail(self.store)
        if patience and not await tail.occupied(tip.seq + patience):
            self._tip = tip
            return
        steps = await tail.steps(tip, await tail.find(tip.seq))
        self._tip = tip
        for step in steps:
            self._take(step)
        self._publish()

    async def _read_to_tail(self) -> None:
        """Read on, and the first time see that what looks like the tail is not the edge of a hole."""
        await self._read_on()
        while not self._looked_above:
            if await self._check_above():
                await self._read_on()
            else:
                self._looked_above = True

    async def _check_above(self, *, by_list: bool = True, doublings: Iterable[int] = range(REACH)) -> bool:
        """Whether records appeared above the tip meanwhile. Raises `Corrupt` if the slot after the tip is a hole."""
        if await find_above(self.store, self.tip.seq, by_list=by_list, doublings=doublings) is None:
            return False
        # The higher record became durable after this one, so this one may have arrived since it was read.
        if await read_slot(self.store, self.tip.seq + 1) is None:
            raise missing_records(self.store.url, [self.tip.seq + 1])
        return True

    async def _read_on(self) -> None:
        while await self._read_next():
            pass

    async def _read_next(self) -> bool:
        body = await read_slot(self.store, self.tip.seq + 1)
        if body is not None:
            self._take(*await judge_slot(self.store, self.tip, body=body))
        self._publish()  # also without a new record: an earlier call may have failed to write the mark
        return body is not None

    async def _decide_sent(self) -> Record | None:
        """Decide the record that was sent, if there is one; the record if it is ours and in the ledger."""
        if self._sent is None:
            return None
        kind = type(self._sent.record).__name__.lower()
        runtime.failpoint(f"ledger.{kind}.put")
        # `_sent` is set before the first byte leaves and cleared only by `_take`: a cancelled call stays undecided.
        body = await occupy(self.store, self._sent.seq, self._sent.body, emit=self._emit, tries=TRIES)
        runtime.failpoint(f"ledger.{kind}.answered")
        self._take(*await judge_slot(self.store, self.tip, body=body))
        self._publish()
        runtime.failpoint(f"ledger.{kind}.known")
        return self._resolved

    def _take(self, step: Step, body: bytes | None = None) -> None:
        """Move the tip over one slot. `body` decides a record of ours that was sent there."""
        sent, self._tip = self._sent, step.tip
        if sent and sent.seq == step.tip.seq:
            self._sent, self._resolved = None, (sent.record if sent.body == body else None)
        self._unpublished.append(step)

    def _publish(self) -> None:
        """Write the high-water mark, then give the new records to history and followers."""
        if self.high_water_mark:
            self.high_water_mark.saw(self.tip)
        unpublished, self._unpublished = self._unpublished, []
        for step in unpublished:
            if step.record is None:
                self._emit(Alarm(must="L2", what=f"record {step.tip.seq} of {self.store.url} is void: {step.void}"))
                continue
            self.history.note(step.record)
            for follower in self._followers:
                follower.give(step.record)

    def _header(self) -> Header:
        tip = self.tip
        fields = {
            "stream": tip.stream,
            "seq": tip.seq + 1,
            "prev": tip.digest,
            "state": tip.state,
            "nonce": runtime.nonce(),
            "at": runtime.now().isoformat(timespec="milliseconds"),
            "epoch": self._epoch or 0,
        }
        return Header(tip.state, tip.seq + 1, fields)

    def _checked(self, record: Record) -> bytes:
        """The body of a record that will count in the next slot. Raises if it will not, so that it is not sent."""
        state = self.state
        if isinstance(record, Epoch):
            if void := judge(state, record):
                self._emit(FencedOut(what=self.store.url, by=state.epoch.name if state.epoch else ""))
                raise Fenced(f"{self.store.url}: {void}", hint="stop the other publisher, or claim with --take-over")
        elif self._epoch is None:
            raise UsageError(f"nothing may be written to {self.store.url} without a claim", hint="call claim() first")
        else:
            self.check_held()
        try:
            body = records.encode(record)
        except (TypeError, ValueError) as error:
            raise UsageError(f"a {type(record).__name__} record cannot be written as JSON: {error}") from error
        if len(body) > records.RECORD_LIMIT:
            raise UsageError(
                f"a record of {len(body)} bytes is over the limit of {records.RECORD_LIMIT}",
                hint="shorten the user metadata of this update",
            )
        if void := fold(self.tip, body).void:
            raise UsageError(f"a {type(record).__name__} record for slot {record.seq} would not count: {void}")
        return body

    def _not_extended(self, seq: int, what: str) -> Corrupt:
        return Corrupt(
            f"the ledger of {self.store.url} does not extend what was seen here up to record {seq}: {what}",
            hint="the bucket was rolled back or replaced; restore it, or start a new stream under a new prefix",
        )

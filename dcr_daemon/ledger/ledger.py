"""A stream's ledger as one process sees it: reads to the tail, appends with a known outcome, follows.

It promises: what it reports has been read in order, folded by `fold` and remembered on disk before anybody sees it
(must T1); it appends only at the last read seq + 1, having read all before (must L0); it reports an append as failed
only if another record was *read* in its slot (must L1); and it writes nothing for a publisher that has been fenced. One
asyncio loop owns it; calls may overlap and are carried out one at a time.
"""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from dcr_daemon import runtime
from dcr_daemon.canonical.fingerprint import Vector
from dcr_daemon.canonical.layout import Layout
from dcr_daemon.errors import Corrupt, Fenced, Incompatible, NotFound, UsageError
from dcr_daemon.events import Alarm, Claimed, Emit, FencedOut, LedgerDoubted, LedgerPolled, LedgerRead, discard
from dcr_daemon.ledger import records
from dcr_daemon.ledger.create import create_stream
from dcr_daemon.ledger.doubt import REPAIR, Doubt, Looks, Reading, read_again
from dcr_daemon.ledger.fold import Step, Tip, begin, fold, judge, tip_before
from dcr_daemon.ledger.follow import Follower, Polling
from dcr_daemon.ledger.high_water_mark import HighWaterMark, Mark
from dcr_daemon.ledger.history import History
from dcr_daemon.ledger.holes import REACH, HoleSearch, find_above, missing_records, read_first_again, read_occupied
from dcr_daemon.ledger.read_ahead import ReadOn
from dcr_daemon.ledger.records import Epoch, Record, Release, Seal, State, Stream
from dcr_daemon.ledger.slot import LOOKS, TRIES, Undecided, occupy, pause_before, read_slot
from dcr_daemon.ledger.tail import Tail
from dcr_daemon.store.port import Store

R = TypeVar("R", bound=Record)

SEQUENTIAL = 64  #: records read one by one from a remembered tip before jumping to the tail
RECENT = 15.0  #: seconds after a look above the tail during which `append` does not look again


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
        emit: gets `Alarm` for void records, `LedgerDoubted`, `LedgerRead`, `LedgerPolled`, `Retrying`, `Claimed`,
            `FencedOut`.
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
        self._doubt: Doubt | None = None
        self._looks = Looks()
        self._followers: weakref.WeakSet[Follower] = weakref.WeakSet()
        self._found_empty = False
        self._looked_above = False
        self._hole_search = HoleSearch(store)
        self._looked_at = float(
            "-inf"
        )  #: when this process last looked at the slot after the next one, and found it free

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

    @property
    def head(self) -> int:
        """The newest version that the bucket shows to be sealed; above `state.seal` only in doubt."""
        return max(self.state.seal.version, self._doubt.head if self._doubt else 0)

    @property
    def doubt(self) -> Doubt | None:
        """Why the ledger was not read to its end, if it was not (must L2)."""
        return self._doubt

    def check_undoubted(self) -> None:
        """Raise `Corrupt` if there is a record that this reader does not go past."""
        if self._doubt:
            raise self._doubt.error(self.store.url)

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

        A record that is not decided (`fold_decided`) ends the reading before it: then there is a `doubt`.

        Raises:
            NotFound: there is no stream.
            Corrupt: the ledger does not extend what was seen, or has a hole.
            Incompatible: it is another stream than the remembered one, or of a newer format.
        """
        async with self._lock:
            await self._open()
            await self._read_to_tail()
        return self.state

    async def read_up_to(self, version: int) -> State:
        """The same as `read`, and read again after a pause if `version` is not sealed there, since one answer that a
        record is absent may be wrong. Afterwards it may still not be sealed."""
        state = await self.read()
        for n in range(1, LOOKS):
            if state.seal.version >= version or self._doubt:
                break
            await pause_before(n)
            state = await self.read()
        return state

    async def read_whole(self) -> State:
        """The same as `read`, and raise `Corrupt` if any record below the newest is missing (must L2).

        Whoever is about to claim or to delete calls it. The first time it lists all records, one request per thousand.
        """
        await self.read()
        if holes := await self._hole_search.find(self.tip.seq):
            raise missing_records(self.store.url, holes)
        return self.state

    async def look_above(self) -> None:
        """Raise `Corrupt` if the slot after the tip is free and the one above it is not (must L2): usually one request.

        `append` does the same if nobody has for `RECENT` seconds. So a writer that calls this while it does something
        else never waits for it.
        """
        async with self._lock:
            await self._look_above()

    async def append(self, make: Callable[[Header], R]) -> R:
        """Append the record that `make` builds, and return it once it is known to be in the ledger.

        If another record takes the slot, everything up to the tail is read and `make` is called again; it may raise
        to give up. A record that an earlier call left undecided is resolved first.

        Raises:
            Undecided: the outcome is not known and the record is kept; call `resolve`.
            Fenced: a newer epoch owns the stream, or a claim is not lawful (must P6).
            Corrupt: there is a record that is not decided, or the slot is a hole; nothing was sent.
            UsageError: the record would not count; nothing was sent.
        """
        async with self._lock:
            await self._open()
            while True:
                await self._decide_sent()
                if runtime.monotonic() > self._looked_at + RECENT:
                    await self._look_above()
                await self._end_doubt()
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
        async with self._lock:
            await self._confirm_tip()

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
        follower = Follower(
            self._poll,
            self.check_gap,
            polling=self._polling,
            is_open=lambda: self._tip is not None and self._tip.state.open is not None,
            emit=self._emit,
            url=self.store.url,
        )
        self._followers.add(follower)
        return follower

    async def check_gap(self, turn: int | None = None) -> None:
        """Raise `Corrupt` if records exist above a free slot at the tail: something deleted one (must L2).

        Args:
            turn: look at one distance only, another one at each turn: that is one request. None: at all of them.
        """
        async with self._lock:
            await self._check_above(by_list=False, doublings=range(REACH) if turn is None else [turn % REACH])
            self._note_polled()

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
        body = await self._read_remembered(0) if mark else await read_slot(self.store, 0)
        if body is None:
            if mark:
                raise self._not_extended(mark.seq, "its first record is gone")
            body = None if self._found_empty else await read_first_again(self.store)
        if body is None:
            self._found_empty = True
            raise NotFound(f"there is no stream at {self.store.url}", hint="a publisher makes one with --create")
        tip, stream = begin(body)
        if mark and mark.stream != tip.stream:
            raise Incompatible(
                f"{self.store.url} holds stream {tip.stream}; this state directory has seen stream {mark.stream} there",
                hint="somebody replaced the stream: point to the right one, or give this one its own --state",
            )
        self._stream = stream
        if mark is None:
            await self._jump(tip, patience=0)
        elif await self._check_mark(mark):
            await self._jump(replace(mark.tip, proved=True), patience=SEQUENTIAL)  # read twice, with the same digest
        else:
            reading = await read_again(self.store)
            self._tip = mark.tip
            await self._adopt(reading)
            self._publish()

    async def _check_mark(self, mark: Mark) -> bool:
        """Whether the remembered record, which is there, does not contradict the remembered state.

        Raises:
            Corrupt: the record is gone, damaged, or another (must T1). One wrong answer does not decide that.
        """
        body = await self._read_remembered(mark.seq, mark.digest)
        if body is None:
            raise self._not_extended(mark.seq, "that record is gone")
        if records.digest(body) != mark.digest:
            if not records.is_sound(body):
                raise Doubt(mark.seq, "its bytes are not those that were read before", 0).error(self.store.url)
            raise self._not_extended(mark.seq, "another record stands there now")
        before = tip_before(mark.stream, mark.seq, body=body)
        return before is None or fold(before, body).tip.state == mark.state

    async def _read_remembered(self, seq: int, digest: str = "") -> bytes | None:
        """A slot that was read before, when it had this digest; an answer that differs is asked for again."""
        body: bytes | None = None
        for n in range(LOOKS):
            if n:
                await pause_before(n)
            body = await read_slot(self.store, seq)
            if body is not None and digest in ("", records.digest(body)):
                break
        return body

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
        while not self._looked_above and not self._doubt:
            if await self._check_above():
                await self._read_on()
            else:  # the slot above the tip is read twice: the first answer may have been wrong
                self._looked_above = not await self._read_next()

    async def _check_above(self, *, by_list: bool = True, doublings: Sequence[int] = range(REACH)) -> bool:
        """Whether records appeared above the tip meanwhile. Raises `Corrupt` if the slot after the tip is a hole."""
        began = runtime.monotonic()
        if await find_above(self.store, self.tip.seq, by_list=by_list, doublings=doublings) is None:
            self._looked_at = began if 0 in doublings else self._looked_at
            return False
        # The higher record became durable after this one, so this one may have arrived since it was read.
        await read_occupied(self.store, self.tip.seq + 1)
        return True

    async def _look_above(self) -> None:
        """Whoever has slept through a take-over may find the slot after its tip free again: that record is lost."""
        while not self._doubt and await self._check_above(by_list=False, doublings=[0]):
            await self._read_on()

    async def _read_on(self) -> None:
        slots = ReadOn(self.store)
        while await self._read_next(slots):
            pass

    async def _read_next(self, slots: ReadOn | None = None) -> bool:
        """Read the next slot, from `slots` if these are given; returns whether the tip has moved."""
        seq = self.tip.seq + 1
        body = await (slots.slot(seq) if slots else read_slot(self.store, seq))
        step = fold(self.tip, body) if body is not None else None
        moved = step is not None
        if step and step.foreign:
            moved = await self._look_again(step)
        elif step:
            self._take(step, body)
        self._publish()  # also without a new record: an earlier call may have failed to write the mark
        if step is None and self._doubt:
            self._doubt = None
            self._emit(LedgerRead(head=self.state.seal.version))
        if step is None:
            self._note_polled()
        return moved

    def _note_polled(self) -> None:
        """The store has answered that nothing follows the tip; in doubt something does."""
        if self._doubt is None:
            self._emit(LedgerPolled(head=self.state.seal.version))

    async def _look_again(self, step: Step) -> bool:
        """`step` does not follow the tip: read everything again; returns whether that led past it."""
        if not self._looks.due(step):
            return False
        reading = await read_again(self.store)
        if await self._adopt(reading):
            return True
        doubt = Doubt(step.tip.seq, step.void, max(await reading.head(), self.state.seal.version))
        if doubt != self._doubt:
            what = f"record {doubt.seq} of {self.store.url} does not follow record {self.tip.seq}: {doubt.reason}"
            self._emit(Alarm(must="L2", what=what))
            self._emit(LedgerDoubted(seq=doubt.seq, head=doubt.head, reason=doubt.reason))
        self._doubt = doubt
        return False

    async def _adopt(self, reading: Reading) -> bool:
        """Go on from what a second reading found, unless it ends where this reader is, or before."""
        mine, found = self.tip, reading.tip
        if found.seq < mine.seq or found == mine:
            return False
        if found.stream != mine.stream or found.state.seal.version < mine.state.seal.version:
            raise self._not_extended(mine.seq, "it leads to an older version")
        fresh = await reading.steps_after(mine)
        if fresh is None:
            self.history.forget()  # my tip was wrong
            fresh = [step for step in reading.steps if step.tip.seq > mine.seq]
        if (sent := self._sent) and sent.seq <= found.seq and not any(step.tip.seq == sent.seq for step in fresh):
            # Its slot is damaged, and was skipped: the record after it says what was there.
            after = tip_before(mine.stream, sent.seq + 1, body=await reading.tail.body(sent.seq + 1))
            ours = after is not None and after.digest == records.digest(sent.body)
            self._sent, self._resolved = None, sent.record if ours else None
        self._tip = found
        for step in fresh:
            self._take(step, await reading.tail.body(step.tip.seq))
        return True

    async def _confirm_tip(self) -> None:
        """Read the tip's record a second time, and everything if it differs: a claim must not follow a misread one."""
        body = await read_slot(self.store, self.tip.seq)
        if body is None or records.digest(body) != self.tip.digest:
            await self._adopt(await read_again(self.store))
            self._publish()

    async def _end_doubt(self) -> None:
        """Before an append: wait a while for a record that is not decided. Raises `Corrupt` if that does not help."""
        for n in range(1, TRIES):
            if self._doubt is None:
                return
            await pause_before(n)
            await self._read_on()
        self.check_undoubted()

    async def _decide_sent(self) -> Record | None:
        """Decide the record that was sent, if there is one; the record if it is ours and in the ledger."""
        sent = self._sent
        if sent is None:
            return None
        kind = type(sent.record).__name__.lower()
        runtime.failpoint(f"ledger.{kind}.put")
        # `_sent` is set before the first byte leaves and cleared only when its slot is decided: a cancelled call stays
        # undecided.
        body, step = await self._read_occupied(sent)
        runtime.failpoint(f"ledger.{kind}.answered")
        if step.foreign:  # another's, whole, and not written after our tip: `_read_next` decides about it
            self._sent, self._resolved = None, None
        else:
            self._take(step, body)
        self._publish()
        runtime.failpoint(f"ledger.{kind}.known")
        return self._resolved

    async def _read_occupied(self, sent: _Sent) -> tuple[bytes, Step]:
        """What occupies the slot of the record that was sent. Damaged bytes may be ours: they decide nothing."""
        for n in range(TRIES):
            if n:
                await pause_before(n)
            body = await occupy(self.store, sent.seq, sent.body, emit=self._emit, tries=TRIES)
            step = fold(self.tip, body)
            if not step.damaged:
                return body, step
        raise Undecided(
            f"record {sent.seq} of {self.store.url} is damaged, and may be the one that was sent: {step.void}",
            hint=REPAIR,
        )

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
            body = records.encode_record(record)
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

"""Which records count (must L2): the rules one by one, hostile bytes, and that nothing but the bytes decides."""

from __future__ import annotations

import asyncio
import re
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.stores.memory import MemoryStore
from support.streams.record_writer import RecordWriter, make_abort, make_anchor, make_open, make_seal

from dcr_daemon.errors import Corrupt, Incompatible
from dcr_daemon.ledger import records
from dcr_daemon.ledger.fold import GENESIS, Step, Tip, begin, fold
from dcr_daemon.ledger.ledger import Header, Ledger
from dcr_daemon.ledger.records import Abort, Epoch, Floor, Keys, Record, Release, State
from dcr_daemon.store.keys import is_key

STREAM = "5ea1"
START = Tip(STREAM, 0, "ab" * 32, GENESIS)


def header(tip: Tip, epoch: int | None = None) -> Header:
    """What an honest writer at `tip` would be given."""
    epoch = epoch if epoch is not None else (tip.state.epoch.seq if tip.state.epoch else 0)
    fields: dict[str, Any] = {
        "stream": tip.stream, "seq": tip.seq + 1, "prev": tip.digest, "state": tip.state, "nonce": "0", "at": "",
        "epoch": epoch,
    }  # fmt: skip
    return Header(tip.state, tip.seq + 1, fields)


def claim(tip: Tip, name: str = "trainer", *, take_over: bool = False) -> Epoch:
    return Epoch(**{**header(tip).fields, "epoch": tip.seq + 1}, name=name, take_over=take_over)


def proved(body: bytes) -> bytes:
    """The JSON of a record, with the digest that proves it."""
    return body[:-1] + b',"digest":"%s"}' % records.digest(body[:-1]).encode()


def put(tip: Tip, record: Record) -> Step:
    return fold(tip, records.encode(record))


def counted(tip: Tip, record: Record) -> Tip:
    step = put(tip, record)
    assert step.void == ""
    assert step.record == record
    return step.tip


def void(tip: Tip, record: Record, why: str) -> None:
    """`record` occupies its slot, changes nothing, and the reason says `why`."""
    step = put(tip, record)
    assert step.record is None
    assert re.search(why, step.void), step.void
    assert step.tip == Tip(tip.stream, tip.seq + 1, records.digest(records.encode(record)), tip.state)


@pytest.fixture
def claimed() -> Tip:
    return counted(START, claim(START))


@pytest.fixture
def opened(claimed: Tip) -> Tip:
    return counted(claimed, make_open(header(claimed)))


@pytest.fixture
def sealed(opened: Tip) -> Tip:
    return counted(opened, make_seal(header(opened)))


class TestClaims:
    """Must P6."""

    def test_the_first_claim_needs_nothing(self) -> None:
        tip = counted(START, claim(START))
        assert tip.state.epoch == records.EpochRef(1, "trainer")

    def test_the_same_name_may_claim_again(self, claimed: Tip) -> None:
        assert counted(claimed, claim(claimed)).state.epoch == records.EpochRef(2, "trainer")

    def test_another_name_may_not_claim_from_a_holder(self, claimed: Tip) -> None:
        void(claimed, claim(claimed, "other"), "which has not released")

    def test_another_name_may_claim_after_a_release(self, claimed: Tip) -> None:
        released = counted(claimed, Release(**header(claimed).fields))
        assert counted(released, claim(released, "other")).state.epoch == records.EpochRef(3, "other")

    def test_another_name_may_take_over(self, claimed: Tip) -> None:
        assert counted(claimed, claim(claimed, "other", take_over=True)).state.epoch == records.EpochRef(2, "other")

    def test_an_epoch_is_the_seq_of_its_claim(self, claimed: Tip) -> None:
        void(claimed, Epoch(**{**header(claimed).fields, "epoch": 1}, name="trainer"), "a claim's epoch is its seq")

    def test_a_newer_epoch_ends_the_attempt_of_the_one_before(self, opened: Tip) -> None:
        tip = counted(opened, claim(opened))
        assert tip.state.open is None
        old = header(tip, epoch=1)
        void(tip, make_seal(old, attempt=2), "epoch 1 is stale")
        void(tip, make_seal(header(tip), attempt=2), "attempt 2 is not open")

    def test_a_released_epoch_writes_nothing_more(self, opened: Tip) -> None:
        tip = counted(opened, Release(**header(opened).fields))
        assert tip.state.open is None
        void(tip, make_open(header(tip)), "was released")
        void(tip, Release(**header(tip).fields), "was released")

    def test_nothing_counts_before_the_first_claim(self) -> None:
        void(START, make_open(header(START)), "stale: the newest is None")


class TestVersions:
    """Musts L2, L3, P7."""

    def test_a_seal_moves_the_chain_by_one(self, sealed: Tip) -> None:
        assert sealed.state.seal == records.SealRef(3, 1)
        assert sealed.state.open is None

    @pytest.mark.parametrize(("version", "base"), [(2, 0), (1, 1), (2, 1), (0, 0)])
    def test_an_open_follows_the_newest_seal(self, claimed: Tip, version: int, base: int) -> None:
        void(claimed, make_open(header(claimed), version=version, base=base), "does not follow version 0")

    def test_one_undecided_attempt_at_a_time(self, opened: Tip) -> None:
        void(opened, make_open(header(opened)), "attempt 2 is undecided")

    def test_a_seal_needs_its_own_open(self, claimed: Tip, opened: Tip) -> None:
        void(claimed, make_seal(header(claimed), attempt=2), "attempt 2 is not open")
        void(opened, make_seal(header(opened), attempt=1), "attempt 1 is not open")

    @pytest.mark.parametrize("change", [{"version": 2}, {"base": 1}, {"version": 2, "base": 1}])
    def test_a_seal_is_of_the_version_that_was_opened(self, opened: Tip, change: dict[str, int]) -> None:
        void(opened, make_seal(header(opened), **change), "was opened for version 1 on 0")

    def test_a_seal_names_the_one_before(self, opened: Tip) -> None:
        void(opened, make_seal(header(opened), previous=1), "the seal before it is record 0")

    def test_a_version_is_sealed_once(self, sealed: Tip) -> None:
        void(sealed, make_seal(header(sealed), version=1, base=0, attempt=2), "attempt 2 is not open")

    def test_an_aborted_attempt_is_never_sealed(self, opened: Tip) -> None:
        tip = counted(opened, make_abort(header(opened)))
        assert tip.state == msgspec.structs.replace(opened.state, open=None)
        void(tip, make_seal(header(tip), attempt=2), "attempt 2 is not open")

    def test_a_version_may_have_several_attempts(self, opened: Tip) -> None:
        tip = counted(opened, make_abort(header(opened)))
        tip = counted(tip, make_open(header(tip)))
        tip = counted(tip, make_seal(header(tip)))
        assert tip.state.seal == records.SealRef(5, 1)

    @pytest.mark.parametrize(("attempt", "version"), [(1, 1), (2, 2)])
    def test_an_abort_names_what_stands_open(self, opened: Tip, attempt: int, version: int) -> None:
        record = Abort(**header(opened).fields, attempt=attempt, version=version, reason="")
        void(opened, record, f"attempt {attempt} is not open")

    def test_a_second_stream_record_is_void(self, sealed: Tip) -> None:
        stream = records.Stream(
            **header(sealed).fields, layout=records.ObjectRef("a", 1, "0" * 64),
            fingerprint=records.ObjectRef("a", 1, "0" * 64), total="0" * 16,
        )  # fmt: skip
        void(sealed, stream, "a stream begins once")

    def test_keys_are_remembered(self, claimed: Tip) -> None:
        assert counted(claimed, Keys(**header(claimed).fields, keys=["k"])).state.keys == 2


class TestRetention:
    """Must L5."""

    def test_an_anchor_is_of_a_sealed_version(self, sealed: Tip) -> None:
        void(sealed, make_anchor(header(sealed), 2), "an anchor of version 2 outside 0 to 1")
        assert counted(sealed, make_anchor(header(sealed), 1)).state.anchor == records.AnchorRef(4, 1)

    def test_the_newest_anchor_never_falls(self, sealed: Tip) -> None:
        tip = counted(sealed, make_anchor(header(sealed), 1))
        void(tip, make_anchor(header(tip), 0), "outside 1 to 1")
        assert counted(tip, make_anchor(header(tip), 1)).state.anchor == records.AnchorRef(5, 1)

    def test_the_floor_stays_at_or_below_an_anchor(self, sealed: Tip) -> None:
        void(sealed, Floor(**header(sealed).fields, floor=1), "a floor of 1 outside 0 to 0")
        tip = counted(sealed, make_anchor(header(sealed), 1))
        assert counted(tip, Floor(**header(tip).fields, floor=1)).state.floor == 1

    def test_the_floor_never_falls(self, sealed: Tip) -> None:
        tip = counted(sealed, make_anchor(header(sealed), 1))
        tip = counted(tip, Floor(**header(tip).fields, floor=1))
        void(tip, Floor(**header(tip).fields, floor=0), "a floor of 0 outside 1 to 1")

    def test_only_the_newest_epoch_writes_them(self, sealed: Tip) -> None:
        tip = counted(sealed, claim(sealed))
        void(tip, make_anchor(header(tip, epoch=1), 1), "epoch 1 is stale")
        void(tip, Floor(**header(tip, epoch=1).fields, floor=0), "epoch 1 is stale")


class TestWhoReadWhat:
    """A record whose writer had not read exactly what came before is void (musts L0, T1)."""

    @pytest.mark.parametrize(
        ("change", "why"),
        [
            ({"stream": "0ther"}, "belongs to stream 0ther"),
            ({"seq": 3}, "says it is record 3"),
            ({"prev": "0" * 64}, "does not follow the record before"),
            ({"state": None}, "had folded another state"),
            ({"state": msgspec.structs.replace(GENESIS, floor=1)}, "had folded another state"),
            ({"format": 0}, "format 0 is unknown"),
        ],
    )
    def test_it_is_void(self, claimed: Tip, change: dict[str, Any], why: str) -> None:
        honest = header(claimed)
        lying = Header(honest.state, honest.seq, {**honest.fields, **change})
        void(claimed, make_open(lying), why)

    def test_a_newer_format_asks_for_an_upgrade_whatever_else_it_holds(self, claimed: Tip) -> None:
        body = msgspec.json.encode({"format": 2, "stream": STREAM, "seq": 2, "kind": "unheard-of"})
        with pytest.raises(Incompatible, match="upgrade"):
            fold(claimed, proved(body))
        assert fold(claimed, body).damaged, "one changed byte must not look like a newer format"

    @pytest.mark.parametrize(
        "body", [b'{"format":2,"stream":"0ther","seq":2}', b'{"format":2,"stream":"5ea1","seq":9}']
    )
    def test_a_newer_format_from_elsewhere_is_only_void(self, claimed: Tip, body: bytes) -> None:
        assert fold(claimed, body).void


HOSTILE = {
    "empty": b"",
    "not JSON": b"\xff\x00",
    "cut": b'{"kind":"open","form',
    "another kind": b'{"kind":"sea1"}',
    "a list": b"[" * 1000 + b"]" * 1000,
    "bottomless": b'{"kind":"seal","metadata":' + b'{"a":' * 200_000 + b"1" + b"}" * 200_001,
    "a long list": b'{"kind":"keys","keys":[' + b'"k",' * 200_000 + b'"k"]}',
}


@pytest.mark.parametrize("body", HOSTILE.values(), ids=HOSTILE)
def test_hostile_bytes_are_void(sealed: Tip, body: bytes) -> None:
    step = fold(sealed, body)
    assert (step.record, step.tip.state, step.tip.seq) == (None, sealed.state, sealed.seq + 1)
    assert step.void


@pytest.mark.parametrize(
    "change",
    [
        {"version": -1}, {"version": 1.5}, {"version": "1"}, {"version": 1 << 63}, {"version": True}, {"bytes": -1},
        {"before": "0" * 15}, {"before": "F" * 16}, {"before": "0" * 16 + "\n"}, {"epoch": None}, {"nonce": "A"},
        {"parts": [{"key": "../../etc/passwd", "size": 1, "sha256": "0" * 64}]},
        {"parts": [{"key": "/etc/passwd", "size": 1, "sha256": "0" * 64}]},
        {"parts": [{"key": "data/1/2/../../x", "size": 1, "sha256": "0" * 64}]},
        {"parts": [{"key": "data/x", "size": -1, "sha256": "0" * 64}]},
        {"parts": [{"key": "data/x", "size": 1, "sha256": "short"}]},
        {"step": 1 << 70},
    ],
    ids=str,
)  # fmt: skip
def test_a_field_outside_its_bounds_makes_the_record_void(opened: Tip, change: dict[str, Any]) -> None:
    fields = msgspec.to_builtins(make_seal(header(opened))) | change
    step = fold(opened, msgspec.json.encode(fields))
    assert step.record is None
    assert "does not parse" in step.void


def test_the_bound_on_nesting_is_the_formats_and_not_the_hosts(opened: Tip) -> None:
    def nested(depth: int) -> Step:
        value: dict[str, Any] = {}
        for _ in range(depth - 1):
            value = {"a": value}
        return put(opened, make_seal(header(opened), metadata=value))

    assert nested(records.MAX_DEPTH).record is not None
    assert "nested deeper" in nested(records.MAX_DEPTH + 1).void


@pytest.mark.parametrize("depth", [0, 400, 800])
def test_a_deep_call_stack_does_not_change_the_verdict(opened: Tip, depth: int) -> None:
    """A parser's own recursion limit depends on who calls it; histories must not."""

    def from_depth(n: int, body: bytes) -> Step:
        return from_depth(n - 1, body) if n else fold(opened, body)

    value: Any = 1
    for _ in range(records.MAX_DEPTH - 1):
        value = [value]
    body = records.encode(make_seal(header(opened), metadata={"a": value}))
    assert from_depth(depth, body).void == ""
    deeper = records.encode(make_seal(header(opened), metadata={"a": [[value]]}))
    assert from_depth(depth, deeper).record is None


@pytest.mark.parametrize("depth", [0, 400, 800])
def test_nor_does_it_for_fields_that_nobody_knows(opened: Tip, depth: int) -> None:
    """They are skipped, by a parser that recurses too."""

    def from_depth(n: int, body: bytes) -> Step:
        return from_depth(n - 1, body) if n else fold(opened, body)

    body = records.encode(make_seal(header(opened)))
    for nesting, counts in ((60, True), (70, False), (700, False), (100_000, False)):
        unknown = body[:-1] + b',"unknown":' + b"[" * nesting + b"]" * nesting + b"}"
        assert (from_depth(depth, proved(unknown)).record is not None) is counts


@pytest.mark.parametrize("number", ["1" * 21, "1" * 700, "1" * 5000, "-9223372036854775809"])
def test_numbers_in_user_data_have_64_bits(opened: Tip, number: str) -> None:
    """How many digits an interpreter reads is a setting of the host's."""
    body = records.encode(make_seal(header(opened), metadata={"a": [0]}))
    assert fold(opened, body.replace(b"[0]", b"[18446744073709551615]")).record is not None
    assert fold(opened, body.replace(b"[0]", b"[%s]" % number.encode())).void


@settings(max_examples=300, deadline=None)
@given(st.text(st.sampled_from("aZ09._-/ \\\n\x00é"), max_size=12))
def test_a_record_names_exactly_the_keys_a_store_takes(key: str) -> None:
    body = msgspec.json.encode({"key": key, "size": 1, "sha256": "0" * 64})
    try:
        msgspec.json.decode(body, type=records.ObjectRef)
        taken = True
    except msgspec.ValidationError:
        taken = False
    assert taken == is_key(key)


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=300) | st.recursive(st.none() | st.integers() | st.text(), st.lists).map(msgspec.json.encode))
def test_any_bytes_fold_to_the_same_verdict_and_change_nothing(body: bytes) -> None:
    step = fold(START, body)
    assert step == fold(START, body)
    assert step.tip.state == GENESIS
    assert step.record is None


class TestRecordZero:
    @pytest.mark.parametrize("body", [b"", b"{}", b'{"kind":"release"}'])
    def test_without_a_stream_record_there_is_no_stream(self, body: bytes) -> None:
        with pytest.raises(Corrupt, match="not a stream record"):
            begin(body)

    def test_a_newer_stream_asks_for_an_upgrade(self) -> None:
        with pytest.raises(Incompatible, match="upgrade"):
            begin(proved(b'{"format":2,"stream":"5ea1","seq":0}'))

    def test_it_is_the_seal_of_version_0(self, store: MemoryStore) -> None:
        async def run() -> State:
            ledger = Ledger(store)
            await RecordWriter(ledger).create()
            return ledger.state

        assert asyncio.run(run()).seal == records.SealRef(0, 0)

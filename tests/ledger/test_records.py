"""Records as they lie in buckets: bytes that were written once must be read for ever."""

from __future__ import annotations

import hashlib

import msgspec
import pytest

from dcr_daemon.ledger import records
from dcr_daemon.ledger.fold import GENESIS, Tip, begin, fold
from dcr_daemon.ledger.records import EpochRef, OpenRef, SealRef, State

SHA = "ab" * 32
HEAD = (
    '"format":1,"stream":"5ea1","seq":{seq},"prev":"{prev}","state":{state},"nonce":"0f","at":"2026-01-01",'
    '"epoch":{epoch}'
)
STATE = '{"seal":{"seq":0,"version":0},"epoch":null,"open":null,"anchor":null,"floor":0,"keys":null}'
REF = f'{{"key":"data/0/0/fingerprint.bin","size":8,"sha256":"{SHA}"}}'
STREAM = (
    f'{{"kind":"stream","layout":{{"key":"layouts/ab.json","size":9,"sha256":"{SHA}"}},"fingerprint":{REF},'
    '"total":"00000000000000ff","model":"tiny",' + HEAD.format(seq=0, prev="0" * 64, state="null", epoch=0) + "}"
)


def follow(tip: Tip, kind: str, own: str, epoch: int) -> Tip:
    """Fold the record that an old writer put after `tip`; it must count, and be what we would write."""
    state = msgspec.json.encode(tip.state).decode()
    head = HEAD.format(seq=tip.seq + 1, prev=tip.digest, state=state, epoch=epoch)
    body = f'{{"kind":"{kind}"{own},{head}}}'.encode()
    step = fold(tip, body)
    assert step.void == ""
    assert step.record is not None
    assert records.encode(step.record) == body
    return step.tip


def test_every_kind_of_record_reads_as_it_did() -> None:
    tip, stream = begin(STREAM.encode())
    assert records.encode(stream) == STREAM.encode()
    assert msgspec.json.encode(GENESIS).decode() == STATE
    tip = follow(tip, "epoch", ',"name":"trainer-0","take_over":false', 1)
    tip = follow(tip, "keys", ',"keys":["k"]', 1)
    tip = follow(tip, "open", ',"version":1,"base":0,"group":"g","call":1,"step":null', 1)
    tip = follow(tip, "abort", ',"attempt":3,"version":1,"reason":"why","rebuild":false', 1)
    tip = follow(tip, "open", ',"version":1,"base":0,"group":"g","call":2,"step":-5', 1)
    assert tip.state.open == OpenRef(5, 1, 0, "g", 2)
    seal = (
        f',"version":1,"base":0,"attempt":5,"parts":[{REF}],"fingerprint":{REF},"before":"00000000000000ff",'
        '"after":"ffffffffffffffff","previous":0,"changed":1,"elements":2,"bytes":3,"dense_bytes":4,"step":-5,'
        '"source":{"path":"checkpoint-5"},"metadata":{"reward":0.5},"anchor":false'
    )
    tip = follow(tip, "seal", seal, 1)
    tip = follow(tip, "anchor", f',"version":1,"index":{REF},"total":"ffffffffffffffff","bytes":5', 1)
    tip = follow(tip, "floor", ',"floor":1', 1)
    tip = follow(tip, "release", "", 1)
    assert tip.state == State(
        seal=SealRef(6, 1), epoch=EpochRef(1, "trainer-0", True), anchor=records.AnchorRef(7, 1), floor=1, keys=2
    )


def test_fields_that_an_earlier_writer_did_not_know_have_their_defaults() -> None:
    tip, _ = begin(STREAM.encode())
    tip = follow(tip, "epoch", ',"name":"trainer-0","take_over":false', 1)
    tip = follow(tip, "open", ',"version":1,"base":0,"group":"g","call":1,"step":null', 1)
    head = HEAD.format(seq=3, prev=tip.digest, state=msgspec.json.encode(tip.state).decode(), epoch=1)
    step = fold(tip, f'{{"kind":"abort","attempt":2,"version":1,"reason":"why",{head}}}'.encode())
    assert isinstance(step.record, records.Abort)
    assert step.record.rebuild is False


def test_fields_that_a_later_writer_adds_are_ignored() -> None:
    tip, _ = begin(proved(STREAM.replace('"model"', '"colour":{"a":[1]},"model"')))
    state = msgspec.json.encode(tip.state).decode()
    head = HEAD.format(seq=1, prev=tip.digest, state=state, epoch=1)
    later = f'{{"kind":"epoch",{head},"name":"a","mood":"good","signature":"ab"}}'
    assert fold(tip, proved(later)).record is not None
    assert fold(tip, later.encode()).damaged, "without a digest: an earlier writer knew every field"


def proved(text: str) -> bytes:
    """The JSON of a record, with the digest that is in every record now."""
    digest = hashlib.sha256(text[:-1].encode()).hexdigest()
    return f'{text[:-1]},"digest":"{digest}"}}'.encode()


def test_a_record_is_written_with_the_digest_of_what_is_before_it() -> None:
    _, stream = begin(STREAM.encode())
    assert records.encode_record(stream) == proved(STREAM)
    assert records.decode_record(proved(STREAM)) == stream


@pytest.mark.parametrize("bit", [0, 2, 5])
def test_no_changed_bit_of_a_record_goes_unnoticed(bit: int) -> None:
    body = proved(STREAM)
    for at in range(len(body)):
        changed = body[:at] + bytes([body[at] ^ 1 << bit]) + body[at + 1 :]
        assert not records.is_sound(changed), changed[at - 5 : at + 5]
    for end in range(len(body)):
        assert not records.is_sound(body[:end])
    assert not records.is_sound(body + b"\n")


@pytest.mark.parametrize(("value", "text"), [(0, "0" * 16), (255, "0" * 14 + "ff"), ((1 << 64) - 1, "f" * 16)])
def test_u64_values_are_sixteen_hex_digits(value: int, text: str) -> None:
    assert records.show_u64(value) == text

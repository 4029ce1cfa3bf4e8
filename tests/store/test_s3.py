"""What the S3 store makes of every way in which a bucket can fail."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import os
from typing import Any

import pytest

from dcr_daemon.errors import Corrupt, Incompatible, KeyNotFound, StoreUnavailable
from dcr_daemon.store import Entry, Outcome, put_if_absent
from dcr_daemon.store.port import DeleteRefused
from dcr_daemon.store.retry import RetryPolicy
from dcr_daemon.store.s3.store import LARGE_BYTES, S3Store

BRIEF = RetryPolicy(seconds=0.3, first=0.001, longest=0.01)
REFUSALS = ["denied", "bad-key", "expired", "archived", "no-bucket", "not-implemented", "moved", "invalid"]


# One conditional PUT, and what is known after it (musts L0, L1).


@pytest.mark.parametrize("fault", ["conflict", "internal", "slow-down", "bad-digest", "html", "drop", "drop-after"])
async def test_a_create_without_a_clear_answer_is_unknown_and_sent_once(fake_s3, fault: str) -> None:
    async with fake_s3() as (server, store):
        # A warm connection: an HTTP client likes to repeat a request on one that the server has closed.
        assert await store.create("ledger/0", b"zero") is Outcome.WON
        server.faults.append(fault)
        assert await store.create("ledger/1", b"one") is Outcome.UNKNOWN
        assert [request.method for request in server.seen] == ["PUT", "PUT"]
        assert ("run/ledger/1" in server.objects) == (fault == "drop-after")


async def test_a_create_without_any_answer_ends_unknown(fake_s3) -> None:
    async with fake_s3(patience=BRIEF, always="stall") as (server, store):
        assert await store.create("ledger/1", b"one") is Outcome.UNKNOWN
        assert len(server.seen) == 1


async def test_a_dead_endpoint_is_unavailable_and_a_create_there_unknown(unused_endpoint: str, fake_s3) -> None:
    store = await S3Store.open("bucket", "run", endpoint_url=unused_endpoint, patience=BRIEF)
    assert await store.create("ledger/1", b"one") is Outcome.UNKNOWN
    with pytest.raises(StoreUnavailable, match="ledger/1"):
        await store.get("ledger/1", limit=9)
    await store.close()


async def test_a_create_asks_for_an_empty_slot_in_one_plain_put(fake_s3) -> None:
    async with fake_s3() as (server, store):
        body = os.urandom(12 << 20)
        assert await store.create("anchors/1/2/model.safetensors", memoryview(body)) is Outcome.WON
        assert await store.create("anchors/1/2/model.safetensors", body) is Outcome.LOST
        for request in server.seen:
            assert (request.method, request.query, request.headers["if-none-match"]) == ("PUT", {}, "*")
            assert "expect" not in request.headers
        assert server.objects == {"run/anchors/1/2/model.safetensors": body}


@pytest.mark.parametrize("fault", REFUSALS)
async def test_a_refusal_is_raised_at_once_with_a_hint(fake_s3, fault: str) -> None:
    async with fake_s3(always=fault) as (server, store):
        for request in (
            store.create("ledger/1", b"one"),
            store.get("ledger/1", limit=9),
            store.overwrite("replicas/a", b"x"),
            store.delete(["data/1"]),
            anext(store.list("")),
        ):
            sent = len(server.seen)
            with pytest.raises(Incompatible, match="s3://bucket/run") as refused:
                await request
            assert refused.value.hint
            methods = [request.method for request in server.seen[sent:] if request.method != "HEAD"]
            assert len(methods) == 1 or methods == ["POST", "DELETE"]  # a single delete says what is refused


async def test_a_missing_bucket_and_a_missing_key_are_told_apart(fake_s3) -> None:
    async with fake_s3() as (server, store):
        with pytest.raises(KeyNotFound) as missing:
            await store.get("data/1", limit=9)
        assert missing.value.key == "data/1"
        server.faults.append("no-bucket")
        with pytest.raises(Incompatible, match="NoSuchBucket"):
            await store.get("data/1", limit=9)


async def test_no_credentials_are_an_operators_matter(fake_s3, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", os.devnull)
    async with fake_s3() as (server, store):
        with pytest.raises(Incompatible, match="credentials"):
            await store.create("ledger/1", b"one")
        assert server.seen == []


# TLS.


async def test_a_certificate_nobody_vouches_for_is_an_operators_matter(fake_s3, tls) -> None:
    async with fake_s3(tls=tls[0]) as (server, store):
        for request in (store.create("ledger/1", b"one"), store.get("ledger/1", limit=9)):
            with pytest.raises(Incompatible, match="not trusted") as refused:
                await request
            assert "AWS_CA_BUNDLE" in refused.value.hint
        assert server.seen == []


async def test_a_large_body_over_tls_is_protected_without_holding_up_the_loop(fake_s3, tls, monkeypatch) -> None:
    monkeypatch.setenv("AWS_CA_BUNDLE", str(tls[1]))
    small, large = os.urandom(1000), os.urandom(LARGE_BYTES)
    async with fake_s3(tls=tls[0]) as (server, store):
        assert await store.create("data/small", small) is Outcome.WON
        assert await store.create("data/large", large) is Outcome.WON
        first, second = server.seen
        assert first.headers["x-amz-content-sha256"] == hashlib.sha256(small).hexdigest()
        assert second.headers["x-amz-content-sha256"] == "UNSIGNED-PAYLOAD"
        assert base64.b64decode(second.headers["content-md5"]) == hashlib.md5(large).digest()
        assert await store.get("data/large", limit=LARGE_BYTES) == large


# create_once: the fate of a data object.


@pytest.mark.parametrize(
    ("faults", "requests"),
    [
        (["drop-after"], ["PUT", "GET"]),
        (["drop"], ["PUT", "GET", "PUT"]),
        (["conflict", "ok", "drop", "ok", "internal"], ["PUT", "GET", "PUT", "GET", "PUT", "GET", "PUT"]),
        (["drop-after", "drop", "slow-down"], ["PUT", "GET", "GET", "GET"]),
    ],
)
async def test_create_once_finds_out_what_became_of_its_put(fake_s3, faults: list[str], requests: list[str]) -> None:
    async with fake_s3() as (server, store):
        server.faults.extend(faults)
        await put_if_absent(store, "data/1/1/a", b"mine")
        assert server.objects == {"run/data/1/1/a": b"mine"}
        assert [request.method for request in server.seen] == requests


async def test_create_once_does_not_take_others_bytes_for_its_own(fake_s3) -> None:
    async with fake_s3(objects={"run/data/a": b"else"}) as (server, store):
        for faults in ([], ["drop"], ["internal"]):
            server.faults.extend(faults)
            with pytest.raises(Corrupt, match="data/a"):
                await put_if_absent(store, "data/a", b"mine")


async def test_create_once_gives_up_undecided(fake_s3) -> None:
    async with fake_s3() as (server, store):
        server.faults.extend(["conflict", "ok"] * 1000)
        with pytest.raises(StoreUnavailable, match="undecided"):
            await put_if_absent(store, "data/a", b"mine", patience=BRIEF)
        assert server.objects == {}
        assert len(server.seen) > 2


# Reads go on where they stopped.


@pytest.mark.parametrize("fault", ["drop", "internal", "slow-down", "html", "cut:0", "drop-after", "no-length"])
async def test_a_read_is_repeated(fake_s3, fault: str) -> None:
    async with fake_s3(objects={"run/data/a": b"bytes"}) as (server, store):
        server.faults.extend([fault, fault])
        assert await store.get("data/a", limit=5) == b"bytes"
        assert len(server.seen) == 3


async def test_a_broken_download_is_continued_by_range(fake_s3) -> None:
    whole = os.urandom(3 << 20)
    async with fake_s3(objects={"run/data/a": whole}) as (server, store):
        server.faults.extend(["cut:1000000", "cut:0", "drop", "cut:700000"])
        assert await store.get("data/a", limit=len(whole)) == whole
        begins = [int(request.headers.get("range", "bytes=0-")[6:-1]) for request in server.seen]
        assert begins == sorted(begins)
        assert begins[0] == 0
        assert 0 < begins[1] <= 1_000_000
        assert begins[-1] > begins[1]


async def test_a_server_without_ranges_is_read_from_the_start_again(fake_s3) -> None:
    whole = os.urandom(3 << 20)
    async with fake_s3(objects={"run/data/a": whole}, always="no-range") as (server, store):
        server.faults.extend(["cut:1000000"])
        assert await store.get("data/a", limit=len(whole)) == whole
        assert len(server.seen) == 2


async def test_a_range_of_unknown_size_is_not_trusted(fake_s3) -> None:
    whole = os.urandom(3 << 20)
    async with fake_s3(objects={"run/data/a": whole}, always="no-size") as (server, store):
        server.faults.extend(["cut:1000000"])
        assert await store.get("data/a", limit=len(whole)) == whole
        assert ["range" in request.headers for request in server.seen] == [False, True, False]


@pytest.mark.parametrize("after", [b"B" * (2 << 20), b"short"])
async def test_two_objects_are_never_mixed(fake_s3, after: bytes) -> None:
    async with fake_s3(objects={"run/replicas/a": b"A" * (2 << 20)}) as (server, store):
        server.faults.append("cut:1000000")
        reading = asyncio.create_task(store.get("replicas/a", limit=2 << 20))
        await server.until(lambda: bool(server.seen) and not server.busy)
        server.objects["run/replicas/a"] = after
        assert await reading == after


async def test_a_larger_object_is_refused_from_its_headers(fake_s3) -> None:
    async with fake_s3(objects={"run/data/a": b"x" * 1000}, always="trickle") as (server, store):
        with pytest.raises(Corrupt, match="1000 bytes"):
            await store.get("data/a", limit=999)
        assert len(server.seen) == 1


@pytest.mark.parametrize("fault", ["internal", "slow-down", "drop", "stall", "trickle", "html"])
async def test_patience_ends(fake_s3, fault: str) -> None:
    async with fake_s3(objects={"run/data/a": b"bytes"}, patience=BRIEF, always=fault) as (server, store):
        for request in (store.get("data/a", limit=9), anext(store.list(""))):
            sent = len(server.seen)
            with pytest.raises(StoreUnavailable, match="s3://bucket/run"):
                await request
            assert len(server.seen) > sent


async def test_overwrite_list_and_delete_are_repeated(fake_s3) -> None:
    async with fake_s3() as (server, store):
        server.faults.extend(["drop-after", "internal"])
        await store.overwrite("replicas/a", b"status")
        server.faults.extend(["slow-down", "drop"])
        assert [entry async for entry in store.list("replicas/")] == [Entry("replicas/a", 6)]
        server.faults.extend(["drop-after", "internal"])
        await store.delete(["replicas/a"])
        assert server.objects == {}


# Lists and deletes.


async def test_a_listing_runs_over_pages_and_leaves_out_foreign_names(fake_s3) -> None:
    names = [f"data/{number}" for number in range(7)]
    foreign = ["", "data/with space", "data//x", "../up", "data/ä"]
    objects = {f"run/{name}": b"x" for name in names + foreign} | {"runner/data/1": b"", "other": b""}
    async with fake_s3(objects=objects, page=2) as (server, store):
        server.faults.extend(["ok", "internal", "ok"])
        assert [entry.key async for entry in store.list("")] == names


async def test_only_what_was_not_deleted_is_asked_again(fake_s3) -> None:
    objects = {f"run/data/{number}": b"x" for number in range(5)}
    undeletable = {"run/data/3": ["InternalError", "SlowDown"]}
    async with fake_s3(objects=objects, undeletable=undeletable) as (server, store):
        await store.delete([f"data/{number}" for number in range(5)])
        assert server.objects == {}
        assert [request.body.count(b"<Key>") for request in server.seen] == [5, 1, 1]


async def test_a_denied_delete_names_the_object_and_the_others_are_deleted(fake_s3) -> None:
    objects = {f"run/data/{number}": b"" for number in range(4)}
    denied = {"run/data/1": ["AccessDenied"], "run/data/2": ["InternalError", "AccessDenied"]}
    async with fake_s3(objects=objects, undeletable=denied) as (server, store):
        with pytest.raises(DeleteRefused, match=r"AccessDenied for run/data/1 \(2 objects in all\)") as refused:
            await store.delete([f"data/{number}" for number in range(4)])
        assert refused.value.keys == {"data/1", "data/2"}
        assert "s3:DeleteObject" in refused.value.hint
        assert set(server.objects) == {"run/data/1", "run/data/2"}


async def test_a_multi_object_delete_has_the_checksum_that_older_stores_want(fake_s3) -> None:
    async with fake_s3(objects={"run/data/1": b""}) as (server, store):
        await store.delete(["data/1"])
        (request,) = server.seen
        assert base64.b64decode(request.headers["content-md5"]) == hashlib.md5(request.body).digest()


@pytest.mark.parametrize("refusal", ["not-implemented", "invalid", "denied"])
async def test_a_store_without_multi_object_delete_deletes_one_by_one(fake_s3, refusal: str) -> None:
    keys = [f"data/{number}" for number in range(5)]
    async with fake_s3(objects={f"run/{key}": b"" for key in keys}, bulk=refusal) as (server, store):
        await store.delete(keys[:3])
        await store.delete(keys[3:])
        assert server.objects == {}
        assert [request.method for request in server.seen] == ["POST", *["DELETE"] * 5]  # asked once


async def test_an_object_that_is_gone_already_is_deleted(fake_s3) -> None:
    """Some stores answer a single delete with NoSuchKey: a retry after a lost answer, or another collector's."""
    gone = {"run/data/1": ["NoSuchKey"], "run/data/2": ["NoSuchKey"]}
    objects = {f"run/data/{number}": b"" for number in (1, 2, 3)}
    async with fake_s3(objects=objects, undeletable=gone, bulk="not-implemented") as (server, store):
        await store.delete(["data/1", "data/2", "data/3"])
        assert set(server.objects) == {"run/data/1", "run/data/2"}


async def test_a_folder_that_may_not_be_deleted_from_is_given_up(fake_s3) -> None:
    keys = [f"{folder}/{number:02d}" for folder in ("anchors", "data", "probe") for number in range(20)]
    denied = {f"run/{key}": ["AccessDenied"] * 9 for key in keys if key.startswith("data/")}
    objects = {f"run/{key}": b"" for key in keys}
    async with fake_s3(objects=objects, undeletable=denied, bulk="denied") as (server, store):
        with pytest.raises(DeleteRefused, match="AccessDenied") as refused:
            await store.delete(keys)
        assert refused.value.keys == {f"data/{number:02d}" for number in range(20)}
        assert set(server.objects) == set(denied)
        assert len(server.seen) == 1 + 20 + 8 + 20


@pytest.mark.parametrize("locked", [[0], [19], range(0, 20, 2), range(19), range(1, 20)])
async def test_an_object_that_may_not_be_deleted_keeps_no_other(fake_s3, locked: Any) -> None:
    """Whatever its place in the folder: locks are by object, too."""
    keys = [f"data/{number:02d}" for number in range(20)]
    denied = {f"run/data/{number:02d}": ["AccessDenied"] * 9 for number in locked}
    async with fake_s3(objects={f"run/{key}": b"" for key in keys}, undeletable=denied, bulk="denied") as (
        server,
        store,
    ):
        with pytest.raises(DeleteRefused) as refused:
            await store.delete(keys)
        assert set(server.objects) == set(denied) == {f"run/{key}" for key in refused.value.keys}


# Requests in flight.


async def test_requests_in_flight_are_bounded(fake_s3) -> None:
    objects = {f"run/data/{number}": b"x" * 100 for number in range(30)}
    async with fake_s3(objects=objects, concurrency=3, pause=0.01) as (server, store):
        await asyncio.gather(*(store.get(f"data/{number}", limit=8 << 20) for number in range(30)))
        assert 1 < server.busiest <= 3


async def test_a_record_does_not_wait_behind_chunks(fake_s3) -> None:
    async with fake_s3(objects={"run/ledger/1": b"record"}, concurrency=2) as (server, store):
        server.faults.extend(["stall", "stall"])
        chunks = [asyncio.create_task(store.get("data/1", limit=8 << 20)) for _ in range(4)]
        await server.until(lambda: len(server.seen) == 2)
        assert await store.get("ledger/1", limit=65536) == b"record"
        for chunk in chunks:
            chunk.cancel()
        await asyncio.gather(*chunks, return_exceptions=True)


async def test_a_cancelled_read_gives_its_place_back(fake_s3) -> None:
    async with fake_s3(objects={"run/data/1": b"x"}, concurrency=1) as (server, store):
        server.faults.append("stall")
        reading = asyncio.create_task(store.get("data/1", limit=8 << 20))
        await server.until(lambda: bool(server.seen))
        reading.cancel()
        with pytest.raises(asyncio.CancelledError):
            await reading
        assert await store.get("data/1", limit=8 << 20) == b"x"


async def test_every_try_is_told(fake_s3) -> None:
    told = []
    async with fake_s3(objects={"run/data/1": b"12345"}, emit=told.append) as (server, store):
        server.faults.extend(["internal", "ok", "drop", "ok", "denied"])
        await store.get("data/1", limit=9)
        await store.create("data/2", b"123")
        await store.create("data/1", b"123")
        with pytest.raises(Incompatible):
            await store.get("data/1", limit=9)
    assert [(event.operation, event.outcome, event.bytes) for event in told] == [
        ("get", "transient", 0),
        ("get", "ok", 5),
        ("create", "unknown", 3),
        ("create", "lost", 3),
        ("get", "incompatible", 0),
    ]


@pytest.mark.parametrize("fault", ["bad-key", "expired"])
async def test_credentials_that_were_good_may_be_good_again(fake_s3, fault: str) -> None:
    async with fake_s3(patience=BRIEF, objects={"run/data/1": b"one"}) as (server, store):
        assert await store.get("data/1", limit=9) == b"one"
        server.faults.extend([fault, fault])
        assert await store.get("data/1", limit=9) == b"one"
        server.faults.append(fault)
        assert await store.create("ledger/1", b"x") is Outcome.UNKNOWN
        server.faults.extend([fault] * 1000)
        with pytest.raises(StoreUnavailable, match="a restart reads static credentials anew"):
            await store.get("data/1", limit=9)


async def test_a_missing_key_shows_that_the_credentials_are_good(fake_s3) -> None:
    async with fake_s3(patience=BRIEF) as (server, store):
        with pytest.raises(KeyNotFound):
            await store.get("ledger/0", limit=9)
        server.faults.append("expired")
        with pytest.raises(KeyNotFound):
            await store.get("ledger/0", limit=9)

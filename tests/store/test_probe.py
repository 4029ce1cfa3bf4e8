"""A store is believed only after it has been tried (must L6)."""

from __future__ import annotations

import pytest
from support.stores.memory import MemoryStore

from dcr_daemon.errors import Incompatible, StoreUnavailable
from dcr_daemon.store import open_store, probe
from dcr_daemon.store.retry import RetryPolicy

EXPIRY = """<LifecycleConfiguration>
<Rule><ID>all</ID><Status>Enabled</Status><Filter><Prefix></Prefix></Filter>
  <Expiration><Days>30</Days></Expiration></Rule>
<Rule><ID>inside</ID><Status>Enabled</Status><Filter><And><Prefix>run/data/</Prefix></And></Filter>
  <Transition><Days>1</Days><StorageClass>GLACIER</StorageClass></Transition></Rule>
<Rule><ID>off</ID><Status>Disabled</Status><Prefix>run/</Prefix><Expiration><Days>30</Days></Expiration></Rule>
<Rule><ID>elsewhere</ID><Status>Enabled</Status><Prefix>logs/</Prefix><Expiration><Days>30</Days></Expiration></Rule>
<Rule><ID>markers</ID><Status>Enabled</Status><Filter><Prefix>run/</Prefix></Filter>
  <Expiration><ExpiredObjectDeleteMarker>true</ExpiredObjectDeleteMarker></Expiration></Rule>
<Rule><ID>parts</ID><Status>Enabled</Status><Filter></Filter>
  <AbortIncompleteMultipartUpload><DaysAfterInitiation>1</DaysAfterInitiation></AbortIncompleteMultipartUpload></Rule>
</LifecycleConfiguration>"""


async def test_a_store_that_ignores_create_if_absent_is_refused_by_name(fake_s3) -> None:
    async with fake_s3(honest=False) as (server, store):
        with pytest.raises(Incompatible, match="s3://bucket/run ignores create-if-absent") as refused:
            await probe(store)
        assert "STORES.md" in refused.value.hint
        assert server.objects == {}


async def test_a_store_that_was_proved_before_is_tried_in_five_requests() -> None:
    store = MemoryStore()
    assert await probe(store, again=True) == []
    assert store.requests == {"create": 3, "get": 1, "delete": 2}  # the deletes are one request to most stores
    assert store.objects == {}


async def test_a_store_that_was_proved_before_may_be_another_one_now(fake_s3) -> None:
    async with fake_s3(honest=False) as (server, store):
        with pytest.raises(Incompatible, match="ignores create-if-absent"):
            await probe(store, again=True)
        assert server.objects == {}


async def test_a_store_in_which_two_racers_win_is_refused(fake_s3) -> None:
    async with fake_s3(atomic=False) as (_, store):
        with pytest.raises(Incompatible, match="racing"):
            await probe(store)


@pytest.mark.parametrize("fault", ["denied", "no-bucket", "not-implemented"])
async def test_a_refusal_comes_with_a_hint(fake_s3, fault: str) -> None:
    async with fake_s3(always=fault) as (_, store):
        with pytest.raises(Incompatible) as refused:
            await probe(store)
        assert refused.value.hint


async def test_a_silent_store_is_unavailable(fake_s3) -> None:
    async with fake_s3(always="drop", patience=RetryPolicy(seconds=0.2, first=0.01)) as (_, store):
        with pytest.raises(StoreUnavailable):
            await probe(store)


async def test_faults_on_the_way_do_not_refuse_a_good_store(fake_s3) -> None:
    async with fake_s3() as (server, store):
        server.faults.extend(["drop-after", "internal", "drop", "slow-down", "ok", "conflict", "ok", "drop-after"] * 2)
        assert await probe(store) == []
        assert server.objects == {}


async def test_objects_that_may_not_be_deleted_are_a_warning(fake_s3) -> None:
    class Everything(dict[str, list[str]]):
        def get(self, key: str, default: object = None) -> list[str]:  # type: ignore[override]
            return ["AccessDenied"]

    async with fake_s3(undeletable=Everything()) as (_, store):
        (warning,) = await probe(store)
        assert "probe/" in warning


async def test_rules_that_would_eat_the_stream_are_told(fake_s3) -> None:
    versioned = "<VersioningConfiguration><Status>Enabled</Status></VersioningConfiguration>"
    async with fake_s3(configuration={"versioning": versioned, "lifecycle": EXPIRY}) as (_, store):
        warnings = await probe(store)
    assert [word for word in ("versioning", "'all'", "'inside'") if any(word in line for line in warnings)] == [
        "versioning",
        "'all'",
        "'inside'",
    ]
    assert len(warnings) == 3


async def test_a_directory_passes(tmp_path) -> None:
    store = await open_store((tmp_path / "s").as_uri())
    assert await probe(store) == []
    await store.close()


async def test_a_collector_that_sweeps_a_probe_away_refuses_no_store() -> None:
    """It cannot tell a probe under way from one that was left over; the probe can."""
    store, sweeps = MemoryStore(), 2

    async def sweep(operation: str, key: str) -> None:
        nonlocal sweeps
        if sweeps and operation == "get" and key.endswith("/race-1"):
            sweeps -= 1
            for found in [key for key in store.objects if key.startswith("probe/")]:
                del store.objects[found]

    store.before = sweep
    assert await probe(store) == []
    assert sweeps == 0
    assert store.objects == {}


async def test_a_store_that_always_loses_objects_is_refused() -> None:
    store = MemoryStore()

    async def lose(operation: str, key: str) -> None:
        if operation == "get":
            store.objects.clear()

    store.before = lose
    with pytest.raises(Incompatible, match="loses objects"):
        await probe(store)

"""Which version are these weights: told by content, at a cost that a long history does not raise for a fresh engine."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from support.stores.memory import MemoryStore

from dcr_daemon.canonical.fingerprint import total
from dcr_daemon.canonical.layout import Layout, TensorSpec
from dcr_daemon.engine.port import TensorClass
from dcr_daemon.ledger import names, records
from dcr_daemon.ledger.ledger import Ledger
from dcr_daemon.ledger.objects import Objects
from dcr_daemon.ledger.records import Anchor, Floor, ObjectRef, Open, Seal
from dcr_daemon.subscribe import locate as module
from dcr_daemon.subscribe.locate import LiveWeights, locate

LAYOUT = Layout([TensorSpec("a", "BF16", (4,)), TensorSpec("b", "BF16", (4,))])


def vector_of(version: int) -> Any:
    return np.array([version + 1, 7], dtype=np.uint64)


async def make_history(store: MemoryStore, versions: list[int]) -> None:
    """A stream whose version n has the sums of `versions[n]`."""
    ledger = Ledger(store)
    await ledger.create_stream(LAYOUT, vector_of(versions[0]))
    await ledger.claim("trainer")
    for version, content in enumerate(versions[1:], start=1):
        opened = await ledger.append(
            lambda header, version=version: Open(**header.fields, version=version, base=version - 1, group="g", call=0)
        )
        body = vector_of(content).astype("<u8").tobytes()
        place = ObjectRef(names.vector(version, opened.seq), len(body), records.digest(body))
        store.objects[place.key] = body
        sums = [records.show_u64(total(vector_of(versions[n]))) for n in (version - 1, version)]
        await ledger.append(
            lambda header, version=version, opened=opened, place=place, sums=sums: Seal(
                **header.fields, version=version, base=version - 1, attempt=opened.seq, parts=[], fingerprint=place,
                before=sums[0], after=sums[1], previous=header.state.seal.seq, changed=0, elements=8, bytes=0,
                dense_bytes=16,
            )
        )  # fmt: skip


async def found(store: MemoryStore, content: int) -> int | None:
    ledger = Ledger(store)
    await ledger.read()
    store.requests.clear()
    return await locate(
        ledger,
        LiveWeights(vector_of(content), [TensorClass.EXACT] * len(LAYOUT)),
        objects=Objects(store, floor=lambda: 0),
        layout=LAYOUT,
        highest=ledger.state.seal.version,
        emit=lambda _: None,
    )


@pytest.fixture
def brief(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "RECENT", 8)


@pytest.mark.usefixtures("brief")
async def test_a_fresh_engine_is_known_at_once_however_long_the_history() -> None:
    store = MemoryStore()
    await make_history(store, list(range(101)))
    assert await found(store, 0) == 0
    assert store.requests["get"] < 12, "the recent versions and the vector of the base"
    assert await found(store, 5) == 5
    assert await found(store, 1000) is None


@pytest.mark.usefixtures("brief")
async def test_a_recent_return_to_the_base_is_the_recent_version() -> None:
    store = MemoryStore()
    await make_history(store, [0, 1, 2, 0, 4, 5])
    assert await found(store, 0) == 3


async def test_an_engine_whose_version_was_collected_is_not_called_by_the_older_name_of_the_same_weights() -> None:
    """Version 1 changed nothing, and its vector is gone: its engine must not be proved at version 0 again (F3).

    What an engine holds exactly is known by the digest in the record; of one that holds less, the vector is needed."""
    store = MemoryStore()
    await make_history(store, [0, 0, 1, 2])
    ledger = Ledger(store)
    await ledger.claim("trainer")
    index, sums = ObjectRef("anchors/3/1/index.json", 0, records.digest(b"")), records.show_u64(total(vector_of(2)))
    await ledger.append(lambda header: Anchor(**header.fields, version=3, index=index, total=sums, bytes=0))
    await ledger.append(lambda header: Floor(**header.fields, floor=3))
    seal = await ledger.history.seal(1)
    objects = Objects(store, floor=lambda: ledger.state.floor)
    at: dict[str, Any] = {"objects": objects, "layout": LAYOUT, "highest": 3, "emit": lambda _: None}
    live = LiveWeights(vector_of(0), [TensorClass.EXACT] * len(LAYOUT))
    less = LiveWeights(vector_of(0) * [1, 0], [TensorClass.EXACT, TensorClass.LOADER_COMPUTED])
    assert await locate(ledger, live, hint=1, **at) == await locate(ledger, less, hint=1, **at) == 1
    del store.objects[seal.fingerprint.key]
    assert await locate(ledger, live, hint=1, **at) == 1
    assert await locate(ledger, less, hint=1, **at) is None
    assert await locate(ledger, less, hint=None, **at) == 0


async def test_versions_below_the_floor_are_known_by_their_records_where_that_is_asked_for() -> None:
    store = MemoryStore()
    await make_history(store, [0, 1, 2, 3])
    ledger = Ledger(store)
    await ledger.claim("trainer")
    index, sums = ObjectRef("anchors/3/1/index.json", 0, records.digest(b"")), records.show_u64(total(vector_of(3)))
    await ledger.append(lambda header: Anchor(**header.fields, version=3, index=index, total=sums, bytes=0))
    await ledger.append(lambda header: Floor(**header.fields, floor=3))
    for version in (0, 1, 2):
        del store.objects[(await ledger.version_record(version)).fingerprint.key]
    objects = Objects(store, floor=lambda: ledger.state.floor)
    at: dict[str, Any] = {"objects": objects, "layout": LAYOUT, "highest": 3, "emit": lambda _: None}
    for version in (1, 2):
        live = LiveWeights(vector_of(version), [TensorClass.EXACT] * len(LAYOUT))
        assert await locate(ledger, live, **at) is None
        assert await locate(ledger, live, below_floor=True, **at) == version
    unknown = LiveWeights(vector_of(9), [TensorClass.EXACT] * len(LAYOUT))
    assert await locate(ledger, unknown, below_floor=True, **at) is None

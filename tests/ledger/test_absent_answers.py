"""A store that says once that an object does not exist, which does: nobody ends because of it, or believes it.

Every request of a reader is answered so in turn.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from support.stores.wrapped import WrappedStore

from dcr_daemon.errors import KeyNotFound
from dcr_daemon.ledger.audit.replay import replay
from dcr_daemon.ledger.ledger import Ledger
from dcr_daemon.store.port import Store
from dcr_daemon.subscribe.materialize import materialize


class AbsentOnce(WrappedStore):
    """Answers the GET of number `nth` (from 0) as if there were no such object."""

    def __init__(self, inner: Store, nth: int | None = None) -> None:
        super().__init__(inner)
        self._nth, self.asked = nth, list[str]()

    async def get(self, key: str, *, limit: int, keep: Any = None) -> bytes:
        self.asked.append(key)
        if len(self.asked) - 1 == self._nth:
            raise KeyNotFound(key)
        return await super().get(key, limit=limit, keep=keep)


@pytest.fixture
def written(make_stream) -> Callable[[], Awaitable[Any]]:
    """Writes five versions, an attempt that was given up, and an anchor from which the chain is the cheaper route."""

    async def write() -> Any:
        stream = await make_stream(5)
        await stream.publish(1, 2)
        await stream.open(3)
        await stream.abort(3)
        await stream.publish(3)
        await stream.anchor(3)
        await stream.publish(4, 5)
        return stream

    return write


async def each_answer(stream: Any, read: Any) -> None:
    """`read(store)` with each of its answers in turn replaced by one that the object is absent."""
    clean = AbsentOnce(stream.store)
    await read(clean)
    for nth, key in enumerate(clean.asked):
        try:
            await read(AbsentOnce(stream.store, nth))
        except BaseException as error:
            error.add_note(f"request {nth}, of {key}")
            raise


async def test_a_cold_reader_finds_the_newest_version_all_the_same(written):
    stream = await written()

    async def read(store: Store) -> None:
        assert (await Ledger(store).read()).seal.version == 5

    await each_answer(stream, read)


async def test_a_reader_that_was_here_before_does_too(written, tmp_path: Path):
    stream = await written()

    mark = tmp_path / "mark.json"
    await Ledger(stream.store, mark=mark).read()

    async def read(store: Store) -> None:
        assert (await Ledger(store, mark=mark).read()).seal.version == 5

    await each_answer(stream, read)


async def test_the_past_is_read_all_the_same(written):
    stream = await written()

    async def read(store: Store) -> None:
        ledger = Ledger(store)
        await ledger.read()
        assert [seal.version for seal in await ledger.history.between(1)] == [1, 2, 3, 4, 5]
        assert [anchor.version for anchor in await ledger.history.anchors()] == [3]

    await each_answer(stream, read)


@pytest.mark.parametrize("version", [None, 5, 4])
async def test_the_version_that_was_asked_for_is_built(written, tmp_path: Path, version: int | None):
    stream = await written()

    numbers = iter(range(1000))

    async def read(store: Store) -> None:
        out = tmp_path / f"out-{next(numbers)}"
        assert (await materialize(store, version=version, out=out)).version == (version or 5)
        assert stream.versions.version_of(out) == (version or 5)

    await each_answer(stream, read)


async def test_a_walk_over_the_whole_ledger_misses_nothing(written):
    stream = await written()

    async def read(store: Store) -> None:
        steps = [step async for step in replay(store)]
        assert steps[-1].tip.state.seal.version == 5

    await each_answer(stream, read)

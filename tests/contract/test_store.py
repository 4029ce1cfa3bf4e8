"""What every store promises. A new store joins by adding its name to `stores` and passing everything here."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

import pytest
from support.stores.memory import MemoryStore

from dcr_daemon.errors import Corrupt, KeyNotFound, UsageError
from dcr_daemon.events import StoreRequest
from dcr_daemon.store import Entry, Outcome, Store, open_store, probe, put_if_absent

RACER = Path(__file__).with_name("racer.py")


STORES = ["file", pytest.param("s3", marks=pytest.mark.seaweed)]


@pytest.fixture(params=STORES)
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """An empty place of each kind."""
    return _place(request, tmp_path)


def _place(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "file":
        return (tmp_path / "stream").as_uri()
    return str(request.getfixturevalue("s3_stream"))


@pytest.fixture(params=["memory", *STORES])
def use(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[[Callable[[Store], Awaitable[None]]], None]:
    """Run a test body with an open store; the one in memory, which other tests rely on, included."""

    def run(body: Callable[[Store], Awaitable[None]]) -> None:
        async def main() -> None:
            store = MemoryStore() if request.param == "memory" else await open_store(_place(request, tmp_path))
            try:
                await body(store)
            finally:
                await store.close()

        asyncio.run(main())

    return run


async def keys(store: Store, prefix: str = "") -> list[str]:
    return [entry.key async for entry in store.list(prefix)]


@pytest.mark.parametrize("size", [0, 1, 4096, (1 << 20) + 1, 20 << 20])
def test_what_is_created_is_read_back(use, size: int) -> None:
    body = bytes(range(251)) * (size // 251 + 1)

    async def check(store: Store) -> None:
        assert await store.create("data/1/7/x.dcr", memoryview(body)[:size]) is Outcome.WON
        assert await store.get("data/1/7/x.dcr", limit=size) == body[:size]
        assert [entry async for entry in store.list("data/")] == [Entry("data/1/7/x.dcr", size)]

    use(check)


def test_a_created_object_is_never_replaced(use) -> None:
    async def check(store: Store) -> None:
        assert await store.create("ledger/0000000000000000.json", b"first") is Outcome.WON
        for body in (b"second", b"first", b""):
            assert await store.create("ledger/0000000000000000.json", body) is Outcome.LOST
        assert await store.get("ledger/0000000000000000.json", limit=99) == b"first"

    use(check)


def test_what_is_not_there_is_missing_and_nothing_else(use) -> None:
    async def check(store: Store) -> None:
        with pytest.raises(KeyNotFound) as missing:
            await store.get("ledger/0000000000000003.json", limit=10)
        assert missing.value.key == "ledger/0000000000000003.json"
        assert await keys(store) == []
        await store.create("data/1/2/a.dcr", b"x")
        for key in ("data/1/2/b.dcr", "data/1/2", "data/1/2/a.dcr/more"):
            with pytest.raises(KeyNotFound):
                await store.get(key, limit=10)

    use(check)


def test_a_limit_keeps_large_objects_out(use) -> None:
    async def check(store: Store) -> None:
        await store.create("data/a", b"x" * 1000)
        assert len(await store.get("data/a", limit=1000)) == 1000
        for limit in (999, 0):
            with pytest.raises(Corrupt, match="1000 bytes"):
                await store.get("data/a", limit=limit)

    use(check)


def test_overwriting_replaces_the_whole_object(use) -> None:
    async def check(store: Store) -> None:
        for body in (b"a long status", b"short", b""):
            await store.overwrite("replicas/r1.json", body)
            assert await store.get("replicas/r1.json", limit=99) == body
        assert await keys(store) == ["replicas/r1.json"]

    use(check)


def test_a_listing_is_in_key_order_and_holds_to_its_prefix(use) -> None:
    names = ["a", "a-1", "a.b", "ab/x", "b/0-x", "b/0/y", "b/0.z", "b/00", "b/1/y", "b/10/y", "b/2", "c_", "Z", "_"]

    async def check(store: Store) -> None:
        for name in names:
            assert await store.create(name, name.encode()) is Outcome.WON
        assert [entry async for entry in store.list("")] == [Entry(name, len(name)) for name in sorted(names)]
        for prefix in ("a", "b/", "b/0", "b/0/", "b/1", "nothing", "nothing/at/all", "b/2/"):
            assert await keys(store, prefix) == sorted(name for name in names if name.startswith(prefix))

    use(check)


def test_a_long_listing_is_complete(use) -> None:
    names = [f"data/{number % 7}/{number:04d}" for number in range(1203)]

    async def check(store: Store) -> None:
        await asyncio.gather(*(store.create(name, b"") for name in names))
        assert await keys(store, "data/") == sorted(names)
        await store.delete(names)
        assert await keys(store) == []

    use(check)


def test_deleting_is_exact_and_repeatable(use) -> None:
    async def check(store: Store) -> None:
        for name in ("data/1/1/a", "data/1/1/b", "data/2/2/a"):
            await store.create(name, b"x")
        for _ in range(2):
            await store.delete(["data/1/1/a", "data/1/1/b", "data/never/was"])
            assert await keys(store) == ["data/2/2/a"]
        await store.delete([])
        assert await store.create("data/1/1/a", b"again") is Outcome.WON

    use(check)


@pytest.mark.parametrize(
    "key",
    ["", "/", "/a", "a/", "a//b", ".", "..", "a/../b", "../a", ".hidden", "a/.b", "-a", "ä", "a b", "a\\b", "a\0b"],
)
def test_keys_that_could_mean_something_else_are_refused(use, key: str) -> None:
    async def check(store: Store) -> None:
        for refused in (
            store.get(key, limit=1),
            store.create(key, b""),
            store.overwrite(key, b""),
            store.delete([key]),
        ):
            with pytest.raises(UsageError):
                await refused

    use(check)


def test_many_readers_and_writers_at_once(use) -> None:
    async def check(store: Store) -> None:
        bodies = {f"data/1/1/{number}": bytes([number]) * (300_000 + number) for number in range(48)}
        outcomes = await asyncio.gather(*(store.create(key, body) for key, body in bodies.items()))
        assert set(outcomes) == {Outcome.WON}
        read = await asyncio.gather(*(store.get(key, limit=1 << 20) for key in list(bodies) * 2))
        assert read == list(bodies.values()) * 2

    use(check)


def test_a_reader_never_sees_half_an_overwrite(use) -> None:
    async def check(store: Store) -> None:
        bodies = [bytes([65 + number]) * (1000 * (number + 1)) for number in range(6)]
        await store.overwrite("replicas/r.json", bodies[0])
        done = asyncio.Event()

        async def write() -> None:
            for number in range(40):
                await store.overwrite("replicas/r.json", bodies[number % 6])
            done.set()

        async def read() -> None:
            while not done.is_set():
                assert await store.get("replicas/r.json", limit=99_999) in bodies

        await asyncio.gather(write(), read(), read())

    use(check)


def test_create_once_agrees_with_itself_and_with_nobody_else(use) -> None:
    async def check(store: Store) -> None:
        await put_if_absent(store, "data/1/1/a", b"mine")
        await put_if_absent(store, "data/1/1/a", memoryview(b"mine"))
        for other in (b"thin", b"longer than mine", b"m", b""):
            with pytest.raises(Corrupt, match="other bytes"):
                await put_if_absent(store, "data/1/1/a", other)
        assert await store.get("data/1/1/a", limit=10) == b"mine"

    use(check)


def test_the_probe_is_content_and_cleans_up(use) -> None:
    async def check(store: Store) -> None:
        assert await probe(store) == []
        assert await keys(store) == []

    use(check)


def test_every_request_is_told_once(url: str) -> None:
    told: list[StoreRequest] = []

    async def main() -> None:
        store = await open_store(url, emit=told.append)  # type: ignore[arg-type]
        await store.create("data/a", b"12345")
        await store.create("data/a", b"12345")
        await store.get("data/a", limit=9)
        with pytest.raises(KeyNotFound):
            await store.get("data/b", limit=9)
        await keys(store)
        await store.overwrite("data/a", b"123")
        await store.delete(["data/a"])
        await store.close()

    asyncio.run(main())
    assert [(event.operation, event.outcome, event.bytes) for event in told] == [
        ("create", "won", 5),
        ("create", "lost", 5),
        ("get", "ok", 5),
        ("get", "missing", 0),
        ("list", "ok", 0),
        ("overwrite", "ok", 3),
        ("delete", "ok", 0),
    ]


@pytest.fixture
def racers(url: str) -> Iterator[list[subprocess.Popen[str]]]:
    """Processes that share nothing but the store."""
    processes = [
        subprocess.Popen(
            [sys.executable, str(RACER), url, f"racer-{number}"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for number in range(4)
    ]
    yield processes
    for process in processes:
        assert process.stdin is not None
        process.stdin.close()
        process.wait(60)


def test_of_racing_processes_exactly_one_wins(url: str, racers: list[subprocess.Popen[str]]) -> None:
    """Must L0: one winner, and every process reads the winner's bytes."""
    for process in racers:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
    rounds = 300 if url.startswith("file:") else 30  # SeaweedFS lets a loser wait for up to a second
    for number in range(rounds):
        for process in racers:
            assert process.stdin is not None
            process.stdin.write(f"ledger/{number:016d}.json\n")
            process.stdin.flush()
        answers = [process.stdout.readline().split() for process in racers if process.stdout]
        won = [f"racer-{index}" for index, (outcome, _) in enumerate(answers) if outcome == "won"]
        assert len(won) == 1, answers
        assert {whose for _, whose in answers} == set(won), answers

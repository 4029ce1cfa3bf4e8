"""Two publishers, every interleaving of their requests, a fault at every place (musts L0-L3, P5, P6).

A stateless search: a run is a list of choices; each run extends the one before by the next untried choice. The
coroutines are stepped by hand, one store request at a time, so the search sees exactly what a bucket sees.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Generator, Iterable, Iterator
from typing import Any

import msgspec
import pytest
from support.stores.memory import Fault, MemoryStore
from support.streams.record_writer import RecordWriter

from dcr_daemon.errors import Fenced, UsageError
from dcr_daemon.ledger import names, records, slot
from dcr_daemon.ledger.fold import begin, fold
from dcr_daemon.ledger.ledger import Ledger
from dcr_daemon.ledger.records import Seal
from dcr_daemon.task_limiter import Work

Result = dict[str, Any]


@pytest.fixture(autouse=True)
def one_request_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """The search has no loop for tasks, and needs none: what is read side by side is not in any order."""

    async def run_in_turn(works: Iterable[Work[Any]], limit: int) -> list[Any]:
        return [await work() for work in works]

    monkeypatch.setattr(slot, "run_limited", run_in_turn)


class Turn:
    """Give the search the floor before a request is made."""

    def __init__(self, operation: str) -> None:
        self.operation = operation

    def __await__(self) -> Generator[Turn, None, None]:
        yield self


class Run:
    """One execution: who moves next, and which fault strikes, is read from `choices`, then always the first."""

    def __init__(self, choices: list[int], faults: int) -> None:
        self.choices = choices
        self.taken: list[tuple[int, int]] = []
        self.faults = faults
        self.store = MemoryStore()
        self.results: list[Result] = []

    def choose(self, options: int) -> int:
        n = len(self.taken)
        choice = self.choices[n] if n < len(self.choices) else 0
        self.taken.append((choice, options))
        return choice

    def drive(self, actors: list[Coroutine[Any, Any, None]]) -> None:
        async def turn(operation: str, _key: str) -> None:
            await Turn(operation)

        self.store.before = turn
        waiting: dict[int, str] = {}
        for n, actor in enumerate(actors):
            self._step(n, actor, waiting)
        while waiting:
            order = sorted(waiting)
            moves = len(order) + bool(self.store.ghosts)
            pick = self.choose(moves) if moves > 1 else 0
            if pick == len(order):
                self.store.land_ghosts()
                continue
            n = order[pick]
            if waiting[n] == "create" and self.faults:
                strike = self.choose(1 + 3)
                if strike:
                    self.faults -= 1
                    kinds = (Fault.REQUEST_LOST, Fault.ANSWER_LOST, Fault.GHOST)
                    self.store.faults.append(kinds[strike - 1])
            self._step(n, actors[n], waiting)
        self.store.land_ghosts()
        self.store.before = None

    @staticmethod
    def _step(n: int, actor: Coroutine[Any, Any, None], waiting: dict[int, str]) -> None:
        """Let one actor go on to its next request (a sleep is no request: time decides nothing)."""
        waiting.pop(n, None)
        try:
            while not isinstance(turn := actor.send(None), Turn):
                pass
            waiting[n] = turn.operation
        except StopIteration:
            pass


def search(scenario: Callable[[Run], None], *, faults: int, limit: int = 200_000) -> int:
    """Run `scenario` once per schedule; the number of schedules."""
    choices: list[int] = []
    for count in range(1, limit):
        run = Run(choices, faults)
        scenario(run)
        while run.taken and run.taken[-1][0] + 1 == run.taken[-1][1]:
            run.taken.pop()
        if not run.taken:
            return count
        choices = [choice for choice, _ in run.taken]
        choices[-1] += 1
    raise AssertionError(f"more than {limit} schedules")


def now(coroutine: Coroutine[Any, Any, Any]) -> Any:
    """Run a coroutine that meets no `Turn` to its end."""
    try:
        while True:
            coroutine.send(None)
    except StopIteration as stop:
        return stop.value


def history(store: MemoryStore) -> Iterator[Any]:
    tip, _ = begin(store.objects[names.record(0)])
    while (body := store.objects.get(names.record(tip.seq + 1))) is not None:
        step = fold(tip, body)
        tip = step.tip
        yield step


def judge(run: Run) -> None:
    """What must hold after every schedule."""
    steps = list(history(run.store))
    assert [step.void for step in steps if step.void] == [], "honest publishers leave no void record"
    in_ledger = {step.record.nonce for step in steps}
    for result in run.results:
        for record in result["told"]:
            assert record.nonce in in_ledger, "what was reported as appended is there"
        mine = [s.record for s in steps if isinstance(s.record, Seal) and s.record.epoch == result["epoch"]]
        assert mine == [record for record in result["told"] if isinstance(record, Seal)], (
            "a publisher knows exactly which of its versions exist: no baseline is undone that should not be"
        )
    versions = [step.record.version for step in steps if isinstance(step.record, Seal)]
    assert versions == list(range(1, len(versions) + 1)), "one chain"
    tip = steps[-1].tip
    reader = Ledger(run.store)
    assert now(reader.read()) == tip.state, "a cold reader sees what a sequential one sees"
    epochs = [result for result in run.results if tip.state.epoch and result["epoch"] == tip.state.epoch.seq]
    assert [result["fenced"] for result in epochs] == [False], "the last to claim is not fenced"


async def publish(run: Run, ledger: Ledger, count: int, name: str | None = None) -> None:
    """Claim (unless that is done), then publish `count` versions or find out that somebody else may."""
    writer = RecordWriter(ledger)
    result: Result = {"told": [], "fenced": False, "epoch": ledger.epoch}
    run.results.append(result)
    try:
        if name:
            result["epoch"] = await ledger.claim(name, take_over=True)
        for _ in range(count):
            result["told"].append(await writer.open())
            result["told"].append(await writer.seal())
    except Fenced:
        result["fenced"] = True


def prepared(run: Run) -> Ledger:
    first = Ledger(run.store)
    now(RecordWriter(first).create())
    now(first.claim("trainer"))
    return first


@pytest.mark.parametrize("faults", [0, 1])
def test_a_takeover_at_any_instant(faults: int) -> None:
    """A is publishing; B takes over: at every interleaving at most one of them seals a version, and knows it."""
    sealed_by_first = set()

    def scenario(run: Run) -> None:
        first, second = prepared(run), Ledger(run.store)
        now(second.read())
        run.drive([publish(run, first, 1), publish(run, second, 1, "other")])
        judge(run)
        sealed_by_first.add(len(run.results[0]["told"]))

    count = search(scenario, faults=faults)
    assert count > (10_000 if faults else 40)
    assert sealed_by_first == {0, 1, 2}, "the takeover came before, between and after"


def test_two_claims_at_once() -> None:
    def scenario(run: Run) -> None:
        ledgers = [Ledger(run.store), Ledger(run.store)]
        now(RecordWriter(ledgers[0]).create())
        now(ledgers[1].read())
        run.drive([publish(run, ledger, 1, name) for ledger, name in zip(ledgers, "ab", strict=True)])
        judge(run)

    assert search(scenario, faults=0) > 100


def test_one_publisher_through_every_pair_of_faults() -> None:
    def scenario(run: Run) -> None:
        first = prepared(run)
        run.drive([publish(run, first, 2)])
        judge(run)
        assert not run.results[0]["fenced"]
        state = now(Ledger(run.store).read())
        assert state.seal == records.SealRef(5, 2), "every record is there once"

    assert search(scenario, faults=2) > 100


def test_the_search_finds_a_404_taken_for_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    """The check of the checker: must L1 removed, a slot that is not readable yet counts as lost to somebody."""
    from dcr_daemon.ledger import ledger as module
    from dcr_daemon.ledger.slot import read_slot

    async def hasty(store: MemoryStore, seq: int, body: bytes, **_: Any) -> bytes:
        await store.create(names.record(seq), body)
        other = msgspec.structs.replace(records.decode_record(body), prev=records.NO_RECORD)
        return await read_slot(store, seq) or records.encode_record(other)

    def scenario(run: Run) -> None:
        first = prepared(run)
        run.drive([publish(run, first, 1)])
        judge(run)

    search(scenario, faults=1)
    monkeypatch.setattr(module, "occupy", hasty)
    with pytest.raises((AssertionError, UsageError)):
        search(scenario, faults=1)

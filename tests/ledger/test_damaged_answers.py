"""A record that is damaged on its way to one reader: nobody believes it, and no reader parts from the others."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from support.events import RecordedEvents
from support.stores.memory import Fault, MemoryStore
from support.streams.record_writer import RecordWriter

from dcr_daemon.events import Alarm
from dcr_daemon.ledger import names
from dcr_daemon.ledger.ledger import Ledger


class Noisy(MemoryStore):
    """Answers with damaged bytes, for each key as often as `spoil` says."""

    def __init__(self) -> None:
        super().__init__()
        self.spoil: Counter[str] = Counter()

    async def get(self, key: str, *, limit: int, keep: Any = None) -> bytes:
        body = await super().get(key, limit=limit)
        if self.spoil[key] > 0:
            self.spoil[key] -= 1
            return body[: len(body) // 2]
        return body


@pytest.mark.parametrize("seq", range(2, 6))
async def test_a_follower_reads_such_a_record_again(tmp_path: Path, seq: int) -> None:
    store, events = Noisy(), RecordedEvents()
    writer = RecordWriter(Ledger(store))
    await writer.create()
    await writer.ledger.claim("main")
    reader = Ledger(store, mark=tmp_path / "mark.json", emit=events)
    await reader.read()
    await writer.version()
    await writer.version()
    store.spoil[names.record(seq)] = 1
    await reader.read()
    assert reader.tip == writer.ledger.tip
    assert not events.of(Alarm)
    again = Ledger(store, mark=tmp_path / "mark.json")
    await again.read()
    assert again.tip == writer.ledger.tip


async def test_a_publisher_whose_own_record_comes_back_damaged_knows_it_all_the_same() -> None:
    """Its seal is there, and it must not undo the version."""
    store = Noisy()
    writer = RecordWriter(Ledger(store))
    await writer.create()
    await writer.ledger.claim("main")
    opened = await writer.open()
    store.spoil[names.record(opened.seq + 1)] = 1
    store.faults.append(Fault.ANSWER_LOST)
    seal = await writer.seal()
    assert writer.ledger.state.seal.seq == seal.seq == opened.seq + 1

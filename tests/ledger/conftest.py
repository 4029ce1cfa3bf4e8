"""Fixtures of the ledger tests: a store in memory, recorded events, and no real time."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from support.events import RecordedEvents
from support.stores.memory import MemoryStore
from support.virtual_time import VirtualTimeRuntime

from dcr_daemon import runtime


@pytest.fixture
def store() -> MemoryStore:
    return MemoryStore()


@pytest.fixture
def events() -> RecordedEvents:
    return RecordedEvents()


@pytest.fixture(autouse=True)
def still() -> Iterator[VirtualTimeRuntime]:
    """No ledger test waits for real time."""
    before, virtual = runtime._current, VirtualTimeRuntime()
    runtime.install(virtual)
    yield virtual
    runtime.install(before)

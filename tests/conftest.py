"""Fixtures that more than one room needs."""

from __future__ import annotations

import asyncio
import inspect
import signal
import sys
from pathlib import Path

import pytest
from hypothesis import settings

settings.register_profile("untimed", deadline=None)  # no test depends on how fast the machine is
settings.load_profile("untimed")

if (
    signal.getsignal(signal.SIGINT) is signal.SIG_IGN
):  # a shell ignores it in background jobs, and children inherit that
    signal.signal(signal.SIGINT, signal.default_int_handler)

sys.path.append(str(Path(__file__).parent))  # for `support`, `sim` and `fuzz`; never the repository root
pytest.register_assert_rewrite("support")
pytest_plugins = [
    "support.streams.versions",
    "support.streams.writer",
    "support.streams.replica",
    "support.streams.trainer",
    "support.processes.fork_server",
    "support.stores.seaweed",
    "support.faults.full_disk",
]


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run `async def test_…` in an event loop of its own."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    arguments = {name: pyfuncitem.funcargs[name] for name in pyfuncitem._fixtureinfo.argnames}
    asyncio.run(pyfuncitem.obj(**arguments))
    return True

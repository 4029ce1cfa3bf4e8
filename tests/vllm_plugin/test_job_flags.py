"""While jobs run, EngineCore reads flags in shared memory and seldom calls the workers: the calls are counted."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest
from support.vllm.toy_engine import ToyEngine

from dcr_daemon.engine import messages
from dcr_daemon.engine.messages import Pending
from dcr_daemon.engine.port import Verdict
from dcr_daemon.vllm_plugin import job_flags
from dcr_daemon.vllm_plugin.calls import Op
from dcr_daemon.vllm_plugin.core import worker_group
from dcr_daemon.vllm_plugin.job_flags import JobFlags
from dcr_daemon.vllm_plugin.weights import faults

pytestmark = pytest.mark.usefixtures("toy_loader")
POLLS = 40


@pytest.fixture
def flagged(tmp_path: Path) -> ToyEngine:
    """An engine whose workers have opened the flags."""
    return ToyEngine(tmp_path, flags=JobFlags.create()).ready()


def rpcs_of_slow_prepare(engine: ToyEngine) -> list[str]:
    """The calls to the workers while a prepare is polled `POLLS` times and does not end."""
    faults.inject("slow", times=100_000, seconds=30.0)
    call = engine.make(messages.Prepare, txn=engine.transaction(engine.step()))
    assert isinstance(engine.send(call), Pending)
    engine.wire.sent.clear()
    for _ in range(POLLS):
        assert isinstance(engine.send(messages.Poll(id=call.id)), Pending)
    during = list(engine.wire.sent)
    faults.inject("slow", times=0)
    return during


def test_a_running_job_is_polled_without_a_call_to_the_workers(flagged: ToyEngine) -> None:
    assert rpcs_of_slow_prepare(flagged) == []


def test_a_job_that_has_ended_is_asked_for_once(flagged: ToyEngine) -> None:
    version = flagged.step()
    for name, ask in {
        "prepare": lambda: flagged.prepare(version),
        "inspect": lambda: flagged.ask(messages.Inspect, messages.Report),
    }.items():
        flagged.wire.sent.clear()
        ask()
        assert flagged.wire.sent.count(Op.POLL) == 1, name
    assert flagged.swap().verdict is Verdict.COMMITTED
    assert flagged.holds(version)


def test_a_flag_that_is_never_set_delays_a_job_and_loses_nothing(
    flagged: ToyEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(JobFlags, "all_set", lambda self, ranks: False)
    version = flagged.step()
    assert flagged.refit(version).verdict is Verdict.COMMITTED
    assert worker_group.UNFLAGGED <= 100, "about three seconds at the endpoint's interval"


def test_a_flag_that_is_always_set_costs_calls_and_nothing_else(
    flagged: ToyEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(JobFlags, "all_set", lambda self, ranks: True)
    assert rpcs_of_slow_prepare(flagged) == [Op.POLL] * POLLS
    flagged.attach()
    assert flagged.refit(1, name="again").verdict is Verdict.COMMITTED


def test_workers_that_do_not_see_the_flags_are_asked_at_every_poll(tmp_path: Path) -> None:
    """As on another host: the file is not there."""
    flags = JobFlags.create()
    hide, flags.path = flags.hide, flags.path + "-elsewhere"  # type: ignore[method-assign]
    flags.hide = lambda: None  # type: ignore[method-assign]
    engine = ToyEngine(tmp_path, flags=flags).ready()
    flags.path = flags.path.removesuffix("-elsewhere")
    hide()
    assert rpcs_of_slow_prepare(engine) == [Op.POLL] * POLLS


def test_the_file_is_hidden_once_all_workers_have_opened_it(flagged: ToyEngine) -> None:
    flags = flagged.core.state.workers._flags
    assert flags is not None
    assert not Path(flags.path).exists()
    flags.set(0, False)
    assert not flags.all_set([0, 1])
    flags.set(0, True)
    assert flags.all_set([0, 1])


def test_flags_that_do_not_fit_into_shared_memory_leave_no_file(monkeypatch, tmp_path: Path) -> None:
    """A hole in a file is no room: the first flag ended the process by SIGBUS."""

    def full(handle: int, offset: int, size: int) -> None:
        raise OSError(errno.ENOSPC, "no space left on device")

    monkeypatch.setattr(job_flags, "SHARED_MEMORY", str(tmp_path))
    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(OSError, match="no space"):
        JobFlags.create()
    assert list(tmp_path.iterdir()) == []

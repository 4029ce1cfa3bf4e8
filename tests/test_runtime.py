"""Failpoints: what a crash test asks for is what happens, and nothing else. Work side by side: no failure is lost."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys

import pytest

from dcr_daemon.runtime import Failpoints, run_until_first

SCRIPT = "from dcr_daemon import runtime\nfor n in range(3): runtime.failpoint('here'); print(n, flush=True)"


def test_a_disk_that_fills_up_stays_full():
    points = Failpoints("disk.mark.write:2=enospc,other=eio")
    points.hit("disk.mark.write")
    points.hit("elsewhere")
    for _ in range(2):
        with pytest.raises(OSError, match="space") as error:
            points.hit("disk.mark.write")
        assert error.value.errno == errno.ENOSPC
    with pytest.raises(OSError, match="error") as error:
        points.hit("other")
    assert error.value.errno == errno.EIO


def test_any_instant_may_be_meant_by_its_number():
    points = Failpoints("*:3=eio,there=enospc")
    points.hit("here")
    with pytest.raises(OSError, match="space"):
        points.hit("there")
    points.hit("elsewhere")
    with pytest.raises(OSError, match="error"):
        points.hit("here")


def test_nothing_is_armed_without_a_wish():
    Failpoints("").hit("anything")


@pytest.mark.crash
def test_the_second_pass_kills_or_stops():
    environ = {**os.environ, "DCR_FAILPOINT": "here:2"}
    killed = subprocess.run([sys.executable, "-c", SCRIPT], env=environ, capture_output=True, text=True, check=False)
    assert (killed.returncode, killed.stdout) == (-signal.SIGKILL, "0\n")
    environ["DCR_FAILPOINT"] = "here:2=stop"
    stopped = subprocess.Popen([sys.executable, "-c", SCRIPT], env=environ, stdout=subprocess.PIPE, text=True)
    assert os.WIFSTOPPED(os.waitpid(stopped.pid, os.WUNTRACED)[1])
    stopped.send_signal(signal.SIGCONT)
    assert stopped.communicate(timeout=60)[0] == "0\n1\n2\n"
    assert stopped.returncode == 0


async def ends(result: object) -> object:
    if isinstance(result, Exception):
        raise result
    return result


async def test_a_failure_is_not_hidden_by_work_that_ends_in_the_same_tick():
    with pytest.raises(ValueError, match="second"):
        await run_until_first(ends("first"), ends(ValueError("second")), ends(KeyError("third")))
    assert await run_until_first(ends("first"), ends("second")) == "first"

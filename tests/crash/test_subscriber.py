"""A subscriber killed at every step goes on where it was, and never takes a replica back."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys

import pytest

pytestmark = pytest.mark.crash

SITES = {
    "subscribe.prefetch.fetched": None,
    "subscribe.staged": None,
    "subscribe.prepared": None,
    "subscribe.swapped": None,
    "subscribe.serving": None,
    "subscribe.loaded": "anchor",
}


def subscribe(stream, directory, home, failpoint=""):
    """`dcr subscribe --once` as a process; its exit status."""
    command = [sys.executable, "-m", "dcr_daemon", "subscribe", "--from", stream.url, "--engine", f"dir://{directory}"]
    command += ["--once", "--replica", "r1", "--state", str(home / "state"), "--staging", str(home / "staging")]
    environ = {**os.environ, "DCR_FAILPOINT": failpoint}
    return subprocess.run([*command, "--poll", "0.05"], env=environ, capture_output=True, timeout=120, check=False)


async def prepare(stream, directory, start):
    """Two versions, and a third one open with its chunks there: something to prefetch."""
    await stream.publish(1)
    if start == "anchor":
        await stream.anchor(1)
    else:
        stream.versions.save(directory, 0, shard_bytes=30_000)
    await stream.publish(2)
    await stream.open(3)
    return [await stream.put(3, chunk) for chunk in stream.chunks(3)]


@pytest.mark.parametrize("site", SITES)
def test_a_killed_subscriber_goes_on(make_stream, tmp_path, site):
    stream = asyncio.run(make_stream(3))
    directory, home = tmp_path / "current", tmp_path / "home"
    chunks = asyncio.run(prepare(stream, directory, SITES[site]))
    killed = subscribe(stream, directory, home, site)
    if site == "subscribe.prefetch.fetched" and killed.returncode == 0:
        pytest.skip("it was through before the first chunk of the open version arrived")
    assert killed.returncode == -signal.SIGKILL, killed.stderr.decode()
    ended = subscribe(stream, directory, home)
    assert ended.returncode == 0, ended.stderr.decode()
    assert stream.versions.version_of(directory) == 2
    asyncio.run(stream.seal(3, chunks))
    ended = subscribe(stream, directory, home)
    assert ended.returncode == 0, ended.stderr.decode()
    assert stream.versions.version_of(directory) == 3

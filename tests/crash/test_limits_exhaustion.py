"""What a process may run out of besides disk: descriptors, memory, somebody who reads its log."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import resource
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from support.streams.watching_publisher import Publishing

from dcr_daemon.canonical.layout import Layout, TensorSpec
from dcr_daemon.checkpoint.directory import write_checkpoint
from dcr_daemon.errors import DcrError
from dcr_daemon.events import Serving
from dcr_daemon.ledger import names


@contextlib.contextmanager
def descriptors(left: int) -> Iterator[None]:
    """All descriptors of this process are taken, but for `left`."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(256, soft), hard))
    taken: list[int] = []
    try:
        with contextlib.suppress(OSError):
            while True:
                taken.append(os.open(os.devnull, os.O_RDONLY))
        for descriptor in taken[:left]:
            os.close(descriptor)
        taken = taken[left:]
        yield
    finally:
        for descriptor in taken:
            os.close(descriptor)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.parametrize("left", [0, 1, 2, 3, 5])
async def test_a_subscriber_without_descriptors_serves_on(make_stream, make_replica, tmp_path, left):
    stream = await make_stream(1, rate=0.3)
    replica = make_replica(stream).at_base(stream)
    ahead = tmp_path / "ahead"
    await stream.publish(1)
    seal = stream.home / names.record(stream.ledger.tip.seq)
    seal.rename(ahead)
    async with replica.running() as task:
        await replica.until(lambda: replica.events.of(Serving), task)
        with descriptors(left):
            ahead.rename(seal)
            await asyncio.sleep(0.5)
            running = not task.done()
        assert running or task.result() is None
        assert stream.versions.version_of(replica.directory) in (0, 1)
        await replica.until(lambda: replica.events.of(Serving)[-1].version == 1, task)
    assert stream.versions.version_of(replica.directory) == 1


@pytest.mark.parametrize("left", [0, 3, 5, 8])
def test_a_publisher_without_descriptors_loses_nothing(tmp_path, left):
    """It ends with its own error, or gets through; the next start has all that it needs."""
    publishing = Publishing(tmp_path)

    async def publish() -> None:
        with descriptors(left):
            await publishing.publish(once=True)

    with contextlib.suppress(DcrError):
        asyncio.run(asyncio.wait_for(publish(), 120))
    publishing.run()
    publishing.check()


def dcr(*arguments: str, log: str = os.devnull) -> int:
    with Path(log).open("wb") as stderr:
        return subprocess.run([sys.executable, "-m", "dcr_daemon", *arguments], stderr=stderr, check=False).returncode


def test_a_log_and_an_event_file_on_a_full_disk_end_no_daemon(tmp_path):
    """`/dev/full` takes no byte, as a disk without room does."""
    publishing = Publishing(tmp_path)
    bucket, full = f"file://{tmp_path}/bucket", "/dev/full"
    publisher = ["publish", "--to", bucket, "--create", "--base", f"{tmp_path}/base", "--watch", f"{tmp_path}/watch"]
    publisher += ["--state", f"{tmp_path}/state", "--once", "--poll", "0.05", "--events", full]
    assert dcr(*publisher, log=full) == 0
    subscriber = ["subscribe", "--from", bucket, "--engine", f"dir://{tmp_path}/served", "--replica", "r1"]
    subscriber += ["--state", f"{tmp_path}/sub", "--once", "--poll", "0.05", "--events", full]
    assert dcr(*subscriber, log=full) == 0
    publishing.check()


#: Publishes, or takes, one version in which every element of 48 MiB of weights is another; prints its peak in bytes.
MEMORY = """
import asyncio, json, sys, threading, time
from pathlib import Path
from dcr_daemon.engine.directory.engine import DirectoryEngine
from dcr_daemon.events import discard
from dcr_daemon.publish.watch.watcher import WatchOptions, run_watch
from dcr_daemon.store.file import FileStore
from dcr_daemon.subscribe.daemon import SubscribeOptions, run_subscribe
role, root, peak = sys.argv[1], Path(sys.argv[2]), [0]

def watch():
    while True:
        lines = Path("/proc/self/status").read_text().splitlines()
        (own,) = (line for line in lines if line.startswith("RssAnon"))
        peak[0] = max(peak[0], int(own.split()[1]) << 10)
        time.sleep(0.002)

threading.Thread(target=watch, daemon=True).start()
store = FileStore(root / "bucket")
if role == "publish":
    options = WatchOptions(state=root / "state", base=root / "base", create=True, watch=root / "watch", once=True,
                           poll=0.05, upload_base=False, anchor_share=None, chunk_bytes=256 << 10, spool_memory=1 << 20,
                           upload_backlog=1 << 20, workers=2, name="p")
    asyncio.run(run_watch(options, store, emit=discard))
else:
    options = SubscribeOptions(replica="r1", state=root / "sub", staging=root / "staging", once=True, poll=0.05)
    asyncio.run(run_subscribe(options, store, engine=DirectoryEngine(root / "served"), emit=discard))
print(json.dumps({"peak": peak[0]}))
"""


def peak(role: str, root: Path) -> int:
    done = subprocess.run([sys.executable, "-c", MEMORY, role, str(root)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])["peak"]


@pytest.mark.slow
def test_memory_is_bounded_by_the_budgets_and_not_by_the_version(tmp_path):
    """What a process has for itself (mapped files are the kernel's to take back), against a tiny model: for a publisher
    the baseline, as large as the version here, and budgets; for a subscriber the decoded changes and one tensor's
    positions. Every element of 48 MiB changes, to random bits: the chunks of this version, and what undoes them, are
    twice that."""
    peaks: list[dict[str, int]] = []
    for rows in (8, 3 << 10):
        root, rng = tmp_path / str(rows), np.random.default_rng(0)
        layout = Layout([TensorSpec(f"t{n}", "BF16", (rows, 1024)) for n in range(8)])
        for name in ("base", "watch/step_1"):
            weights = {spec.name: rng.integers(0, 1 << 16, spec.elements, dtype="u2") for spec in layout}
            write_checkpoint(root / name, layout, bits_of=weights.__getitem__)
        shutil.copytree(root / "base", root / "served")
        peaks.append({role: peak(role, root) for role in ("publish", "subscribe")})
    growth = {role: peaks[1][role] - peaks[0][role] for role in peaks[0]}
    print({role: value >> 20 for role, value in growth.items()})
    version, tensor = layout.nbytes, (3 << 10) * 1024
    assert growth["publish"] < version + version
    assert growth["subscribe"] < 3 * version + 64 * tensor

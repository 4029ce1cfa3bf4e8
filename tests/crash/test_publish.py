"""kill -9 at every named instant of a publisher: one more start, and the chain is what it would have been."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from dcr_daemon.canonical.layout import Layout, TensorSpec
from dcr_daemon.checkpoint.directory import Checkpoint, write_checkpoint
from dcr_daemon.store.file import FileStore
from dcr_daemon.subscribe.materialize import materialize

SITES = ["publish.open", "publish.chunk.put", "publish.uploaded", "publish.sealed", "publish.anchor.put:2"]
LAYOUT = Layout([TensorSpec("a", "BF16", (64, 64)), TensorSpec("b", "F32", (100,)), TensorSpec("c", "BF16", (5000,))])
SCRIPT = """
import asyncio, sys
from pathlib import Path
from dcr_daemon.events import discard
from dcr_daemon.publish.watch import WatchOptions, run_watch
from dcr_daemon.store.file import FileStore
root = Path(sys.argv[1])
options = WatchOptions(state=root / "state", base=root / "base", create=True, watch=root / "watch", once=True,
                       poll=0.05, anchor_every=1, chunk_bytes=300, workers=2)
asyncio.run(run_watch(options, FileStore(root / "bucket"), discard))
"""


def publish(root: Path, failpoint: str = "") -> int:
    environment = {**os.environ, "DCR_FAILPOINT": failpoint}
    return subprocess.run([sys.executable, "-c", SCRIPT, str(root)], env=environment, check=False).returncode


@pytest.mark.crash
@pytest.mark.parametrize("site", SITES)
def test_a_killed_publisher_goes_on_where_the_ledger_says(tmp_path: Path, site: str) -> None:
    rng = np.random.default_rng(0)
    chain = [{"a": rng.integers(0, 1 << 16, 4096, dtype="u2"), "b": rng.integers(0, 1 << 32, 100, dtype="u4"),
              "c": rng.integers(0, 1 << 16, 5000, dtype="u2")}]  # fmt: skip
    write_checkpoint(tmp_path / "base", LAYOUT, chain[0].__getitem__)
    for n in (1, 2):
        moved = {name: bits + (rng.random(bits.size) < 0.1).astype(bits.dtype) for name, bits in chain[-1].items()}
        chain.append(moved)
        write_checkpoint(tmp_path / f"watch/step_{n}", LAYOUT, chain[-1].__getitem__)
    assert publish(tmp_path, site) == -signal.SIGKILL
    assert publish(tmp_path) == 0
    assert publish(tmp_path) == 0
    seals = [path.read_text() for path in sorted((tmp_path / "bucket/ledger").iterdir())]
    assert sum('"kind":"seal"' in text for text in seals) == 2, "each checkpoint is one version, never two"
    for version in (1, 2):
        out = tmp_path / f"v{version}"
        asyncio.run(materialize(FileStore(tmp_path / "bucket"), version=version, out=out))
        with Checkpoint(out) as checkpoint:
            assert all(np.array_equal(checkpoint.bits(name), bits) for name, bits in chain[version].items())

"""Memory that grew with the model: what is staged, spooled and sent is bounded by what was asked for."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from support.streams.trainer import Trainer
from support.streams.versions import Versions

from dcr_daemon.canonical.layout import Layout, TensorSpec
from dcr_daemon.store.file import FileStore

TENSORS, ROWS, COLUMNS = 192, 512, 1024
MODEL = TENSORS * ROWS * COLUMNS * 2  #: bytes


class Peak:
    """The most anonymous memory (no file's) that this process had above what it had at the start, in bytes."""

    def __init__(self) -> None:
        self.bytes = 0
        self._ended = threading.Event()

    @contextlib.contextmanager
    def measured(self) -> Iterator[None]:
        began = _anonymous()
        thread = threading.Thread(target=self._watch, args=(began,))
        thread.start()
        try:
            yield
        finally:
            self._ended.set()
            thread.join()

    def _watch(self, began: int) -> None:
        while not self._ended.wait(0.002):
            self.bytes = max(self.bytes, _anonymous() - began)


def _anonymous() -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) << 10
    raise AssertionError("this kernel does not tell")


@pytest.fixture
def trainer(tmp_path: Path) -> Trainer:
    """A model of 200 MB, every element of which changes in version 2."""
    (tmp_path / "versions").mkdir()
    versions = Versions(tmp_path / "versions")
    versions.layout = Layout([TensorSpec(f"layer.{n:02d}", "BF16", (ROWS, COLUMNS)) for n in range(TENSORS)])
    rng = np.random.default_rng(0)

    def draw() -> dict[str, np.ndarray]:
        return {s.name: rng.integers(0, 1 << 16, s.elements, dtype=np.uint16) for s in versions.layout}

    first = draw()
    little = first | {"layer.00": first["layer.00"] ^ np.uint16(1)}
    versions.values = [first, little, draw()]
    trainer = Trainer(tmp_path, versions)
    trainer.bucket = FileStore(tmp_path / "bucket")
    return trainer


@pytest.mark.slow
async def test_a_version_as_large_as_the_model_is_never_held_whole(trainer: Trainer) -> None:
    """Buckets were cloned at every wake, a snapshot of 78 GB was kept per engine, and the host ran out of memory."""
    small = {"spool_memory": 4 << 20, "chunk_bytes": 1 << 20, "upload_backlog": 8 << 20, "anchor_share": None}
    replica = trainer.replica(at=0)
    await trainer.publish(1, upload_base=False, **small)
    await replica.once()  # whatever is compiled once is compiled
    trainer.save(2)
    sent, applied = Peak(), Peak()
    with sent.measured():
        await trainer.once(**small)
    with applied.measured():
        await replica.once()
    delta = sum(path.stat().st_size for path in (trainer.home / "bucket" / "data" / "2").rglob("*.dcr"))
    assert delta > MODEL * 0.9
    assert sent.bytes < MODEL + MODEL // 2, "the baseline, and no version beside it"
    assert applied.bytes < MODEL * 3 // 4
    assert trainer.versions.version_of(replica.directory) == 2

"""The engine contract on a checkpoint directory; `tests/e2e` has it on a server."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from support.streams.versions import Versions
from support.vllm.engine_contract import *  # noqa: F403  # the tests themselves

from dcr_daemon.checkpoint.safetensors import SafetensorsFile
from dcr_daemon.engine.directory.engine import DirectoryEngine


class Directory:
    """A checkpoint directory at version 0; see `engine_contract.Subject`."""

    def __init__(self, home: Path, versions: Versions) -> None:
        self.versions = versions
        self._home, self._path = home, versions.save(home / "current", shard_bytes=30_000)

    def open(self) -> DirectoryEngine:
        return DirectoryEngine(self._path)

    async def live(self) -> bytes:
        version = self.versions.version_of(self._path)
        assert version is not None, "the weights are of no version"
        return self.versions.vector(version).astype("<u8").tobytes()

    def anchor(self, version: int) -> list[str]:
        out = self.versions.save(self._home / f"anchor-{version}", version, shard_bytes=40_000)
        return [str(path) for path in sorted(out.glob("*.safetensors"))]

    def damage(self, tensor: str) -> None:
        with contextlib.ExitStack() as opened:
            for shard in self._path.glob("*.safetensors"):
                file = opened.enter_context(SafetensorsFile(shard, writable=True))
                if any(spec.name == tensor for spec in file.specs):
                    last = file.spec(tensor).elements - 1
                    file.write_elements(tensor, np.array([last]), values=file.bits(tensor)[-1:] ^ 1)


@pytest.fixture
def subject(tmp_path: Path, make_versions: Callable[..., Versions]) -> Directory:
    return Directory(tmp_path, make_versions())

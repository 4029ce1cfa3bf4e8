"""The engine contract on the plugin's own core and workers over a toy model; `tests/e2e` has it on a server."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from support.vllm.engine_contract import *  # noqa: F403  # the tests themselves
from support.vllm.toy_model import LAYOUT
from support.vllm.toy_server import ToyPort, ToyServer, ToyVersions

pytestmark = pytest.mark.usefixtures("toy_loader")


class Toy:
    """Two ranks at the newest version; see `engine_contract.Subject`."""

    def __init__(self, home: Path, versions: ToyVersions) -> None:
        self.versions = versions
        self._server = ToyServer(home, versions).start(0)

    def open(self) -> ToyPort:
        return self._server.client()

    async def live(self) -> bytes:
        attached = await self.open().attach(self.versions.facts())
        found, head = np.frombuffer(attached.vector, "<u8").copy(), LAYOUT.index("head")
        found[head] = self.versions.vector(0)[head]  # which no rank holds, and no version changes
        return found.tobytes()

    def anchor(self, version: int) -> list[str]:
        out = self.versions.home / f"anchor-{version}"
        if not out.exists():
            self.versions.save(out, version)
        return [str(path) for path in sorted(out.glob("*.safetensors"))]

    def damage(self, tensor: str) -> None:
        engine = self._server.engine
        assert engine is not None
        for worker in engine.workers:
            worker.dcr_call({"op": "fault", "call": "test", "token": 0, "arg": {"damage": tensor}})


@pytest.fixture
def subject(tmp_path: Path) -> Toy:
    for name in ("server", "versions"):
        (tmp_path / name).mkdir()
    return Toy(tmp_path / "server", ToyVersions(tmp_path / "versions"))

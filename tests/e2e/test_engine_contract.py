"""The engine contract on a real vLLM server."""

from __future__ import annotations

import asyncio

import pytest
from support.vllm.engine_contract import *  # noqa: F403  # the tests themselves
from support.vllm.server import ModelVersions, Rig

from dcr_daemon.engine.vllm_client import VllmEngine

pytestmark = [pytest.mark.vllm, pytest.mark.slow]


class Server:
    """A server at the newest version; see `engine_contract.Subject`."""

    def __init__(self, rig: Rig) -> None:
        self._rig = rig
        asyncio.run(rig.own())

    @property
    def versions(self) -> ModelVersions:
        return self._rig.versions

    def open(self) -> VllmEngine:
        return VllmEngine(self._rig.server.socket)

    async def live(self) -> bytes:
        return await self._rig.live()

    def anchor(self, version: int) -> list[str]:
        return self._rig.versions.anchor(version)

    def damage(self, tensor: str) -> None:
        self._rig.flip(tensor)


@pytest.fixture
def subject(dense: Rig) -> Server:
    return Server(dense)

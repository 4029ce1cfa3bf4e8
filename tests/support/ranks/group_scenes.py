"""Lives of a group of ranks: killed, stopped, started again, and what the stream must be in the end.

A group lives and dies together, as under a launcher: when one rank ends badly, the others are ended too, and the group
is started again with the same command line. Scenes know processes, files and the bucket; nothing of the publisher's
inside.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dcr_daemon.ledger.ledger import Ledger
from dcr_daemon.store import open_store
from support.processes.fork_server import DEADLINE, ForkServer, Process
from support.ranks.launch import environment
from support.ranks.programs.steps import bits, write_base
from support.ranks.stream_checks import check_stream

LOOK = 0.02  #: seconds between two looks of a scene
MODULES = ("support.ranks.programs.steps", "torch.distributed.checkpoint", "dcr_daemon.projection.probes.self_check")


@pytest.fixture(scope="session")
def shared_rank_server() -> Iterator[ForkServer]:
    """A fork server that has imported torch: one per pytest worker; its start takes ten seconds."""
    fork_server = ForkServer(*MODULES)
    yield fork_server
    fork_server.close()


@pytest.fixture
def ranks(shared_rank_server: ForkServer) -> Iterator[ForkServer]:
    yield shared_rank_server
    shared_rank_server.end()


class Life:
    """One start of a group."""

    def __init__(self, processes: list[Process]) -> None:
        self.processes = processes

    def __getitem__(self, rank: int) -> Process:
        return self.processes[rank]

    @property
    def ended(self) -> bool:
        return all(process.poll() is not None for process in self.processes)

    def failed(self) -> list[int]:
        """Ranks that have not ended well."""
        return [n for n, process in enumerate(self.processes) if process.poll() not in (None, 0)]

    async def end(self, *, spare: Sequence[int] = ()) -> None:
        """What a launcher does when one has failed."""
        for rank, process in enumerate(self.processes):
            if rank not in spare:
                process.send(signal.SIGKILL)
                await process.wait()

    def said(self) -> str:
        return "\n".join(f"--- {process.log.name}\n{process.said()[-4000:]}" for process in self.processes)


class Ranks:
    """Groups that publish to one stream, one life after another; `home` holds all they leave behind."""

    def __init__(self, fork_server: ForkServer, home: Path, url: str) -> None:
        self.fork_server, self.home, self.url = fork_server, home, url
        self.base = write_base(home / "base")
        self.lives: list[Life] = []

    def start(
        self,
        mesh: str,
        steps: int,
        *,
        state: str = "state",
        armed: Mapping[int, str] | None = None,
        spoilt: Mapping[int, int] | None = None,
        passed: bool = False,
    ) -> Life:
        """Start a group of `mesh` that goes on until `steps`.

        Args:
            armed: what failpoint the ranks named are started with.
            spoilt: the step at which the ranks named hand over half of their weights at first.
            passed: whether each rank writes down the instants that it passes.
        """
        world = int(np.prod([int(n) for n in mesh.split("x")]))
        life = len(self.lives)
        places = [self.url, str(self.base), str(self.home / state), str(self.home), mesh, str(steps)]
        processes = []
        for rank in range(world):
            environ = environment(rank, world) | {"RIG_MEET": str(self.home / f"meet-{life}")}
            environ["DCR_FAILPOINT"] = (armed or {}).get(rank, "")
            environ["RIG_SPOILT"] = str((spoilt or {}).get(rank, ""))
            if passed:
                environ["DCR_TEST_PASSED"] = str(self.home / f"passed-{life}-{rank}")
            log = self.home / f"life-{life}-rank-{rank}.log"
            processes.append(self.fork_server.start(places, log, entry="support.ranks.programs.steps:main", **environ))
        self.lives.append(Life(processes))
        return self.lives[-1]

    def go(self, *steps: int) -> None:
        """Let a group publish these steps."""
        for step in steps:
            (self.home / f"go-{step}").touch()

    async def through(self, life: Life) -> None:
        """Until every rank has ended well."""
        await self._until(life, lambda: life.ended or life.failed(), "the end of every rank")
        assert not life.failed(), life.said()

    async def killed(self, life: Life, rank: int) -> None:
        """Until a rank's failpoint has killed it; then the launcher ends the others."""
        await self._until(life, lambda: life.ended or life.failed(), f"the end of rank {rank}")
        assert life[rank].poll() == -signal.SIGKILL, f"rank {rank} never came to it:\n{life.said()}"
        await life.end()

    async def stopped(self, life: Life, rank: int) -> None:
        """Until a rank's failpoint has stopped it."""
        await self._until(life, lambda: life[rank].stopped or life.ended or life.failed(), f"rank {rank} to stop")
        assert life[rank].stopped, f"rank {rank} never came to it:\n{life.said()}"

    async def sealed(self, version: int) -> None:
        """Until the stream has this version."""
        store, life = await open_store(self.url), self.lives[-1]
        ledger = Ledger(store)

        async def there() -> bool:
            assert not life.failed(), life.said()
            return (await ledger.read()).seal.version >= version

        try:
            await self._until(life, there, f"version {version}")
        finally:
            await store.close()

    async def _until(self, life: Life, condition: Callable[[], Any], what: str) -> None:
        """Wait for a condition, a plain or an asynchronous one."""
        try:
            async with asyncio.timeout(DEADLINE):
                while True:
                    found = condition()
                    if await found if asyncio.iscoroutine(found) else found:
                        return
                    await asyncio.sleep(LOOK)
        except TimeoutError:
            raise AssertionError(f"waited {DEADLINE} s for {what}:\n{life.said()}") from None

    async def check(self, steps: int, *, worlds: Sequence[int]) -> None:
        """Each step is exactly one version, made by a group of so many ranks, bit for bit; nothing else was sealed."""
        told = await check_stream(self.url, self.home / "out", {step: bits(step) for step in range(1, steps + 1)})
        assert [one.step for one in told] == list(range(1, steps + 1))
        assert [len(one.parts) for one in told] == list(worlds)

"""Engines and subscribers killed for real, in the middle of an update: all of it comes back by itself, bit for bit.

A vLLM server follows a stream through a real `dcr subscribe`. Something is killed at a chosen instant, a supervisor's
work is done (the dead process is started again, nothing else), and then the server must serve the newest version with
every parameter and buffer as a fresh server loads it. In between it never serves anything but a sealed version.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from support.streams.writer import StreamWriter
from support.vllm.server import ModelVersions, Rig

from dcr_daemon.engine.port import EngineGone, EngineStatus, Verdict
from dcr_daemon.engine.vllm_client import VllmEngine
from dcr_daemon.store import open_store
from dcr_demo.models import copy_side_files
from dcr_demo.processes import Process
from dcr_demo.scene import dcr

pytestmark = pytest.mark.vllm

FENCED = 12
PATIENCE = 240.0


class Life:
    """A stream of its own for one test, and whoever follows it into the rig's server."""

    def __init__(self, rig: Rig, home: Path) -> None:
        self.rig, self.home = rig, home
        (home / "versions").mkdir()
        self.versions = ModelVersions(home / "versions", rig.server.model, seed=7)
        self.url = f"file://{home}/stream"
        self.followers: list[Process] = []

    async def begin(self) -> None:
        """The server at version 0 of a new stream; nobody follows yet."""
        await self.rig.own()
        first = ModelVersions(self.rig.fresh_home(), self.rig.server.model)
        zero = await self.rig.engine.load(0, first.anchor(0), first.vector_file(0), "v0")
        assert zero.verdict is Verdict.COMMITTED
        self.writer = StreamWriter(self.url, self.versions, await open_store(self.url))
        await self.writer.create()

    async def publish(self, rate: float = 0.03) -> int:
        version = self.versions.step(rate)
        await self.writer.publish(version)
        return version

    def follow(self, name: str = "r1", failpoint: str = "") -> Process:
        """`dcr subscribe` as a process; several may share the engine, each with a state of its own."""
        home = self.home / name
        command = dcr("subscribe", "--from", self.url, "--engine", self.rig.server.engine, "--replica", name)
        command += ["--state", str(home), "--staging", str(home / "staging"), "--poll", "0.1"]
        command += ["--base", str(self.rig.server.model)]
        process = Process(name, command, self.home / f"{name}.log", {"DCR_FAILPOINT": failpoint})
        self.followers.append(process)
        return process.start()

    def checkpoint(self, version: int) -> Path:
        """A plain checkpoint of a version, as a pod may have one on its volume."""
        out = self.versions.save(self.home / f"checkpoint-{version}", version)
        copy_side_files(self.rig.server.model, out)
        return out

    async def status(self) -> EngineStatus | None:
        try:
            return await VllmEngine(self.rig.server.socket).status()
        except EngineGone:
            return None

    async def serves(self, version: int) -> None:
        """Wait for it. Whatever is served meanwhile must be some version, and never a lower one than before."""
        lowest = 0

        async def look() -> bool:
            nonlocal lowest
            status = await self.status()
            if status is None or not status.serving:
                return False
            assert status.version is not None
            assert status.version >= lowest
            lowest = status.version
            return status.version == version

        await self.until(look, f"version {version} to be served")

    async def until(self, ready: Callable[[], Any], what: str) -> None:
        end = asyncio.get_running_loop().time() + PATIENCE
        while True:
            found = ready()
            if await found if asyncio.iscoroutine(found) else found:
                return
            if asyncio.get_running_loop().time() > end:
                tails = "\n".join(f"--- {p.name}\n{p.tail(15)}" for p in [*self.followers, self.rig.server.process])
                pytest.fail(f"waited for {what}:\n{tails}")
            await asyncio.sleep(0.1)

    async def memory(self) -> Any:
        return await VllmEngine(self.rig.server.socket).checksums()

    async def holds(self, version: int) -> None:
        """Every exact tensor of a version, summed by a new owner; whoever followed is fenced by that."""
        assert await self.rig.live_of(self.versions) == self.versions.vector(version).astype("<u8").tobytes()


@asynccontextmanager
async def life(rig: Rig, home: Path) -> AsyncIterator[Life]:
    made = Life(rig, home)
    await made.begin()
    try:
        yield made
    finally:
        for follower in made.followers:
            follower.kill(signal.SIGCONT)
            follower.stop()


# -- the engine -------------------------------------------------------------------------------------------------------


async def killed_at(made: Life, fault: str, *, target: str, rank: int | None, model: int) -> None:
    """An update to a new version is interrupted by a death at `fault`; the server is started again on the checkpoint
    of version `model`, and the same subscriber, never restarted, must bring it to the newest version."""
    rig, mark = made.rig, made.home / "reached"
    follower = made.follow()
    await made.serves(await made.publish())
    before = made.versions.newest
    await made.serves(before)
    wanted = {before: await made.memory()}
    action = "kill" if target == "worker" else "hang"
    where = {} if rank is None else {"rank": rank}
    rig.plant(fault, action=action, mark=str(mark), **where)
    version = await made.publish()
    await made.until(mark.exists, f"{fault} to be reached")
    if target == "server":
        rig.server.process.kill()
    elif target == "front":
        rig.server.process.signal_leader(signal.SIGKILL)
    elif target == "core":
        os.kill(core_of(rig.server.process.pid), signal.SIGKILL)
    await made.until(lambda: not rig.alive, "the server to end")  # a hanging worker: the watchdog (must E5)
    rig.restart(made.checkpoint(model))
    if model in wanted:
        assert await made.memory() == wanted[model]  # vLLM's own loader gives what our update had given
    await made.serves(version)
    assert follower.poll() is None
    recovered = await made.memory()
    last = await made.publish()
    await made.serves(last)
    follower.stop()
    await made.holds(last)
    if target == "worker" and fault == "apply":
        rig.restart(made.checkpoint(version))
        assert await made.memory() == recovered


def core_of(server: int) -> int:
    """The process of the engine that a server has started."""
    for path in Path("/proc").glob("[0-9]*"):
        try:
            parent = path.joinpath("stat").read_text().rsplit(")", 1)[1].split()[1]
            title = path.joinpath("cmdline").read_bytes()
        except OSError:
            continue
        if int(parent) == server and b"EngineCore" in title:
            return int(path.name)
    raise AssertionError(f"server {server} has no engine")


async def test_a_worker_killed_in_the_middle_of_writing(moe: Rig, short_tmp: Path, tmp_path: Path) -> None:
    async with life(moe, tmp_path) as made:
        await killed_at(made, "apply", target="worker", rank=1, model=1)


@pytest.mark.faults
@pytest.mark.parametrize(("fault", "rank"), [("job", 1), ("apply", 0), ("commit", 1), ("commit", 0)])
async def test_a_worker_killed_at_any_instant_of_an_update(moe: Rig, tmp_path: Path, fault: str, rank: int) -> None:
    """`commit` on rank 1: rank 0 has committed already."""
    async with life(moe, tmp_path) as made:
        await killed_at(made, fault, target="worker", rank=rank, model=0)


@pytest.mark.faults
@pytest.mark.parametrize("fault", ["job", "apply", "commit", "committed"])
async def test_an_engine_process_killed_at_any_instant_of_an_update(dense: Rig, tmp_path: Path, fault: str) -> None:
    """Its worker waits at that point meanwhile. `committed`: on all ranks, and the engine is still paused."""
    async with life(dense, tmp_path) as made:
        await killed_at(made, fault, target="core", rank=None, model=1)


@pytest.mark.faults
@pytest.mark.parametrize(("target", "fault"), [("server", "job"), ("server", "apply"), ("front", "commit")])
async def test_a_whole_server_killed_in_the_middle_of_an_update(
    moe: Rig, tmp_path: Path, target: str, fault: str
) -> None:
    """`front`: only the process that holds the port and the socket; its engine must not outlive it."""
    async with life(moe, tmp_path) as made:
        await killed_at(made, fault, target=target, rank=0, model=0)


@pytest.mark.faults
async def test_a_worker_that_never_returns_ends_the_engine(moe: Rig, tmp_path: Path) -> None:
    async with life(moe, tmp_path) as made:
        await killed_at(made, "apply", target="watchdog", rank=1, model=0)


@pytest.mark.faults
@pytest.mark.parametrize("holds", ["base", "older", "newest", "garbage"])
async def test_a_server_that_starts_with_any_weights_is_brought_to_the_newest_version(
    dense: Rig, tmp_path: Path, holds: str
) -> None:
    """Found out by content alone: the checkpoint on a pod's volume may be anything of the right shape."""
    async with life(dense, tmp_path) as made:
        for _ in range(2):
            newest = await made.publish()
        await made.writer.anchor(newest, limit=1 << 20)
        stranger = ModelVersions(dense.fresh_home(), dense.server.model, seed=99)
        stranger.step(1.0)
        made.versions.values.append(stranger.values[1])
        starts = {"base": 0, "older": 1, "newest": newest, "garbage": newest + 1}
        dense.restart(made.checkpoint(starts[holds]))
        made.versions.values.pop()
        status = await made.status()
        assert status is not None
        assert (status.version, status.serving) == (None, False)
        follower = made.follow()
        await made.serves(newest)
        await made.serves(await made.publish())
        follower.stop()
        await made.holds(made.versions.newest)


# -- the subscriber ---------------------------------------------------------------------------------------------------

SITES = ("attached", "located", "proved", "serving", "staged", "prepared", "swapped")


async def subscriber_dies(made: Life, site: str) -> None:
    """Killed at a site while the engine lives on; another one, started in its place, goes on from there."""
    if site in ("staged", "prepared", "swapped"):
        await made.publish()
    killed = made.follow(failpoint=f"subscribe.{site}")
    await made.until(lambda: killed.poll() is not None, f"{site} to be reached")
    assert killed.poll() == -signal.SIGKILL
    between = await made.status()
    assert between is not None
    assert between.version is not None or not between.serving
    made.follow()
    await made.serves(made.versions.newest)
    await made.serves(await made.publish())


@pytest.mark.parametrize("site", ["prepared", "swapped"])
async def test_a_subscriber_killed_around_a_swap(dense: Rig, tmp_path: Path, site: str) -> None:
    async with life(dense, tmp_path) as made:
        await subscriber_dies(made, site)
        made.followers[-1].stop()
        await made.holds(made.versions.newest)


@pytest.mark.faults
@pytest.mark.parametrize("site", SITES)
async def test_a_subscriber_killed_at_any_step(dense: Rig, tmp_path: Path, site: str) -> None:
    async with life(dense, tmp_path) as made:
        await subscriber_dies(made, site)


async def test_what_a_killed_subscriber_left_begun_is_ended_by_the_next(dense: Rig, tmp_path: Path) -> None:
    """Half written on purpose: it can go neither forward nor back until the next owner settles it. The one that is gone
    is this test: a subscriber that lives would settle it itself."""
    async with life(dense, tmp_path) as made:
        first = made.follow()
        served = await made.publish()
        await made.serves(served)
        first.stop()
        version = await made.publish()
        gone = VllmEngine(dense.server.socket)
        await gone.attach(made.versions.facts())
        await gone.prove(served, made.versions.vector_file(served), f"v{served}")
        await gone.prepare(made.versions.transaction(version))
        dense.plant("apply", times=2)
        dense.plant("rollback", times=2)
        assert (await gone.swap(f"to-{version}")).verdict is Verdict.BEGUN
        status = await made.status()
        assert status is not None
        assert (status.version, status.serving) == (None, False)
        assert dense.post("/resume")[0] >= 400
        made.follow("r2")
        await made.serves(version)
        made.followers[-1].stop()
        await made.holds(version)


async def test_a_subscriber_that_slept_through_a_takeover_is_fenced(dense: Rig, tmp_path: Path) -> None:
    """SIGSTOP with everything prepared; another takes over and goes on; then the first one wakes."""
    async with life(dense, tmp_path) as made:
        sleeper = made.follow("r1", failpoint="subscribe.prepared=stop")
        await made.serves(0)
        first = await made.publish()
        await made.until(lambda: _stopped(sleeper.pid), "the first subscriber to stop")
        made.follow("r2")
        await made.serves(first)
        second = await made.publish()
        await made.serves(second)
        sleeper.kill(signal.SIGCONT)
        await made.until(lambda: sleeper.poll() is not None, "the first subscriber to end")
        assert sleeper.poll() == FENCED, sleeper.tail()
        await made.serves(await made.publish())


def _stopped(pid: int) -> bool:
    return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "T"

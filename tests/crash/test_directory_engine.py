"""A checkpoint directory survives kill -9 at any instant (must E8): every kill is repaired, bit for bit."""

from __future__ import annotations

import asyncio
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import msgspec
import pytest

from dcr_daemon.engine.directory.engine import DirectoryEngine

pytestmark = pytest.mark.crash

WORKER = Path(__file__).with_name("directory_worker.py")
KILLS = 30

#: failpoint -> whether the change it interrupts has begun, and so ends in the new version
SITES = {
    "engine.dir.journal": False,
    "engine.dir.dirty": True,
    "engine.dir.hidden": True,
    "engine.dir.write": True,
    "engine.dir.data": True,
    "engine.dir.version": True,
    "engine.dir.shown": True,
    "engine.dir.clean": True,
}
LOAD_SITES = {**{name: begun for name, begun in SITES.items() if name != "engine.dir.write"}, "engine.dir.move": True}
#: failpoints of the replacement of links, which comes before any change; a file at a time, but for the last
LINK_SITES = ["disk.shards.write", "disk.shards.sync", "engine.dir.copied", "engine.dir.owned", "disk.shards.synced"]


class Case:
    """A directory at version 0, and the plan of a worker that brings it further."""

    def __init__(self, versions, home: Path, *, anchor: bool = False) -> None:
        self.versions, self.home, self.directory = versions, home, home / "current"
        self.last = len(versions.values) - 1
        self.plan = home / "plan.json"
        files = []
        if anchor:
            out = versions.save(home / "anchor", self.last, shard_bytes=30_000)
            files = [str(path) for path in sorted(out.glob("*.safetensors"))]
        plan = {
            "facts": versions.facts(),
            "vectors": [versions.vector_file(version) for version in range(self.last + 1)],
            "transactions": [versions.transaction(version + 1) for version in range(self.last)],
            "anchor": files,
        }
        self.plan.write_bytes(msgspec.json.encode(plan))

    def worker(self, failpoint: str = "") -> subprocess.Popen[bytes]:
        environ = {**os.environ, "DCR_FAILPOINT": failpoint}
        command = [sys.executable, str(WORKER), str(self.directory), str(self.plan)]
        return subprocess.Popen(command, env=environ, stdout=subprocess.PIPE)

    def check_loadable(self) -> None:
        """Whoever finds a config must find a whole version behind it."""
        if (self.directory / "config.json").exists() and list(self.directory.glob("*.safetensors")):
            seen = self.home / "as a loader sees it"
            shutil.copytree(self.directory, seen, ignore=shutil.ignore_patterns(".dcr"))
            assert self.versions.version_of(seen) is not None
            shutil.rmtree(seen)

    def repair(self) -> int | None:
        """Attach, as the next subscriber would; the version that it tells must be the one that is there."""

        async def attach() -> int | None:
            engine = DirectoryEngine(self.directory)
            try:
                return (await engine.attach(self.versions.facts())).version
            finally:
                await engine.close()

        version = asyncio.run(attach())
        if version is not None:
            assert self.versions.version_of(self.directory) == version
            assert (self.directory / "config.json").exists()
            leftover = {path.name for path in (self.directory / ".dcr").iterdir()}
            assert leftover <= {"version.json", "owner.json"}
        return version


@pytest.mark.parametrize("site", SITES)
def test_a_kill_inside_a_swap_and_another_inside_the_repair(make_versions, tmp_path, site):
    case = Case(make_versions(1, rate=0.2), tmp_path)
    case.versions.save(case.directory, 0, shard_bytes=30_000)
    for attempt in range(2):
        worker = case.worker(site)
        worker.communicate(timeout=120)
        # The second one repairs first, and passes only some of the sites on its way.
        assert worker.returncode == -signal.SIGKILL or (attempt and worker.returncode == 0)
        case.check_loadable()
    assert case.repair() == (1 if SITES[site] else 0)


@pytest.mark.parametrize("site", LINK_SITES)
@pytest.mark.parametrize("after", [1, 2])
def test_a_kill_while_links_are_replaced_by_copies(make_versions, tmp_path, site, after):
    """What they lead to keeps its bytes, every file its content, and the next start goes on."""
    case = Case(make_versions(1, rate=0.2), tmp_path)
    cache = case.versions.save(tmp_path / "cache", 0, shard_bytes=30_000)
    before = {path.name: path.read_bytes() for path in cache.iterdir()}
    case.directory.mkdir()
    for path in cache.iterdir():
        (case.directory / path.name).symlink_to(f"../cache/{path.name}")
    last = site.endswith(".synced")  # once, at the end
    worker = case.worker(site if last else f"{site}:{after}")
    worker.communicate(timeout=120)
    assert worker.returncode == -signal.SIGKILL
    case.check_loadable()
    assert case.repair() == 0
    assert case.worker().wait(timeout=120) == 0
    assert case.repair() == 1
    assert {path.name: path.read_bytes() for path in cache.iterdir()} == before


@pytest.mark.parametrize("site", ["engine.dir.dirty", "engine.dir.write", "engine.dir.data"])
def test_files_that_somebody_links_to_after_a_kill_are_replaced_before_the_repair_writes(make_versions, tmp_path, site):
    case = Case(make_versions(1, rate=0.2), tmp_path)
    case.versions.save(case.directory, 0, shard_bytes=30_000)
    worker = case.worker(site)
    worker.communicate(timeout=120)
    links = tmp_path / "links"
    links.mkdir()
    for path in case.directory.glob("*.safetensors"):
        (links / path.name).hardlink_to(path)
    before = {path.name: path.read_bytes() for path in links.iterdir()}
    assert case.repair() == 1
    assert {path.name: path.read_bytes() for path in links.iterdir()} == before


@pytest.mark.parametrize("site", LOAD_SITES)
@pytest.mark.parametrize("start", ["empty", "at a version"])
def test_a_kill_inside_a_load(make_versions, tmp_path, site, start):
    case = Case(make_versions(1, rate=0.5), tmp_path, anchor=True)
    if start != "empty":
        case.versions.save(case.directory, 0, shard_bytes=50_000)
        case.repair()
        asyncio.run(_adopt(case))
    worker = case.worker(site)
    worker.communicate(timeout=120)
    assert worker.returncode == -signal.SIGKILL
    case.check_loadable()
    before = 0 if start != "empty" else None
    assert case.repair() == (1 if LOAD_SITES[site] else before)


async def _adopt(case: Case) -> None:
    engine = DirectoryEngine(case.directory)
    await engine.attach(case.versions.facts())
    await engine.prove(0, case.versions.vector_file(0), "v0")
    await engine.close()


def test_kills_at_random_instants_are_always_repaired(make_versions, tmp_path):
    """The delay is drawn over start, repair, prepare and swap alike; the seed is shown by a failure."""
    seed = random.randrange(1 << 32)
    draw = random.Random(seed)
    versions = make_versions(0)
    for _ in range(60):
        versions.step(0.1)
    case = Case(versions, tmp_path)
    versions.save(case.directory, 0, shard_bytes=30_000)
    reached, interrupted = 0, 0
    for kill in range(KILLS):
        worker = case.worker()
        assert worker.stdout is not None
        if draw.random() < 0.9:
            worker.stdout.readline()
            time.sleep(draw.random() * 0.15)
        else:
            time.sleep(draw.random() * 2)
        worker.kill()
        worker.communicate()
        case.check_loadable()
        interrupted += (case.directory / ".dcr" / "dirty").exists()
        if draw.random() < 0.5:
            version = case.repair()
            if version is not None or kill:
                assert version is not None, f"seed {seed}"
                assert version >= reached, f"seed {seed}"
                reached = version
        if reached == case.last:
            versions.save(tmp_path / f"again-{kill}", 0)
            case.directory = tmp_path / f"again-{kill}"
            reached = 0
    worker = case.worker()
    worker.communicate(timeout=120)
    assert worker.returncode == 0, f"seed {seed}"
    assert case.repair() == case.last, f"seed {seed}"
    assert interrupted, f"no kill fell into a swap: seed {seed}"

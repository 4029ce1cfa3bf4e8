"""What must be true after every round, from the bucket's bytes, the replicas' files and the trainer's memory alone."""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path
from typing import Any

import numpy as np
from soak.daemons import Failed
from soak.world import LAYOUT, World

from dcr_daemon.checkpoint.directory import Checkpoint
from dcr_daemon.errors import DcrError
from dcr_daemon.ledger.audit.verify import Report, verify
from dcr_daemon.ledger.ledger import Ledger
from dcr_daemon.subscribe.materialize import materialize

AT_ONCE = 4  #: versions built side by side


async def check(world: World) -> int:
    """All of it; returns how many versions were compared. The world has settled and nothing is damaged any more."""
    report = await check_history(world)
    compared = await check_versions(world, report.floor)
    for replica in world.replicas:
        check_directory(replica.directory, world.bits(world.head), f"{replica.name} at version {world.head}")
        left = {path.name for path in (replica.directory / ".dcr").iterdir()}
        if not left <= {"version.json", "owner.json"}:
            raise Failed(f"{replica.name} left {sorted(left)}")
    return compared


async def check_history(world: World) -> Report:
    """One undamaged history, the same for cold and sequential readers, in which every step is one version."""
    ledger = Ledger(world.store)
    report, state = await verify(world.store), await ledger.read()
    if report.ok and report.floor < state.floor:  # raised meanwhile, behind the newest anchor
        report, state = await verify(world.store), await ledger.read()
    if not report.ok:
        raise Failed(f"dcr verify: {report.damages}")
    if (report.head, report.floor) != (state.seal.version, state.floor):
        raise Failed(f"cold readers see head {state.seal.version} and floor {state.floor}, sequential ones {report}")
    seals = await ledger.history.between(1)
    if [seal.version for seal in seals] != list(range(1, report.head + 1)):
        raise Failed(f"versions {[seal.version for seal in seals]}")
    for seal in seals:
        if world.seals.setdefault(seal.version, seal) != seal:
            raise Failed(f"version {seal.version} was {world.seals[seal.version]}, and is {seal}")
    steps = [seal.step for seal in seals]
    if len(set(steps)) != len(steps) or not set(steps) <= set(world.written):
        raise Failed(f"steps {steps} of {sorted(world.written)}")
    return report


async def check_versions(world: World, floor: int, *, damaged: bool = False) -> int:
    """Every version from the floor on materialises to what it was made from; where objects are `damaged`, or to
    nothing, with an error that is DCR's own. Returns how many were built."""
    limit = asyncio.Semaphore(AT_ONCE)

    async def build(version: int) -> bool:
        async with limit:
            return await check_version(world, version, damaged=damaged)

    return sum(await asyncio.gather(*(build(version) for version in range(floor, world.head + 1))))


async def check_version(world: World, version: int, *, damaged: bool) -> bool:
    """Whether it was built; it need not be if something is damaged, or if it is below the floor by now."""
    out = world.home / f"built-{version}"
    try:
        await materialize(world.store, version=version, out=out)
    except DcrError as error:
        state = await world.state()
        if damaged or (state is not None and version < state.floor):
            return False
        raise Failed(f"version {version} cannot be materialised: {error!r}") from error
    check_directory(out, world.bits(version), f"version {version}, materialised,")
    shutil.rmtree(out)
    return True


def check_directory(path: Path, expected: dict[str, Any], what: str) -> None:
    """A checkpoint has exactly these bits, and lacks nothing that a loader needs."""
    if not (path / "config.json").exists():
        raise Failed(f"{what} has no config.json")
    with Checkpoint(path) as found:
        if found.layout != LAYOUT:
            raise Failed(f"{what} has another layout")
        for name, bits in expected.items():
            if not np.array_equal(found.bits(name), bits):
                raise Failed(f"{what} has other bits in {name}")

"""A soak of several rounds, all drawn from its seed: what befalls whom, and in which order."""

from __future__ import annotations

import os
import random
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from soak.checks import check
from soak.daemons import Failed
from soak.damage import DamagedObject, DamagedRecord, DeletedObject
from soak.faults import Fault, Kill, KillInstant, Stop, StoreKilled, TakeOver
from soak.files import DamagedDirectory, FullDisk, HalfCheckpoint, LinkedFiles, Stale, Wiped
from soak.links import BadAnswers, Misread, MisreadRecord, SlowAnswers
from soak.results import Soaked
from soak.world import World
from support.processes.fork_server import ForkServer
from support.stores.seaweed import SeaweedProcess

#: kinds of faults, and how often each is drawn
KINDS: dict[type[Fault], int] = {
    Kill: 10, KillInstant: 8, Stop: 8, TakeOver: 12, Wiped: 8, Stale: 8, DamagedDirectory: 5, FullDisk: 8,
    BadAnswers: 8, SlowAnswers: 5, Misread: 8, DamagedObject: 6, DeletedObject: 4, StoreKilled: 2,
    LinkedFiles: 4, HalfCheckpoint: 5, MisreadRecord: 8, DamagedRecord: 5,
}  # fmt: skip
FOR_ROOT = {FullDisk}
ROUNDS = 8  #: of one soak, on one stream
LINGER = 2.0  #: seconds that the trainer waits for a step to be served before it writes the next


@dataclass
class Round:
    """What one round does: steps of the trainer, and faults meanwhile."""

    number: int
    steps: int
    faults: list[Fault]

    def __str__(self) -> str:
        return f"round {self.number}, {self.steps} steps: " + "; ".join(map(str, self.faults))


def draw_rounds(seed: int, count: int, kinds: dict[type[Fault], int] = KINDS) -> list[Round]:
    """The rounds of a soak. Kinds that need root are left out where the user is another."""
    draw = random.Random(seed)
    able = {kind: often for kind, often in kinds.items() if os.geteuid() == 0 or kind not in FOR_ROOT}
    rounds = []
    for number in range(1, count + 1):
        steps = draw.choice((1, 2, 2, 3))
        chosen = dict.fromkeys(draw.choices(list(able), list(able.values()), k=draw.choice((1, 2, 2, 3))))
        of_bucket = [kind for kind in chosen if issubclass(kind, DamagedObject)]
        for kind in of_bucket[1:]:  # what dcr verify names is compared with one of them
            del chosen[kind]
        rounds.append(Round(number, steps, [kind(draw, steps) for kind in chosen]))
    return rounds


async def soak(
    seed: int,
    rounds: Sequence[Round],
    *,
    home: Path,
    weed: SeaweedProcess,
    fork_server: ForkServer,
    tell: Callable[[str], None] = print,
) -> Soaked:
    """Play rounds on one new stream. A round that fails is the last one; `home` keeps its logs."""
    draw, done = random.Random(f"stream of {seed}"), Soaked(seed)
    anchors, keep = draw.choice((1, 2, 4)), draw.choice((2, 3, 5))
    world = World(home, weed, fork_server, seed=seed, anchor_every=anchors, keep=keep)
    try:
        async with world:
            for round_ in rounds:
                began = time.monotonic()
                tell(f"  {round_}")
                done.compared += await play(world, round_)
                done.played(time.monotonic() - began, [fault.name for fault in round_.faults if fault.struck])
            await world.stop()
            if left := _children(fork_server.pid):
                raise Failed(f"processes left over: {left}")
    except Exception as error:  # noqa: BLE001 - one of the harness, too, fails this soak and not those after it
        told = str(error) if isinstance(error, Failed) else traceback.format_exc()
        done.failure = f"{rounds[done.rounds] if done.rounds < len(rounds) else 'the end'}: {told}"
    done.versions = world.head
    done.restarts = sum(max(daemon.lives - 1, 0) for daemon in world.daemons)
    return done


async def play(world: World, round_: Round) -> int:
    """One round; returns how many versions were compared."""
    for daemon in world.daemons:
        daemon.expected = set()
    for fault in round_.faults:
        await fault.begin(world)
    for step in range(round_.steps):
        for fault in round_.faults:
            await fault.before_step(world, step)
        world.write()
        await world.within(LINGER, world.arrived)
    for fault in round_.faults:
        await fault.end(world)
    await world.heal()
    for fault in round_.faults:
        await fault.repair(world)
    await world.heal()  # once more, for those who ended with what an operator has repaired since
    world.write()
    await world.settle()
    return await check(world)


def _children(pid: int) -> list[int]:
    """Processes that this one has started and that still run."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[1]) == pid and fields[0] != "Z":
            found.append(int(stat.parent.name))
    return found

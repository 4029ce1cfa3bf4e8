"""Objects that are damaged or lost in the bucket: named by `dcr verify`, and repaired as docs/OPERATIONS.md says."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator
from typing import ClassVar

from soak.checks import check_versions
from soak.daemons import Failed, forget
from soak.faults import Fault
from soak.world import World

from dcr_daemon.ledger import names
from dcr_daemon.ledger.audit.verify import verify
from dcr_daemon.ledger.ledger import Ledger


class DamagedObject(Fault):
    """An object that a seal or an anchor names has other bytes, and mostly somebody who has to read it.

    Repaired from a backup, or by a new anchor above it.
    """

    name = "damaged object"
    codes: ClassVar[set[int]] = {13, 15, 16}
    shown = ("how", "reader", "remedy", "key")
    ways: ClassVar[tuple[str, ...]] = ("flipped", "truncated", "emptied")

    def choose(self, draw: random.Random) -> None:
        self.how, self.where, self.which = draw.choice(self.ways), draw.random(), draw.random()
        self.reader = draw.choice(("", "r1", "r2", "r3", "holder"))
        self.remedy = draw.choice(("backup", "anchor"))
        self.key, self.at = "", 0

    async def strike(self, world: World) -> None:
        keys = sorted([key async for key in _named(world)])
        self.key = keys[int(self.which * len(keys))]
        self.body = await world.store.get(self.key, limit=1 << 30)
        await self._damage(world)
        for daemon in world.daemons:
            daemon.expected |= self.codes
        if self.reader:
            daemon = world.daemon(self.reader)
            await world.end(daemon)
            forget(daemon.state, daemon.home / "current", daemon.home / "staging")
            daemon.start()
        self.struck = True

    async def _damage(self, world: World) -> None:
        at = int(self.where * len(self.body))
        if self.how == "deleted":
            await world.store.delete([self.key])
        elif self.how == "flipped" and self.body:
            flipped = self.body[:at] + bytes([self.body[at] ^ 0x20]) + self.body[at + 1 :]
            await world.store.overwrite(self.key, flipped)
        else:
            await world.store.overwrite(self.key, self.body[:at] if self.how == "truncated" else b"")

    async def repair(self, world: World) -> None:
        report = await verify(world.store)
        named = {damage.key for damage in report.damages}
        if not named <= {self.key}:
            raise Failed(f"{self.key} is {self.how}, dcr verify names {report.damages}")
        if not named and self.key in {key async for key in _named(world)} and self.body:
            raise Failed(f"{self.key} is {self.how}, dcr verify names nothing")
        if self.how != "deleted":
            await check_versions(world, report.floor, damaged=True)
        if self.remedy == "backup":
            await world.store.overwrite(self.key, self.body)
            return
        if self.how == "deleted":
            await world.store.overwrite(self.key, b"")
        await world.anchor_now()


class DeletedObject(DamagedObject):
    """An object that a seal or an anchor names is gone."""

    name = "deleted object"
    ways = ("deleted",)


async def _named(world: World) -> AsyncIterator[str]:
    """The keys of everything that versions at or above the floor, and their anchors, are made of."""
    ledger = Ledger(world.store)
    state = await ledger.read()
    prefixes = [names.attempt(s.version, s.attempt) for s in await ledger.history.between(max(state.floor, 1))]
    prefixes += [a.index.key.rpartition("/")[0] + "/" for a in await ledger.history.anchors()]
    for prefix in prefixes:
        async for entry in world.store.list(prefix):
            yield entry.key

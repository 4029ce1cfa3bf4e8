"""Objects that are damaged or lost in the bucket: named by `dcr verify`, and repaired as docs/OPERATIONS.md says."""

from __future__ import annotations

import contextlib
import random
from typing import ClassVar

from soak.checks import check_versions
from soak.daemons import Failed, forget
from soak.faults import Fault
from soak.links import other_time
from soak.world import World

from dcr_daemon.errors import Corrupt
from dcr_daemon.ledger import names
from dcr_daemon.ledger.audit.verify import verify
from dcr_daemon.ledger.ledger import Ledger

#: What `dcr verify` says of a version that was diffed from another than the newest, which no route led to (must P4).
STRAY = "its sum before is not the sum after the version before"


class DamagedObject(Fault):
    """An object that a seal or an anchor names has other bytes, and mostly somebody who has to read it.

    Repaired from a backup, or by a new anchor above it.
    """

    name = "damaged object"
    targets = ("the bucket",)
    codes: ClassVar[set[int]] = {13, 15, 16}
    shown = ("how", "reader", "remedy", "key")
    ways: ClassVar[tuple[str, ...]] = ("flipped", "truncated", "emptied")
    built_before_repair: ClassVar[bool] = True  #: what is missing is waited for, which takes too long

    def choose(self, draw: random.Random) -> None:
        self.how, self.where, self.which = draw.choice(self.ways), draw.random(), draw.random()
        self.reader = draw.choice(("", "r1", "r2", "r3", "holder"))
        self.remedy = draw.choice(("backup", "anchor"))
        self.key, self.at = "", 0

    async def begin(self, world: World) -> None:
        for daemon in world.daemons:
            daemon.expected |= self.codes

    async def strike(self, world: World) -> None:
        keys = sorted([e.key for prefix in await self.prefixes(world) async for e in world.store.list(prefix)])
        self.key = keys[int(self.which * len(keys))]
        self.body = await world.store.get(self.key, limit=1 << 30)
        await self._damage(world)
        if self.reader:
            daemon = world.daemon(self.reader)
            await world.end(daemon)
            forget(daemon.state, daemon.home / "current", daemon.home / "staging")
            daemon.start()
        self.struck = True

    async def prefixes(self, world: World) -> list[str]:
        """Where the objects lie that versions at or above the floor, and their anchors, are made of."""
        ledger = Ledger(world.store)
        state = await ledger.read()
        seals = await ledger.history.between(max(state.floor, 1))
        anchors = await ledger.history.anchors()
        return [
            *(names.attempt(seal.version, seal.attempt) for seal in seals),
            *(anchor.index.key.rpartition("/")[0] + "/" for anchor in anchors),
        ]

    async def _damage(self, world: World) -> None:
        at = int(self.where * len(self.body))
        if self.how == "deleted":
            await world.store.delete([self.key])
        elif self.how == "its time":
            await world.store.overwrite(self.key, other_time(self.body, self.where))
        elif self.how == "flipped" and self.body:
            flipped = self.body[:at] + bytes([self.body[at] ^ 0x20]) + self.body[at + 1 :]
            await world.store.overwrite(self.key, flipped)
        else:
            await world.store.overwrite(self.key, self.body[:at] if self.how == "truncated" else b"")

    async def repair(self, world: World) -> None:
        needed = {await self._needed(world)}
        report = await verify(world.store)
        needed.add(await self._needed(world))
        strays = {damage.version for damage in report.damages if damage.what == STRAY}
        named = {damage.key for damage in report.damages if damage.version not in strays}
        if not self.is_named_right(named, needed):
            raise Failed(f"{self.key} is {self.how}, dcr verify names {report.damages}")
        if self.built_before_repair:
            await check_versions(world, report.floor, damaged=True)
        if self.remedy == "backup":
            await world.store.overwrite(self.key, self.body)
        elif self.how == "deleted":
            await world.store.overwrite(self.key, b"")
        if self.remedy == "anchor" or strays:
            await world.anchor_now()

    async def _needed(self, world: World) -> bool:
        """Whether readers of the versions that are kept still need it."""
        return any(self.key.startswith(prefix) for prefix in await self.prefixes(world))

    def is_named_right(self, named: set[str], needed: set[bool]) -> bool:
        """`dcr verify` names exactly what was damaged, unless nobody needs it any more."""
        return not self.body or named in [{self.key} if one else set() for one in needed]


class DeletedObject(DamagedObject):
    """An object that a seal or an anchor names is gone."""

    name = "deleted object"
    ways = ("deleted",)
    built_before_repair = False


class DamagedRecord(DamagedObject):
    """A record of the ledger has other bytes, or is gone, until it is restored from a backup."""

    name = "damaged record"
    ways = ("flipped", "truncated", "emptied", "its time", "deleted", "deleted")
    built_before_repair = False

    def choose(self, draw: random.Random) -> None:
        super().choose(draw)
        self.remedy = "backup"

    async def prefixes(self, world: World) -> list[str]:
        return ["ledger/"]

    async def repair(self, world: World) -> None:
        if self.key != names.record(0):
            await super().repair(world)
            return
        with contextlib.suppress(Corrupt):  # nothing can be read without the first record
            report = await verify(world.store)
            raise Failed(f"{self.key} is {self.how}, dcr verify names {report.damages}")
        await world.store.overwrite(self.key, self.body)

    def is_named_right(self, named: set[str], needed: set[bool]) -> bool:
        """`dcr verify` names the record, and what it cannot know without it, such as that a floor was raised."""
        return self.key in named

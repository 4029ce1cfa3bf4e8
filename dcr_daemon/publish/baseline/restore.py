"""Brings a baseline to the newest sealed version: from its cache, the base checkpoint or an anchor, then the chain.

Whatever it starts from, the result is proved: the full fingerprint of the bytes equals the vector that the ledger names
(must P5). The blocks of one rank of many have no vector of their own in the ledger: the objects that they are built
from are verified one by one, and rank 0 seals nothing unless all blocks add up to the whole (must P3).
"""

from __future__ import annotations

import contextlib
from pathlib import Path

from dcr_daemon import runtime
from dcr_daemon.canonical.fingerprint import Vector, total
from dcr_daemon.checkpoint.directory import Checkpoint
from dcr_daemon.errors import Corrupt, DcrError, Incompatible, NotFound
from dcr_daemon.events import Alarm, Emit, Retrying, Waiting
from dcr_daemon.ledger.ledger import Ledger
from dcr_daemon.ledger.objects import ObjectPending, Objects
from dcr_daemon.ledger.records import show_u64, total_of
from dcr_daemon.ledger.route import NoRoute, Route
from dcr_daemon.ledger.routes import Routes
from dcr_daemon.publish.baseline.baseline import Baseline, check_vector
from dcr_daemon.publish.baseline.fetched import FetchedObjects
from dcr_daemon.publish.baseline.rebuild import Rebuild
from dcr_daemon.runtime import Workers


class Restorer:
    """Reads one stream into one baseline. The ledger has been read up to this process's claim.

    Args:
        fetched: a directory on disk for objects that arrive slowly; it is empty when a baseline is restored.

    Attributes:
        mismatches: how often in a row the restored baseline did not fit those of the other ranks. From the second time
            on every object is read, whatever the tables of contents say.
    """

    def __init__(
        self,
        ledger: Ledger,
        objects: Objects,
        *,
        baseline: Baseline,
        base: Path | None,
        workers: Workers,
        emit: Emit,
        fetched: Path,
    ) -> None:
        self._ledger, self._objects, self._baseline = ledger, objects, baseline
        self._base, self._emit = base, emit
        self._fetched = FetchedObjects(fetched, workers=workers)
        self._rebuild = Rebuild(objects, baseline, fetched=self._fetched, workers=workers, emit=emit)
        self.mismatches = 0

    async def restore(self) -> None:
        """Bring the baseline to the newest sealed version.

        If every route to it is damaged, the baseline keeps its bytes as an unverified base: the next version is diffed
        from them and gets an anchor at once, from which the stream continues (must P4).

        Raises:
            NotFound: nothing in the bucket leads to the version, and no base was given.
            Incompatible: the base is not the stream's version 0.
            StoreUnavailable: the bucket does not answer, or objects that the ledger names are not there.
        """
        head = self._ledger.state.seal.version
        if self._baseline.version != head:
            await self._restore(head)
        await self._fetched.forget()

    async def _restore(self, head: int) -> None:
        self._rebuild.damaged.clear()
        self._rebuild.thorough = self.mismatches > 1
        have = await self._cached(head)
        if have == head:
            return
        self._emit(Waiting(what=f"the baseline: building version {head} from {_start(have)}"))
        with contextlib.suppress(Corrupt):
            await self.vector(head)  # raises `ObjectPending`: without it nothing that is built can be proved
        routes = Routes(self._ledger.history, head, held=have, base=0 if self._base else None)
        failed: list[DcrError] = []
        try:
            async for route in routes:
                if reason := failed[-1] if failed else routes.damage:
                    self._emit(Retrying(what=f"the baseline: {reason.message}; trying {route}"))
                try:
                    await self._build(route, head)
                    return
                except (Corrupt, NotFound, ObjectPending) as error:
                    failed.append(error)
                    routes.damaged_deltas |= self._rebuild.damaged
        except NoRoute as error:
            hint = "give --base with the checkpoint that the stream was created from"
            raise NotFound(error.message, hint="" if self._base else hint) from error
        except Corrupt as error:  # damaged records stop every plan
            failed.append(error)
        damage = next((error for error in failed if isinstance(error, Corrupt)), routes.damage)
        if damage is None:
            raise failed[0]
        await self._baseline.adopt_unverified(head, unverified_base=True)
        self._emit(
            Alarm(
                must="P4",
                what=f"version {head} cannot be built from {self._ledger.store.url} any more: {damage.message}. "
                "The next version will have an anchor at once; replicas that cannot follow the chain wait for it",
            )
        )

    async def _build(self, route: Route, head: int) -> None:
        try:
            if route.anchor is not None:
                await self._rebuild.load_anchor(await self._ledger.history.anchor(route.anchor))
            elif self._baseline.version is None:
                await self.load_base()
                runtime.failpoint("publish.restore.base")
            await self._rebuild.apply(route.hops, self._ledger.history.seal)
            await self._prove(head, f"version {head} built from {self._ledger.store.url}")
        except BaseException:
            self._baseline.invalidate()
            raise

    async def _cached(self, head: int) -> int | None:
        """The sealed version that the cache holds, proved by its full fingerprint; None if it holds none.

        Without a hint an attempt was under way when the last process ended: it may have been sealed before its hint
        was written, or have changed nothing yet. In both cases the cache holds the newest version.
        """
        if self._baseline.new:
            return None
        candidates = []
        hint = self._baseline.hint()
        if hint and hint[0] <= head and await self._plausible(*hint):
            candidates.append(hint)
        with contextlib.suppress(Corrupt, NotFound, ObjectPending):
            if self._baseline.blocks.complete and (not candidates or candidates[0][0] != head):
                candidates.append((head, await self.vector(head)))
        if candidates:
            await self._baseline.prove(*candidates)
        runtime.failpoint("publish.restore.cached")
        return self._baseline.version

    async def _plausible(self, version: int, vector: Vector) -> bool:
        """Whether the ledger can be asked about a hint and does not contradict it."""
        if not self._baseline.blocks.complete:
            return True
        try:
            record = await self._ledger.version_record(version)
        except Corrupt:  # on the way to it, so most likely on the chain from it too
            return False
        return show_u64(total(vector)) == total_of(record)

    async def load_base(self) -> None:
        """Version 0 from the base checkpoint, which must have its fingerprint."""
        assert self._base is not None
        with Checkpoint(self._base) as checkpoint:
            await self._rebuild.load_base(checkpoint)
        try:
            await self._prove(0, f"base {self._base}")
        except Corrupt as error:
            raise Incompatible(
                f"base {self._base} is not version 0 of {self._ledger.store.url}: {error.message}",
                hint="give the very checkpoint that the stream was created from",
            ) from error

    async def vector(self, version: int) -> Vector:
        """The fingerprint that the ledger names for a sealed version."""
        return await self._objects.read_vector(await self._ledger.version_record(version), self._baseline.layout)

    async def _prove(self, version: int, what: str) -> None:
        if not self._baseline.blocks.complete:
            await self._baseline.adopt_unverified(version)
            return
        want = await self.vector(version)
        found = await self._baseline.prove((version, want))
        hint = "`dcr verify` tells which object is damaged"
        check_vector(want, found, layout=self._baseline.layout, what=what, hint=hint)

    async def side_files(self) -> dict[str, bytes]:
        """Side files of the newest anchor; none if there is no anchor."""
        async for anchor in self._ledger.history.anchors_back():
            index = await self._objects.read_anchor_index(anchor)
            return {Path(ref.key).name: await self._objects.read_file(ref, anchor.version) for ref in index.extras}
        return {}


def _start(have: int | None) -> str:
    return "an anchor or the base" if have is None else f"version {have}"

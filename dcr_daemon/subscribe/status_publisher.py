"""Publishes one replica's state: as events, in its status object, and the highest version served on its own disk.

A version is reported as served only when the engine has said so. The mark on disk is written first; if that fails, the
version is reported again later (must E2).
"""

from __future__ import annotations

from dcr_daemon import runtime
from dcr_daemon.engine.port import Swapped
from dcr_daemon.errors import DcrError
from dcr_daemon.events import Blocked, Committed, Emit, EngineLost, Loading, Paused, Serving, Unsupported
from dcr_daemon.ledger.ledger import Ledger
from dcr_daemon.ledger.records import Seal
from dcr_daemon.subscribe.backoff import BlockedVersion
from dcr_daemon.subscribe.status import StatusWriter


class StatusPublisher:
    """Publishes one replica's state; called by the driver at each change.

    Attributes:
        serving: whether the engine generates, as it said last.
    """

    def __init__(self, ledger: Ledger, writer: StatusWriter, *, emit: Emit) -> None:
        self._ledger, self._writer, self._emit = ledger, writer, emit
        self._served: int | None = None
        self._blocked: Blocked | None = None
        self._lost = ""
        self.serving = False

    def report(self, state: str, detail: str = "") -> None:
        """Change the status object."""
        if doubt := self._ledger.doubt:
            detail = f"in doubt about record {doubt.seq}: {doubt.reason}" + (f"; {detail}" if detail else "")
        self._writer.set(state=state, detail=detail, serving=self.serving, head=self._ledger.head)

    def attaching(self) -> None:
        """An attach begins. While the engine is away that is no news: one is tried again and again."""
        if not self._lost:
            self.report("attaching")

    def attached(self, incarnation: str, version: int | None) -> None:
        self._lost = ""
        self._writer.set(engine=incarnation, version=version)

    async def committed(self, base: int, ended: Swapped, seconds: float, *, route: str) -> None:
        """The engine is at a new version; `serves` reports that it generates with it."""
        assert ended.version is not None
        record = await self._ledger.version_record(ended.version)
        step = record.step if isinstance(record, Seal) else None
        self._emit(
            Committed(
                base=base,
                version=ended.version,
                route=route,
                pause_seconds=ended.pause,
                seconds=seconds,
                step=step,
                phases=ended.phases,
            )
        )
        self._writer.set(version=ended.version, step=step)

    def serves(self, version: int) -> None:
        """The engine generates with `version`. Emitted once, and again after another state.

        Raises:
            ResourceExhausted: the mark cannot be written.
        """
        if self.serving and self._served == version:
            return
        if mark := self._ledger.high_water_mark:
            mark.serves(version)
        runtime.failpoint("subscribe.served")
        self.serving, self._served, self._lost = True, version, ""
        if self._blocked and (self._blocked.version is None or self._blocked.version <= version):
            self._blocked = None
        self._emit(Serving(version=version))
        self.report("serving")

    def paused(self, version: int) -> None:
        """Somebody else has paused the engine: the replica is not ready, and does not resume it."""
        if self.serving:
            self.serving = False
            self._emit(Paused(version=version))
        self.report("paused", "somebody else has paused the engine")

    def loading(self, version: int) -> None:
        """A dense load begins; the engine generates nothing until it ends."""
        self.serving = False
        self._emit(Loading(version=version))
        self.report("loading", f"all of version {version}")

    def lost(self, reason: str) -> None:
        """The engine is away or unproved. Emitted once per reason."""
        self._not_served("waiting for the engine", EngineLost(reason=reason))

    def unsupported(self, reason: str) -> None:
        """The engine can never be served, as it was started. Emitted once per reason."""
        self._not_served("unsupported", Unsupported(reason=reason))

    def _not_served(self, state: str, fact: EngineLost | Unsupported) -> None:
        self.serving, self._served = False, None
        if fact.reason != self._lost:
            self._emit(fact)
        self._lost = fact.reason
        self.report(state, fact.reason)

    def blocked(self, error: DcrError, blocked_version: BlockedVersion | None) -> None:
        """The replica cannot advance and goes on with what it has. Emitted once per reason."""
        poisoned = blocked_version is not None and blocked_version.poisoned
        fact = Blocked(
            version=blocked_version.version if blocked_version else None, reason=str(error), poisoned=poisoned
        )
        if fact != self._blocked:
            self._emit(fact)
        self._blocked = fact
        self.report("poisoned" if poisoned else "blocked", str(error))

"""`Coordinator`: what every rank of a group does with a stream, whatever its part in it. `Leader` is rank 0's, `Member`
every other rank's.

    open ─► (agree) ─► start ─► diff ... (the `Attempt`) ─► seal ─► anchor_if_due
      └────────┴─────────┴───────────┴───────────────────────┴────► abort_unless_sealed

A publisher or a watcher calls it, one task at a time, on the event loop on which it was made. `Attempt.fate` says what
an attempt came to.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from dcr_daemon.canonical.fingerprint import Bits
from dcr_daemon.canonical.layout import Layout
from dcr_daemon.ledger.ledger import Ledger
from dcr_daemon.ledger.records import Open
from dcr_daemon.publish.group.context import RankContext
from dcr_daemon.publish.version.attempt import Attempt
from dcr_daemon.publish.version.fate import Cause
from dcr_daemon.publish.version.versions import SealedVersion

CLOSE_PATIENCE = 5.0  #: seconds that each step of an end waits for the ledger: supervisors kill after 30

Judge = Callable[[list[bytes]], bytes]  #: the declarations of all ranks, by rank → the verdict


class Coordinator(Protocol):
    """One rank's hold on a stream. Made by `opening.open_coordinator`; `Leader` and `Member` are the two kinds.

    Attributes:
        context: what this rank works with: baseline, workers, state directory, the attempt under way.
        ledger: the stream's ledger; the leader's is claimed.
        layout: of the stream.
    """

    context: RankContext
    ledger: Ledger
    layout: Layout

    @property
    def head(self) -> int:
        """The newest sealed version, as far as the ledger was read."""
        return self.ledger.state.seal.version

    def read(self, tensor: int, start: int, count: int) -> Bits:
        """See `RankContext.read`."""
        return self.context.read(tensor, start, count)

    async def begin(self, *, step: int | None = None, call: int | None = None) -> Attempt:
        """`open`, then `start`. Arguments and errors are theirs."""
        return await self.start(await self.open(step=step, call=call))

    async def open(self, *, step: int | None = None, call: int | None = None) -> Open:
        """Open this call's attempt (the leader), or wait until the leader has (a member). An earlier attempt that is
        still undecided ends first (must P7).

        Args:
            step: the trainer's label; the same on every rank.
            call: the number of this call of `publish` (must P2); one more than the last by default.

        Raises:
            Fenced: another publisher, or another start of this group, owns the stream.
            StoreUnavailable: the fate of the earlier attempt cannot be learnt now, or the bucket does not answer.
            UpdateAborted: the leader gave this call up, or is in a later one.
            UsageError: the leader publishes another step.
        """
        ...

    async def agree(self, record: Open, round_: int, *, declared: bytes, judge: Judge) -> bytes:
        """Exchange declarations with all ranks: every rank gives one, the leader judges them, all get the verdict.

        Args:
            record: what `open` returned.
            round_: one attempt may have several rounds.
            declared: this rank's declaration.
            judge: called by the leader, on a worker. What it raises ends the attempt.
        """
        ...

    async def start(self, record: Open) -> Attempt:
        """Begin to diff for what `open` returned, from exactly its base (must P3).

        Raises:
            Fenced, UpdateAborted: it was overtaken meanwhile.
        """
        ...

    async def seal(
        self,
        attempt: Attempt,
        *,
        source: dict[str, Any] | None = None,
        metadata: dict[str, Any] | None = None,
        check: Callable[[], None] = lambda: None,
    ) -> SealedVersion:
        """Wait for the uploads of a finished attempt, then for its seal, and move the baseline. The leader seals.

        Args:
            source: where the weights came from; the leader's goes into the record.
            metadata: the user's, JSON-like; the leader's goes into the record.
            check: called before this rank commits itself: by the leader when it makes the record, by a member before it
                puts its part. What it raises ends the attempt.

        Raises:
            Fenced: another publisher owns the stream; the attempt is not a version and never will be.
            StoreUnavailable: the bucket did not answer within the patience. `abort_unless_sealed` learns the fate.
            UpdateAborted: a rank gave the update up, or does not answer while the next one has begun.
            Corrupt: the ranks together do not hold what the stream says; each builds its baseline anew.
        """
        ...

    async def abort_unless_sealed(self, cause: Cause, *, patience: float | None = None) -> SealedVersion | None:
        """End the attempt under way, if there is one: commit it if the ledger has its seal, else abort and undo it.

        Args:
            cause: why an attempt that is not sealed ends here; its fate gets it.
            patience: seconds that the ledger, or the leader, may take; by default those of every update.

        Returns:
            The version, if it was sealed.

        Raises:
            Fenced: another publisher owns the stream; the attempt is undone all the same.
            StoreUnavailable: the fate cannot be learnt now (`AttemptFate.unknown`); nothing is changed.
        """
        ...

    async def skip(self, *, call: int, reason: str) -> None:
        """Make no attempt of this call, and let no other rank wait for it (must P2)."""
        ...

    def start_lag_timer(self) -> None:
        """The trainer is in its next call: from now on ranks that have stopped answering are given up (must P7)."""
        ...

    async def run_idle_checks(self) -> None:
        """Between updates, until cancelled: look for a newer claim, and for damage in the baseline.

        Returns when the baseline was found damaged; `repair`, or the next `open`, builds it anew (must P4).

        Raises:
            Fenced: another publisher owns the stream.
        """
        ...

    async def repair(self) -> None:
        """Build a baseline that `run_idle_checks` found damaged anew, and bring about the anchor that is owed.

        Raises:
            Fenced, StoreUnavailable: as everything that reads or writes; the next `open` tries again.
        """
        ...

    async def anchor_if_due(self, *, at_once: bool = False) -> None:
        """Write the anchor that is due, or this rank's share of it. No attempt may be under way.

        Args:
            at_once: an anchor is due, whatever the policy says; only for a group of one.

        Raises:
            Fenced: another publisher owns the stream.
        """
        ...

    async def close(self) -> None:
        """End what is undecided, and give everything back. Safe to call after any error, and done within a few times
        `CLOSE_PATIENCE` seconds."""
        ...

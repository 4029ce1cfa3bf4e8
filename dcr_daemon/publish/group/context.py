"""What one rank works with, whoever leads: its baseline, the spool, and the attempt whose chunks it makes.

The baseline of a rank of many is built when its blocks are known, which depends on its weights and on what the other
ranks hold. `Leader` (rank 0) and `Member` (the others) decide when an attempt begins and how it ends; what that means
for this rank's bytes is here.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from dcr_daemon import runtime
from dcr_daemon.canonical.fingerprint import Bits
from dcr_daemon.canonical.layout import Layout
from dcr_daemon.checkpoint.blocks import BlockSet
from dcr_daemon.checkpoint.directory import read_side_files
from dcr_daemon.codec.warm import compile_kernels
from dcr_daemon.errors import UpdateAborted, UsageError
from dcr_daemon.events import Aborted, Alarm, Sealed
from dcr_daemon.ledger.objects import Objects
from dcr_daemon.ledger.records import Open, Seal
from dcr_daemon.publish.baseline.baseline import Baseline
from dcr_daemon.publish.baseline.restore import Restorer
from dcr_daemon.publish.baseline.scrub import Scrub
from dcr_daemon.publish.resources import RankResources
from dcr_daemon.publish.version.attempt import Attempt
from dcr_daemon.publish.version.fate import Cause, reason_of
from dcr_daemon.publish.version.spool import Spool
from dcr_daemon.publish.version.uploads import Uploads
from dcr_daemon.publish.version.versions import SealedVersion


class RankContext:
    """Used by one task at a time.

    Args:
        resources: whose ledger was read.
        objects: reads the stream's objects.
        layout: of the stream.

    Attributes:
        attempt: the one under way; None between updates.
        owes_anchor: the baseline was damaged: an anchor has to follow (must P4).
        committed: a version of this process was sealed. All ranks of a group know that alike.
    """

    def __init__(self, resources: RankResources, objects: Objects, layout: Layout) -> None:
        self.resources, self.objects, self.layout = resources, objects, layout
        self.options, self.rank, self.ledger = resources.options, resources.rank, resources.ledger
        self.state, self.workers, self.emit = resources.state, resources.workers, resources.emit
        self.attempt: Attempt | None = None
        self.owes_anchor = self.committed = False
        self._spool = Spool(self.state.spool, self.options.spool_memory, workers=self.workers)
        self._baseline: Baseline | None = None
        self._restorer: Restorer | None = None
        self._scrub: Scrub | None = None
        self._look_at = runtime.monotonic() + self.options.look

    @property
    def baseline(self) -> Baseline:
        if self._baseline is None:
            raise UsageError("nothing was published yet, so this rank does not know what it holds")
        return self._baseline

    @property
    def restorer(self) -> Restorer:
        assert self._restorer is not None
        return self._restorer

    @property
    def holds(self) -> bool:
        """Whether there is a baseline."""
        return self._baseline is not None

    def hold(self, blocks: BlockSet | Baseline) -> None:
        """Keep a baseline of these blocks from now on; one of other blocks is forgotten.

        Raises:
            ResourceExhausted: no room for it.
        """
        if isinstance(blocks, Baseline):
            baseline = blocks
        else:
            if self._baseline and self._baseline.blocks.digest == blocks.digest:
                return
            if self._baseline:
                self._baseline.close()
            baseline = Baseline(self.state.path, blocks, self.ledger.stream.stream, self.workers)
        self._baseline = baseline
        self._restorer = Restorer(
            self.ledger,
            self.objects,
            baseline=baseline,
            base=self.options.base,
            workers=self.workers,
            emit=self.emit,
            fetched=self.state.fetched,
        )
        self._scrub = Scrub(baseline, self.options.scrub_rate)

    async def compile_kernels(self) -> None:
        """Make ready for the first update: no call of `publish` waits for a compiler."""
        await self.workers.run(compile_kernels, {spec.width for spec in self.layout})

    def read(self, tensor: int, start: int, count: int) -> Bits:
        """The bits of a layout tensor, of which all is held, as the attempt under way has left them."""
        return self.baseline.read(tensor, start, count)

    async def restore(self) -> None:
        """Bring the baseline to the newest sealed version, as far as the ledger was read.

        Raises:
            see `Restorer.restore`.
        """
        if self.baseline.version != self.ledger.state.seal.version:
            await self.restorer.restore()

    async def start(self, record: Open) -> Attempt:
        """Begin to diff for an attempt, from exactly its base (must P3).

        Raises:
            UpdateAborted: the ledger went on without the attempt, and the baseline is not at the attempt's base.
        """
        await self.restore()
        if record.base != self.baseline.version:
            raise UpdateAborted(
                f"version {record.version} was given up: the stream is at version {self.baseline.version}"
            )
        options = self.options
        uploads = Uploads(
            self.ledger.store, version=record.version, attempt=record.seq, backlog=options.upload_backlog,
            concurrency=options.uploads, patience=options.patience, emit=self.emit,
        )  # fmt: skip
        self.attempt = Attempt(record, self.resources, baseline=self.baseline, spool=self._spool, uploads=uploads)
        return self.attempt

    def commit(self, seal: Seal) -> SealedVersion:
        """Version and baseline move together: the seal is in the ledger."""
        attempt, self.attempt = self.attempt, None
        assert attempt is not None
        self.committed = True
        self.owes_anchor |= self.baseline.unverified_base
        self.baseline.commit(attempt.version, attempt.segments, size=attempt.size)
        self.restorer.mismatches = 0
        runtime.failpoint("publish.baseline.committed")
        attempt.forget()
        self.emit(
            Sealed(
                version=seal.version, attempt=seal.attempt, step=seal.step, seq=seal.seq, changed=seal.changed,
                elements=seal.elements, bytes=seal.bytes, dense_bytes=seal.dense_bytes,
                seconds=runtime.monotonic() - attempt.started,
            )
        )  # fmt: skip
        sealed = SealedVersion.of(seal)
        attempt.fate.set_sealed(sealed)
        return sealed

    async def undo(self, cause: Cause, *, reason: str = "") -> None:
        """The attempt is known not to be a version, and never to become one.

        Args:
            cause: why; its fate gets it.
            reason: what the event says; by default the cause.
        """
        attempt, self.attempt = self.attempt, None
        if attempt:
            if not await attempt.undo():
                self.emit(
                    Alarm(must="P7", what=f"the undo of version {attempt.version} failed: the baseline is rebuilt")
                )
            runtime.failpoint("publish.baseline.undone")
            self.emit(Aborted(version=attempt.version, attempt=attempt.id, reason=reason or reason_of(cause)))
            attempt.fate.set_aborted(cause)

    def mark_suspect(self) -> None:
        """What the ranks hold does not add up: the baseline is built anew, from the bucket and not from its cache."""
        self.baseline.distrust()
        self.restorer.mismatches += 1

    def damaged(self, where: str) -> None:
        """The baseline is not what it should be: rebuilt before anything is diffed from it, and anchored (must P4)."""
        version = self.ledger.state.seal.version
        self.emit(Alarm(must="P4", what=f"the baseline of version {version} is damaged {where}; rebuilding"))
        self.baseline.distrust()
        self.owes_anchor = True

    async def prove(self) -> None:
        """Recompute the baseline's fingerprint; damage is an alarm and a rebuild, never an anchor (must P4)."""
        if self.baseline.version == self.ledger.state.seal.version:
            if bool((await self.baseline.fingerprint() == self.baseline.vector).all()):
                return
            self.damaged("before an anchor")
        await self.restorer.restore()

    async def side_files(self) -> dict[str, bytes]:
        """Side files for an anchor: the base's, else those of the anchor before."""
        base = self.options.base
        if base and base.is_dir():
            return read_side_files(base)
        return await self.restorer.side_files()

    @property
    def _scrub_due(self) -> float:
        """When the next block may be scrubbed, on `runtime.monotonic`. While the fate of an attempt is open the bytes
        already belong to the next version; there are no sums to compare them with."""
        return float("inf") if self.attempt or self._scrub is None else self._scrub.due

    async def _scrub_one(self) -> bool:
        """Check one block; whether the baseline is sound."""
        assert self._scrub is not None
        if tensor := await self._scrub.step():
            self.damaged(f"in {tensor}")
        return not tensor

    async def run_idle_checks(self, look: Callable[[], Awaitable[None]], check: Callable[[], None]) -> None:
        """Between updates, until cancelled: `look` at the ledger now and then, then `check` what was seen; scrub, and
        let the baseline's file follow.

        Returns once the baseline was found damaged.
        """
        while True:
            if runtime.monotonic() >= self._look_at:
                await look()
                self._look_at = runtime.monotonic() + self.options.look * (0.75 + runtime.jitter() / 2)
                check()
            scrub_at = self._scrub_due
            if runtime.monotonic() >= scrub_at and not await self._scrub_one():
                return
            if self._save_due:
                await self.baseline.save_step()
            else:
                await runtime.sleep(max(0.0, min(self._look_at, scrub_at) - runtime.monotonic()))

    @property
    def _save_due(self) -> bool:
        return self._baseline is not None and not self.attempt and self._baseline.save_due

    async def close(self) -> None:
        """Give everything back. An attempt that is still undecided leaves no baseline."""
        try:
            if self.attempt:
                await self.attempt.cancel()
                self.baseline.invalidate()
            elif self._baseline:
                await self._baseline.save()
        finally:
            if self._baseline:
                self._baseline.close()
            self.resources.close()

"""`dcr publish --watch`: checkpoints that any framework writes below a directory become versions.

    scan (CheckpointScanner) ─► select (CheckpointSelection) ─► ingest file by file (CheckpointIngest) ─► seal
              ▲                                                                                           │
              └──────────── wait for a file event (InotifyWatcher), or the next timed scan ◄──────────────┘

An attempt opens at the first complete file of a checkpoint, and ingests the others as they come. For a checkpoint in
pieces (torch's distributed checkpoints, files of a sharded writer) it opens when all files are there. It is aborted and
undone when a file that was read changes, when its directory vanishes, or when another checkpoint is complete first;
never by time. What was sealed is never published again: the seals say which files they came from.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from dcr_daemon import runtime
from dcr_daemon.errors import DcrError, NotFound, StoreUnavailable
from dcr_daemon.events import Degraded, Emit, Retrying
from dcr_daemon.publish.group.leader import Leader
from dcr_daemon.publish.group.opening import open_leader
from dcr_daemon.publish.inputs.model_config import read_config
from dcr_daemon.publish.inputs.sources import SourceChanged
from dcr_daemon.publish.inputs.tied import TiedTensors, find_tied
from dcr_daemon.publish.options import PublishOptions
from dcr_daemon.publish.version.versions import SealedVersion
from dcr_daemon.publish.watch.candidate import CheckpointCandidate, CompleteFile, CompletePieces
from dcr_daemon.publish.watch.file_identity import FileIdentity
from dcr_daemon.publish.watch.file_stability import STABLE_SCANS, STABLE_SCANS_UNCLOSED
from dcr_daemon.publish.watch.ingest import CheckpointIngest, CheckpointMisfit, check_headers
from dcr_daemon.publish.watch.inotify import DirectoryEvents
from dcr_daemon.publish.watch.once import Cause, NotPublished, OnceReport, Published
from dcr_daemon.publish.watch.pieces.reader import ContentMismatch
from dcr_daemon.publish.watch.policy_paths import PolicyPaths
from dcr_daemon.publish.watch.published import read_published
from dcr_daemon.publish.watch.reporting import WatchReporter
from dcr_daemon.publish.watch.scanner import CheckpointScanner
from dcr_daemon.publish.watch.selection import Candidates, CheckpointSelection
from dcr_daemon.store.port import Store
from dcr_daemon.wording import shorten

SCAN_INTERVAL = 1.0  #: seconds between two timed scans beside inotify
SCAN_REST = 1e-4  #: seconds without a scan for every file that the last one found: about what the scan took
RETRY_DELAY_LIMIT = 60.0  #: most seconds between two tries at a checkpoint that changes or cannot be read
STORE_PAUSE = 5.0  #: seconds before an unavailable bucket is tried again


@dataclass(frozen=True, slots=True, kw_only=True)
class WatchOptions(PublishOptions):
    """Options of a watching publisher, beside those of every publisher.

    Attributes:
        watch: the directory below which checkpoints appear.
        select: globs of the paths that are the policy, below `watch`; empty if the first one that is published tells.
        step_pattern: a regular expression that finds the training step in a path; None for the known patterns.
        marker: name of a file that completes a checkpoint (`STABLE`); None if there is none.
        poll: seconds between scans, for file systems without inotify; None to use inotify.
        once: publish what is complete at the start, oldest first, and return.
        newest: publish only the newest of several complete checkpoints.
    """

    watch: Path
    select: tuple[str, ...] = ()
    step_pattern: str | None = None
    marker: str | None = None
    poll: float | None = None
    once: bool = False
    newest: bool = False


async def run_watch(options: WatchOptions, store: Store, *, emit: Emit) -> OnceReport:
    """Publish every checkpoint that appears below `options.watch` until cancelled (or once).

    Returns:
        With `once`, what was published and what not.

    Raises:
        Fenced: another publisher owns the stream; do not restart.
        Incompatible: base or store do not fit; the names are listed.
        NotFound: no stream there and `create` not given, or no such directory.
        UsageError: options that do not go together.
        ResourceExhausted: the state directory's disk is full.
    """
    if not options.watch.is_dir():
        raise NotFound(f"there is no directory {options.watch}", hint="make it before the publisher starts")
    paths = PolicyPaths(options.select, options.step_pattern)
    leader = await open_leader(options, store, emit=emit)
    try:
        return await Watcher(options, leader, paths, emit=emit).run()
    except DcrError as error:
        with contextlib.suppress(DcrError):
            await leader.abort_unless_sealed(error)
        raise
    finally:
        await leader.close()


class Watcher:
    """Publishes the checkpoints of one directory through one leader: scan, select, ingest, seal; one step at a time."""

    def __init__(self, options: WatchOptions, leader: Leader, paths: PolicyPaths, *, emit: Emit) -> None:
        self._options, self._leader, self._paths, self._emit = options, leader, paths, emit
        self._interval = options.poll or SCAN_INTERVAL
        self._selection = CheckpointSelection(
            leader.layout, paths, marker=options.marker is not None, newest=options.newest
        )
        self._reporter = WatchReporter(options.watch, paths, leader.layout, emit=emit)
        self._tied = TiedTensors()
        self._scanner = self._new_scanner(None)
        self._events = DirectoryEvents(options.watch, poll=bool(options.poll))
        self._last_timed_scan = float("-inf")
        self._current: CheckpointIngest | None = None  #: the attempt under way
        self._abort_reason: str | None = None  #: the attempt under way is to be aborted
        self._damaged = False  #: the baseline is to be repaired
        self._failures: dict[str, int] = {}  #: number of failed tries, by checkpoint
        self._told_blind_spot = False

    def _new_scanner(self, config: Mapping[str, Any] | None) -> CheckpointScanner:
        options = self._options
        excluded = _excluded(options, self._leader.ledger.store.url)
        return CheckpointScanner(
            options.watch,
            excluded,
            paths=self._paths,
            marker=options.marker,
            ignore=options.ignore,
            config=config,
            tied=self._tied,
            unknown_scans=STABLE_SCANS if options.once else STABLE_SCANS_UNCLOSED,
        )

    async def run(self) -> OnceReport:
        """Publish until cancelled; with `once`, until what was complete at the start is published."""
        config, layout = await read_config(self._leader.ledger, self._options.base), self._leader.layout
        self._tied = await self._leader.context.workers.run(lambda: find_tied(layout, config, read=self._leader.read))
        self._scanner = self._new_scanner(config)
        await self._read_published()
        try:
            if self._options.once:
                return await self._run_once()
            while True:
                self._events.follow(self._scanner.files)
                if not await self._step():
                    await self._wait()
        finally:
            self._events.close()
            if self._current:
                self._current.close()

    async def _read_published(self) -> None:
        """Find out which checkpoints below the watched directory are versions already."""
        context = self._leader.context
        published = await read_published(
            self._leader.ledger,
            context.state.path / "published.json",
            watch=self._options.watch,
            on_disk=lambda: context.workers.run(self._scanner.file_times),
        )
        for source in published.sources:
            self._mark_published(source.path, source.identity)
        self._scanner.mark_unread(published)

    async def _run_once(self) -> OnceReport:
        await self._scan()
        await runtime.sleep(self._interval)
        found = await self._scan()
        report, tried = OnceReport(), set[str]()
        while turn := [c for c in self._selection.choose(found).publish if c.relative not in tried]:
            tried.add(turn[0].relative)
            result = await self._publish_whole(turn[0])
            if isinstance(result, Published):
                report.published.append(result)
            else:
                report.not_published.append(result)
        rest = {name: candidate for name, candidate in found.items() if name not in tried}
        choice = self._selection.choose(rest)
        report.not_published += [*self._reporter.passed_by(choice), *self._reporter.left_out(rest)]
        await self._leader.retention.ended()
        if not found:
            self._reporter.nothing_found()
        return report

    async def _publish_whole(self, candidate: CheckpointCandidate) -> Published | NotPublished:
        """Publish a checkpoint whose files are all there."""
        try:
            current = self._current = await self._open_attempt(candidate)
            for unit in current.pending(candidate):
                await current.ingest(unit)
            sealed = await self._seal(current)
            return Published(candidate.relative, sealed.version, sealed.step, tuple(candidate.passed_by))
        except CheckpointMisfit as error:
            skipped = self._skip_misfit(error)
            candidate.refusal = error.message
        except SourceChanged as error:
            self._emit(Degraded(what=f"not published: {candidate.relative}: {error.message}"))
            cause: Cause = "refused" if isinstance(error, ContentMismatch) else "incomplete"
            skipped = NotPublished(candidate.relative, cause, error.message, error.hint)
        await self._abort_current(skipped.reason)
        return skipped

    async def _step(self) -> bool:
        """Do one thing, or find that there is nothing to do (False). Failures that may pass are retried later."""
        try:
            if self._abort_reason is not None:
                await self._abort_current(self._abort_reason)
            elif self._damaged:
                await self._leader.repair()
                self._damaged = False
            else:
                return await self._advance(await self._scan())
        except CheckpointMisfit as error:
            self._skip_misfit(error)
            self._abort_reason = error.message if self._current else None
        except SourceChanged as error:
            self._abort_reason = error.message
            if current := self._current:
                if isinstance(error, ContentMismatch):
                    self._scanner.mark_refused(current.relative, current.identity, why=error.message)
                self._selection.postpone(current.relative, self._retry_delay(current.relative))
        except StoreUnavailable as error:
            self._emit(Retrying(what=f"the bucket: {error.message}"))
            self._abort_reason = self._abort_reason or (f"StoreUnavailable: {error.message}" if self._current else None)
            await runtime.sleep(STORE_PAUSE)
        return True

    @property
    def _scan_is_due(self) -> bool:
        # After a sleep of an interval it must be, and differences of times are rounded.
        return runtime.monotonic() - self._last_timed_scan >= 0.99 * self._interval

    async def _scan(self) -> Candidates:
        timed = self._scan_is_due
        if timed:
            self._last_timed_scan = runtime.monotonic()
        found = await self._leader.context.workers.run(self._scanner.scan, self._leader.layout, timed)
        self._reporter.scanned(found, unread=self._scanner.unread)
        self._selection.forget_except(found)
        if self._options.marker is None and not self._told_blind_spot and (why := self._scanner.blind_spot):
            self._told_blind_spot = True
            unchanged = "a file that nobody is seen closing counts as complete when some scans find it unchanged"
            self._emit(Degraded(what=f"{why}: {unchanged}; --marker NAME is safer"))
        return found

    async def _advance(self, found: Candidates) -> bool:
        """Take the attempt under way, or a new one, one step further; False if everything waits for files."""
        choice = self._selection.choose(found)
        self._reporter.passed_by(choice)
        ready = self._selection.ready(choice, found)
        if self._current is None:
            selected = ready[0] if ready else self._selection.being_written(found)
            if selected is None:
                self._reporter.waiting(found, watched=self._events.found)
                return False
            self._current = await self._open_attempt(selected)
        current, candidate = self._current, found.get(self._current.relative)
        if reason := self._why_abort(current, candidate, ready):
            self._abort_reason = reason
            return True
        assert candidate is not None
        if pending := current.pending(candidate):
            await self._ingest_until_next_scan(current, pending)
        elif candidate in ready:
            await self._seal(current)
        else:
            self._reporter.waiting(found, watched=self._events.found)
            return False
        return True

    async def _ingest_until_next_scan(
        self, current: CheckpointIngest, pending: Sequence[CompleteFile] | Sequence[CompletePieces]
    ) -> None:
        """Ingest one, and as many more as the time to the next timed scan allows.

        A scan tells whether another checkpoint goes first, and costs as much as there are files.
        """
        for unit in pending:
            await current.ingest(unit)
            if self._scan_is_due:
                return

    async def _open_attempt(self, candidate: CheckpointCandidate) -> CheckpointIngest:
        whole = self._selection.is_whole(candidate)
        check_headers(candidate, self._leader.layout, ignore=self._options.ignore, whole=whole)
        self._reporter.not_read(candidate)
        attempt = await self._leader.begin(step=candidate.step)
        return CheckpointIngest(
            self._leader, attempt, relative=candidate.relative, ignore=self._options.ignore, tied=self._tied,
            emit=self._emit,
        )  # fmt: skip

    def _why_abort(
        self, current: CheckpointIngest, candidate: CheckpointCandidate | None, ready: list[CheckpointCandidate]
    ) -> str:
        """Why the attempt under way must not go on; empty if it may. Raises `SourceChanged` like `current.check`."""
        if candidate is None:
            return f"{current.relative} vanished"
        current.check()
        if candidate.refusal:
            return f"{current.relative}: {candidate.refusal}"
        if lost := current.lost_files(candidate):
            return f"{current.relative}: {shorten(lost)} does not belong to it any more"
        if ready and ready[0] is not candidate:
            older = candidate in ready and ready[0].order < candidate.order
            relation = "is older than" if older else "was complete before"
            return f"{ready[0].relative} {relation} {current.relative}"
        return ""

    async def _seal(self, current: CheckpointIngest) -> SealedVersion:
        sealed = await current.finish_and_seal(self._scanner.newest_ns)
        self._current, self._failures = None, {}
        current.close()
        self._reporter.followed(current.followed)
        self._mark_published(current.relative, current.identity)
        runtime.failpoint("publish.remembered")
        try:
            await self._leader.anchor_if_due()
        except StoreUnavailable as error:
            self._emit(Degraded(what=f"no anchor now; the next version tries again: {error.message}"))
        return sealed

    async def _abort_current(self, reason: str) -> None:
        """Abort the attempt under way. If it turns out to be sealed after all, it is a version like any other."""
        sealed = await self._leader.abort_unless_sealed(reason)
        current, self._current, self._abort_reason = self._current, None, None
        if current is None:
            return
        current.close()
        if sealed:
            self._mark_published(current.relative, current.identity)
        else:
            self._selection.mark_abandoned(current.relative, current.identity)

    def _mark_published(self, relative: str, identity: frozenset[FileIdentity]) -> None:
        self._scanner.mark_published(relative, identity)
        self._selection.mark_published(relative, identity)

    def _retry_delay(self, name: str) -> float:
        """Seconds until the next try at a checkpoint that could not be read to its end.

        Zero after its first failure: a trainer that keeps its newest few checkpoints takes away the oldest. A publisher
        that pauses then finds the next one gone as well, and never catches up.
        """
        failures = self._failures[name] = self._failures.get(name, 0) + 1
        return min(self._interval * 2 ** min(failures - 1, 10), RETRY_DELAY_LIMIT) if failures > 1 else 0.0

    async def _wait(self) -> None:
        """Wait for a file event or the next timed scan; the leader's idle checks run meanwhile."""
        changed = self._wait_for_change(self._scanner.files_found * SCAN_REST)
        # The checks return (None) only when they have found damage in the baseline; they raise `Fenced`.
        if await runtime.run_until_first(self._leader.run_idle_checks(), changed) is None:
            self._damaged = True
        self._events.changed.clear()

    async def _wait_for_change(self, rest: float) -> bool:
        """Wait for a file event, but at least `rest` seconds: files that come one by one are scanned together."""
        await runtime.sleep(min(rest, self._interval))
        return await runtime.wait_event(self._events.changed, self._interval - min(rest, self._interval))

    def _skip_misfit(self, error: CheckpointMisfit) -> NotPublished:
        """Pass by a checkpoint that does not fit, until its files change: the others must not wait for a person."""
        self._selection.mark_misfit(error.relative)
        self._scanner.mark_refused(error.relative, error.identity, why=error.message)
        return self._reporter.misfit(error)


def _excluded(options: WatchOptions, url: str) -> list[Path]:
    """Directories that hold safetensors files of their own: the base, the state, and a bucket in a directory."""
    bucket = [Path(unquote(urlsplit(url).path))] if url.startswith("file:") else []
    return [options.state, *bucket, *([options.base] if options.base else [])]

"""`dcr publish --watch`: checkpoints that any framework writes below a directory become versions.

An attempt opens at the first complete file of a checkpoint and takes up the others as they come; of a checkpoint in
pieces (torch's distributed checkpoints, files of a sharded writer) it opens when all of them are there. It is aborted
and undone when a file that was read changes, when its directory vanishes, or when another checkpoint is complete first;
never by time. What was sealed is never published again: the seals say what they came from.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from dcr_daemon import runtime
from dcr_daemon.errors import DcrError, NotFound, StoreUnavailable
from dcr_daemon.events import Degraded, Emit, Notice, Retrying, Waiting
from dcr_daemon.publish.group.leader import Leader
from dcr_daemon.publish.group.opening import open_leader
from dcr_daemon.publish.inputs.model_config import read_config
from dcr_daemon.publish.inputs.sources import SourceChanged
from dcr_daemon.publish.options import PublishOptions
from dcr_daemon.publish.watch.candidate import CheckpointCandidate
from dcr_daemon.publish.watch.file_identity import FileIdentity, number_in
from dcr_daemon.publish.watch.ingest import CheckpointIngest, check_headers
from dcr_daemon.publish.watch.inotify import InotifyWatcher
from dcr_daemon.publish.watch.piece_reader import ContentMismatch
from dcr_daemon.publish.watch.published import read_published
from dcr_daemon.publish.watch.scanner import CheckpointScanner
from dcr_daemon.store.port import Store

SCAN_INTERVAL = 1.0  #: seconds between two timed looks beside inotify
RETRY_DELAY_LIMIT = 60.0  #: seconds between two tries at a checkpoint that changes or cannot be read, at most
STORE_PAUSE = 5.0  #: seconds before an unavailable bucket is tried again


@dataclass(frozen=True, slots=True, kw_only=True)
class WatchOptions(PublishOptions):
    """A watching publisher's choices, beside those of every publisher.

    `watch`: the directory below which checkpoints appear. `marker`: name of a file that completes a checkpoint
    (`STABLE`). `poll`: seconds between looks for file systems without inotify, None to use inotify.
    `once`: publish what is complete at the start, oldest first, and return. `newest`: of several complete
    checkpoints publish only the newest.
    """

    watch: Path
    marker: str | None = None
    poll: float | None = None
    once: bool = False
    newest: bool = False


async def run_watch(options: WatchOptions, store: Store, emit: Emit) -> None:
    """Publish every checkpoint that appears below `options.watch` until cancelled (or once).

    Raises:
        Fenced: another publisher owns the stream; do not restart.
        Incompatible: base, layout or store do not fit; the names are listed.
        NotFound: no stream there and `create` not given, or no such directory.
        UsageError: options that do not go together.
        ResourceExhausted: the state directory's disk is full.
    """
    if not options.watch.is_dir():
        raise NotFound(f"there is no directory {options.watch}", hint="make it before the publisher starts")
    session = await open_leader(options, store, emit)
    try:
        await Watcher(options, session, emit).run()
    except DcrError as error:
        with contextlib.suppress(DcrError):
            await session.settle(f"{type(error).__name__}: {error.message}")
        raise
    finally:
        await session.close()


class Watcher:
    """The loop around one session: look, decide, take up, seal."""

    def __init__(self, options: WatchOptions, session: Leader, emit: Emit) -> None:
        self._options, self._session, self._emit = options, session, emit
        self._interval = options.poll or SCAN_INTERVAL
        self._scanner = self._new_scanner(None)
        self._changed = asyncio.Event()
        self._last_scan = float("-inf")
        self._current: CheckpointIngest | None = None
        self._abort_reason: str | None = None
        self._failures: dict[str, int] = {}
        self._newest_number = -1
        self._published: set[str] = set()
        self._abandoned: dict[str, frozenset[FileIdentity]] = {}
        self._reported: dict[str, Notice] = {}
        self._notices: InotifyWatcher | None = None
        self._watched_inode: tuple[int, int] | None = None
        self._damaged = False

    def _new_scanner(self, config: Mapping[str, Any] | None) -> CheckpointScanner:
        options = self._options
        excluded = _excluded(options, self._session.ledger.store.url)
        return CheckpointScanner(options.watch, excluded, options.marker, options.ignore, config)

    async def run(self) -> None:
        """Until cancelled; with `once`, until what was complete at the start is published."""
        self._scanner = self._new_scanner(await read_config(self._session.ledger, self._options.base))
        cache = self._session.state.path / "published.json"
        for source in await read_published(self._session.ledger, cache, self._options.watch):
            self._mark_published(source.path, source.identity)
        if self._options.once:
            await self._run_once()
            return
        try:
            while True:
                self._ensure_watching()
                if not await self._act():
                    await self._wait()
        finally:
            if self._notices:
                self._notices.close()
            if self._current:
                self._current.close()

    def _ensure_watching(self) -> None:
        """Have notices of the directory that bears the name now: it may have been moved away, and another made."""
        identity = self._watched_identity()
        if identity == self._watched_inode:
            return
        self._watched_inode = identity
        if self._notices:
            self._notices.close()
            self._notices = None
        if identity and not self._options.poll:
            self._notices = InotifyWatcher(self._options.watch, self._scanner, self._changed)

    def _watched_identity(self) -> tuple[int, int] | None:
        """Device and inode of the watched directory; None while it is not there."""
        try:
            stat = self._options.watch.stat()
        except OSError:
            return None
        return stat.st_dev, stat.st_ino

    async def _wait(self) -> None:
        """Until something changed, or the next look is due; the session is tended meanwhile."""
        changed = runtime.wait_event(self._changed, self._interval)
        # The checks return (None) only when they have found damage in the baseline; they raise `Fenced`.
        if await runtime.run_until_first(self._session.run_idle_checks(), changed) is None:
            self._damaged = True
        self._changed.clear()

    async def _run_once(self) -> None:
        await self._scan()
        await runtime.sleep(self._interval)
        found = await self._scan()
        for checkpoint in self._complete(found):
            current = self._current = await self._open_attempt(checkpoint)
            try:
                for file in current.pending(checkpoint):
                    await current.ingest(file)
                await self._seal(current)
            finally:
                current.close()
        for notice in self._lacks(found).values():
            self._emit(Degraded(what=f"not published: {notice.what}"))
        await self._session.retention.ended()
        if not found:
            self._emit(Waiting(what=f"nothing to publish: no complete checkpoint below {self._options.watch} is new"))

    async def _scan(self) -> dict[str, CheckpointCandidate]:
        now = runtime.monotonic()
        timed = now - self._last_scan >= self._interval
        if timed:
            self._last_scan = now
        return await self._session.workers.run(self._scanner.scan, self._session.layout, timed)

    async def _act(self) -> bool:
        """One look and at most one thing done; tells whether it was."""
        try:
            if self._abort_reason is not None:
                await self._abort_current(self._abort_reason)
            elif self._damaged:
                await self._session.repair()
                self._damaged = False
            else:
                return await self._advance(await self._scan())
        except SourceChanged as error:
            self._abort_reason = error.message
            if isinstance(error, ContentMismatch) and self._current:
                self._scanner.mark_refused(self._current.relative, self._current.identity, error.message)
            await runtime.sleep(self._retry_delay())
        except StoreUnavailable as error:
            self._emit(Retrying(what=f"the bucket: {error.message}"))
            self._abort_reason = self._abort_reason or (f"StoreUnavailable: {error.message}" if self._current else None)
            await runtime.sleep(STORE_PAUSE)
        return True

    def _retry_delay(self) -> float:
        """Seconds until the next try. None where a checkpoint fails for the first time: a trainer that keeps its newest
        few takes away the oldest, and whoever rests then finds the next one gone as well, and never catches up."""
        name = self._current.relative if self._current else ""
        tries = self._failures[name] = self._failures.get(name, -1) + 1
        return min(self._interval * 2 ** min(tries, 10), RETRY_DELAY_LIMIT) if tries else 0.0

    async def _advance(self, found: dict[str, CheckpointCandidate]) -> bool:
        complete = _in_order(self._complete(found), found)
        if self._current is None:
            choice = complete[0] if complete else self._oldest_partial(found)
            if choice is None:
                self._report_waiting(found)
                return False
            self._current = await self._open_attempt(choice)
        current, checkpoint = self._current, found.get(self._current.relative)
        if why := self._why_abort(current, checkpoint, complete):
            self._abort_reason = why
            return True
        assert checkpoint is not None
        if wanted := current.pending(checkpoint):
            await current.ingest(wanted[0])
        elif checkpoint in complete:
            await self._seal(current)
        else:
            self._report_waiting(found)
            return False
        return True

    def _complete(self, found: dict[str, CheckpointCandidate]) -> list[CheckpointCandidate]:
        """Checkpoints to be published as they are, oldest first. One to which nothing will be added counts even if it
        lacks tensors: it is an error that must be told."""
        layout, marker = self._session.layout, self._options.marker is not None
        ready = [f for f in found.values() if not f.lacks(layout) or f.is_final(marker=marker)]
        ready.sort(key=lambda checkpoint: checkpoint.order)
        if self._options.newest:
            return [f for f in ready if f.relative in self._published or self._is_new(f)][-1:]
        return ready

    def _oldest_partial(self, found: dict[str, CheckpointCandidate]) -> CheckpointCandidate | None:
        """The checkpoint being written, if any of its files is complete. One older than the newest version, or that
        was overtaken, is left alone until it is complete: most such are remains of a crash."""
        partial = [
            f
            for f in found.values()
            if f.files and not f.in_pieces and self._is_new(f) and self._abandoned.get(f.relative) != f.identity
        ]
        return min(_in_order(partial, found), key=lambda checkpoint: checkpoint.order, default=None)

    def _is_new(self, checkpoint: CheckpointCandidate) -> bool:
        return checkpoint.number is None or checkpoint.number > self._newest_number

    def _why_abort(
        self, current: CheckpointIngest, checkpoint: CheckpointCandidate | None, complete: list[CheckpointCandidate]
    ) -> str:
        """Why the attempt under way must not go on; empty if it may."""
        if checkpoint is None:
            return f"{current.relative} vanished"
        current.check()
        if checkpoint.refusal:
            return f"{current.relative}: {checkpoint.refusal}"
        if strangers := current.identity - checkpoint.identity:
            names = ", ".join(sorted(identity.name for identity in strangers))
            return f"{current.relative}: {names} does not belong to it any more"
        if complete and complete[0] is not checkpoint:
            how = "is older than" if checkpoint in complete else "was complete before"
            return f"{complete[0].relative} {how} {current.relative}"
        return ""

    async def _open_attempt(self, checkpoint: CheckpointCandidate) -> CheckpointIngest:
        if checkpoint in self._complete({checkpoint.relative: checkpoint}):
            check_headers(checkpoint, self._session.layout, self._options.ignore)
        attempt = await self._session.begin(step=checkpoint.number)
        return CheckpointIngest(self._session, attempt, checkpoint.relative, self._options.ignore, self._emit)

    async def _seal(self, current: CheckpointIngest) -> None:
        await current.seal()
        self._current, self._failures = None, {}
        current.close()
        self._mark_published(current.relative, current.identity)
        runtime.failpoint("publish.remembered")
        try:
            await self._session.anchor_if_due()
        except StoreUnavailable as error:
            self._emit(Degraded(what=f"no anchor now; the next version tries again: {error.message}"))

    async def _abort_current(self, why: str) -> None:
        """End the attempt under way. If it turns out to be sealed after all, it is a version like any other."""
        sealed = await self._session.settle(why)
        current, self._current, self._abort_reason = self._current, None, None
        if current is None:
            return
        current.close()
        if sealed:
            self._mark_published(current.relative, current.identity)
        else:
            self._abandoned[current.relative] = current.identity

    def _mark_published(self, relative: str, identity: frozenset[FileIdentity]) -> None:
        """This is a version now, and never taken up again."""
        self._scanner.mark_published(relative, identity)
        self._published.add(relative)
        number = number_in(relative)
        self._newest_number = max(self._newest_number, -1 if number is None else number)

    def _report_waiting(self, found: dict[str, CheckpointCandidate]) -> None:
        """Tell what is waited for, each thing once."""
        waits = self._lacks(found)
        if not waits:
            gone = "" if self._watched_inode else ", which is not there any more"
            waits = {"": Waiting(what=f"a checkpoint below {self._options.watch}{gone}")}
        for name, notice in waits.items():
            if self._reported.get(name) != notice:
                self._emit(notice)
        self._reported = waits

    def _lacks(self, found: dict[str, CheckpointCandidate]) -> dict[str, Notice]:
        """For each checkpoint that is not complete or was refused, what it lacks."""
        lacks = {name: (checkpoint, checkpoint.lacks(self._session.layout)) for name, checkpoint in found.items()}
        return {
            name: Degraded(what=f"{name} is refused: {what}")
            if checkpoint.refusal
            else Waiting(what=f"{name} is incomplete: {what}")
            for name, (checkpoint, what) in lacks.items()
            if what
        }


def _in_order(
    candidates: list[CheckpointCandidate], found: dict[str, CheckpointCandidate]
) -> list[CheckpointCandidate]:
    """Those of the candidates that no older checkpoint may turn out to go before.

    A file that was closed before inotify watched its directory is known to be complete two looks later than its
    successors. One of a checkpoint that is really being written holds nobody up.
    """
    undetermined = [other.number for other in found.values() if other.undetermined and other.number is not None]
    return [f for f in candidates if f.number is None or not any(number < f.number for number in undetermined)]


def _excluded(options: WatchOptions, url: str) -> list[Path]:
    """The base, the state and a bucket in a directory hold safetensors files of their own."""
    bucket = [Path(unquote(urlsplit(url).path))] if url.startswith("file:") else []
    return [options.state, *bucket, *([options.base] if options.base else [])]

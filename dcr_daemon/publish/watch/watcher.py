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
from dcr_daemon.events import Emit, Waiting
from dcr_daemon.publish.group.leader import Leader
from dcr_daemon.publish.group.opening import open_session
from dcr_daemon.publish.inputs.model_config import read_config
from dcr_daemon.publish.inputs.sources import SourceChanged
from dcr_daemon.publish.options import PublishOptions
from dcr_daemon.publish.watch.candidate import Found
from dcr_daemon.publish.watch.file_identity import FileIdentity, number_in
from dcr_daemon.publish.watch.history import read_published
from dcr_daemon.publish.watch.ingest import CheckpointIngest, check_headers
from dcr_daemon.publish.watch.inotify import InotifyWatcher
from dcr_daemon.publish.watch.pieces import NotAsPromised
from dcr_daemon.publish.watch.scanner import CheckpointScanner
from dcr_daemon.store.port import Store

LOOK = 1.0  #: seconds between two timed looks beside inotify
SETBACK_LIMIT = 60.0  #: seconds between two tries at a checkpoint that changes or cannot be read, at most
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
    session = await open_session(options, store, emit)
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
        self._interval = options.poll or LOOK
        self._survey = self._new_survey(None)
        self._changed = asyncio.Event()
        self._last_look = float("-inf")
        self._current: CheckpointIngest | None = None
        self._dying: str | None = None
        self._setbacks: dict[str, int] = {}
        self._newest = -1
        self._published: set[str] = set()
        self._given_up: dict[str, frozenset[FileIdentity]] = {}
        self._said: dict[str, str] = {}
        self._notices: InotifyWatcher | None = None
        self._watched: tuple[int, int] | None = None
        self._damaged = False

    def _new_survey(self, config: Mapping[str, Any] | None) -> CheckpointScanner:
        options = self._options
        excluded = _excluded(options, self._session.ledger.store.url)
        return CheckpointScanner(options.watch, excluded, options.marker, options.ignore, config)

    async def run(self) -> None:
        """Until cancelled; with `once`, until what was complete at the start is published."""
        self._survey = self._new_survey(await read_config(self._session.ledger, self._options.base))
        kept = self._session.state.path / "published.json"
        for source in await read_published(self._session.ledger, kept, self._options.watch):
            self._remember(source.path, source.identity)
        if self._options.once:
            await self._run_once()
            return
        try:
            while True:
                self._attend()
                if not await self._turn():
                    await self._wait()
        finally:
            if self._notices:
                self._notices.close()
            if self._current:
                self._current.close()

    def _attend(self) -> None:
        """Have notices of the directory that bears the name now: it may have been moved away, and another made."""
        place = self._place()
        if place == self._watched:
            return
        self._watched = place
        if self._notices:
            self._notices.close()
            self._notices = None
        if place and not self._options.poll:
            self._notices = InotifyWatcher(self._options.watch, self._survey, self._changed)

    def _place(self) -> tuple[int, int] | None:
        """Device and inode of the watched directory; None while it is not there."""
        try:
            stat = self._options.watch.stat()
        except OSError:
            return None
        return stat.st_dev, stat.st_ino

    async def _wait(self) -> None:
        """Until something changed, or the next look is due; the session is tended meanwhile."""
        changed, tending = asyncio.ensure_future(self._changed.wait()), asyncio.ensure_future(self._session.tend())
        try:
            await asyncio.wait((changed, tending), timeout=self._interval, return_when=asyncio.FIRST_COMPLETED)
        finally:
            changed.cancel()
            tending.cancel()
            await asyncio.wait((changed, tending))
        self._changed.clear()
        if not tending.cancelled():
            tending.result()  # raises `Fenced`; else the baseline is damaged
            self._damaged = True

    async def _run_once(self) -> None:
        await self._look()
        await runtime.sleep(self._interval)
        found = await self._look()
        for checkpoint in self._complete(found):
            current = self._current = await self._begin(checkpoint)
            try:
                for file in current.wants(checkpoint):
                    await current.take(file)
                await self._seal(current)
            finally:
                current.close()
        for what in self._lacks(found).values():
            self._emit(Waiting(what=f"not published: {what}"))
        await self._session.retention.ended()
        if not found:
            self._emit(Waiting(what=f"nothing to publish: no complete checkpoint below {self._options.watch} is new"))

    async def _look(self) -> dict[str, Found]:
        now = runtime.monotonic()
        timed = now - self._last_look >= self._interval
        if timed:
            self._last_look = now
        return await self._session.workers.run(self._survey.look, self._session.layout, timed)

    async def _turn(self) -> bool:
        """One look and at most one thing done; tells whether it was."""
        try:
            if self._dying is not None:
                await self._bury(self._dying)
            elif self._damaged:
                await self._session.repair()
                self._damaged = False
            else:
                return await self._step(await self._look())
        except SourceChanged as error:
            self._dying = error.message
            if isinstance(error, NotAsPromised) and self._current:
                self._survey.refuse(self._current.relative, self._current.identity, error.message)
            await runtime.sleep(self._setback())
        except StoreUnavailable as error:
            self._emit(Waiting(what=f"the bucket: {error.message}"))
            self._dying = self._dying or (f"StoreUnavailable: {error.message}" if self._current else None)
            await runtime.sleep(STORE_PAUSE)
        return True

    def _setback(self) -> float:
        """Seconds until the next try. None where a checkpoint fails for the first time: a trainer that keeps its newest
        few takes away the oldest, and whoever rests then finds the next one gone as well, and never catches up."""
        name = self._current.relative if self._current else ""
        tries = self._setbacks[name] = self._setbacks.get(name, -1) + 1
        return min(self._interval * 2 ** min(tries, 10), SETBACK_LIMIT) if tries else 0.0

    async def _step(self, found: dict[str, Found]) -> bool:
        complete = _in_order(self._complete(found), found)
        if self._current is None:
            choice = complete[0] if complete else self._first_partial(found)
            if choice is None:
                self._say(found)
                return False
            self._current = await self._begin(choice)
        current, checkpoint = self._current, found.get(self._current.relative)
        if why := self._void(current, checkpoint, complete):
            self._dying = why
            return True
        assert checkpoint is not None
        if wanted := current.wants(checkpoint):
            await current.take(wanted[0])
        elif checkpoint in complete:
            await self._seal(current)
        else:
            self._say(found)
            return False
        return True

    def _complete(self, found: dict[str, Found]) -> list[Found]:
        """Checkpoints to be published as they are, oldest first. One to which nothing will be added counts even if it
        lacks tensors: it is an error that must be told."""
        layout, marker = self._session.layout, self._options.marker is not None
        ready = [f for f in found.values() if not f.lacks(layout) or f.ended(marker=marker)]
        ready.sort(key=lambda checkpoint: checkpoint.order)
        if self._options.newest:
            return [f for f in ready if f.relative in self._published or self._is_new(f)][-1:]
        return ready

    def _first_partial(self, found: dict[str, Found]) -> Found | None:
        """The checkpoint being written, if any of its files is complete. One older than the newest version, or that
        was overtaken, is left alone until it is complete: most such are remains of a crash."""
        partial = [
            f
            for f in found.values()
            if f.files and not f.in_pieces and self._is_new(f) and self._given_up.get(f.relative) != f.identity
        ]
        return min(_in_order(partial, found), key=lambda checkpoint: checkpoint.order, default=None)

    def _is_new(self, checkpoint: Found) -> bool:
        return checkpoint.number is None or checkpoint.number > self._newest

    def _void(self, current: CheckpointIngest, checkpoint: Found | None, complete: list[Found]) -> str:
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

    async def _begin(self, checkpoint: Found) -> CheckpointIngest:
        if checkpoint in self._complete({checkpoint.relative: checkpoint}):
            check_headers(checkpoint, self._session.layout, self._options.ignore)
        attempt = await self._session.begin(step=checkpoint.number)
        return CheckpointIngest(self._session, attempt, checkpoint.relative, self._options.ignore, self._emit)

    async def _seal(self, current: CheckpointIngest) -> None:
        await current.seal()
        self._current, self._setbacks = None, {}
        current.close()
        self._remember(current.relative, current.identity)
        runtime.failpoint("publish.remembered")
        try:
            await self._session.anchor_if_due()
        except StoreUnavailable as error:
            self._emit(Waiting(what=f"an anchor, tried again after the next version: {error.message}"))

    async def _bury(self, why: str) -> None:
        """End the attempt under way. If it turns out to be sealed after all, it is a version like any other."""
        sealed = await self._session.settle(why)
        current, self._current, self._dying = self._current, None, None
        if current is None:
            return
        current.close()
        if sealed:
            self._remember(current.relative, current.identity)
        else:
            self._given_up[current.relative] = current.identity

    def _remember(self, relative: str, identity: frozenset[FileIdentity]) -> None:
        """This is a version now, and never taken up again."""
        self._survey.published(relative, identity)
        self._published.add(relative)
        number = number_in(relative)
        self._newest = max(self._newest, -1 if number is None else number)

    def _say(self, found: dict[str, Found]) -> None:
        """Tell what is waited for, each thing once."""
        waits = self._lacks(found)
        if not waits:
            gone = "" if self._watched else ", which is not there any more"
            waits = {"": f"a checkpoint below {self._options.watch}{gone}"}
        for name, text in waits.items():
            if self._said.get(name) != text:
                self._emit(Waiting(what=text))
        self._said = waits

    def _lacks(self, found: dict[str, Found]) -> dict[str, str]:
        """In a sentence for each checkpoint that is not complete, what it lacks."""
        lacks = {name: (checkpoint, checkpoint.lacks(self._session.layout)) for name, checkpoint in found.items()}
        return {
            name: f"{name} is {'refused' if checkpoint.refusal else 'incomplete'}: {what}"
            for name, (checkpoint, what) in lacks.items()
            if what
        }


def _in_order(candidates: list[Found], found: dict[str, Found]) -> list[Found]:
    """Those of the candidates that no older checkpoint may turn out to go before.

    A file that was closed before inotify watched its directory is known to be complete two looks later than its
    successors. One of a checkpoint that is really being written holds nobody up.
    """
    fresh = [other.number for other in found.values() if other.fresh and other.number is not None]
    return [f for f in candidates if f.number is None or not any(number < f.number for number in fresh)]


def _excluded(options: WatchOptions, url: str) -> list[Path]:
    """The base, the state and a bucket in a directory hold safetensors files of their own."""
    bucket = [Path(unquote(urlsplit(url).path))] if url.startswith("file:") else []
    return [options.state, *bucket, *([options.base] if options.base else [])]

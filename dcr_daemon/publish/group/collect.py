"""Rank 0 waits until one object of every rank of its group is there: a declaration, a part, a share of an anchor.

LIST is only a hint: what it names is read and judged by its content. A rank that writes a `fail` object ends the wait.
No clock ends it (must P7): until the trainer is in its next call, a missing rank is waited for, and an event says so.
From then on (`lag_began`), the missing ranks are given up when none of them puts an object for `lag` seconds.
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable
from functools import partial

from dcr_daemon import runtime
from dcr_daemon.errors import Corrupt, KeyNotFound, StoreUnavailable, UpdateAborted
from dcr_daemon.events import Emit, Retrying, Waiting
from dcr_daemon.ledger import records
from dcr_daemon.ledger.records import PART_LIMIT
from dcr_daemon.publish.rank import Rank
from dcr_daemon.store.poller import Poller
from dcr_daemon.store.port import Store
from dcr_daemon.task_limiter import run_limited
from dcr_daemon.wording import shorten_ranks

FEW = 8  #: missing ranks up to which each is listed by itself, without the chunks of those that are there
_FIRST, _LAST = 0.02, 1.0  #: seconds between two looks


class ObjectCollector:
    """Objects of one group below `prefix`, found by their names `<group>-<rank>-<nonce><suffix>`.

    Args:
        check: called now and then while it waits; what it raises ends the wait.
        lag: seconds without a new object of any missing rank after which the missing ranks are given up.
        lag_began: when the trainer's next call began, on `runtime.monotonic`; None while it has not.
    """

    def __init__(
        self,
        store: Store,
        rank: Rank,
        prefix: str,
        *,
        lag: float,
        lag_began: Callable[[], float | None],
        check: Callable[[], Awaitable[None]],
        emit: Emit,
    ) -> None:
        self._store, self._rank, self._prefix = store, rank, prefix
        self._lag, self._lag_began, self._check, self._emit = lag, lag_began, check, emit
        self._name = re.compile(rf"{re.escape(prefix + rank.group)}-(0|[1-9][0-9]*)-([a-z0-9]+)(.*)")
        self._seen: set[str] = set()
        self._moved = runtime.monotonic()

    async def all(self, suffix: str, *, what: str) -> dict[int, str]:
        """Key of every other rank's object, by rank.

        Raises:
            UpdateAborted: a rank failed, or lags; the message says which and why.
            Corrupt: two processes say that they are one rank.
        """
        found: dict[int, str] = {}
        missing = list(range(1, self._rank.world))
        poller = Poller(first=_FIRST, longest=_LAST)
        while missing:
            if await self._look(missing, suffix, found):
                poller.reset()
                self._moved = runtime.monotonic()
            missing = [n for n in missing if n not in found]
            if not missing:
                break
            self._check_lag(missing, what)
            if poller.report_due():
                self._emit(Waiting(what=f"{what} of {shorten_ranks(missing)}"))
                await self._check()
            await poller.pause()
        return found

    async def _look(self, missing: list[int], suffix: str, found: dict[int, str]) -> bool:
        """Whether anything of a missing rank is new; what is found is put into `found`."""
        group, moved = f"{self._prefix}{self._rank.group}-", False

        async def look(prefix: str) -> None:
            nonlocal moved
            try:
                async for entry in self._store.list(prefix):
                    if await self._take(entry.key, missing, suffix, found):
                        moved = True  # not `|=`, which would read it before the `await`
            except StoreUnavailable as error:
                self._emit(Retrying(what=f"the store of {self._store.url}: {error.message}"))

        prefixes = [f"{group}{n}-" for n in missing] if len(missing) <= FEW else [group]
        await run_limited([partial(look, prefix) for prefix in prefixes], FEW)
        return moved

    async def _take(self, key: str, missing: list[int], suffix: str, found: dict[int, str]) -> bool:
        match = self._name.fullmatch(key)
        if match is None or int(match[1]) not in missing:
            return False
        number = int(match[1])
        if match[3] == suffix:
            if found.get(number, key) != key:
                raise Corrupt(
                    f"two processes are rank {number} of group {self._rank.group}: {found[number]} and {key}",
                    hint="end all processes of the group and start it anew",
                )
            found[number] = key
        elif match[3] == ".fail.json":
            await self._failed(number, key)
        new = key not in self._seen
        self._seen.add(key)
        return new

    async def _failed(self, number: int, key: str) -> None:
        try:
            fail = records.decode_fail(await self._store.get(key, limit=PART_LIMIT))
        except KeyNotFound:
            return
        except ValueError as error:
            raise UpdateAborted(f"rank {number} failed, and its reason cannot be read: {error}") from error
        raise UpdateAborted(f"rank {number} gave the update up: {fail.reason}")

    def _check_lag(self, missing: list[int], what: str) -> None:
        began = self._lag_began()
        if began is not None and runtime.monotonic() - max(began, self._moved) > self._lag:
            raise UpdateAborted(
                f"{what} of {shorten_ranks(missing)} did not come, nothing else of theirs for {self._lag:g} s, and "
                "the next update has begun",
                hint="the next version brings what this one would have; a rank that is dead has to be started anew",
            )

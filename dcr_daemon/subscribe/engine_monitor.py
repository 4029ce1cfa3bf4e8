"""Checks the engine at intervals while the driver waits for something else (a record, a download).

A restarted engine waits, paused, for somebody to prove it; a fenced subscriber must stop; weights that somebody wrote,
or that a scrub found damaged, must be repaired. All of that is noticed within a heartbeat, whether or not there is a
new version, a working store, or a download that takes hours.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from dcr_daemon import runtime
from dcr_daemon.engine.port import Engine, EngineGone
from dcr_daemon.subscribe.scrub import Scrub

T = TypeVar("T")
ANSWER = 60.0  #: seconds that an engine may take to say what it is; one step of a model does not take as long


class EngineMonitor:
    """Monitors one engine.

    Args:
        heartbeat: seconds between two checks.
        notice: called at each check with whether the engine generates.
    """

    def __init__(self, engine: Engine, scrub: Scrub, *, heartbeat: float, notice: Callable[[bool], None]) -> None:
        self._engine, self._scrub, self._heartbeat, self._notice = engine, scrub, heartbeat, notice

    async def run_while_healthy(self, work: Coroutine[Any, Any, T], incarnation: str, *, version: int | None) -> T:
        """Await `work`, which asks nothing of the engine, as long as the engine is what the last attach found.

        Raises:
            Fenced: another subscriber has attached. `work` is cancelled.
            EngineGone: the engine went away, was restarted, or is no longer proved at `version`. `work` is cancelled.
            What `work` raises.
        """
        result: T = await runtime.run_until_first(work, self._watch_status(incarnation, version), self._watch_damage())
        return result

    async def wait_restarted(self, seconds: float) -> bool:
        """Wait until the engine goes away or is another incarnation than at first, at most `seconds`. Returns whether
        it did."""
        until, incarnation = runtime.monotonic() + seconds, ""
        while runtime.monotonic() < until:
            try:
                async with asyncio.timeout(ANSWER):
                    status = await self._engine.status()
            except EngineGone:
                return True
            except TimeoutError:
                pass
            else:
                if status.incarnation != (incarnation or status.incarnation):
                    return True
                incarnation = status.incarnation
            await runtime.sleep(self._heartbeat)
        return False

    async def _watch_status(self, incarnation: str, version: int | None) -> None:
        """Check the engine until something is wrong with it; raises that."""
        while True:
            await runtime.sleep(self._heartbeat)
            try:
                async with asyncio.timeout(ANSWER):
                    status = await self._engine.status()
            except TimeoutError:
                raise EngineGone(f"the engine has not answered for {ANSWER:.0f} s", hint="look at its log") from None
            if status.incarnation != incarnation:
                raise EngineGone("the engine was restarted", hint="attach again")
            if status.version != version:
                raise EngineGone(f"the engine is no longer proved at version {version}", hint="attach again")
            self._notice(status.serving)

    async def _watch_damage(self) -> None:
        raise EngineGone(await self._scrub.wait_damage(), hint="attach again")

"""The routes on which a version can be rebuilt, cheapest first, each around what was found damaged on the ones before.

Whoever rebuilds a version (the publisher its baseline, `dcr materialize` a checkpoint, a subscriber the tensors that an
engine's loader computes with) takes the routes from here in order and only applies them. A subscriber's driver, which
goes one step at a time and remembers damage longer than one rebuild, plans with `History.route` itself.
"""

from __future__ import annotations

from typing import Self

from dcr_daemon.errors import Corrupt, NotFound
from dcr_daemon.ledger.history import History
from dcr_daemon.ledger.route import Route


class Routes:
    """The routes to `target`, as an asynchronous iterator. Asking for the next one says that the last one failed.

    If the caller has added no damaged delta since then, nobody knows which object is to blame, and what the failed
    route started from is not used again. So the iteration ends. The first step raises `NotFound` if `target` is not
    sealed, `NoRoute`, with the reason, if there is no route at all, and `Corrupt` if damaged records stop every plan.

    Planning reads records further back than the route that it ends with may need. So where a damaged record stops it,
    it goes on without what is held, without the base, from the newest usable anchor alone, and from the chain alone.

    Args:
        held: a version that the caller holds and that the first try overwrites; only the first route starts from it.
        base: a version that the caller can load again for every try, that of a checkpoint on disk.

    Attributes:
        base: the argument; None once a route from it has failed and nobody knows why.
        damaged_anchors, damaged_deltas: versions whose anchor, or whose delta, cannot be used. The caller adds what it
            finds; no later route passes it.
        damage: the first damaged record that stopped a plan; None if there was none.

    Example:
        >>> routes = Routes(history, 7, base=0)
        >>> async for route in routes:
        ...     try:
        ...         return await build(route)
        ...     except Corrupt as error:
        ...         failures.append(error)
    """

    def __init__(self, history: History, target: int, *, held: int | None = None, base: int | None = None) -> None:
        self._history, self._target = history, target
        self._held, self.base = held, base
        self.damaged_anchors: set[int] = set()
        self.damaged_deltas: set[int] = set()
        self.damage: Corrupt | None = None
        self._last: Route | None = None
        self._start: int | None = None  #: what the last route was planned from
        self._known = 0  #: damaged deltas when the last route was given out

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Route:
        # No generator: one that is left half-way is closed by a task of its own, which outlives the caller.
        if self._last is None:
            self._start, self._last = await self._plan(*self._starts())
            return self._last
        if len(self.damaged_deltas) == self._known:
            if self._last.anchor is not None:
                self.damaged_anchors.add(self._last.anchor)
            elif self._start != self._held:
                self.base = None
        self._held, self._known = None, len(self.damaged_deltas)
        try:
            self._start, self._last = await self._plan(*self._starts())
        except (NotFound, Corrupt):
            raise StopAsyncIteration from None
        return self._last

    async def cheapest(self, have: int | None = None) -> Route:
        """The cheapest route from `have` (None: the base, if it may be used) that passes nothing damaged.

        Raises as `History.route`.
        """
        start = self.base if have is None else have
        _, route = await self._plan(*[] if start is None else [start])
        return route

    def _starts(self) -> list[int]:
        """What a chain may start from, preferred first. A damaged seal on the chain from one is on that from an older
        one too, so a base that is no newer than what is held is left for the next try."""
        starts = [] if self._held is None else [self._held]
        if self.base is not None and all(self.base > held for held in starts):
            starts.append(self.base)
        return starts

    async def _plan(self, *starts: int) -> tuple[int | None, Route]:
        """The cheapest route from the first of `starts` (from nothing if there is none), and that start. The others,
        nothing, and fewer anchors are for the case that a damaged record stops the plan."""
        plans: list[tuple[int | None, int | None]] = [(start, None) for start in starts]
        plans += [(None, None), (None, 1)]
        plans += [(start, 0) for start in starts]
        stopped: Corrupt | None = None
        for start, anchor_limit in plans:
            try:
                return start, await self._history.route(
                    start,
                    self._target,
                    avoid_anchors=self.damaged_anchors,
                    avoid_deltas=self.damaged_deltas,
                    anchor_limit=anchor_limit,
                )
            except NotFound:
                if stopped is None:
                    raise
            except Corrupt as error:
                stopped = stopped or error
                self.damage = self.damage or error
        assert stopped is not None, "a plan that was not stopped has returned or raised"
        raise stopped

"""Plans the cheapest route from a version to a newer one, by bytes: the chain, or an anchor and the chain. Pure.

`History.route` reads what the plan needs; `routes` yields one route after the other.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from dcr_daemon.errors import NotFound, UsageError


class NoRoute(NotFound):
    """There is no route to the version now; a later anchor may make one."""


@dataclass(frozen=True, slots=True)
class Route:
    """Load the anchor of version `anchor` unless it is None, then apply the deltas that lead to the versions `hops`.

    `bytes`: what has to be fetched for it.
    """

    anchor: int | None
    hops: tuple[int, ...]
    bytes: int

    def __str__(self) -> str:
        if self.anchor is not None:
            return f"the anchor of version {self.anchor}"
        return f"the chain from version {self.hops[0] - 1}" if self.hops else "what is held"


def plan_route(
    have: int | None, target: int, *, hops: Mapping[int, int], anchors: Mapping[int, int], floor: int
) -> Route:
    """The route of fewest bytes; of equal ones the chain before an anchor, then the newest anchor.

    Args:
        have: version held now, None if unknown or nothing.
        target: version to reach.
        hops: bytes of the delta that leads *to* each version, as far as known.
        anchors: bytes of the anchor of each version.
        floor: deltas and anchors of versions below it may be gone and are not used (must L5). Nor is a chain that
            starts below it: the vector that its first hop is checked against may be gone (version 0 keeps its own).

    Raises:
        UsageError: `target` is below `have`; a version never moves down (must E2).
        NoRoute: with what is missing.
    """
    if have == target:
        return Route(None, (), 0)
    if have is not None and have > target:
        raise UsageError(
            f"version {target} is below {have}", hint="going back is publishing old weights as a new version"
        )
    if target < floor:
        raise NoRoute(
            f"version {target} is below the floor: retention may have deleted it",
            hint=f"version {floor} is the oldest that can be had",
        )
    start = None if have and have < floor else have
    # From the target down: `cost` is the chain from `version` to it, as long as every hop is there.
    cost, best, version = 0, None, target
    while True:
        if version == start:
            best = (
                Route(None, tuple(range(version + 1, target + 1)), cost) if best is None or cost <= best.bytes else best
            )
            break
        if version in anchors and version >= floor and (best is None or cost + anchors[version] < best.bytes):
            best = Route(version, tuple(range(version + 1, target + 1)), cost + anchors[version])
        if version not in hops or version < floor or version == 0:
            break
        cost, version = cost + hops[version], version - 1
    if best is None:
        raise NoRoute(
            f"no route from {'nothing' if have is None else f'version {have}'} to version {target}: "
            + _why(have, version, any(floor <= anchor <= target for anchor in anchors), floor),
            hint="wait for the publisher's next anchor",
        )
    return best


def _why(have: int | None, version: int, anchored: bool, floor: int) -> str:
    """What stopped the way back from the target, at `version`."""
    if have is None and not anchored:
        return "there is no anchor at or below it (a base that was not uploaded has none)"
    if version < floor:
        return f"the delta of version {version} is below the floor {floor}"
    if version == 0:
        return "version 0 has no anchor (its checkpoint was not uploaded)"
    return f"the delta of version {version} is not there"

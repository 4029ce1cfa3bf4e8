"""Decides what may be deleted from a stream, and why (musts L5 to L8). Pure; the collector deletes.

    policy ─► floor ─► `floor` record, durable ─► deletes

A policy says what an operator wants kept; safety never rests on it. The floor goes no higher than a complete anchor
that the ledger names, so at any time some anchor at or above the floor, and the chain after it, lead from nothing to
the head. A wrong clock, in the `at` of a record or here, makes a stream keep more or less history than was asked for,
and does nothing else.

A decision stays right however old the knowledge that it was made on: the floor never falls. An attempt that was neither
sealed nor open at some tail that lies above it can never be sealed, since only its own `open` could have made it the
open one. An anchor is named after a seq that its writer had read, at least that of its own claim: once a newer epoch
or a release stands above that, no record can name it. A publisher writes one anchor at a time: once one is recorded,
whatever was begun before it has ended. Names are never used again (must L0). So LIST may be stale, two collectors may
work at once, and an object that arrives late is deleted by the next sweep. Keys that this module does not recognise are
never touched. The ledger is read after the listing, so an object of an attempt above its tail, or of a version that it
could not have opened, shows that the ledger has lost records: then nothing is deleted at all.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum

from dcr_daemon.errors import UsageError
from dcr_daemon.ledger import names
from dcr_daemon.ledger.records import State
from dcr_daemon.store.port import Entry

#: the prefixes that retention looks at; it never even lists the ledger, layouts or replica reports
PREFIXES = (names.DATA, names.ANCHORS, names.PROBES)

MAX_HOURS = 1e6  #: more than a century

_NUMBER = r"(0|[1-9][0-9]{0,18})"
_DATA = re.compile(
    rf"data/{_NUMBER}/{_NUMBER}/"
    r"(?:[^/]+\.(?:dcr|part\.json|sums|fail\.json|declaration)|[0-9]+\.verdict|fingerprint\.bin)"
)
_ANCHOR = re.compile(rf"anchors/{_NUMBER}/{_NUMBER}/.+")
_PROBE = re.compile(r"probe/[0-9a-f]+/[^/]+")


@dataclass(frozen=True, slots=True)
class RetentionPolicy:
    """Which versions an operator wants kept: the newest `versions`, and those sealed in the last `hours`.

    A version that either asks for is kept; with neither, every version is.
    """

    versions: int | None = None
    hours: float | None = None

    @classmethod
    def of(cls, versions: int | None, hours: float | None) -> RetentionPolicy:
        """The policy as an operator gives it; 0 and None both mean "not set". Raises `UsageError` for other values."""
        if (versions is not None and versions < 0) or (hours is not None and not 0 <= hours <= MAX_HOURS):
            raise UsageError(f"cannot keep {versions} versions, or those of {hours} hours", hint="0 keeps everything")
        return cls(versions or None, hours or None)

    @property
    def active(self) -> bool:
        return self.versions is not None or self.hours is not None

    def oldest(self, head: int, young: int | None) -> int:
        """The oldest version to keep. `young`: the oldest one sealed in the last `hours`; the head if none was."""
        wishes = [head] if self.active else [0]
        if self.versions is not None:
            wishes.append(head - self.versions + 1)
        if self.hours is not None and young is not None:
            wishes.append(young)
        return max(0, min(wishes))


@dataclass(frozen=True, slots=True)
class AnchorFact:
    """The newest anchor of a version.

    `seq`: of its record. `folders`: the prefixes of its objects (None: its index cannot be read). `wrong`: what is
    wrong with it (empty: it is complete; None: not checked).
    """

    version: int
    seq: int
    folders: frozenset[str] | None
    wrong: str | None = None


@dataclass(frozen=True, slots=True)
class Facts:
    """What the ledger says up to `tip`.

    `sealed`: the attempt that became each version at or above the floor of which an object is listed. `anchors`: the
    newest anchor of each version at or above the floor, newest first. `unexplained`: versions and attempts
    that this history does not explain.
    """

    tip: int
    state: State
    sealed: Mapping[int, int]
    anchors: Sequence[AnchorFact]
    unexplained: Collection[tuple[int, int]] = ()


class Why(Enum):
    """Why an object is deleted."""

    BELOW = "below the floor"
    UNSEALED = "its attempt was never sealed, and cannot be any more"
    SUPERSEDED = "a newer anchor of the same version is recorded"
    UNRECORDED = "an anchor that was never recorded, and cannot be any more"
    PROBE = "left over from a start-up probe"


class Kept(Enum):
    """Why an object stays."""

    NEEDED = "needed, or not to be judged yet"
    UNKNOWN = "no object of a stream"
    UNEXPLAINED = "of records that the ledger does not have"


@dataclass(frozen=True, slots=True)
class Item:
    """One object to delete. `version` and `attempt` are those in its key; None if the key has none."""

    key: str
    size: int
    why: Why
    version: int | None = None
    attempt: int | None = None


@dataclass(frozen=True, slots=True)
class FloorPlan:
    """`floor`: the new floor; `held`: why it is lower than the policy asks for (empty if it is not); `blocked`: it is
    lower because there is no complete anchor."""

    floor: int
    oldest: int
    held: str = ""
    blocked: bool = False


@dataclass(frozen=True, slots=True)
class Plan:
    """What is to be done: write `floor` unless it is the present one (`before`), then delete `items`.

    `kept`: number of objects that stay; `unknown`: keys that are not a stream's, which stay too and should be checked.
    `unexplained`: keys that the ledger should know of and does not; if there are any, nothing may be done.
    """

    before: int
    floor: FloorPlan
    items: tuple[Item, ...]
    kept: int
    kept_bytes: int
    unknown: tuple[str, ...]
    unexplained: tuple[str, ...] = ()

    @property
    def rises(self) -> bool:
        return self.floor.floor > self.before

    @property
    def bytes(self) -> int:
        return sum(item.size for item in self.items)


def plan_floor(oldest: int, floor: int, anchors: Iterable[AnchorFact]) -> FloorPlan:
    """The floor for keeping versions from `oldest` on: the newest complete anchor at or below it.

    The versions between that anchor and `oldest` stay, because they lead from the one to the other.
    """
    if oldest <= floor:
        return FloorPlan(floor, oldest)
    wrong = []
    for anchor in anchors:
        if floor <= anchor.version <= oldest:
            if not anchor.wrong:
                held = "" if anchor.version == oldest else _way(anchor.version, oldest)
                return FloorPlan(anchor.version, oldest, held)
            wrong.append(f"that of version {anchor.version} {anchor.wrong}")
    reason = f"there is no whole anchor at or below version {oldest}"
    if wrong:
        reason += f" ({'; '.join(wrong)})"
    return FloorPlan(floor, oldest, f"{_versions(floor, oldest - 1)} cannot go: {reason}", blocked=True)


def plan_retention(facts: Facts, floor: FloorPlan, *, listing: Iterable[Entry]) -> Plan:
    """Which objects of `listing` are to be deleted once the floor is durable."""
    judge = _Judge(facts, floor.floor)
    items, kept_bytes = list[Item](), 0
    kept: dict[Kept, list[str]] = {why: [] for why in Kept}
    for entry in listing:
        verdict = judge(entry)
        if isinstance(verdict, Item):
            items.append(verdict)
            continue
        kept[verdict].append(entry.key)
        kept_bytes += entry.size
    return Plan(
        facts.state.floor,
        floor,
        tuple(items),
        sum(map(len, kept.values())),
        kept_bytes,
        tuple(kept[Kept.UNKNOWN]),
        tuple(kept[Kept.UNEXPLAINED]),
    )


def listed_attempts(listing: Iterable[Entry]) -> set[tuple[int, int]]:
    """The versions and attempts of which an object below data/ is listed."""
    return {(int(found[1]), int(found[2])) for entry in listing if (found := _DATA.fullmatch(entry.key))}


class _Judge:
    """Called with a listed object: `Item` if it is to be deleted, else why it stays."""

    def __init__(self, facts: Facts, floor: int) -> None:
        self._facts, self._floor = facts, floor
        self._anchors = {anchor.version: anchor for anchor in facts.anchors}

    def __call__(self, entry: Entry) -> Item | Kept:
        if found := _DATA.fullmatch(entry.key):
            return self._data(entry, int(found[1]), int(found[2]))
        if found := _ANCHOR.fullmatch(entry.key):
            return self._anchor(entry, int(found[1]), int(found[2]))
        if _PROBE.fullmatch(entry.key):  # a probe that is under way notices it, and begins again
            return Item(entry.key, entry.size, Why.PROBE)
        return Kept.UNKNOWN

    def _data(self, entry: Entry, version: int, attempt: int) -> Item | Kept:
        facts, state = self._facts, self._facts.state
        if version == 0:  # the vector identifies an engine that holds the base, for ever
            return Kept.NEEDED if entry.key == names.vector(0, 0) else Kept.UNKNOWN
        if attempt > facts.tip or version > state.seal.version + 1 or (version, attempt) in facts.unexplained:
            return Kept.UNEXPLAINED
        if state.open and attempt == state.open.seq:
            return Kept.NEEDED
        if version < self._floor:
            return Item(entry.key, entry.size, Why.BELOW, version, attempt)
        if version <= state.seal.version and facts.sealed.get(version, attempt) == attempt:
            return Kept.NEEDED
        return Item(entry.key, entry.size, Why.UNSEALED, version, attempt)

    def _anchor(self, entry: Entry, version: int, attempt: int) -> Item | Kept:
        facts, state = self._facts, self._facts.state
        if attempt > facts.tip or version > state.seal.version:
            return Kept.UNEXPLAINED
        if version < self._floor:
            return Item(entry.key, entry.size, Why.BELOW, version, attempt)
        recorded = self._anchors.get(version)
        if recorded and (recorded.folders is None or names.anchor(version, attempt) in recorded.folders):
            return Kept.NEEDED
        if recorded and attempt < recorded.seq:
            return Item(entry.key, entry.size, Why.SUPERSEDED, version, attempt)
        ended = state.epoch is None or state.epoch.released or attempt < state.epoch.seq
        if ended or (state.anchor and attempt < state.anchor.seq):
            return Item(entry.key, entry.size, Why.UNRECORDED, version, attempt)
        return Kept.NEEDED  # the living publisher may be writing it now


def _way(anchor: int, oldest: int) -> str:
    them = "is the way" if anchor == oldest - 1 else "are the way"
    return f"{_versions(anchor, oldest - 1)} {them} from the anchor to version {oldest}, the oldest to keep"


def _versions(first: int, last: int) -> str:
    return f"version {first}" if first == last else f"versions {first} to {last}"

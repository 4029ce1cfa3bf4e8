"""Typed events. The packages emit them; logs, metrics, health, progress displays and the demo's table listen.

An event says what happened, in fields; its class gives its name (`kind_of`) and its level. The subclasses of `Notice`
(`Waiting`, `Retrying`, `Degraded`) carry a text for people instead of fields; no program may depend on that text.
Emitting is cheap and never raises.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import ClassVar, Literal

import msgspec

#: How bad an event is. `warning`: something was refused, given up, skipped or is repeated, or a replica is not ready.
#: `error`: data or ownership is at stake, an operator looks now. `debug`: many per version.
Level = Literal["debug", "info", "warning", "error"]


class Event(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Base of every event. Every class states its `level`."""

    level: ClassVar[Level]

    @property
    def severity(self) -> Level:
        """The level of this event: that of its class, unless its fields say otherwise."""
        return self.level


class Claimed(Event, frozen=True, kw_only=True):
    """`ousted`: who held the stream and had not released it. If it is the same name, that is this publisher's dead
    process, or another living one that was given this name and is fenced from now on."""

    level = "info"

    epoch: int
    name: str
    ousted: str | None = None


class Opened(Event, frozen=True, kw_only=True):
    level = "info"

    version: int
    attempt: int
    step: int | None = None


class ShardTaken(Event, frozen=True, kw_only=True):
    """A complete input file was read and diffed."""

    level = "debug"

    path: str
    tensors: int
    seconds: float


class Rounded(Event, frozen=True, kw_only=True):
    """The input is wider than the model: fp32 masters of a bf16 model, say. Told once per pair of dtypes."""

    level = "info"

    tensors: int
    given: str
    canonical: str


class Mapped(Event, frozen=True, kw_only=True):
    """All ranks of a group agreed on what each is the source of. `report` is for people, line by line."""

    level = "info"

    ranks: int
    direct_bytes: int
    residual_bytes: int
    regions: int
    report: str
    seconds: float

    @property
    def severity(self) -> Level:
        """A warning if some ranks must send tensors to others: that costs time in every update."""
        return "warning" if self.residual_bytes else self.level


class ChunkPut(Event, frozen=True, kw_only=True):
    level = "debug"

    version: int
    attempt: int
    n: int
    bytes: int
    seconds: float


class Sealed(Event, frozen=True, kw_only=True):
    """`seconds` from the opening of the attempt to its seal."""

    level = "info"

    version: int
    attempt: int
    step: int | None
    seq: int
    changed: int
    elements: int
    bytes: int
    dense_bytes: int
    seconds: float


class Aborted(Event, frozen=True, kw_only=True):
    level = "warning"

    version: int
    attempt: int
    reason: str


class AnchorPut(Event, frozen=True, kw_only=True):
    level = "info"

    version: int
    bytes: int
    seconds: float


class Rebuilding(Event, frozen=True, kw_only=True):
    """A publisher's baseline is being built from `what`; told every few seconds. `done` and `total` are in bytes."""

    level = "info"

    what: str
    done: int
    total: int


class Collected(Event, frozen=True, kw_only=True):
    """Retention deleted objects; nothing below version `floor` need be there any more."""

    level = "info"

    floor: int
    objects: int
    bytes: int
    seconds: float


class FencedOut(Event, frozen=True, kw_only=True):
    """Somebody newer owns this stream or engine."""

    level = "error"

    what: str
    by: str


class OpenSeen(Event, frozen=True, kw_only=True):
    level = "info"

    version: int
    attempt: int


class ChunkFetched(Event, frozen=True, kw_only=True):
    """`sealed` tells whether the seal was already there: False means it was prefetched."""

    level = "debug"

    version: int
    attempt: int
    key: str
    bytes: int
    sealed: bool
    seconds: float


class SealSeen(Event, frozen=True, kw_only=True):
    level = "info"

    version: int
    seq: int
    step: int | None = None


class Staged(Event, frozen=True, kw_only=True):
    level = "info"

    version: int
    bytes: int
    chunks: int


class Attached(Event, frozen=True, kw_only=True):
    level = "info"

    version: int | None
    tensors: int
    seconds: float


class Prepared(Event, frozen=True, kw_only=True):
    level = "info"

    txn: str
    base: int
    version: int
    changed: int
    seconds: float


class Committed(Event, frozen=True, kw_only=True):
    """The engine serves `version`. `pause_seconds` is the time in which it generated nothing."""

    level = "info"

    base: int
    version: int
    route: str
    pause_seconds: float
    seconds: float
    step: int | None = None


class Serving(Event, frozen=True, kw_only=True):
    """The engine generates, proved at a version that the policy allows: the replica is ready from now on.

    Emitted after every attach that ends in serving and after every commit or repair.
    """

    level = "info"

    version: int


class EngineLost(Event, frozen=True, kw_only=True):
    """The engine does not answer or is no longer proved: the replica is not ready until the next `Serving`."""

    level = "warning"

    reason: str


class LedgerRead(Event, frozen=True, kw_only=True):
    """A replica has read the ledger to its end for the first time: `head` is the newest sealed version there."""

    level = "info"

    head: int


class Loading(Event, frozen=True, kw_only=True):
    """A dense load begins: the engine generates nothing until the next `Serving`."""

    level = "info"

    version: int


class Paused(Event, frozen=True, kw_only=True):
    """Somebody else has paused the engine: the replica is not ready until the next `Serving`."""

    level = "warning"

    version: int


class Blocked(Event, frozen=True, kw_only=True):
    """Something stands before a replica's target; it goes on with what it has, and tries again. Told once per reason.

    `version` cannot be reached now (None: it is not about one). One that is `poisoned` is only gone round by an anchor.
    """

    level = "warning"

    version: int | None
    reason: str
    poisoned: bool = False


class ScrubEnded(Event, frozen=True, kw_only=True):
    """A complete pass over the live weights found every tensor as it must be."""

    level = "info"

    version: int | None
    tensors: int
    bytes: int
    seconds: float


class Damaged(Event, frozen=True, kw_only=True):
    """A scrub found tensors whose live bits are not those that were accepted; the engine has paused.

    `what` names them with their ranks."""

    level = "error"

    version: int | None
    tensors: list[str]
    what: str


class RolledBack(Event, frozen=True, kw_only=True):
    level = "error"

    txn: str
    version: int
    reason: str


class Repaired(Event, frozen=True, kw_only=True):
    level = "info"

    version: int
    how: str


class Alarm(Event, frozen=True, kw_only=True):
    """Something that must not happen and was contained; `must` cites the protocol."""

    level = "error"

    must: str
    what: str


class Notice(Event, frozen=True, kw_only=True):
    """Base of the events that carry a text for people. `RepetitionFilter` finds its repetitions."""

    level: ClassVar[Level]

    what: str


class Waiting(Notice, frozen=True, kw_only=True):
    """Something that is expected to come is awaited; `what` names it."""

    level = "info"


class Retrying(Notice, frozen=True, kw_only=True):
    """An operation failed and is repeated, now or later; `what` names it and says why it failed."""

    level = "warning"


class Degraded(Notice, frozen=True, kw_only=True):
    """Something was refused, given up or skipped, and the process goes on with less; `what` says what and why."""

    level = "warning"


class StoreRequest(Event, frozen=True, kw_only=True):
    level = "debug"

    operation: str
    outcome: str
    seconds: float
    bytes: int = 0


class RepetitionFilter:
    """Tells which notices repeat the one before: a listener that writes for people writes each of them once.

    Events at debug level between two equal notices do not make the second one new; any other event does.
    """

    def __init__(self) -> None:
        self._last: Notice | None = None

    def repeats(self, event: Event) -> bool:
        """Whether `event` is a notice that is equal to the last one. To be asked once about every event."""
        if isinstance(event, Notice) and event == self._last:
            return True
        if isinstance(event, Notice):
            self._last = event
        elif event.severity != "debug":
            self._last = None
        return False


@functools.cache
def kind_of(event_type: type[Event]) -> str:
    """The name of an event as logs and metrics write it: `ChunkPut` is `chunk_put`."""
    name = event_type.__name__
    return "".join(f"_{c.lower()}" if c.isupper() and i else c.lower() for i, c in enumerate(name))


Emit = Callable[[Event], None]


def discard(event: Event) -> None:
    """An `Emit` that nobody listens to."""

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
    """A publisher has claimed the stream under `name`.

    `ousted` is the name of the publisher that held the stream and had not released it. If it equals `name`, that was
    an earlier process of this publisher, or a running one of the same name, which is fenced from now on.
    """

    level = "info"

    epoch: int
    name: str
    ousted: str | None = None


class Opened(Event, frozen=True, kw_only=True):
    """A publisher has begun attempt `attempt` at `version`; `step` is the trainer's.

    `seconds` run from the beginning of the update; 0.0 on ranks that follow rank 0.
    """

    level = "info"

    version: int
    attempt: int
    step: int | None = None
    seconds: float = 0.0


class ShardTaken(Event, frozen=True, kw_only=True):
    """A complete input file was read and compared with the baseline."""

    level = "debug"

    path: str
    tensors: int
    seconds: float


class Rounded(Event, frozen=True, kw_only=True):
    """The input has wider elements than the model, such as fp32 for bf16. Emitted once per pair of dtypes."""

    level = "info"

    tensors: int
    given: str
    canonical: str


class TensorFollowed(Event, frozen=True, kw_only=True):
    """The input leaves out the tensor `name`, which `config.json` ties to `source`: it takes the same changes. Emitted
    once per tensor."""

    level = "info"

    name: str
    source: str


class Mapped(Event, frozen=True, kw_only=True):
    """All ranks of a group have agreed on which elements each of them publishes. `report` is for people, in lines."""

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


class Diffed(Event, frozen=True, kw_only=True):
    """A publisher has compared and encoded all of an attempt; `seconds` run from its opening."""

    level = "debug"

    version: int
    attempt: int
    changed: int
    seconds: float


class ChunkPut(Event, frozen=True, kw_only=True):
    """Chunk `n` of an attempt is in the bucket."""

    level = "debug"

    version: int
    attempt: int
    n: int
    bytes: int
    seconds: float


class Sealed(Event, frozen=True, kw_only=True):
    """`version` is sealed: it exists. `seconds` run from the opening of the attempt to its seal."""

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
    """An attempt at `version` has ended without a seal."""

    level = "warning"

    version: int
    attempt: int
    reason: str


class CheckpointSkipped(Event, frozen=True, kw_only=True):
    """A complete checkpoint below the watched directory is not published. Emitted once per checkpoint, or per shape.

    `cause` is "misfit" (it does not fit the stream's layout), "other_shape" (its path has another shape than those that
    are published) or "outdated" (a newer one is published instead). `reason` is for people.
    """

    level = "warning"

    path: str
    cause: str
    reason: str


class AnchorPut(Event, frozen=True, kw_only=True):
    """The anchor of `version`, a whole checkpoint, is in the bucket."""

    level = "info"

    version: int
    bytes: int
    seconds: float


class Rebuilding(Event, frozen=True, kw_only=True):
    """A publisher rebuilds its baseline from `what`. Emitted every few seconds; `done` and `total` are in bytes."""

    level = "info"

    what: str
    done: int
    total: int


class Collected(Event, frozen=True, kw_only=True):
    """Retention has deleted objects. No object below version `floor` is needed any more."""

    level = "info"

    floor: int
    objects: int
    bytes: int
    seconds: float


class FencedOut(Event, frozen=True, kw_only=True):
    """A newer owner, `by`, holds this stream or engine (`what`)."""

    level = "error"

    what: str
    by: str


class OpenSeen(Event, frozen=True, kw_only=True):
    """A replica has read that a publisher has begun an attempt at `version`."""

    level = "info"

    version: int
    attempt: int


class ChunkFetched(Event, frozen=True, kw_only=True):
    """A replica has downloaded a chunk. `sealed` is False if it was prefetched, before the seal was there."""

    level = "debug"

    version: int
    attempt: int
    key: str
    bytes: int
    sealed: bool
    seconds: float


class SealSeen(Event, frozen=True, kw_only=True):
    """A replica has read the seal of `version` in the ledger."""

    level = "info"

    version: int
    seq: int
    step: int | None = None


class Staged(Event, frozen=True, kw_only=True):
    """All chunks of `version` are verified and lie in the staging directory."""

    level = "info"

    version: int
    bytes: int
    chunks: int


class Attached(Event, frozen=True, kw_only=True):
    """A subscriber has attached to its engine; `version` is the one that the engine is verified at, if any."""

    level = "info"

    version: int | None
    tensors: int
    seconds: float


class Prepared(Event, frozen=True, kw_only=True):
    """The engine has verified the change from `base` to `version` and is ready to swap.

    `seconds` run from the beginning of the staging, `prepare_seconds` are those of the engine. `spent` divides the time
    of its slowest rank: read, decode, gather (live bits), sum, stage (onto a device).
    """

    level = "info"

    txn: str
    base: int
    version: int
    changed: int
    seconds: float
    prepare_seconds: float = 0.0
    spent: dict[str, float] = {}


class Committed(Event, frozen=True, kw_only=True):
    """The engine has `version` now. `pause_seconds` is the time in which it generated nothing.

    `phases` divides it: rest (until no request runs), begin, apply (write and sum), sums (compare), commit, resume.
    """

    level = "info"

    base: int
    version: int
    route: str
    pause_seconds: float
    seconds: float
    step: int | None = None
    phases: dict[str, float] = {}


class Serving(Event, frozen=True, kw_only=True):
    """The engine generates and is verified at a version that the policy allows: the replica is ready from now on.

    Emitted after every attach that ends in serving and after every commit or repair.
    """

    level = "info"

    version: int


class EngineLost(Event, frozen=True, kw_only=True):
    """The engine does not answer or is no longer verified: the replica is not ready until the next `Serving`."""

    level = "warning"

    reason: str


class Unsupported(Event, frozen=True, kw_only=True):
    """The engine can never follow this stream, as it was started; `reason` names what stands against it. The replica is
    not ready, and seldom asks again until another engine process answers. Emitted once per reason."""

    level = "warning"

    reason: str


class Refused(Event, frozen=True, kw_only=True):
    """The engine has refused a version, or an anchor of it; its weights are what they were, or are proved again."""

    level = "warning"

    subject: Literal["version", "anchor"]
    version: int
    reason: str


class LedgerRead(Event, frozen=True, kw_only=True):
    """The ledger was read to its end, for the first time or after `LedgerDoubted` or `LedgerUnread`: `head` is the
    newest sealed version there."""

    level = "info"

    head: int


class LedgerPolled(Event, frozen=True, kw_only=True):
    """The end of the ledger was looked at, and nothing follows what was read: `head` is the newest sealed version."""

    level = "debug"

    head: int


class LedgerUnread(Event, frozen=True, kw_only=True):
    """The end of the ledger was not seen for `seconds`: which version is the newest is unknown until the next
    `LedgerRead`. `since` is when it was last seen, in UTC; None if this process has never seen it. Emitted once."""

    level = "warning"

    seconds: float
    since: str | None


class LedgerDoubted(Event, frozen=True, kw_only=True):
    """Record `seq` does not follow what was read before it, and may be damaged: this process goes on with what it has,
    and is not ready until the next `LedgerRead`. `head` is the newest version that the bucket shows to be sealed."""

    level = "error"

    seq: int
    head: int
    reason: str


class Loading(Event, frozen=True, kw_only=True):
    """A dense load begins: the engine generates nothing until the next `Serving`."""

    level = "info"

    version: int


class Paused(Event, frozen=True, kw_only=True):
    """Another client has paused the engine: the replica is not ready until the next `Serving`."""

    level = "warning"

    version: int


class Blocked(Event, frozen=True, kw_only=True):
    """A replica cannot reach its target now; it serves what it has, and tries again. Emitted once per reason.

    `version` is the one that cannot be reached (None: the reason is not a version). If it is `poisoned`, only an
    anchor of a later version leads past it.
    """

    level = "warning"

    version: int | None
    reason: str
    poisoned: bool = False


class ScrubEnded(Event, frozen=True, kw_only=True):
    """A complete pass over the live weights found no damage."""

    level = "info"

    version: int | None
    tensors: int
    bytes: int
    seconds: float


class Damaged(Event, frozen=True, kw_only=True):
    """A scrub found tensors whose live bits differ from those that were committed; the engine has paused.

    `what` names them with their ranks."""

    level = "error"

    version: int | None
    tensors: list[str]
    what: str


class RolledBack(Event, frozen=True, kw_only=True):
    """The engine has undone transaction `txn` and has `version` again."""

    level = "error"

    txn: str
    version: int
    reason: str


class Repaired(Event, frozen=True, kw_only=True):
    """The engine has `version` again after damage or a failed change; `how` says by which means."""

    level = "info"

    version: int
    how: str


class Alarm(Event, frozen=True, kw_only=True):
    """A violation of the protocol was found and contained; `must` is the number of the rule in docs/PROTOCOL.md."""

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
    """One request to the store has ended, with `outcome`; `seconds` and `bytes` are its own."""

    level = "debug"

    operation: str
    outcome: str
    seconds: float
    bytes: int = 0


class RepetitionFilter:
    """Finds the notices that repeat the one before, for listeners that write for people.

    Events at debug level between two equal notices do not make the second one new; any other event does.
    """

    def __init__(self) -> None:
        self._last: Notice | None = None

    def repeats(self, event: Event) -> bool:
        """Whether `event` is a notice that equals the last one. Call it once for every event."""
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
    """An `Emit` that ignores every event."""

"""Typed facts. The core emits them; logs, metrics, health and the demo's table listen.

An event is a past tense with numbers, never a log text. Emitting must be cheap and must not raise.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import msgspec


class Event(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Base of every fact."""


class Claimed(Event, frozen=True, kw_only=True):
    """`ousted`: who held the stream and had not released it. If it is the same name, that is this publisher's dead
    process, or another living one that was given this name and is fenced from now on."""

    epoch: int
    name: str
    ousted: str | None = None


class Opened(Event, frozen=True, kw_only=True):
    version: int
    attempt: int
    step: int | None = None


class ShardTaken(Event, frozen=True, kw_only=True):
    """A complete input file was read and diffed."""

    path: str
    tensors: int
    seconds: float


class Rounded(Event, frozen=True, kw_only=True):
    """The input is wider than the model: fp32 masters of a bf16 model, say. Told once per pair of dtypes."""

    tensors: int
    given: str
    canonical: str


class Mapped(Event, frozen=True, kw_only=True):
    """All ranks of a group agreed on what each is the source of. `report` is for people, line by line."""

    ranks: int
    direct_bytes: int
    residual_bytes: int
    regions: int
    report: str
    seconds: float


class ChunkPut(Event, frozen=True, kw_only=True):
    version: int
    attempt: int
    n: int
    bytes: int
    seconds: float


class Sealed(Event, frozen=True, kw_only=True):
    """`seconds` from the opening of the attempt to its seal."""

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
    version: int
    attempt: int
    reason: str


class AnchorPut(Event, frozen=True, kw_only=True):
    version: int
    bytes: int
    seconds: float


class Rebuilding(Event, frozen=True, kw_only=True):
    """A publisher's baseline is being built from `what`; told every few seconds. `done` and `total` are in bytes."""

    what: str
    done: int
    total: int


class Collected(Event, frozen=True, kw_only=True):
    """Retention deleted objects; nothing below version `floor` need be there any more."""

    floor: int
    objects: int
    bytes: int
    seconds: float


class FencedOut(Event, frozen=True, kw_only=True):
    """Somebody newer owns this stream or engine."""

    what: str
    by: str


class OpenSeen(Event, frozen=True, kw_only=True):
    version: int
    attempt: int


class ChunkFetched(Event, frozen=True, kw_only=True):
    """`sealed` tells whether the seal was already there: False means it was prefetched."""

    version: int
    attempt: int
    key: str
    bytes: int
    sealed: bool
    seconds: float


class SealSeen(Event, frozen=True, kw_only=True):
    version: int
    seq: int
    step: int | None = None


class Staged(Event, frozen=True, kw_only=True):
    version: int
    bytes: int
    chunks: int


class Attached(Event, frozen=True, kw_only=True):
    version: int | None
    tensors: int
    seconds: float


class Prepared(Event, frozen=True, kw_only=True):
    txn: str
    base: int
    version: int
    changed: int
    seconds: float


class Committed(Event, frozen=True, kw_only=True):
    """The engine serves `version`. `pause_seconds` is the time in which it generated nothing."""

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

    version: int


class EngineLost(Event, frozen=True, kw_only=True):
    """The engine does not answer or is no longer proved: the replica is not ready until the next `Serving`."""

    reason: str


class LedgerRead(Event, frozen=True, kw_only=True):
    """A replica has read the ledger to its end for the first time: `head` is the newest sealed version there."""

    head: int


class Loading(Event, frozen=True, kw_only=True):
    """A dense load begins: the engine generates nothing until the next `Serving`."""

    version: int


class Paused(Event, frozen=True, kw_only=True):
    """Somebody else has paused the engine: the replica is not ready until the next `Serving`."""

    version: int


class Blocked(Event, frozen=True, kw_only=True):
    """Something stands before a replica's target; it goes on with what it has, and tries again. Told once per reason.

    `version` cannot be reached now (None: it is not about one). One that is `poisoned` is only gone round by an anchor.
    """

    version: int | None
    reason: str
    poisoned: bool = False


class ScrubEnded(Event, frozen=True, kw_only=True):
    """A complete pass over the live weights found every tensor as it must be."""

    version: int | None
    tensors: int
    bytes: int
    seconds: float


class Damaged(Event, frozen=True, kw_only=True):
    """A scrub found tensors whose live bits are not those that were accepted; the engine has paused.

    `what` names them with their ranks."""

    version: int | None
    tensors: list[str]
    what: str


class RolledBack(Event, frozen=True, kw_only=True):
    txn: str
    version: int
    reason: str


class Repaired(Event, frozen=True, kw_only=True):
    version: int
    how: str


class Alarm(Event, frozen=True, kw_only=True):
    """Something that must not happen and was contained; `must` cites the protocol."""

    must: str
    what: str


class Waiting(Event, frozen=True, kw_only=True):
    what: str


class StoreRequest(Event, frozen=True, kw_only=True):
    operation: str
    outcome: str
    seconds: float
    bytes: int = 0


@functools.cache
def kind_of(event_type: type[Event]) -> str:
    """The name of an event as logs and metrics write it: `ChunkPut` is `chunk_put`."""
    name = event_type.__name__
    return "".join(f"_{c.lower()}" if c.isupper() and i else c.lower() for i, c in enumerate(name))


Emit = Callable[[Event], None]


def discard(event: Event) -> None:
    """An `Emit` that nobody listens to."""

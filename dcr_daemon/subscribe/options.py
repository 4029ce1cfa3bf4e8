"""What an operator may choose about a subscriber, and where it keeps its state."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

STAGING_LIMIT = 8 << 30


@dataclass(frozen=True, slots=True, kw_only=True)
class SubscribeOptions:
    """What an operator may choose. Sizes are in bytes, times in seconds.

    `replica`: id of this replica. `state`: root of the state of all streams (FORMATS 5).
    `staging`: where chunks wait, None for a directory of this replica's in `/dev/shm`, or in the state without one.
    `staging_limit`: bytes of chunks staged at most.
    `once`: reach the newest seal read at the start, then return.
    `pin`: serve this version and never a newer one.
    `poll`: between looks at the ledger's tail. `patience`: how long an absent engine is waited for with `once`.
    """

    replica: str
    state: Path
    staging: Path | None = None
    staging_limit: int = STAGING_LIMIT
    once: bool = False
    pin: int | None = None
    poll: float = 1.0
    patience: float = 60.0


def subscriber_state(root: Path, url: str, replica: str) -> Path:
    """The directory below `root` that belongs to one replica's subscriber of the stream at `url`."""
    return root / "subscribe" / hashlib.sha256(url.rstrip("/").encode()).hexdigest()[:16] / replica

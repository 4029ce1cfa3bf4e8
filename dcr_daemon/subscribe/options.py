"""What an operator may choose about a subscriber, and where it keeps its state."""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass
from pathlib import Path

from dcr_daemon.errors import UsageError

STAGING_LIMIT = 8 << 30
#: An hour bounds how long damaged weights are served. At this rate a rank of 16 GB is through in 4 minutes, and of
#: 200 GB in 50; the sums themselves run at gigabytes a second, so a core is hardly busy with them.
SCRUB_EVERY = 3600.0
SCRUB_RATE = float(64 << 20)
_ID = re.compile(r"[a-z0-9]{1,32}")


@dataclass(frozen=True, slots=True, kw_only=True)
class SubscribeOptions:
    """What an operator may choose. Sizes are in bytes, times in seconds.

    `replica`: id of this replica, 1 to 32 of `a-z0-9`: it names an object and a directory. `state`: root of the state
    of all streams.
    `staging`: where chunks wait, None for a directory of this replica's in `/dev/shm`, or in the state without one.
    `staging_limit`: bytes of chunks staged at most.
    `once`: reach the newest seal read at the start, then return.
    `pin`: serve this version and never a newer one.
    `base`: the checkpoint of version 0, for engines whose loader computes with some tensors; not needed with an anchor.
    `poll`: between looks at the ledger's tail.
    `patience`: how long an absent engine is waited for with `once`, and a missing object before another way is tried.
    `scrub_every`: from the start of one pass over the live weights to the next, 0 for none.
    `scrub_rate`: bytes a second that each rank reads for it, 0 for no limit.
    """

    replica: str
    state: Path
    staging: Path | None = None
    staging_limit: int = STAGING_LIMIT
    once: bool = False
    pin: int | None = None
    base: Path | None = None
    poll: float = 1.0
    patience: float = 60.0
    scrub_every: float = SCRUB_EVERY
    scrub_rate: float = SCRUB_RATE

    def __post_init__(self) -> None:
        """Raises `UsageError` for an id that is none, before anything of that name is made."""
        if not _ID.fullmatch(self.replica):
            raise UsageError(
                f"not the id of a replica: {self.replica!r}", hint="give --replica an id of 1 to 32 of a-z and 0-9"
            )


def subscriber_state(root: Path, url: str, replica: str) -> Path:
    """The directory below `root` that belongs to one replica's subscriber of the stream at `url`."""
    return root / "subscribe" / hashlib.sha256(url.rstrip("/").encode()).hexdigest()[:16] / replica

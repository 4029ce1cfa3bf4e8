"""What an operator may choose about a subscriber, and where it keeps its state."""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass
from pathlib import Path

from dcr_daemon.errors import UsageError
from dcr_daemon.ledger.follow import Polling

STAGING_LIMIT = 8 << 30
#: One hour bounds how long damaged weights are served. At this rate a rank of 16 GB takes 4 minutes, one of 200 GB
#: takes 50; the sums themselves run at gigabytes a second, so they hardly use a core.
SCRUB_EVERY = 3600.0
SCRUB_RATE = float(64 << 20)
#: It is reached half an hour after the last record. 10,000 replicas then send 333 requests a second.
POLL_MAX = 30.0
_ID_LENGTH = 63  #: as the name of a pod
_ID = re.compile(rf"[a-z0-9]([a-z0-9.-]{{0,{_ID_LENGTH - 2}}}[a-z0-9])?")


@dataclass(frozen=True, slots=True, kw_only=True)
class SubscribeOptions:
    """What an operator may choose. Sizes are in bytes, times in seconds.

    `replica`: the id of this replica, 1 to 63 of `a-z0-9.-`, first and last no `.-`; it names an object and a
    directory.
    `state`: the root directory of the state of all streams.
    `staging`: the directory of fetched chunks; None for one in `/dev/shm`, or in the state directory without that.
    `staging_limit`: bytes of chunks staged at most.
    `once`: reach the newest seal read at the start, then return.
    `pin`: serve this version and never a newer one.
    `base`: the checkpoint of version 0, for engines whose loader computes with some tensors; not needed with an anchor.
    `poll`: time between two polls of the ledger's tail after a new record; while none comes it grows to `poll_max`.
    While a version is open or expected it is a tenth of this (`ledger.follow.Polling.fast`).
    `patience`: how long `once` waits for an absent engine, and how long a missing object is waited for before another
    route is tried.
    `scrub_every`: time from the start of one pass over the live weights to the next, 0 for none.
    `scrub_rate`: bytes a second that each rank reads in a pass, 0 for no limit.
    """

    replica: str
    state: Path
    staging: Path | None = None
    staging_limit: int = STAGING_LIMIT
    once: bool = False
    pin: int | None = None
    base: Path | None = None
    poll: float = 1.0
    poll_max: float = POLL_MAX
    patience: float = 60.0
    scrub_every: float = SCRUB_EVERY
    scrub_rate: float = SCRUB_RATE

    def __post_init__(self) -> None:
        """Raises `UsageError` for an id that is none, before anything of that name is made."""
        if not _ID.fullmatch(self.replica):
            raise UsageError(
                f"not the id of a replica: {self.replica!r}",
                hint="give --replica an id of 1 to 63 of a-z, 0-9, - and . that begins and ends with a-z or 0-9",
            )

    @property
    def polling(self) -> Polling:
        return Polling(first=self.poll, longest=max(self.poll, self.poll_max))


def replica_id(host: str) -> str:
    """The id of the replica on a host: the host's name, as it is where it can be an id.

    Any other name is shortened and gets a digest of the whole name, since names of pods may differ only at their end.

    Example:
        >>> replica_id("Rollout-7d9c5b6f4b-x2x9q")
        'rollout-7d9c5b6f4b-x2x9q'
        >>> replica_id("my_host")
        'my-host-76d033e4'

    Raises `UsageError` for an empty name.
    """
    name = host.lower()
    if not name:
        raise UsageError("this host has no name", hint="give --replica an id")
    if _ID.fullmatch(name):
        return name
    digest = hashlib.sha256(name.encode()).hexdigest()[:8]
    kept = re.sub(r"[^a-z0-9.-]+", "-", name)[: _ID_LENGTH - len(digest) - 1].strip(".-")
    return f"{kept}-{digest}".lstrip("-")


def subscriber_state(root: Path, url: str, *, replica: str) -> Path:
    """The directory below `root` that belongs to one replica's subscriber of the stream at `url`."""
    return root / "subscribe" / hashlib.sha256(url.rstrip("/").encode()).hexdigest()[:16] / replica

"""What an operator may choose about a publisher, and where it keeps its state."""

from __future__ import annotations

import hashlib
import os
from dataclasses import dataclass
from pathlib import Path

from dcr_daemon.codec.chunk import TARGET_BYTES, Codec
from dcr_daemon.errors import UsageError

#: versions kept by default: enough for any replica to come by the chain, little beside the trainer's own checkpoints
KEEP_VERSIONS = 256

SCRUB_RATE = float(512 << 20)  #: bytes a second


def default_state() -> Path:
    """Root of the state of all streams: `$STATE_DIRECTORY`, else `$XDG_STATE_HOME/dcr`, else `~/.local/state/dcr`."""
    if given := os.environ.get("STATE_DIRECTORY"):
        return Path(given.split(":")[0])
    if xdg := os.environ.get("XDG_STATE_HOME"):
        return Path(xdg) / "dcr"
    return Path.home() / ".local" / "state" / "dcr"


def stream_state(root: Path, url: str) -> Path:
    """The directory below `root` that belongs to the publisher of the stream at `url`."""
    return root / "publish" / hashlib.sha256(url.rstrip("/").encode()).hexdigest()[:16]


def parse_codec(name: str) -> Codec:
    """`auto`, `ulp`, `xor` or `overwrite`; `UsageError` for anything else."""
    try:
        return Codec[name.upper()]
    except KeyError:
        raise UsageError(f"there is no codec {name!r}", hint="auto, ulp, xor or overwrite") from None


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishOptions:
    """A publisher's choices. Sizes are in bytes, times in seconds.

    `state`: root of the state of all streams; this stream's own part is kept below it.
    `base`: the checkpoint that is version 0; needed with `create`, else only if a route needs version 0.
    `name`: publisher name, None to draw one and keep it in the state; `take_over` claims from another name.
    `upload_base`: write the anchor of version 0 at `create`.
    `anchor_every`: versions between anchors; `anchor_share`: an anchor when the chunks since the last one outweigh
    this share of a dense checkpoint. None switches either off.
    `keep_versions`: the newest versions, which retention keeps; `keep_hours`: versions sealed in so many hours are kept
    too. With neither (None or 0) all are. The way to the oldest of them from an anchor at or below it stays as well.
    `spool_memory`: chunks of the undecided attempt held in memory, the rest goes to files in the state.
    `chunk_bytes`: encoded size at which a chunk is closed and leaves.
    `upload_backlog`: chunk bytes waiting for the bucket before a diff waits; `uploads`: concurrent PUTs.
    `patience`: how long an unreachable bucket is tried before the attempt is given up.
    `scrub_rate`: bytes of the baseline that are checked per second between updates, 0 for none; the default is some
    percents of one core, and finds damage in a 60 GB share of a model in two minutes.
    `lag`: once the next update has begun, seconds without an object of any missing rank until rank 0 gives them up.
    `look`: seconds between two looks for a newer claim while nothing is published.
    `declaration_limit`: largest accepted declaration or verdict, in bytes.
    `ignore`: globs of input names outside the layout that are dropped without a word.
    """

    state: Path
    base: Path | None = None
    create: bool = False
    name: str | None = None
    take_over: bool = False
    codec: Codec = Codec.AUTO
    ignore: tuple[str, ...] = ()
    upload_base: bool = True
    anchor_every: int | None = None
    anchor_share: float | None = 1.0
    keep_versions: int | None = KEEP_VERSIONS
    keep_hours: float | None = None
    spool_memory: int = 1 << 30
    chunk_bytes: int = TARGET_BYTES
    upload_backlog: int = 512 << 20
    uploads: int = 8
    patience: float = 600.0
    workers: int = 0
    scrub_rate: float = SCRUB_RATE
    lag: float = 30.0
    look: float = 10.0
    declaration_limit: int = 64 << 20

"""`dcr materialize`: a plain Hugging Face checkpoint of one version, in a new directory, proved by its fingerprint."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from dcr_daemon.events import Emit, discard
from dcr_daemon.store.port import Store


@dataclass(frozen=True, slots=True)
class Materialized:
    """What was built: `out`, its `version`, the trainer's `step`, tensors, dense bytes, fingerprint total (hex)."""

    out: Path
    version: int
    step: int | None
    tensors: int
    bytes: int
    total: str


async def materialize(
    store: Store, *, version: int | None = None, out: Path, base: Path | None = None, emit: Emit = discard
) -> Materialized:
    """Build version `version` (None: the newest sealed) in `out`, from the cheapest anchor or `base` and the chain.

    `out` appears complete and proved, or not at all. No subscriber state is read or written.

    Raises:
        Misuse: `out` exists and is not empty.
        NotFound: no such stream or version, or nothing to start from and no `base` given.
        Incompatible: `base` is not a version this can start from.
        Corrupt: objects of the stream do not give the fingerprint of the seal.
    """
    raise NotImplementedError

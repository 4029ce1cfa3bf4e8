"""What a publisher tells about a version, and what a user may attach to it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import msgspec

from dcr_daemon.errors import Misuse
from dcr_daemon.ledger.records import Seal

METADATA_LIMIT = 64 << 10  #: bytes of user metadata in a seal


@dataclass(frozen=True, slots=True)
class SealedVersion:
    """A version that exists: `seq` is its place in the ledger, `changed` counts elements, sizes are in bytes."""

    version: int
    step: int | None
    seq: int
    changed: int
    elements: int
    bytes: int
    dense_bytes: int

    @classmethod
    def of(cls, seal: Seal) -> SealedVersion:
        return cls(
            seal.version, seal.step, seal.seq, seal.changed, seal.elements, seal.bytes, seal.dense_bytes
        )  # fmt: skip


def checked_metadata(metadata: Any) -> dict[str, Any]:
    """User metadata as a record can carry it; `Misuse` if it cannot."""
    try:
        body = msgspec.json.encode(dict(metadata or {}))
        plain: dict[str, Any] = msgspec.json.decode(body, type=dict[str, Any])
    except (TypeError, ValueError, msgspec.MsgspecError, RecursionError) as error:
        raise Misuse(f"metadata cannot be written as JSON: {error}") from error
    if len(body) > METADATA_LIMIT:
        raise Misuse(f"metadata of {len(body)} bytes is over the limit of {METADATA_LIMIT}")
    return plain

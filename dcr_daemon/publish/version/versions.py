"""What a publisher tells about a version, and what a user may attach to it."""

from __future__ import annotations

import operator
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from dcr_daemon.errors import UsageError
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
    """User metadata as a record can carry it; `UsageError` if it cannot."""
    if metadata is not None and not isinstance(metadata, Mapping):
        raise UsageError(f"metadata is a {type(metadata).__name__}", hint="give a mapping, such as {'loss': 0.5}")
    try:
        body = msgspec.json.encode(dict(metadata or {}))
        plain: dict[str, Any] = msgspec.json.decode(body, type=dict[str, Any])
    except (TypeError, ValueError, msgspec.MsgspecError, RecursionError) as error:
        raise UsageError(
            f"metadata cannot be written as JSON: {error}",
            hint="give plain numbers, strings, lists and mappings; loss.item(), not a tensor",
        ) from error
    if len(body) > METADATA_LIMIT:
        raise UsageError(f"metadata of {len(body)} bytes is over the limit of {METADATA_LIMIT}")
    return plain


def checked_step(step: Any) -> int | None:
    """The trainer's label as a record can carry it: any integer of 64 bits, also numpy's and torch's.

    Raises:
        UsageError: it is no integer, or too large.
    """
    if step is None:
        return None
    try:
        number = operator.index(step)
    except (TypeError, ValueError, RuntimeError) as error:
        raise UsageError(f"step is a {type(step).__name__}", hint="give an integer or None") from error
    if not -(1 << 63) <= number < 1 << 63:
        raise UsageError(f"step {number} does not fit into 64 bits")
    return number

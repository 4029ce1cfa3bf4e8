"""The object-store port: the operations that DCR needs of a bucket.

One of them orders everything: *create if absent* (must L0). Keys are relative to the stream's prefix. LIST is a
hint (must L6). Every implementation passes `tests/contract/test_store.py`.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Protocol

from dcr_daemon.errors import Incompatible
from dcr_daemon.store.partial import PartialFile


class Outcome(Enum):
    """What is known after a conditional create."""

    WON = "won"  #: the object is ours and durable
    LOST = "lost"  #: the slot was occupied, perhaps by an earlier try of our own: read it
    UNKNOWN = "unknown"  #: no answer, or an answer that decides nothing: read the slot, or put the same bytes again


class DeleteRefused(Incompatible):
    """The store does not let us delete the objects `keys`; all others that were to be deleted are."""

    kind = "Incompatible"

    def __init__(self, message: str, *, keys: Iterable[str], hint: str = "") -> None:
        super().__init__(message, hint=hint)
        self.keys = frozenset(keys)


def raise_refused(refused: Mapping[str, Incompatible]) -> None:
    """Raise `DeleteRefused` for these keys, with the reason of the first; nothing if there are none."""
    for error in refused.values():
        others = f" ({len(refused)} objects in all)" if len(refused) > 1 else ""
        raise DeleteRefused(error.message + others, keys=refused, hint=error.hint) from error


@dataclass(frozen=True, slots=True)
class Entry:
    """One line of a LIST: key relative to the stream, size in bytes."""

    key: str
    size: int


class Store(Protocol):
    """A stream's prefix in a bucket.

    Every method retries what can be retried, bounded and jittered, and then raises `StoreUnavailable`;
    denied access and missing buckets are `Incompatible`. `create` never retries by itself.
    """

    url: str

    async def get(self, key: str, *, limit: int, keep: PartialFile | None = None) -> bytes:
        """The whole object. Raises `KeyNotFound`, or `Corrupt` if it is larger than `limit` bytes.

        `keep`: where to keep what has arrived, for an object that is never overwritten and that is as long as
        `limit` or of unknown size. The caller verifies the digest, and clears it. A store may ignore it.
        """
        ...

    async def create(self, key: str, body: bytes | memoryview) -> Outcome:
        """One plain PUT with If-None-Match: *. Durable when it answers `WON`. Tried exactly once."""
        ...

    async def overwrite(self, key: str, body: bytes) -> None:
        """Replace an object; for replica status only, nothing depends on it for safety (must L7)."""
        ...

    def list(self, prefix: str) -> AsyncIterator[Entry]:
        """Objects whose key begins with `prefix`, in key order; may be stale."""
        ...

    async def delete(self, keys: Iterable[str]) -> None:
        """Delete objects; an absent one is no error. Only retention calls this.

        Raises `DeleteRefused` for those that may not be deleted, when all others are deleted.
        """
        ...

    async def close(self) -> None: ...

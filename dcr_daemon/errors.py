"""Everything DCR raises on purpose.

    DcrError                         exit 1   a bug, or something nobody foresaw
    ├── Misuse                       exit 2   fix the call, flag or configuration key
    ├── Incompatible                 exit 10  store, layout or input does not fit; an operator acts
    ├── NotFound                     exit 11  no such stream or version
    ├── Fenced                       exit 12  somebody newer owns this; stop, do not restart
    ├── Corrupt                      exit 13  bytes differ from their digest or format
    │   └── CorruptChunk                      the same, found by the chunk decoder
    ├── Exhausted                    exit 14  disk, tmpfs or memory budget full, or a disk that takes nothing
    ├── StoreUnavailable             exit 15  the bucket did not answer within the budget
    ├── EngineRefused                exit 16  the engine cannot take this stream or transaction
    └── Given                        exit 1   another rank cannot take part; publish the next update (in training alone)

A new kind exists only where a caller acts differently. The message names the thing; `hint` says what to do
next. `Missing` is not an error of DCR: it is a store's answer that a key does not exist.
"""

from __future__ import annotations

from typing import ClassVar


class DcrError(Exception):
    """Base of every deliberate error.

    Args:
        message: what is wrong, naming the object, tensor, file or flag.
        hint: one sentence that says what to do next; empty if nothing sensible can be said.
    """

    exit_code: ClassVar[int] = 1

    def __init__(self, message: str, *, hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        return f"{self.message} ({self.hint})" if self.hint else self.message


class Misuse(DcrError):
    exit_code = 2


class Incompatible(DcrError):
    exit_code = 10


class NotFound(DcrError):
    exit_code = 11


class Fenced(DcrError):
    exit_code = 12


class Corrupt(DcrError):
    exit_code = 13


class CorruptChunk(Corrupt):
    pass


class Exhausted(DcrError):
    exit_code = 14


class StoreUnavailable(DcrError):
    exit_code = 15


class EngineRefused(DcrError):
    exit_code = 16


class Given(DcrError):
    """An update of many ranks was given up, here or elsewhere: no rank publishes it, and the next one is right."""


class Missing(Exception):
    """A store has no object under this key now. Decides nothing by itself (must L1, L6)."""

    def __init__(self, key: str) -> None:
        super().__init__(key)
        self.key = key

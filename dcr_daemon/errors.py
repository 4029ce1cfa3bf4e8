"""Errors that DCR raises on purpose, whichever package raises them.

    DcrError                 exit 1   a bug, or something nobody foresaw
    ├── UsageError           exit 2   fix the call, flag or configuration key
    ├── Incompatible         exit 10  store, layout or input does not fit; an operator acts
    ├── NotFound             exit 11  no such stream or version
    ├── Fenced               exit 12  a newer owner holds the stream or the engine; stop, do not restart
    ├── Corrupt              exit 13  bytes differ from their digest or format
    │   └── CorruptChunk              the same, found by the chunk decoder
    ├── ResourceExhausted    exit 14  a disk, tmpfs or memory budget is full, or a disk accepts no writes
    ├── StoreUnavailable     exit 15  the bucket did not answer within the budget
    ├── EngineRefused        exit 16  the engine cannot take this stream or transaction
    ├── InputIncomplete      exit 17  `publish --once` left out checkpoints that are incomplete; run it again later
    └── UpdateAborted        exit 1   another rank cannot take part; publish the next update (in training alone)

A package adds a subclass only where its own callers act differently: `ledger.objects` (`ObjectPending`, `BelowFloor`),
`ledger.route` (`NoRoute`), `ledger.slot` (`Undecided`), `publish.group.peers` (`SumsMismatch`),
`publish.inputs.sources` (`SourceChanged`), `publish.watch.ingest` (`CheckpointMisfit`), `store.port` (`DeleteRefused`),
`engine.port` (`EngineGone`, exit 16). The message names the object at fault; `hint` says what to do next. `KeyNotFound`
is not an error of DCR: it is a store's answer that a key does not exist.
"""

from __future__ import annotations

import warnings
from typing import ClassVar


class DcrError(Exception):
    """Base of every deliberate error.

    Args:
        message: what is wrong, naming the object, tensor, file or flag.
        hint: one sentence that says what to do next; empty if nothing sensible can be said.
    """

    exit_code: ClassVar[int] = 1
    kind: ClassVar[str] = "DcrError"  #: the name in `--json` output and on the engine's socket; it never changes

    def __init_subclass__(cls) -> None:
        if "kind" not in cls.__dict__:
            cls.kind = cls.__name__

    def __init__(self, message: str, *, hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        return f"{self.message} ({self.hint})" if self.hint else self.message


class UsageError(DcrError):
    kind = "Misuse"
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


class ResourceExhausted(DcrError):
    kind = "Exhausted"
    exit_code = 14


class StoreUnavailable(DcrError):
    exit_code = 15


class EngineRefused(DcrError):
    exit_code = 16


class InputIncomplete(DcrError):
    exit_code = 17


class UpdateAborted(DcrError):
    """An update of many ranks was aborted, here or elsewhere: no rank publishes it, and the next one is right."""

    kind = "Given"


class KeyNotFound(Exception):
    """A store has no object under this key now. Decides nothing by itself (must L1, L6)."""

    def __init__(self, key: str) -> None:
        super().__init__(key)
        self.key = key


_OLD_NAMES = {"Misuse": UsageError, "Exhausted": ResourceExhausted, "Given": UpdateAborted, "Missing": KeyNotFound}


def __getattr__(name: str) -> type[Exception]:
    """The names that errors had in 0.1.0: aliases for this version, with a `DeprecationWarning`."""
    if name not in _OLD_NAMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    present = _OLD_NAMES[name]
    warnings.warn(f"dcr_daemon.errors.{name} is {present.__name__} now", DeprecationWarning, stacklevel=2)
    return present

"""The engine port: what a subscriber asks of something that holds live weights.

The subscriber's driver calls it. Input: paths of verified local files. Output: the records below. No weights and no
other bulk bytes are passed. `VllmEngine` (through the plugin's socket) and `DirectoryEngine` implement it, and both
pass `tests/contract/test_engine.py`. The order of calls:

    attach → prove (or load) → serve → prepare → swap → prepare → swap → …
                                       scrub, status: at any time

The engine itself, not the subscriber, refuses to run on a mixture of versions (must E1). All calls raise
`EngineRefused` with every reason named, `Fenced` when another owner has attached since (must E3), or `EngineGone` when
the engine process does not answer. A refused `serve` or `prepare` has written no weight, but what was prepared before
may be dropped. After any other refused call attach again: the answer tells what the weights are now.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Protocol

import msgspec

from dcr_daemon.errors import DcrError, EngineRefused


class EngineGone(DcrError):
    """The engine does not answer: it died or has not started. Wait and attach again."""

    exit_code = 16


class EngineUnsupported(EngineRefused):
    """The engine can never follow this stream, as it was started: its model, a tensor or an option cannot be kept up to
    date. No retry changes that, another start may."""

    kind = EngineRefused.kind  # as programs that read `--json` know it; on the socket `Refused.lasting` tells it apart


class TensorClass(StrEnum):
    """How an engine holds a canonical tensor."""

    EXACT = "exact"  #: bits copied; changed in place
    #: The loader computes its values (a cast, `A_log`), so it is loaded whole. On the wire it is "loaded".
    LOADER_COMPUTED = "loaded"
    ABSENT = "absent"  #: no loader reads it (a tied head, layers that predict ahead); left out of all comparisons


class StreamFacts(msgspec.Struct, frozen=True, kw_only=True):
    """What an engine is told about the stream at attach. `layout` is the local path of the layout object, and
    `layout_digest` its SHA-256 in hex."""

    stream: str
    layout: str
    layout_digest: str


class Attached(msgspec.Struct, frozen=True, kw_only=True):
    """Answer to attach.

    `token` is higher than that of every owner before. `incarnation` is a random id of this run of the engine process.
    `adopted` names a begun transaction that only commit or rollback may end: call `finish_adopted` and attach again,
    because then only `token` and `incarnation` are up to date in this answer (must E6). `version` is the version that
    the engine was last proved at in this incarnation, None if it is unproved. `serving` tells whether it generates now.
    `vector` is the live fingerprint vector (u64 little-endian, layout order; 0 where the class is not `exact`).
    `classes` are in layout order. `unverified`: the weights may be anybody's, and `load` does not replace them before
    `prove` has accepted them as a version.
    """

    token: int
    incarnation: str
    adopted: str | None
    version: int | None
    serving: bool
    vector: bytes
    classes: list[TensorClass]
    unverified: bool = False


class VersionDelta(msgspec.Struct, frozen=True, kw_only=True):
    """One staged version of a route, a *hop*: it changes version `base` into `version`.

    All paths are local, and the subscriber has verified the files. `attempt` is the sequence number of the `open`
    record that the chunks belong to. `chunks` are all chunk files of the version. `before` and `after` are vector
    files: one u64 (little-endian) per tensor of the layout. `loaded` is a safetensors file of all tensors of the class
    `loaded` as this version has them; empty if there are none, or if none has changed since the first hop's base.
    """

    version: int
    base: int
    attempt: int
    chunks: list[str]
    before: str
    after: str
    loaded: str = ""


class Transaction(msgspec.Struct, frozen=True, kw_only=True):
    """Consecutive hops that are applied as one change (must E6). `id` is unique for ever. `label` is what the engine
    shows as its weight version."""

    id: str
    hops: list[VersionDelta]
    label: str

    @property
    def base(self) -> int:
        return self.hops[0].base

    @property
    def version(self) -> int:
        return self.hops[-1].version


class Prepared(msgspec.Struct, frozen=True, kw_only=True):
    """Answer to prepare. `changed` counts distinct elements over all ranks. `fits` is the number of hops in the
    transaction: if it is lower than asked, the other hops are over the engine's cap. `spent`: seconds by what they were
    spent on, as far as the engine says."""

    txn: str
    changed: int
    fits: int
    spent: dict[str, float] = {}


class Verdict(StrEnum):
    """What became of a transaction."""

    COMMITTED = "committed"
    ROLLED_BACK = "rolled back"
    BEGUN = "begun"  #: neither: weights may be a mixture, and the engine stays paused; attach again and adopt it
    UNKNOWN = "unknown"  #: this engine knows no such transaction: it was never begun, or ended in an earlier run


class Swapped(msgspec.Struct, frozen=True, kw_only=True):
    """Outcome of a transaction, or of a load.

    `version` is the proved version afterwards, None if there is none; `serving` tells whether the engine generates.
    `pause`: seconds in which it could not, because of this call; `phases` divides them, as far as the engine says.
    `tries` counts how often the values were written. `pause` and `tries` may be 0 where a version changes nothing that
    the engine holds. `reason` says why, unless it is committed.
    """

    txn: str
    verdict: Verdict
    version: int | None
    serving: bool
    pause: float = 0.0
    tries: int = 0
    reason: str = ""
    phases: dict[str, float] = {}


class EngineStatus(msgspec.Struct, frozen=True, kw_only=True):
    """Answer to status. `prepared` and `begun` are ids of transactions."""

    incarnation: str
    version: int | None
    serving: bool
    prepared: str | None = None
    begun: str | None = None


class Difference(msgspec.Struct, frozen=True, kw_only=True):
    """A tensor whose live bits are not those that were accepted.

    `ranks` hold wrong bits (empty where weights are files); `engine` is the number of the data parallel engine.
    `replica`: another rank holds the same elements rightly, so only a copy is damaged.
    """

    tensor: str
    ranks: list[int] = []
    engine: int = 0
    replica: bool = False


class Scrubbed(msgspec.Struct, frozen=True, kw_only=True):
    """What one scrub summed: `tensors` tensors, `bytes` bytes. All are as `version` has them, except `differing`.

    `next` is the index of the tensor to continue with after an interruption; None when the pass reached the end of the
    layout."""

    version: int | None
    tensors: int
    bytes: int
    next: int | None = None
    differing: list[Difference] = []


class Engine(Protocol):
    """One engine, as its owner sees it. Vectors and files are given as local paths."""

    async def attach(self, facts: StreamFacts) -> Attached:
        """Become the owner, find out where each tensor lies, and sum the live weights.

        Raises:
            EngineUnsupported: a tensor could not be updated later, or the layout does not fit.
            Fenced: this client was the owner of this incarnation before, and another client has attached since.
        """
        ...

    async def prove(self, version: int, vector: str, label: str, loaded: str = "") -> None:
        """Declare which version the live weights are. The engine compares `vector` (a file) with its own live sums
        and refuses a difference, naming the tensors. `loaded` is a safetensors file of the tensors of that class, for
        an engine that has some: it compares what its loader makes of them, and loads them where that differs."""
        ...

    async def serve(self) -> None:
        """Let generation run. Refused unless the engine is proved, and nothing is begun (musts E1, E2)."""
        ...

    async def prepare(self, txn: Transaction) -> Prepared:
        """Decode a transaction and check it against the live weights while generation goes on; nothing is written
        (must E4). It replaces what was prepared before.

        Raises:
            EngineRefused: the hops do not begin at the live version, do not form a chain, or do not add up.
            Corrupt: a staged file is damaged: fetch it again.
            ResourceExhausted: the first hop alone is over the engine's cap.
        """
        ...

    async def swap(self, txn: str) -> Swapped:
        """Pause, write the prepared transaction, check it, commit, resume: one call inside the engine (must E5). A
        second call with the same id returns the same outcome."""
        ...

    async def outcome(self, txn: str) -> Swapped:
        """What became of a transaction; for a subscriber that was restarted or lost the answer."""
        ...

    async def finish_adopted(self, txn: str) -> Swapped:
        """End an adopted, begun transaction: commit it if all its values can be written, else roll it back
        (must E6)."""
        ...

    async def drop(self) -> None:
        """Forget a prepared transaction."""
        ...

    async def load(self, version: int, files: list[str], vector: str, label: str) -> Swapped:
        """Write every tensor from the safetensors files of an anchor, then prove `version` by `vector` (a file).

        This repairs any state. It only goes forward: old values are not kept."""
        ...

    async def scrub(self, rate: float, first: int = 0) -> Scrubbed:
        """Sum the live weights again, beginning with tensor `first` of the layout; each rank reads at most `rate`
        bytes per second (0: no limit).

        It only reads, while generation goes on (must E4), and yields to every other call: it returns at once if one is
        under way, ends within one slice when one arrives, and returns after about half a minute in any case; `next` is
        then where to continue. A swap causes no false alarm, because a tensor is compared only with the version at
        which it was summed. A true difference leaves the engine unproved and paused, like a write by somebody else
        (musts E1, F1): attach again, and repair it by `load`. Refused unless proved."""
        ...

    async def status(self) -> EngineStatus:
        """The engine's present state. A client that has attached asks as the owner: it gets `Fenced` if another has
        attached since, and `EngineGone` if the engine was restarted since. Other clients may ask too."""
        ...

    async def close(self) -> None:
        """Release what this client holds; the engine stays as it is."""
        ...

"""The engine port: what a subscriber asks of something that holds live weights.

vLLM (through its plugin's socket) and a checkpoint directory are two implementations; both pass
`tests/contract/test_engine.py`. The engine, not the subscriber, refuses to run on a mixture (must E1). All calls
raise `EngineRefused` with every reason named, `Fenced` when another owner has attached since (must E3), or
`EngineGone` when the engine process does not answer.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Protocol

import msgspec

from dcr_daemon.errors import DcrError


class EngineGone(DcrError):
    """The engine does not answer: it died or has not started. Wait and attach again."""

    exit_code = 16


class TensorClass(StrEnum):
    """How an engine holds a canonical tensor."""

    EXACT = "exact"  #: bits copied; changed in place
    #: The loader computes its values (a cast, `A_log`), so it is loaded whole. On the wire it is "loaded".
    LOADER_COMPUTED = "loaded"
    ABSENT = "absent"  #: no loader reads it (a tied head, layers that predict ahead); left out of all comparisons


class StreamFacts(msgspec.Struct, frozen=True, kw_only=True):
    """What an engine is told about the stream at attach. `layout` is the path of the layout object (local)."""

    stream: str
    layout: str
    layout_digest: str


class Attached(msgspec.Struct, frozen=True, kw_only=True):
    """Answer to attach.

    `vector` is the live fingerprint vector (u64 little-endian, layout order; 0 where the class is not `exact`).
    `classes` are in layout order. `adopted` names a begun transaction that only commit or rollback may end; then
    nothing else in the answer but `token` and `incarnation` is fresh (must E6). `version` is what the engine itself
    was last proved at in this incarnation, None if unproved. `serving` tells whether it generates now.
    """

    token: int
    incarnation: str
    adopted: str | None
    version: int | None
    serving: bool
    vector: bytes
    classes: list[TensorClass]


class VersionDelta(msgspec.Struct, frozen=True, kw_only=True):
    """One version of a route, staged: paths are local and verified; `before`/`after` are vector files.

    `loaded`: safetensors file of all `loaded` tensors as this version has them; empty if there are none, or if none
    has changed between the first hop's base and this version.
    """

    version: int
    base: int
    attempt: int
    chunks: list[str]
    before: str
    after: str
    loaded: str = ""


class Transaction(msgspec.Struct, frozen=True, kw_only=True):
    """Consecutive hops composed into one change (must E6). `label` is shown by the engine as its weight version."""

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
    """`fits` is how many hops are in the transaction: fewer than asked means the rest is over the cap."""

    txn: str
    changed: int
    fits: int


class Verdict(StrEnum):
    COMMITTED = "committed"
    ROLLED_BACK = "rolled back"
    BEGUN = "begun"  #: neither; adopt it
    UNKNOWN = "unknown"  #: this engine knows no such transaction


class Swapped(msgspec.Struct, frozen=True, kw_only=True):
    """Outcome of a transaction. `pause` is in seconds; `tries` counts applies; `reason` is set unless committed."""

    txn: str
    verdict: Verdict
    version: int | None
    serving: bool
    pause: float = 0.0
    tries: int = 0
    reason: str = ""


class EngineStatus(msgspec.Struct, frozen=True, kw_only=True):
    incarnation: str
    version: int | None
    serving: bool
    prepared: str | None = None
    begun: str | None = None


class Difference(msgspec.Struct, frozen=True, kw_only=True):
    """A tensor whose live bits are not those that were accepted.

    `ranks` hold wrong bits (none where weights are files); `engine` counts data parallel engines. `replica`: other
    holders of the same elements are right, so a copy differs from its owner.
    """

    tensor: str
    ranks: list[int] = []
    engine: int = 0
    replica: bool = False


class Scrubbed(msgspec.Struct, frozen=True, kw_only=True):
    """What one scrub looked at: `tensors` of them, `bytes` in all, each as `version` has it but for the `differing`.

    `next` is the tensor to go on with after an interruption; None when the pass reached its end."""

    version: int | None
    tensors: int
    bytes: int
    next: int | None = None
    differing: list[Difference] = []


class Engine(Protocol):
    async def attach(self, facts: StreamFacts) -> Attached:
        """Become the owner; record placement; sum the live weights. Refuses what it could not update later."""
        ...

    async def prove(self, version: int, vector: str, label: str, loaded: str = "") -> None:
        """Declare which version the live weights are. The engine compares `vector` (a file) with its own live sums
        and refuses a difference, naming the tensors. `loaded`, for an engine that has such tensors, is a file of their
        bytes: it makes sure that it holds what its loader makes of them, by loading them if need be."""
        ...

    async def serve(self) -> None:
        """Let generation run. Refused unless proved and clean (must E1, E2)."""
        ...

    async def prepare(self, txn: Transaction) -> Prepared:
        """Decode and check against the live weights while generation goes on; nothing is written (must E4)."""
        ...

    async def swap(self, txn: str) -> Swapped:
        """Pause, write, check, commit, resume: one call inside the engine (must E5)."""
        ...

    async def outcome(self, txn: str) -> Swapped:
        """What became of a transaction; for a subscriber that died or lost the answer."""
        ...

    async def finish_adopted(self, txn: str) -> Swapped:
        """End an adopted, begun transaction: forward if its values are all there, else back (must E6)."""
        ...

    async def drop(self) -> None:
        """Forget a prepared transaction."""
        ...

    async def load(self, version: int, files: list[str], vector: str, label: str) -> Swapped:
        """Dense, forward-only repair: write every tensor from safetensors files, then prove it (anchors)."""
        ...

    async def scrub(self, rate: float, first: int = 0) -> Scrubbed:
        """Sum the live weights anew, from tensor `first` of the layout on; each rank reads at most `rate` bytes a
        second (0: no limit).

        Only reads, beside generation (must E4), and is never in the way: any other call of the owner ends it within
        one slice, where one is under way it returns at once, and after about half a minute it returns by itself;
        `next` then tells where to go on. A version move
        gives no false alarm: a tensor is judged only by the version it was summed at. A true difference leaves the
        engine unproved and paused, like a write by somebody else (musts E1, F1): attach again, repair by `load`.
        Refused unless proved."""
        ...

    async def status(self) -> EngineStatus:
        """What the engine is now. Whoever has attached asks as the owner: `Fenced` once another has attached since,
        `EngineGone` if the engine was restarted since. Anybody else may ask too."""
        ...

    async def close(self) -> None: ...

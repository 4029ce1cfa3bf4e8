"""What EngineCore says to its workers, and what each worker answers.

One worker method, `dcr_call(env) -> dict`, that never raises (must E3): `collective_rpc("dcr_call", args=(env,))`
without a time-out. `env` is a `Call`, the answer a `Reply`, both as plain dicts of builtins so that any executor can
carry them. A reply counts only if its `call` is the caller's own.

Order of a transaction, each step on all ranks before the next (musts E1, E4, E5, E6):

    start(prepare) → poll… → join → [joint verdict] → approve → check → [pause] → begin → apply → commit
                                                          │                         └─► apply again │ rollback
    drop ◄────────────────────────────────────────────────┘

`begin` sets dirty and writes nothing; `apply` and `rollback` return live sums over exactly the changed elements, which
must equal, byte for byte, that rank's own `PreparedRank.after` (or `.before`) from `join`. Tensors that the loader
computes with (`loaded`) have no sums there: the loader runs at `join`, on scratch, and `apply` and `rollback` are not
ok unless live memory holds what it made, or what was there before. A dense load is
start(check) → join → begin(kind=load) → start(load) → join → start(fingerprint) → join → commit, and can only go
forward; any other load may take its place.

Sums are u64 little-endian, indices u32, counts i64, packed as bytes. Box numbers are indices into the `boxes` that
this rank returned at attach. Two boxes with equal (tensor, dst, shape, strides) are replicas, on one rank or several;
distinct boxes add up.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Any, TypeVar

import msgspec

METHOD = "dcr_call"
EXIT_DIRTY = 86  #: status of a worker that was asked for a forward pass while dirty (must E1)

#: Entry points through which others may change, move or reload weights (must F1). What a worker lacks is skipped.
WRITERS = (
    "reload_weights", "load_model", "start_weight_update", "start_draft_weight_update", "update_weights",
    "finish_weight_update", "sleep", "wake_up", "discard", "reset_weights", "checkpoint_restore", "add_lora",
    "remove_lora", "update_config", "elastic_ep_execute", "apply_model",
)  # fmt: skip

T = TypeVar("T")


class Op(StrEnum):
    """Operations. `hello`, `status` and `checksums` need no token; `attach` raises it; all others must carry it."""

    HELLO = "hello"  #: {} -> Status; installs guards and wraps, starts the thread; idempotent
    STATUS = "status"  #: {} -> Status
    ATTACH = "attach"  #: Attach -> AttachedRank
    START = "start"  #: Start -> JobStatus
    POLL = "poll"  #: JobRef -> JobStatus
    JOIN = "join"  #: JobRef -> PreparedRank | ComparedRank | FingerprintRank | JobStatus, by the kind of the job
    CANCEL = "cancel"  #: JobRef -> JobStatus; sets the flag, does not wait
    APPROVE = "approve"  #: TxnRef -> Status; the joint verdict was good: the transaction is now prepared
    CHECK = "check"  #: TxnRef -> Status; could `begin` and `apply` succeed now? nothing is changed
    BEGIN = "begin"  #: Begin -> Status; dirty and begun from here on, nothing written
    APPLY = "apply"  #: TxnRef -> Sums; may be repeated
    COMMIT = "commit"  #: TxnRef -> Status; clears dirty, forgets the old values
    ROLLBACK = "rollback"  #: TxnRef -> Sums; old values written back, still begun and dirty: judge, then `close`
    CLOSE = "close"  #: TxnRef -> Status; ends a rolled back transaction whose sums were judged good
    DROP = "drop"  #: {} -> Status; forgets what is prepared, cancels a running job; refused while begun
    CHECKSUMS = "checksums"  #: {} -> Checksums; sha256 of every parameter and buffer
    PLACEMENT = "placement"  #: {} -> list of dicts for people: where each canonical tensor lies
    FAULT = "fault"  #: tests only, needs DCR_TEST_FAULTS=1 in the worker's environment


class Code(StrEnum):
    """Why a call was not ok: what the caller does next depends on it."""

    FENCED = "fenced"  #: a newer owner attached
    REFUSED = "refused"  #: cannot be done in this state or with this model; the text says why
    UNPROVED = "unproved"  #: somebody else may have changed the weights, or storage moved: attach again
    CORRUPT = "corrupt"  #: a chunk or file is damaged: fetch it again
    EXHAUSTED = "exhausted"  #: the first hop alone is over the cap
    FAILED = "failed"  #: unforeseen; see the worker's log


class Call(msgspec.Struct, frozen=True, kw_only=True):
    op: str
    call: str
    token: int = 0
    arg: dict[str, Any] = {}


class Reply(msgspec.Struct, frozen=True, kw_only=True):
    """`generation` counts writes by anybody else (reload, sleep, LoRA …); when it moves, all is unproved (F1)."""

    rank: int
    call: str
    ok: bool
    code: str = ""
    error: str = ""
    hint: str = ""
    generation: int = 0
    dirty: bool = False
    result: Any = None


class JobKind(StrEnum):
    PREPARE = "prepare"
    COMPARE = "compare"
    FINGERPRINT = "fingerprint"
    SCRUB = "scrub"
    CHECK = "check"  #: of a load: whether its files hold what it will write; reads files only
    LOAD = "load"


class JobState(StrEnum):
    QUEUED = "queued"
    RUNNING = "running"
    DONE = "done"
    FAILED = "failed"
    CANCELLED = "cancelled"


class TxnState(StrEnum):
    NONE = "none"
    HELD = "held"  #: joined, not yet judged
    PREPARED = "prepared"
    BEGUN = "begun"
    ROLLED_BACK = "rolled back"  #: old values written back, not yet closed; still dirty


class Attach(msgspec.Struct, frozen=True, kw_only=True):
    """`Call.token` is the new, higher token. `cap`: bytes each worker reserves for one transaction.

    `cpus` for the worker's thread; None: all allowed cores (then nice 19 alone keeps it out of the way).
    """

    layout: str
    layout_digest: str
    cap: int
    cpus: list[int] | None = None


class BoxRow(msgspec.Struct, frozen=True, array_like=True):
    """One placed box: `tensor` in layout order; the rest in canonical elements, merged as far as possible."""

    tensor: int
    dst: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]


class TensorHandling(StrEnum):
    """What one rank's loader does with a canonical tensor. Joined over ranks: any `refused` refuses it; placed boxes
    must tile it; `loader_computed` on one is that or `skipped` on all; `skipped` everywhere is left out."""

    PLACED = "placed"
    LOADER_COMPUTED = "loaded"  #: the loader computes with it: it is loaded whole
    SKIPPED = "skipped"  #: not this rank's (pipeline stage, other experts), or nobody's (a tied head)
    REFUSED = "refused"


class AttachedRank(msgspec.Struct, frozen=True, kw_only=True):
    """`adopted` names a begun transaction: then only the token has changed and the rest is empty (must E6).

    `held` is in layout order; `refusals` maps tensor names (or "" for the whole model) to reasons.
    """

    token: int
    adopted: str | None
    held: list[TensorHandling] = []
    boxes: list[BoxRow] = []
    refusals: dict[str, str] = {}
    parameters: int = 0


class HopFiles(msgspec.Struct, frozen=True, kw_only=True):
    """One version: chunk files on this host, in the order in which segments are numbered.

    `loaded`: file of all loaded tensors as this version has them, empty if none has changed since the first hop's
    base; `after`: the version's vector, which they must sum to.
    """

    version: int
    base: int
    attempt: int
    chunks: list[str]
    loaded: str = ""
    after: str = ""


class Start(msgspec.Struct, frozen=True, kw_only=True):
    """`id` names the job; for a prepare it is also the transaction's id.

    `files`: safetensors of everything (load only). `loaded`: of the loaded tensors alone (compare, and a load of
    nothing else). `vector`: file of what either must sum to. `tensors`: the first, and the one after the last, of a
    scrub; `rate`: bytes a second that it may read, 0 for no limit.
    """

    id: str
    kind: JobKind
    hops: list[HopFiles] = []
    files: list[str] = []
    loaded: str = ""
    vector: str = ""
    tensors: tuple[int, int] = (0, 0)
    rate: float = 0.0


class JobRef(msgspec.Struct, frozen=True, kw_only=True):
    id: str


class TxnRef(msgspec.Struct, frozen=True, kw_only=True):
    txn: str


class Begin(msgspec.Struct, frozen=True, kw_only=True):
    """`kind` is "delta" for an approved transaction, "load" for a dense, forward-only one."""

    txn: str
    kind: str = "delta"


class JobStatus(msgspec.Struct, frozen=True, kw_only=True):
    """`progress` in [0, 1], for people."""

    id: str
    kind: JobKind
    state: JobState
    code: str = ""
    error: str = ""
    progress: float = 0.0


class SegmentSums(msgspec.Struct, frozen=True, kw_only=True):
    """One hop on one rank, one entry per (segment, box) that share changed elements.

    `segment` numbers the hop's segments over its chunks in order. `before`/`after` are sums over the shared changed
    elements just before and just after this hop.
    """

    version: int
    segment: bytes
    box: bytes
    count: bytes
    before: bytes
    after: bytes


class Sums(msgspec.Struct, frozen=True, kw_only=True):
    """One entry per box that a transaction changes: `sums` over its changed elements (each counted once)."""

    box: bytes
    count: bytes
    sums: bytes


class PreparedRank(msgspec.Struct, frozen=True, kw_only=True):
    """`fits` hops are in the transaction (fewer than asked: the rest is over the cap; `hops` has that many).

    `before` and `after` are what `rollback` and `apply` must answer. For each tensor, distinct boxes' after − before
    must equal the sum over hops and segments of after − before.
    """

    txn: str
    fits: int
    changed: int
    hops: list[SegmentSums]
    before: Sums
    after: Sums


class FingerprintRank(msgspec.Struct, frozen=True, kw_only=True):
    """`sums[i]` is the sum over all of box i of this rank; after a scrub 0 for boxes of tensors not asked for."""

    id: str
    sums: bytes


class ComparedRank(msgspec.Struct, frozen=True, kw_only=True):
    """Names of the parameters that do not hold what the loader makes of the values given."""

    id: str
    differ: list[str]


class Status(msgspec.Struct, frozen=True, kw_only=True):
    rank: int
    pid: int
    device: str
    token: int
    txn: str | None
    kind: str
    state: TxnState
    dirty: bool
    generation: int
    changed_by: str
    job: JobStatus | None
    outcomes: dict[str, str]


class Checksums(msgspec.Struct, frozen=True, kw_only=True):
    """SHA-256 in hex over the raw bytes in row-major order, by parameter or buffer name."""

    parameters: dict[str, str]
    buffers: dict[str, str]


def plain(value: Any) -> Any:
    """Builtins of a struct; bytes stay bytes."""
    return msgspec.to_builtins(value, builtin_types=(bytes,))


def parse(value: Any, kind: type[T]) -> T:
    """A struct from builtins; `msgspec.ValidationError` if it does not fit."""
    return msgspec.convert(value, kind, builtin_types=(bytes,))

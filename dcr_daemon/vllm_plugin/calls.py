"""The records between EngineCore (`core.worker_group`) and each worker (`worker.extension`).

One worker method, `dcr_call(env) -> dict`, that never raises (must E3): `collective_rpc("dcr_call", args=(env,))`
without a time-out. `env` is a `Call`, the answer a `Reply`, both as plain dicts of builtins so that any executor can
carry them. A reply counts only if its `call` is the caller's own.

Order of a transaction, each step on all ranks before the next (musts E1, E4, E5, E6):

    start(prepare) → poll… → join → [joint verdict] → approve → check → [pause] → begin → apply → commit
                                                          │                         └─► apply again │ rollback
    drop ◄────────────────────────────────────────────────┘

`begin` sets dirty and writes nothing; `apply` and `rollback` return live sums over exactly the changed elements, which
must equal, byte for byte, that rank's own `PreparedRank.after` (or `.before`) from `join`. Tensors that the loader
computes with have no sums there: the loader runs at `join`, on copies of the parameters, and `apply` (`rollback`) is ok
only if live memory then holds its result (the values from before). A dense load is
start(check) → join → begin(kind=load) → start(load) → join → start(fingerprint) → join → commit, and can only go
forward; another load may replace it.

Sums are u64 little-endian, indices u32, counts i64, packed as bytes. Box numbers are indices into the `boxes` that
this rank returned at attach. Two boxes with equal (tensor, dst, shape, strides) are copies, on one rank or several;
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

    HELLO = "hello"  #: Hello -> Status; installs guards and wraps, starts the thread; idempotent
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
    DROP = "drop"  #: {} -> Status; forgets the prepared transaction, cancels a running job; refused while begun
    CHECKSUMS = "checksums"  #: {} -> Checksums; sha256 of every parameter and buffer
    PLACEMENT = "placement"  #: {} -> list of dicts for diagnosis: where each canonical tensor lies
    FAULT = "fault"  #: tests only, needs DCR_TEST_FAULTS=1 in the worker's environment


class Code(StrEnum):
    """Why a call was not ok; it decides what the caller does next."""

    FENCED = "fenced"  #: a newer owner attached
    REFUSED = "refused"  #: cannot be done in this state or with this model; the text says why
    UNPROVED = "unproved"  #: an external writer may have changed the weights, or storage moved: attach again
    CORRUPT = "corrupt"  #: a chunk or file is damaged: fetch it again
    EXHAUSTED = "exhausted"  #: the first hop alone is over the cap, or memory, descriptors or the disk failed
    FAILED = "failed"  #: unforeseen; see the worker's log


class Call(msgspec.Struct, frozen=True, kw_only=True):
    op: str
    call: str
    token: int = 0
    arg: dict[str, Any] = {}


class Reply(msgspec.Struct, frozen=True, kw_only=True):
    """`generation` counts external writes (reload, sleep, LoRA …); when it changes, the engine is unproved (must
    F1)."""

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
    CHECK = "check"  #: whether the files of a load hold all that it will write; reads files only
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


class Hello(msgspec.Struct, frozen=True, kw_only=True):
    """`flags`: path of the `JobFlags`, empty if there are none."""

    flags: str = ""


class Attach(msgspec.Struct, frozen=True, kw_only=True):
    """`Call.token` is the new, higher token. `cap`: bytes each worker reserves for one transaction, None
    for a share of its weights.

    `cpus` for the worker's thread; None: all allowed cores (then nice 19 alone keeps it out of the way).
    """

    layout: str
    layout_digest: str
    cap: int | None
    cpus: list[int] | None = None


class BoxRow(msgspec.Struct, frozen=True, array_like=True):
    """One placed box: `tensor` in layout order; the rest in canonical elements, merged as far as possible."""

    tensor: int
    dst: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]


class TensorHandling(StrEnum):
    """What one rank's loader does with a canonical tensor.

    Joined over ranks: one `REFUSED` refuses the tensor; the boxes of `PLACED` must tile it; if one rank says
    `LOADER_COMPUTED`, all others say that or `SKIPPED`; a tensor that is `SKIPPED` on all ranks is left out.
    """

    PLACED = "placed"
    LOADER_COMPUTED = "loaded"  #: the loader computes with it: it is loaded whole
    SKIPPED = "skipped"  #: not this rank's (pipeline stage, other experts), or nobody's (a tied head)
    REFUSED = "refused"


class AttachedRank(msgspec.Struct, frozen=True, kw_only=True):
    """`adopted` names a begun transaction: then only the token has changed, and the other fields are empty (must E6).

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

    `loaded`: path of a file with this version's bytes of all loader-computed tensors, empty if none of them has changed
    since the first hop's base. `after`: path of the version's vector, which those bytes must sum to.
    """

    version: int
    base: int
    attempt: int
    chunks: list[str]
    loaded: str = ""
    after: str = ""


class Start(msgspec.Struct, frozen=True, kw_only=True):
    """`id` names the job; for a prepare it is also the transaction's id.

    `files`: paths of safetensors files with all tensors (load only). `loaded`: path of a file with the loader-computed
    tensors alone (compare, or a load of nothing else). `vector`: path of the vector that either must sum to. For a
    scrub, `tensors`: its first tensor and the one after its last; `rate`: bytes per second that it may read, 0 for no
    limit.
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
    """`progress` in [0, 1], for logs."""

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
    """`fits`: how many hops the transaction holds; further hops would exceed the cap. `hops` has that many entries.

    `before` and `after` are what `rollback` and `apply` must answer. For each tensor, the sum of after − before over
    distinct boxes must equal the sum of after − before over hops and segments. `spent`: seconds by
    what they were spent on.
    """

    txn: str
    fits: int
    changed: int
    hops: list[SegmentSums]
    before: Sums
    after: Sums
    spent: dict[str, float] = {}


class FingerprintRank(msgspec.Struct, frozen=True, kw_only=True):
    """`sums[i]` is the sum over box i of this rank; after a scrub it is 0 for boxes of tensors that were not asked
    for. `stale`: after a scrub, the tensors from which vLLM derived others that are no longer what it would derive.
    `changed`: after a scrub, names of parameters that the stream does not have, and that were changed."""

    id: str
    sums: bytes
    stale: list[int] = []
    changed: list[str] = []


class ComparedRank(msgspec.Struct, frozen=True, kw_only=True):
    """`differ`: parameters that do not hold what the loader computes from the given values."""

    id: str
    differ: list[str]


class Status(msgspec.Struct, frozen=True, kw_only=True):
    """`host`: name of the worker's host. `flagged`: the worker sets its flag in the `JobFlags` when a job ends."""

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
    host: str = ""
    flagged: bool = False


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

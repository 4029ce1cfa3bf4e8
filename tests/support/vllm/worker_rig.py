"""What tests of the worker half share: versions as chunk files, a worker around a model, the calls EngineCore makes."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from dcr_daemon.canonical.box import Box
from dcr_daemon.canonical.dtypes import bits_dtype
from dcr_daemon.canonical.fingerprint import fingerprint
from dcr_daemon.canonical.layout import Layout
from dcr_daemon.codec.chunk import SEGMENT_BYTES, ChunkId, Codec, Segment
from dcr_daemon.codec.encode import ChunkEncoder
from dcr_daemon.vllm_plugin import calls
from dcr_daemon.vllm_plugin.calls import HopFiles, JobState, Op
from dcr_daemon.vllm_plugin.worker.extension import WorkerExtension

Lanes = list[np.ndarray]


def random_lanes(layout: Layout, seed: int = 0) -> Lanes:
    """Arbitrary bits for every tensor, NaNs and all."""
    rng = np.random.default_rng(seed)
    return [
        np.frombuffer(rng.bytes(spec.nbytes), dtype=bits_dtype(spec.width)).copy() if spec.elements else
        np.zeros(0, dtype=bits_dtype(spec.width))
        for spec in layout
    ]  # fmt: skip


def step(lanes: Lanes, share: float, seed: int) -> Lanes:
    """A next version: about `share` of the elements of every tensor get other bits."""
    rng = np.random.default_rng(seed)
    new = []
    for old in lanes:
        changed = old.copy()
        where = np.flatnonzero(rng.random(old.size) < share)
        if old.size and not where.size:
            where = np.array([seed % old.size])
        changed[where] += rng.choice([1, -1, 3, 77], size=where.size).astype(old.dtype)
        new.append(changed)
    return new


def halves(layout: Layout, tensor: int) -> list[Box]:
    """A tensor as two boxes, a matrix cut along its columns: positions are then ordinals in a strided box."""
    spec = layout[tensor]
    if len(spec.shape) != 2 or spec.shape[1] < 2:
        return [Box.flat(0, spec.elements)] if spec.elements else []
    rows, columns = spec.shape
    left = columns // 2
    return [Box(0, (rows, left), (columns, 1)), Box(left, (rows, columns - left), (columns, 1))]


class Version:
    """One hop: chunk files, and the segments in the order in which workers number them."""

    def __init__(self, hop: HopFiles, segments: list[Segment]) -> None:
        self.hop = hop
        self.segments = segments


def write_version(
    out: Path,
    layout: Layout,
    old: Lanes,
    new: Lanes,
    *,
    version: int,
    codec: Codec = Codec.AUTO,
    target: int = 4 << 20,
    boxes: Callable[[Layout, int], list[Box]] | None = None,
) -> Version:
    """Encode the step from `old` to `new` into chunk files of about `target` bytes."""
    encoder = ChunkEncoder(layout, codec=codec, target=target)
    paths: list[str] = []
    segments: list[Segment] = []
    out.mkdir(parents=True, exist_ok=True)

    def close() -> None:
        if not encoder.changed:
            return
        n = len(paths)
        identity = ChunkId(
            stream="s", attempt=version * 10, base=version - 1, version=version, group="g", rank=0, nonce="n", n=n
        )
        chunk = encoder.finish(identity)
        path = out / f"{version}-{n}.dcr"
        path.write_bytes(chunk.data)
        paths.append(str(path))
        segments.extend(chunk.segments)

    for tensor, spec in enumerate(layout):
        for box in boxes(layout, tensor) if boxes else _whole(spec.elements, spec.width):
            where = box.canonical(np.arange(box.elements, dtype=np.int64))
            encoder.add(tensor, box, old[tensor][where].copy(), new[tensor][where].copy())
            if encoder.full:
                close()
    close()
    return Version(HopFiles(version=version, base=version - 1, attempt=version * 10, chunks=paths), segments)


def _whole(elements: int, width: int) -> list[Box]:
    most = SEGMENT_BYTES // width
    return [Box.flat(start, min(most, elements - start)) for start in range(0, elements, most)]


def vector(layout: Layout, lanes: Lanes) -> np.ndarray:
    return fingerprint(layout, lanes)


class Stub:
    """Just enough of a vLLM worker: counters where vLLM has methods."""

    def __init__(self, model: torch.nn.Module, config: Any, rank: int = 0) -> None:
        self.rank = rank
        self.vllm_config = config
        self.device = torch.device("cpu")
        self.model_runner = SimpleNamespace(get_model=lambda: model)
        self.forwards = 0

    def execute_model(self, *args: Any) -> str:
        self.forwards += 1
        return "output"

    def execute_dummy_batch(self) -> None:
        self.forwards += 1

    def reload_weights(self, *args: Any) -> None: ...

    def add_lora(self, request: Any) -> bool:
        return True


class Worker(Stub, WorkerExtension):
    """As vLLM mixes the extension into its worker."""


class Driver:
    """Makes the calls of `calls.Op` to one worker and unpacks what it answers."""

    def __init__(self, worker: Any) -> None:
        self.worker = worker
        self.token = 0
        self._calls = itertools.count()

    def reply(self, op: Op, /, **arg: Any) -> calls.Reply:
        name = f"call-{next(self._calls)}"
        env = calls.plain(calls.Call(op=op, call=name, token=self.token, arg=calls.plain(arg)))
        reply = calls.parse(self.worker.dcr_call(env), calls.Reply)
        assert reply.call == name
        return reply

    def ok(self, op: Op, answer: type | None = None, /, **arg: Any) -> Any:
        reply = self.reply(op, **arg)
        assert reply.ok, f"{op}: {reply.code}: {reply.error}"
        return reply.result if answer is None else calls.parse(reply.result, answer)

    def attach(self, layout: Layout, place: Path, cap: int = 1 << 22) -> calls.AttachedRank:
        path = place / f"{layout.digest}.json"
        path.write_bytes(layout.encoded)
        self.token += 1
        return self.ok(Op.ATTACH, calls.AttachedRank, layout=str(path), layout_digest=layout.digest, cap=cap)

    def finish(self, job: str) -> calls.JobStatus:
        for _ in range(6000):
            status = self.ok(Op.POLL, calls.JobStatus, id=job)
            if status.state not in (JobState.QUEUED, JobState.RUNNING):
                return status
            time.sleep(0.005)
        raise AssertionError(f"job {job} does not end")

    def prepare(self, txn: str, versions: Sequence[Version]) -> calls.PreparedRank:
        self.ok(Op.START, id=txn, kind="prepare", hops=[version.hop for version in versions])
        status = self.finish(txn)
        assert status.state == JobState.DONE, status.error
        return self.ok(Op.JOIN, calls.PreparedRank, id=txn)

    def fingerprint(self, layout: Layout, attached: calls.AttachedRank, job: str = "") -> np.ndarray:
        """The vector as this one rank sees it; replicas must agree."""
        return join_boxes(len(layout), attached.boxes, self.box_sums(job))

    def box_sums(self, job: str = "") -> np.ndarray:
        """What each box of this rank sums to."""
        job = job or f"f{next(self._calls)}"
        self.ok(Op.START, id=job, kind="fingerprint")
        assert self.finish(job).state == JobState.DONE
        return np.frombuffer(self.ok(Op.JOIN, calls.FingerprintRank, id=job).sums, dtype="<u8")

    def swap(self, txn: str) -> calls.Sums:
        for op in (Op.APPROVE, Op.CHECK, Op.BEGIN):
            self.ok(op, txn=txn)
        return self.ok(Op.APPLY, calls.Sums, txn=txn)


def join_boxes(tensors: int, boxes: Sequence[calls.BoxRow], sums: np.ndarray) -> np.ndarray:
    seen: dict[calls.BoxRow, int] = {}
    out = np.zeros(tensors, dtype=np.uint64)
    for box, value in zip(boxes, sums, strict=True):
        key = (box.tensor, box.dst, box.shape, box.strides)
        if key not in seen:
            out[box.tensor : box.tensor + 1] += value  # an array wraps in silence, as sums mod 2^64 do
        assert seen.setdefault(key, int(value)) == int(value), "replicas differ"
    return out


def unpack(sums: calls.Sums) -> dict[int, tuple[int, int]]:
    """Box -> (count, sum)."""
    boxes, counts = np.frombuffer(sums.box, "<u4"), np.frombuffer(sums.count, "<i8")
    return {int(b): (int(c), int(s)) for b, c, s in zip(boxes, counts, np.frombuffer(sums.sums, "<u8"), strict=True)}


def segment_totals(hop: calls.SegmentSums) -> dict[int, tuple[int, int, int]]:
    """Segment -> (count, before, after) summed over the boxes of one rank (no replicas)."""
    out: dict[int, tuple[int, int, int]] = {}
    columns = [np.frombuffer(getattr(hop, name), t) for name, t in
               (("segment", "<u4"), ("count", "<i8"), ("before", "<u8"), ("after", "<u8"))]  # fmt: skip
    for segment, count, before, after in zip(*columns, strict=True):
        a, b, c = out.get(int(segment), (0, 0, 0))
        out[int(segment)] = a + int(count), (b + int(before)) % (1 << 64), (c + int(after)) % (1 << 64)
    return out

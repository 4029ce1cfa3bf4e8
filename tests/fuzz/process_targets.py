"""Targets between and beside processes: sockets, workers, status objects, local files."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import hashlib
from collections.abc import Callable
from typing import Any

import msgspec
from fuzz import samples
from fuzz.harness import REFUSED, as_file, loop, run, scratch, target

from dcr_daemon.checkpoint.blocks import BlockSet
from dcr_daemon.config import read_config
from dcr_daemon.engine import messages
from dcr_daemon.engine.directory.checkout import Checkout
from dcr_daemon.engine.directory.journal import read_journal
from dcr_daemon.engine.port import Attached, EngineStatus, Prepared, Swapped
from dcr_daemon.errors import Corrupt, DcrError, EngineRefused, UsageError
from dcr_daemon.ledger.high_water_mark import HighWaterMark
from dcr_daemon.publish.baseline.baseline import Baseline
from dcr_daemon.publish.watch import published
from dcr_daemon.runtime import Workers
from dcr_daemon.subscribe.status import decode_status
from dcr_daemon.vllm_plugin import calls
from dcr_daemon.vllm_plugin.calls import Code
from dcr_daemon.vllm_plugin.worker.extension import answer
from dcr_daemon.vllm_plugin.worker.session import Refusal

# Sockets.

_RESULTS: tuple[Any, ...] = (
    None,
    Attached,
    Prepared,
    Swapped,
    EngineStatus,
    messages.Report,
    list[messages.RankChecksums],
)


@target
def socket_frames(data: bytes) -> None:
    """A connection's bytes: frames, and in them calls and answers."""
    reader = asyncio.StreamReader(loop=loop())
    reader.feed_data(data)
    reader.feed_eof()
    with contextlib.suppress(UsageError, asyncio.IncompleteReadError):
        while (body := run(messages.read_frame(reader))) is not None:
            socket_records(body)


@target
def socket_records(data: bytes) -> None:
    """One record: a call as a server reads it, an answer as a client does."""
    with contextlib.suppress(UsageError):
        call = messages.decode_call(data)
        assert messages.decode_call(messages.encode(call)) == call
    try:
        found = messages.decode_answer(data)
    except UsageError:
        return
    for kind in _RESULTS:
        with contextlib.suppress(DcrError):
            messages.result_of(found, kind)


_KINDS = (
    calls.Call, calls.Reply, calls.Attach, calls.Start, calls.JobRef, calls.TxnRef, calls.Begin, calls.AttachedRank,
    calls.PreparedRank, calls.ComparedRank, calls.FingerprintRank, calls.Sums, calls.Status, calls.JobStatus,
)  # fmt: skip


class _Rank:
    """A worker that does nothing but be asked."""

    rank, external_writes, dirty = 0, 0, False

    def fence(self, token: int) -> None:
        if token < 2:
            raise Refusal(Code.FENCED, "a newer owner attached")

    def __getattr__(self, name: str) -> Callable[..., None]:
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *_: None


@target
def worker_calls(data: bytes) -> None:
    """What reaches a vLLM worker over its executor: always answered, never raised (must E3)."""
    try:
        envelope = msgspec.msgpack.decode(data)
    except (msgspec.MsgspecError, RecursionError):
        return
    for kind in _KINDS:
        with contextlib.suppress(ValueError):
            calls.parse(envelope, kind)
    reply = answer(_Rank(), envelope, "c")  # type: ignore[arg-type]
    assert calls.parse(reply, calls.Reply).call == "c"


# Status objects and local files.


@target
def status(data: bytes) -> None:
    """A replica's status object: a report, or as good as absent (must L7)."""
    decode_status(data)


@target
def mark(data: bytes) -> None:
    """The high-water mark."""
    path = as_file("seen.json", data)
    with contextlib.suppress(*REFUSED):
        found = HighWaterMark(path).mark
        assert found is not None


@target
def published_list(data: bytes) -> None:
    """`published.json` is a shortcut: a value, or nothing."""
    published._load(as_file("published.json", data), samples.STREAM, scratch())


@target
def baseline_hint(data: bytes) -> None:
    """`baseline.json` is a hint: a value, or nothing."""
    as_file("baseline.json", data)
    hint = _baseline().hint()
    assert hint is None or hint[1].size == len(samples.LAYOUT)


@functools.cache
def _baseline() -> Baseline:
    return Baseline(scratch(), BlockSet.whole(samples.LAYOUT), samples.STREAM, Workers(1))


@target
def directory_marks(data: bytes) -> None:
    """`.dcr/version.json`, `.dcr/dirty` and `.dcr/owner.json` of a served directory."""
    checkout = Checkout(scratch() / "served")
    for name, read in (("version.json", checkout.marker), ("dirty", checkout.dirty), ("owner.json", checkout.owner)):
        checkout.marks.mkdir(parents=True, exist_ok=True)
        (checkout.marks / name).write_bytes(data)
        with contextlib.suppress(EngineRefused):
            read()
        (checkout.marks / name).unlink()


@target
def journal(data: bytes) -> None:
    """The redo journal as it is, and under a digest that fits: sound entries, `Corrupt`, or none."""
    for body in (data, data + hashlib.sha256(data).digest()):
        found = read_journal(as_file("journal", body))
        if found is None:
            continue
        with contextlib.suppress(Corrupt):
            for entry in found.entries(samples.LAYOUT):
                spec = samples.LAYOUT[entry.tensor]
                assert entry.positions.size == entry.new.size == entry.old.size
                assert not entry.positions.size or int(entry.positions.min()) >= 0
                assert not entry.positions.size or int(entry.positions.max()) < spec.elements
        found.close()


_KNOWN = {"publish": {"to": "to", "watch": "watch", "endpoint-url": "endpoint_url"}, "status": {"json": "json"}}


@target
def config(data: bytes) -> None:
    """The user's TOML."""
    with contextlib.suppress(UsageError):
        read_config(as_file("dcr.toml", data), "publish", known=_KNOWN)

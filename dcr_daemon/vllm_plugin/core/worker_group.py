"""Calls all workers of one engine and matches their replies. Runs on EngineCore's thread.

Called by everything in `core`: an operation of `calls` goes out to every rank, and the parsed results come back in rank
order. A reply counts only if it carries the call's own id (must E3). Another component's failed RPC leaves replies in
the queues: vLLM raises at the first failing rank and does not read the later ones. A stale reply is skipped until that
rank's own reply comes. A stale *error* is raised again by vLLM, which loses the replies it had read, so the call is
made once more under a new id; before a call that cannot be repeated, one that can is made. Afterwards all queues are in
step.
"""

from __future__ import annotations

import logging
import secrets
import socket
from collections.abc import Sequence
from typing import Any, Protocol, TypeVar

import msgspec

from dcr_daemon.errors import Corrupt, DcrError, EngineRefused, Fenced, ResourceExhausted
from dcr_daemon.vllm_plugin import calls
from dcr_daemon.vllm_plugin.calls import Code, Op, Reply
from dcr_daemon.vllm_plugin.job_flags import JobFlags

log = logging.getLogger("vllm.dcr")
T = TypeVar("T")

#: A worker refuses to carry these out twice, so their replies must not be lost.
ONCE = (Op.ATTACH, Op.START)
STALE = 64  #: stale replies that are skipped, per rank
UNFLAGGED = 64  #: polls of a job between two calls to the workers while not all of their flags are set

_KINDS: dict[str, type[DcrError]] = {
    Code.FENCED: Fenced,
    Code.REFUSED: EngineRefused,
    Code.UNPROVED: EngineRefused,
    Code.CORRUPT: Corrupt,
    Code.EXHAUSTED: ResourceExhausted,
    Code.FAILED: EngineRefused,
}


class WorkerTransport(Protocol):
    """Carries calls to the workers; `hooks` implements it over vLLM's executor."""

    @property
    def unsupported(self) -> str:
        """Why these workers cannot be called safely, and what to use instead; empty if they can."""
        ...

    def send(self, call: dict[str, Any]) -> Sequence[Any] | None:
        """One object per rank, not checked. None: vLLM raised an error of an earlier call and the replies are lost."""
        ...

    def next_reply(self, rank: int) -> Any:
        """The next object in one rank's queue; only to skip stale replies."""
        ...


class WorkerGroup:
    """Calls all ranks; keeps each rank's last count of external writes, and the owner token that calls carry.

    `ask` raises the error kind that a rank's code stands for, and names the ranks; `replies` returns every reply.
    """

    def __init__(self, transport: WorkerTransport, *, flags: JobFlags | None = None) -> None:
        self._transport = transport
        self._flags = flags
        self._ranks: list[int] = []
        self._hosts: list[str] = []
        self._unflagged = 0  #: polls since the workers were last asked
        self._nonce = secrets.token_hex(4)
        self._calls = 0
        self.token = 0
        self.generations: list[int] = []

    def greet(self) -> None:
        """Guard every worker, and give it the flags. Without them the workers are asked at every poll."""
        hello = calls.Hello(flags=self._flags.path if self._flags else "")
        try:
            workers = self.ask(Op.HELLO, calls.Status, arg=hello)
        finally:
            if self._flags is not None:
                self._flags.hide()
        if not all(worker.flagged for worker in workers):
            self._flags = None
        self._ranks = [worker.rank for worker in workers]
        self._hosts = [worker.host for worker in workers]

    def unsupported(self) -> str:
        """Why these workers can never be kept up to date; empty if nothing is known that prevents it."""
        here, elsewhere = socket.gethostname(), dict[str, list[str]]()
        for rank, host in zip(self._ranks, self._hosts, strict=True):
            if host != here:
                elsewhere.setdefault(host, []).append(str(rank))
        if not elsewhere:
            return self._transport.unsupported
        where = "; ".join(f"rank {', '.join(ranks)} on {host}" for host, ranks in elsewhere.items())
        return f"workers run on other hosts than the engine ({here}): {where}; start one server per host"

    def jobs_may_have_ended(self) -> bool:
        """Whether to ask the workers for their jobs: false while one of them has not set its flag, but not for ever."""
        self._unflagged += 1
        if self._flags is not None and self._unflagged < UNFLAGGED and not self._flags.all_set(self._ranks):
            return False
        self._unflagged = 0
        return True

    def ask(self, op: Op, kind: type[T], *, arg: msgspec.Struct | None = None) -> list[T]:
        """The result of every rank, as `kind`."""
        replies = self.replies(op, arg)
        raise_for(op, replies)
        return [calls.parse(reply.result, kind) for reply in replies]

    def replies(self, op: Op, arg: msgspec.Struct | None = None) -> list[Reply]:
        """The reply of every rank, ok or not, in rank order."""
        if op in ONCE:
            self.replies(Op.STATUS)
        for _ in range(STALE):
            self._calls += 1
            name = f"{self._nonce}-{self._calls}"
            call = calls.Call(op=op, call=name, token=self.token, arg=calls.plain(arg) if arg else {})
            answers = self._transport.send(calls.plain(call))
            if answers is not None:
                replies = [self._own(rank, answer, name) for rank, answer in enumerate(answers)]
                self.generations = [reply.generation for reply in replies]
                return replies
        raise EngineRefused("the workers answer only with errors of earlier calls", hint="restart the server")

    def _own(self, rank: int, answer: Any, call: str) -> Reply:
        for _ in range(STALE):
            if isinstance(answer, dict) and answer.get("call") == call:
                return calls.parse(answer, Reply)
            log.warning("dcr: rank %d had a stale reply in its queue; reading the next one", rank)
            answer = self._transport.next_reply(rank)
        raise EngineRefused(f"rank {rank} does not answer calls in order", hint="restart the server")


def kind_of(code: str) -> type[DcrError]:
    """The error kind that a worker's code stands for."""
    return _KINDS.get(code, EngineRefused)


def raise_for(op: Op, replies: Sequence[Reply]) -> None:
    """Raise an error that names the ranks that were not ok; its kind is that of the first such rank."""
    bad = [reply for reply in replies if not reply.ok]
    if not bad:
        return
    texts: dict[str, list[int]] = {}
    for reply in bad:
        texts.setdefault(reply.error, []).append(reply.rank)
    who = "; ".join(f"rank {', '.join(map(str, ranks))}: {text}" for text, ranks in texts.items())
    raise kind_of(bad[0].code)(f"{op}: {who}", hint=bad[0].hint)

"""All workers of one engine, asked as one. Lives on EngineCore's thread.

A reply counts only under the call's own id (must E3). Somebody else's failed RPC leaves replies behind: vLLM raises at
the first failing rank and does not read the later ones. A stale reply is read past, until that rank's own answer comes;
a stale *error* is raised again by vLLM, which loses the replies it had read, so the call is made once more under a new
id. Calls that could not be repeated are preceded by one that can. So the queues are in step again for everybody.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Sequence
from typing import Any, Protocol, TypeVar

import msgspec

from dcr_daemon.errors import Corrupt, DcrError, EngineRefused, Fenced, ResourceExhausted
from dcr_daemon.vllm_plugin import calls
from dcr_daemon.vllm_plugin.calls import Code, Op, Reply

log = logging.getLogger("vllm.dcr")
T = TypeVar("T")

#: A second one would be refused, so a lost reply must not happen.
ONCE = (Op.ATTACH, Op.START)
STALE = 64  #: replies left behind that we read past, per rank

_KINDS: dict[str, type[DcrError]] = {
    Code.FENCED: Fenced,
    Code.REFUSED: EngineRefused,
    Code.UNPROVED: EngineRefused,
    Code.CORRUPT: Corrupt,
    Code.EXHAUSTED: ResourceExhausted,
    Code.FAILED: EngineRefused,
}


class WorkerTransport(Protocol):
    """How calls reach the workers; `hooks` implements it over vLLM's executor."""

    def send(self, call: dict[str, Any]) -> Sequence[Any] | None:
        """One answer per rank, whatever it is. None: an error of an earlier call came up, the answers are lost."""
        ...

    def next_reply(self, rank: int) -> Any:
        """The next thing in one rank's queue; for reading past stale replies only."""
        ...


class WorkerGroup:
    """Calls all ranks; keeps the highest weights generation each rank has shown.

    Raises the error kind that a rank's code stands for, naming the ranks, unless told to hand replies back.
    """

    def __init__(self, wire: WorkerTransport) -> None:
        self._wire = wire
        self._nonce = secrets.token_hex(4)
        self._calls = 0
        self.token = 0
        self.generations: list[int] = []

    def ask(self, op: Op, kind: type[T], arg: msgspec.Struct | None = None) -> list[T]:
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
            answers = self._wire.send(calls.plain(call))
            if answers is not None:
                replies = [self._own(rank, answer, name) for rank, answer in enumerate(answers)]
                self.generations = [reply.generation for reply in replies]
                return replies
        raise EngineRefused("the workers answer with nothing but errors of earlier calls", hint="restart the server")

    def _own(self, rank: int, answer: Any, call: str) -> Reply:
        for _ in range(STALE):
            if isinstance(answer, dict) and answer.get("call") == call:
                return calls.parse(answer, Reply)
            log.warning("dcr: rank %d had a stale reply in its queue; reading on to our own", rank)
            answer = self._wire.next_reply(rank)
        raise EngineRefused(f"rank {rank} does not answer our calls in order", hint="restart the server")


def kind_of(code: str) -> type[DcrError]:
    """The error that a worker's code stands for."""
    return _KINDS.get(code, EngineRefused)


def raise_for(op: Op, replies: Sequence[Reply]) -> None:
    """Raise the error of the ranks that were not ok; of several kinds the first rank's."""
    bad = [reply for reply in replies if not reply.ok]
    if not bad:
        return
    texts: dict[str, list[int]] = {}
    for reply in bad:
        texts.setdefault(reply.error, []).append(reply.rank)
    who = "; ".join(f"rank {', '.join(map(str, ranks))}: {text}" for text, ranks in texts.items())
    raise kind_of(bad[0].code)(f"{op}: {who}", hint=bad[0].hint)

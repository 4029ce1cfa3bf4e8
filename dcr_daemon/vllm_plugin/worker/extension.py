"""The worker extension: one method in every vLLM worker, a guard on its forward pass, wraps on whoever writes weights.

`--worker-extension-cls dcr_daemon.vllm_plugin.WorkerExtension` makes vLLM mix this class into its worker. It defines
nothing but `dcr_call`, because vLLM refuses an extension whose names clash. `dcr_call` never raises: an exception on
one rank would leave another rank's answer behind for the next call to read (must E3).
"""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Callable
from typing import Any

import msgspec

from dcr_daemon.errors import DcrError
from dcr_daemon.vllm_plugin import calls
from dcr_daemon.vllm_plugin.calls import EXIT_DIRTY, Code, Op, Reply
from dcr_daemon.vllm_plugin.weights import faults
from dcr_daemon.vllm_plugin.worker.jobs import code_of
from dcr_daemon.vllm_plugin.worker.session import Refusal, WorkerSession

log = logging.getLogger("dcr.worker")

FORWARD = ("execute_model", "execute_dummy_batch")

FREE = (Op.HELLO, Op.STATUS, Op.CHECKSUMS, Op.ATTACH, Op.FAULT)  #: need no current token


class WorkerExtension:
    """Mixed into vLLM's worker. All state lies in one attribute, made by the first call."""

    def dcr_call(self, env: dict[str, Any]) -> dict[str, Any]:
        """Answer one `calls.Call` with one `calls.Reply`; never raises."""
        call = str(env.get("call", "")) if isinstance(env, dict) else ""
        rank = getattr(self, "rank", -1)
        try:
            state = self.__dict__.get("_dcr_session")
            if state is None:
                state = self.__dict__["_dcr_session"] = install(self)
        except Exception as error:  # must E3: no exception leaves a worker
            log.exception("dcr: this worker cannot be guarded")
            return calls.plain(Reply(rank=rank, call=call, ok=False, code=Code.FAILED, error=str(error)))
        return answer(state, env, call)


def answer(rank: WorkerSession, env: dict[str, Any], call: str) -> dict[str, Any]:
    """Parse, fence, dispatch; whatever goes wrong becomes a reply that still tells the worker's state."""
    code, error, hint, result = "", "", "", None
    try:
        message = calls.parse(env, calls.Call)
        op = Op(message.op)
        if op not in FREE:
            rank.require_token(message.token)
        result = _dispatch(rank, op, message)
    except Refusal as refusal:
        code, error, hint = refusal.code, refusal.error, refusal.hint
    except (DcrError, OSError) as failure:
        code, error, hint = code_of(failure), str(failure), getattr(failure, "hint", "")
    except (msgspec.ValidationError, ValueError) as failure:
        code, error = Code.FAILED, f"the call does not parse: {failure}"
    except Exception as failure:  # must E3: no exception leaves a worker
        log.exception("dcr: %s failed", env.get("op"))
        code, error = Code.FAILED, f"{type(failure).__name__}: {failure}"
    return calls.plain(
        Reply(
            rank=rank.rank,
            call=call,
            ok=not code,
            code=code,
            error=error,
            hint=hint,
            generation=rank.generation,
            dirty=rank.dirty,
            result=result,
        )
    )


def _dispatch(rank: WorkerSession, op: Op, message: calls.Call) -> Any:
    simple: dict[Op, Callable[[], Any]] = {
        Op.HELLO: rank.status,
        Op.STATUS: rank.status,
        Op.CHECKSUMS: rank.checksums,
        Op.PLACEMENT: rank.placement,
        Op.DROP: rank.drop,
    }
    if op in simple:
        return simple[op]()
    if op is Op.ATTACH:
        return rank.attach(message.token, calls.parse(message.arg, calls.Attach))
    if op is Op.FAULT:
        if not faults.ENABLED:
            raise Refusal(Code.REFUSED, "faults are for tests: DCR_TEST_FAULTS is not set in this worker")
        return _inject(rank, message.arg)
    with_argument: dict[Op, tuple[type, Callable[[Any], Any]]] = {
        Op.START: (calls.Start, rank.start),
        Op.POLL: (calls.JobRef, rank.poll),
        Op.JOIN: (calls.JobRef, rank.join),
        Op.CANCEL: (calls.JobRef, rank.cancel),
        Op.APPROVE: (calls.TxnRef, rank.approve),
        Op.CHECK: (calls.TxnRef, rank.check),
        Op.BEGIN: (calls.Begin, rank.begin),
        Op.APPLY: (calls.TxnRef, rank.apply),
        Op.COMMIT: (calls.TxnRef, rank.commit),
        Op.ROLLBACK: (calls.TxnRef, rank.rollback),
        Op.CLOSE: (calls.TxnRef, rank.close),
    }
    kind, method = with_argument[op]
    return method(calls.parse(message.arg, kind))


def _inject(rank: WorkerSession, arg: dict[str, Any]) -> None:
    """A fault on every rank, or on the one that `rank` names; `damage` names a tensor in which a bit flips now."""
    if arg.pop("rank", rank.rank) != rank.rank:
        return
    if "damage" in arg:
        rank.damage(str(arg["damage"]))
    else:
        faults.inject(**arg)


def install(worker: Any) -> WorkerSession:
    """Make the state of a vLLM worker, guard its forward pass and watch whoever writes weights."""
    from vllm.platforms import current_platform

    rank = WorkerSession(
        rank=int(worker.rank),
        model=worker.model_runner.get_model(),
        config=worker.vllm_config,
        platform=str(current_platform.device_name),
        device=worker.device,
    )
    guard(worker, rank)
    return rank


def guard(worker: Any, rank: WorkerSession) -> None:
    """Wrap the worker's own methods, on the instance: vLLM looks them up there at each call."""
    missing = [name for name in FORWARD if not callable(getattr(worker, name, None))]
    if missing:
        raise RuntimeError(f"this vLLM's worker lacks {', '.join(missing)}: it cannot be guarded")
    for name in FORWARD:
        setattr(worker, name, _guarded(getattr(worker, name), rank))
    for name in calls.WRITERS:
        if callable(getattr(worker, name, None)):
            setattr(worker, name, _watched(getattr(worker, name), name, rank))


def _guarded(forward: Callable[..., Any], rank: WorkerSession) -> Callable[..., Any]:
    @functools.wraps(forward)
    def guarded(*args: Any, **kwargs: Any) -> Any:
        if rank.dirty:
            # Raising would be reported by one rank only, while the others wait for it in a collective (must E1).
            log.critical("asked for a forward pass while weights are half written: this worker ends")
            os._exit(EXIT_DIRTY)
        return forward(*args, **kwargs)

    return guarded


def _watched(writer: Callable[..., Any], name: str, rank: WorkerSession) -> Callable[..., Any]:
    @functools.wraps(writer)
    def watched(*args: Any, **kwargs: Any) -> Any:
        rank.note_external_write(name)  # before the write, so that a failing one counts too
        return writer(*args, **kwargs)

    return watched

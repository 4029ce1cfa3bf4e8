"""The worker extension: the RPC of every vLLM worker, a guard on its forward pass, and wraps around external writers.

Runs in the worker process. `--worker-extension-cls dcr_daemon.vllm_plugin.WorkerExtension` makes vLLM mix this class
into its worker; EngineCore (`core.worker_group`) calls its method `dcr_call`, one `calls.Call` in, one `calls.Reply`
out. The class defines nothing else, because vLLM refuses an extension whose names clash with its own. `dcr_call` never
raises: after an exception on one rank the next call would read another rank's old reply (must E3).
"""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Callable
from typing import Any

import msgspec
import torch

from dcr_daemon.errors import DcrError
from dcr_daemon.vllm_plugin import calls
from dcr_daemon.vllm_plugin.calls import EXIT_DIRTY, Code, Op, Reply
from dcr_daemon.vllm_plugin.weights import faults
from dcr_daemon.vllm_plugin.worker import reserve
from dcr_daemon.vllm_plugin.worker.jobs import code_of
from dcr_daemon.vllm_plugin.worker.session import Refusal, WorkerSession

log = logging.getLogger("dcr.worker")

FORWARD = ("execute_model", "execute_dummy_batch")

FREE = (Op.HELLO, Op.STATUS, Op.CHECKSUMS, Op.ATTACH, Op.FAULT)  #: need no current token


class WorkerExtension:
    """Mixed into vLLM's worker. Its whole state is one `WorkerSession`, which the first call makes."""

    def dcr_call(self, env: dict[str, Any]) -> dict[str, Any]:
        """Answer one `calls.Call` with one `calls.Reply`; never raises."""
        call = str(env.get("call", "")) if isinstance(env, dict) else ""
        rank = getattr(self, "rank", -1)
        try:
            session = self.__dict__.get("_dcr_session")
            if session is None:
                session = self.__dict__["_dcr_session"] = install(self)
        except Exception as error:  # must E3: no exception leaves a worker
            log.exception("dcr: this worker cannot be guarded")
            return calls.plain(Reply(rank=rank, call=call, ok=False, code=Code.FAILED, error=str(error)))
        return answer(session, env, call)


def answer(session: WorkerSession, env: dict[str, Any], call: str) -> dict[str, Any]:
    """Parse the call, check its token, carry it out; every error becomes a reply that still reports the worker's
    state."""
    code, error, hint, result = "", "", "", None
    try:
        message = calls.parse(env, calls.Call)
        op = Op(message.op)
        if op not in FREE:
            session.require_token(message.token)
        result = _dispatch(session, op, message)
    except Refusal as refusal:
        code, error, hint = refusal.code, refusal.error, refusal.hint
    except (DcrError, OSError, MemoryError, torch.OutOfMemoryError) as failure:
        code, error, hint = code_of(failure), str(failure), getattr(failure, "hint", "")
    except (msgspec.ValidationError, ValueError) as failure:
        code, error = Code.FAILED, f"the call does not parse: {failure}"
    except Exception as failure:  # must E3: no exception leaves a worker
        log.exception("dcr: %s failed", env.get("op"))
        code, error = Code.FAILED, f"{type(failure).__name__}: {failure}"
    return calls.plain(
        Reply(
            rank=session.rank,
            call=call,
            ok=not code,
            code=code,
            error=error,
            hint=hint,
            generation=session.external_writes,
            dirty=session.dirty,
            result=result,
        )
    )


def _dispatch(session: WorkerSession, op: Op, message: calls.Call) -> Any:
    simple: dict[Op, Callable[[], Any]] = {
        Op.STATUS: session.status,
        Op.CHECKSUMS: session.checksums,
        Op.PLACEMENT: session.placement,
        Op.DROP: session.drop,
    }
    if op in simple:
        return simple[op]()
    if op is Op.ATTACH:
        return session.attach(message.token, calls.parse(message.arg, calls.Attach))
    if op is Op.FAULT:
        if not faults.ENABLED:
            raise Refusal(Code.REFUSED, "faults are for tests only: DCR_TEST_FAULTS is not set in this worker")
        return _inject(session, message.arg)
    with_argument: dict[Op, tuple[type, Callable[[Any], Any]]] = {
        Op.HELLO: (calls.Hello, session.hello),
        Op.START: (calls.Start, session.start),
        Op.POLL: (calls.JobRef, session.poll),
        Op.JOIN: (calls.JobRef, session.join),
        Op.CANCEL: (calls.JobRef, session.cancel),
        Op.APPROVE: (calls.TxnRef, session.approve),
        Op.CHECK: (calls.TxnRef, session.check),
        Op.BEGIN: (calls.Begin, session.begin),
        Op.APPLY: (calls.TxnRef, session.apply),
        Op.COMMIT: (calls.TxnRef, session.commit),
        Op.ROLLBACK: (calls.TxnRef, session.rollback),
        Op.CLOSE: (calls.TxnRef, session.close),
    }
    kind, method = with_argument[op]
    return method(calls.parse(message.arg, kind))


def _inject(session: WorkerSession, arg: dict[str, Any]) -> None:
    """Inject a fault on every rank, or only on the one that `rank` names; `damage` flips a bit of the named tensor."""
    if arg.pop("rank", session.rank) != session.rank:
        return
    if "damage" in arg:
        session.damage(str(arg["damage"]))
    else:
        faults.inject(**arg)


def install(worker: Any) -> WorkerSession:
    """Make the session of a vLLM worker, guard its forward pass and wrap its external writers."""
    from vllm.platforms import current_platform

    session = WorkerSession(
        rank=int(worker.rank),
        model=worker.model_runner.get_model(),
        config=worker.vllm_config,
        platform=str(current_platform.device_name),
        device=worker.device,
        device_arena=worker.__dict__.get(reserve.ATTRIBUTE),
    )
    guard(worker, session)
    return session


def guard(worker: Any, session: WorkerSession) -> None:
    """Wrap methods of the worker, on the instance: vLLM looks them up there at each call."""
    missing = [name for name in FORWARD if not callable(getattr(worker, name, None))]
    if missing:
        raise RuntimeError(f"this vLLM's worker lacks {', '.join(missing)}: it cannot be guarded")
    for name in FORWARD:
        setattr(worker, name, _guarded(getattr(worker, name), session))
    for name in calls.WRITERS:
        if callable(getattr(worker, name, None)):
            setattr(worker, name, _watched(getattr(worker, name), name, session))


def _guarded(forward: Callable[..., Any], session: WorkerSession) -> Callable[..., Any]:
    @functools.wraps(forward)
    def guarded(*args: Any, **kwargs: Any) -> Any:
        if session.dirty:
            # An exception would be reported by one rank only, while the others wait for it in a collective (must E1).
            log.critical("dcr: a forward pass was requested while weights are half written: this worker ends")
            os._exit(EXIT_DIRTY)
        return forward(*args, **kwargs)

    return guarded


def _watched(writer: Callable[..., Any], name: str, session: WorkerSession) -> Callable[..., Any]:
    @functools.wraps(writer)
    def watched(*args: Any, **kwargs: Any) -> Any:
        session.note_external_write(name)  # before the write, so that a failing write counts as well
        return writer(*args, **kwargs)

    return watched

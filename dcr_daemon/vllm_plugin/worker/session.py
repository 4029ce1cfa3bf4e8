"""State of one worker: the owner's token, the attachment, at most one transaction and at most one job.

Runs in the worker process. `extension` calls one method per `calls.Op`; all of them run on the worker's main thread,
one RPC at a time, never beside a forward pass. A transaction ends only by commit or rollback, never by a time-out (must
E6). A method refuses by raising `Refusal`; the caller turns it, and any unforeseen error, into a reply (must E3).
"""

from __future__ import annotations

import hashlib
import logging
import os
import socket
from collections.abc import Callable
from typing import Any, TypeVar

import msgspec
import torch

from dcr_daemon.canonical.layout import Layout
from dcr_daemon.engine.staged import read_layout
from dcr_daemon.errors import ResourceExhausted
from dcr_daemon.vllm_plugin import calls
from dcr_daemon.vllm_plugin.calls import Code, JobKind, JobState, TxnState
from dcr_daemon.vllm_plugin.job_flags import JobFlags
from dcr_daemon.vllm_plugin.weights import faults
from dcr_daemon.vllm_plugin.weights.arena import DeviceArena
from dcr_daemon.vllm_plugin.weights.memory import uint_view
from dcr_daemon.vllm_plugin.weights.torch_memory import flip_bit
from dcr_daemon.vllm_plugin.worker.attachment import Attachment, attach
from dcr_daemon.vllm_plugin.worker.jobs import BackgroundThread, Job
from dcr_daemon.vllm_plugin.worker.reserve import TransactionMemory
from dcr_daemon.vllm_plugin.worker.transaction import Transaction

log = logging.getLogger("dcr.worker")

T = TypeVar("T")

KEPT_OUTCOMES = 16
BEGUN_STATES = (TxnState.BEGUN, TxnState.ROLLED_BACK)


class Refusal(Exception):
    """The call is answered with `ok=False`, `code`, `error` and `hint`."""

    def __init__(self, code: Code, error: str, *, hint: str = "") -> None:
        super().__init__(error)
        self.code, self.error, self.hint = code, error, hint


class WorkerSession:
    """State of one worker.

    Args:
        rank: global rank of the worker.
        model: the live model, whose parameters are read and written.
        config: vLLM's `VllmConfig`, from which `loader.eligibility` decides whether the model can be updated in place.
        platform: name of vLLM's platform: "cpu", "cuda", "rocm" …
        device: torch device that holds the model.
        device_arena: memory that was reserved there before vLLM sized its KV cache.
    """

    def __init__(
        self,
        *,
        rank: int,
        model: torch.nn.Module,
        config: Any,
        platform: str,
        device: torch.device,
        device_arena: DeviceArena | None = None,
    ) -> None:
        self.rank = rank
        self._model, self._config, self._platform, self._device = model, config, platform, device
        self.dirty = False
        self.external_writes = 0  # on the wire: `generation`
        self._changed_by = ""
        self._invalidations = 0  # rises with each begun write of our own, and when a transaction is forgotten
        self._token = 0
        self._attachment: Attachment | None = None
        self._memory = TransactionMemory(model, device, device_arena)
        self._txn: Transaction | None = None
        self._txn_id: str | None = None
        self._kind = ""
        self._state = TxnState.NONE
        self._applied = False
        self._outcomes: dict[str, str] = {}
        self._background = BackgroundThread()

    # -- facts ---------------------------------------------------------------------------------------------------

    def status(self) -> calls.Status:
        job = self._background.job
        return calls.Status(
            rank=self.rank,
            pid=os.getpid(),
            device=str(self._device),
            token=self._token,
            txn=self._txn_id,
            kind=self._kind,
            state=self._state,
            dirty=self.dirty,
            generation=self.external_writes,
            changed_by=self._changed_by,
            job=job.status if job is not None else None,
            outcomes=dict(self._outcomes),
            host=socket.gethostname(),
            flagged=self._background.flagged,
        )

    def hello(self, arg: calls.Hello) -> calls.Status:
        """Open the flags that tell EngineCore when a job has ended. Where they cannot be opened, it polls instead."""
        if arg.flags:
            try:
                self._background.use_flags(JobFlags(arg.flags), self.rank)
            except OSError as error:
                log.info("dcr: rank %d does not see %s, and is polled: %s", self.rank, arg.flags, error)
        return self.status()

    def checksums(self) -> calls.Checksums:
        def digest(tensors: Any) -> dict[str, str]:
            return {name: hashlib.sha256(uint_view(tensor.cpu()).data).hexdigest() for name, tensor in tensors}

        return calls.Checksums(
            parameters=digest(self._model.named_parameters(remove_duplicate=False)),
            buffers=digest(self._model.named_buffers(remove_duplicate=False)),
        )

    def placement(self) -> list[dict[str, Any]]:
        return self._attached().describe()

    def damage(self, tensor: str) -> None:
        """For tests: flip one bit of a tensor, if this rank holds it."""
        attachment = self._attached()
        for number in attachment.placement.by_tensor.get(attachment.layout.index(tensor), [])[:1]:
            row = attachment.placement.rows[number]
            flip_bit(
                dict((*self._model.named_parameters(), *self._model.named_buffers()))[row.parameter],
                int(row.targets()[0]),
            )

    def note_external_write(self, name: str) -> None:
        """An external writer (`name`) is about to change weights: all that is known about them becomes void (must
        F1)."""
        self._background.quiesce()
        self.external_writes += 1
        self._changed_by = name
        if self._state not in BEGUN_STATES:
            self._forget()

    # -- ownership -----------------------------------------------------------------------------------------------

    def require_token(self, token: int) -> None:
        if token != self._token:
            raise Refusal(Code.FENCED, f"fenced: token {token}, the owner has {self._token}")

    def attach(self, token: int, arg: calls.Attach) -> calls.AttachedRank:
        """Take the new owner's token, place the layout and reserve memory for a transaction.

        While a transaction is begun only the token changes (must E6): placing or reserving again would destroy the old
        values that a rollback needs.
        """
        if token <= self._token:
            raise Refusal(Code.FENCED, f"fenced: token {token} is not above {self._token}")
        if self._state in BEGUN_STATES:
            self._token = token
            return calls.AttachedRank(token=token, adopted=self._txn_id)
        self._background.quiesce()
        self._token = token
        self._forget()
        device_arena = self._reserved(self._memory.reserve_device, arg.cap)
        placement = self._place(read_layout(arg.layout, arg.layout_digest), device_arena).placement
        if not placement.refusals:
            self._reserved(self._memory.reserve_host, arg.cap)
            self._background.use_cpus(arg.cpus)
        return calls.AttachedRank(
            token=token,
            adopted=None,
            held=placement.held,
            boxes=placement.boxes,
            refusals=placement.refusals,
            parameters=len({row.parameter for row in placement.rows}),
        )

    def _place(self, layout: Layout, device_arena: DeviceArena | None) -> Attachment:
        """Find out where the layout's tensors lie in memory now."""
        self._attachment = attach(
            self._model,
            self._config,
            layout,
            platform=self._platform,
            device_arena=device_arena,
            external_writes=self.external_writes,
            before=self._attachment,
        )
        return self._attachment

    def _reserved(self, reserve: Callable[[int | None], T], cap: int | None) -> T:
        """What `reserve` answers; without the memory there is no attachment."""
        try:
            return reserve(cap)
        except ResourceExhausted:
            self._attachment = None
            raise

    def _placed(self) -> Attachment:
        """The attachment, even if an external writer has written since."""
        if self._attachment is None:
            raise Refusal(Code.REFUSED, "no layout is attached", hint="attach first")
        if self._attachment.placement.refusals:
            raise Refusal(Code.REFUSED, "this model was refused at attach")
        return self._attachment

    def _attached(self) -> Attachment:
        """The attachment. Refuses if an external writer may have written since."""
        attachment = self._placed()
        if attachment.external_writes != self.external_writes:
            raise Refusal(Code.UNPROVED, f"{self._changed_by} may have changed the weights", hint="attach again")
        return attachment

    # -- jobs ----------------------------------------------------------------------------------------------------

    def start(self, arg: calls.Start) -> calls.JobStatus:
        """Start a job on the background thread; its result is taken over by `join`."""
        # Files may be checked in any state: the check reads no weight.
        attachment = self._placed() if arg.kind is JobKind.CHECK else self._attached()
        job = self._background.job
        if job is not None and (job.kind is JobKind.SCRUB or arg.kind is JobKind.CHECK):
            # A scrub may be cancelled at any time; a load is checked first, and by then no other job has an owner.
            self._background.quiesce()
        elif job is not None and job.live:
            raise Refusal(Code.REFUSED, f"job {job.id} ({job.kind}) is {job.state}", hint="join or cancel it first")
        loading_now = self._state in BEGUN_STATES and self._kind == "load"
        if (
            self._state in BEGUN_STATES
            and arg.kind is not JobKind.CHECK
            and (not loading_now or arg.kind is JobKind.PREPARE)
        ):
            raise Refusal(Code.REFUSED, f"transaction {self._txn_id} is {self._state}")
        if arg.kind is JobKind.LOAD and not loading_now:
            raise Refusal(Code.REFUSED, "a load job needs a begun load", hint="send begin with kind=load first")
        if arg.kind is JobKind.PREPARE:
            self._forget()
        stamp = (self.external_writes, self._invalidations)
        self._background.start(Job(arg.id, arg.kind, self._work(arg, attachment), stamp))
        return self._job(arg.id).status

    def _work(self, arg: calls.Start, attachment: Attachment) -> Callable[[Job], Any]:
        """The work of a job. It reads weights; only a load, which is begun and dirty, writes them."""
        arena = self._memory.host
        return {
            JobKind.PREPARE: lambda job: attachment.prepare(job, arg.hops, arena=arena),
            JobKind.FINGERPRINT: attachment.fingerprint,
            JobKind.SCRUB: lambda job: (attachment.scrub(job, arg), range(*arg.tensors)),
            JobKind.COMPARE: lambda job: attachment.read_computed([arg.loaded], arg.vector),
            JobKind.CHECK: lambda job: attachment.check_load(arg),
            JobKind.LOAD: lambda job: attachment.load(job, arg),
        }[arg.kind]

    def _job(self, name: str) -> Job:
        job = self._background.job
        if job is None or job.id != name:
            raise Refusal(Code.REFUSED, f"no job {name}")
        return job

    def poll(self, arg: calls.JobRef) -> calls.JobStatus:
        return self._job(arg.id).status

    def cancel(self, arg: calls.JobRef) -> calls.JobStatus:
        """Ask a job to stop; it may finish all the same. Poll until it is no longer live."""
        job = self._job(arg.id)
        job.cancelled.set()
        return job.status

    def join(self, arg: calls.JobRef) -> Any:
        """Take over a finished job's result. A result from before a write is void."""
        job = self._job(arg.id)
        if job.live:
            raise Refusal(Code.REFUSED, f"job {job.id} is {job.state}", hint="poll until it is done")
        if job.state is JobState.FAILED:
            raise Refusal(Code(job.code), job.error)
        if job.state is not JobState.DONE:
            raise Refusal(Code.REFUSED, f"job {job.id} was cancelled")
        if job.stamp != (self.external_writes, self._invalidations):
            raise Refusal(
                Code.UNPROVED, f"job {job.id} is void: weights changed while it ran or since", hint="start again"
            )
        if job.kind is JobKind.CHECK:
            return job.status
        if job.kind is JobKind.LOAD:
            self._attached().write_computed(job.result)
            self._attached().replay()
            self._applied = True
            return job.status
        if job.kind is JobKind.COMPARE:
            return calls.ComparedRank(id=job.id, differ=self._attached().differing(job.result))
        if job.kind is JobKind.SCRUB:
            sums, tensors = job.result
            return msgspec.structs.replace(sums, stale=self._attached().stale(tensors))
        if job.kind is JobKind.FINGERPRINT:
            return job.result
        if self._txn is not job.result:
            self._attached().run_loader(job.result)
            self._txn, self._txn_id, self._kind = job.result, job.id, "delta"
            self._state, self._applied = TxnState.HELD, False
        return job.result.answer

    # -- the transaction -----------------------------------------------------------------------------------------

    def approve(self, arg: calls.TxnRef) -> calls.Status:
        """All ranks were verified jointly: this transaction may begin (must E4)."""
        self._expect(arg.txn, TxnState.HELD, TxnState.PREPARED)
        self._state = TxnState.PREPARED
        return self.status()

    def check(self, arg: calls.TxnRef) -> calls.Status:
        """Check that the transaction could begin now, as `begin` does, but change nothing."""
        self._expect(arg.txn, TxnState.PREPARED, TxnState.BEGUN)
        self._require_unmoved()
        return self.status()

    def begin(self, arg: calls.Begin) -> calls.Status:
        """Set dirty; all ranks do so before any of them writes (must E1).

        A dense load replaces a transaction that can go neither forward nor back, and an unfinished load (must E5): it
        writes all tensors, so it needs no old values, and external writes or moved storages do not matter.
        """
        if arg.kind == "delta":
            if self._state in BEGUN_STATES:
                self._expect(arg.txn, TxnState.BEGUN)
                return self.status()
            self._expect(arg.txn, TxnState.PREPARED)
            self._require_unmoved()
            self._background.quiesce()
        else:
            self._background.quiesce()
            attachment = self._placed()
            if attachment.external_writes != self.external_writes or attachment.live.moved_parameter() is not None:
                self._place(attachment.layout, attachment.device_arena)
                self._placed()
            self._forget()
            self._txn_id, self._kind = arg.txn, "load"
        self.dirty = True
        self._invalidations += 1
        self._state, self._applied = TxnState.BEGUN, False
        return self.status()

    def apply(self, arg: calls.TxnRef) -> calls.Sums:
        """Write the new values. May be repeated, also after a rollback: values are absolute (must E5)."""
        txn, attachment = self._writable(arg.txn)
        self._state = TxnState.BEGUN
        sums = txn.apply(attachment.live, attachment.placement)
        attachment.replay()
        self._applied = True
        return sums

    def rollback(self, arg: calls.TxnRef) -> calls.Sums:
        """Write the old values back. The worker stays dirty until `close`, after the sums were verified."""
        txn, attachment = self._writable(arg.txn)
        sums = txn.rollback(attachment.live, attachment.placement)
        attachment.replay()
        self._state, self._applied = TxnState.ROLLED_BACK, False
        return sums

    def commit(self, arg: calls.TxnRef) -> calls.Status:
        """Forget the old values and clear dirty. Repeatable, because a failed rank makes the caller ask all ranks
        again."""
        if self._outcomes.get(arg.txn) == "committed" and self._txn_id is None:
            return self.status()
        self._expect(arg.txn, TxnState.BEGUN)
        self._attached()
        faults.point("commit")
        if not self._applied or (self._background.job is not None and self._background.job.live):
            raise Refusal(Code.REFUSED, f"transaction {arg.txn} is begun but not written")
        ended = self._end(arg.txn, "committed")
        faults.point("committed")
        return ended

    def close(self, arg: calls.TxnRef) -> calls.Status:
        """Clear dirty after a rollback that was verified on all ranks. Repeatable."""
        if self._outcomes.get(arg.txn) == "rolled back" and self._txn_id is None:
            return self.status()
        self._expect(arg.txn, TxnState.ROLLED_BACK)
        return self._end(arg.txn, "rolled back")

    def drop(self) -> calls.Status:
        """Forget the prepared transaction and stop a running job."""
        if self._state in BEGUN_STATES:
            raise Refusal(Code.REFUSED, f"transaction {self._txn_id} is {self._state}; it ends in commit or rollback")
        self._background.quiesce()
        self._forget()
        self._free_groups()
        return self.status()

    def _end(self, txn: str, outcome: str) -> calls.Status:
        self._outcomes[txn] = outcome
        for name in list(self._outcomes)[:-KEPT_OUTCOMES]:
            del self._outcomes[name]
        self._forget()
        self.dirty = False
        self._free_groups()
        return self.status()

    def _free_groups(self) -> None:
        """Give back what a transaction took on the device: between two of them the memory is vLLM's."""
        if self._attachment is not None and self._attachment.memory is not None:
            self._attachment.memory.set_groups(())

    def _forget(self) -> None:
        """Forget the transaction; the results of jobs that are running or finished become void."""
        self._invalidations += 1
        self._txn, self._txn_id, self._kind, self._applied = None, None, "", False
        self._state = TxnState.NONE

    def _expect(self, txn: str, *states: TxnState) -> None:
        if self._txn_id != txn or self._state not in states:
            held = f"{self._txn_id} is {self._state}" if self._txn_id else "there is none"
            raise Refusal(Code.REFUSED, f"transaction {txn} is not {' or '.join(states)}: {held}")

    def _require_unmoved(self) -> None:
        moved = self._attached().live.moved_parameter()
        if moved is not None:
            raise Refusal(Code.UNPROVED, f"storage of {moved} moved or was replaced", hint="attach again")

    def _writable(self, name: str) -> tuple[Transaction, Attachment]:
        """A begun delta and where to write it. Works also after an external write: a rollback is still possible."""
        self._expect(name, *BEGUN_STATES)
        attachment = self._attachment
        if self._txn is None or attachment is None:
            raise Refusal(
                Code.REFUSED,
                f"{name} is a dense load, which cannot be applied or rolled back",
                hint="load again, then commit",
            )
        moved = attachment.live.moved_parameter()
        if moved is not None:
            raise Refusal(Code.UNPROVED, f"storage of {moved} moved or was replaced inside a transaction")
        return self._txn, attachment

"""What one worker knows and may do: its owner's token, its placement, at most one transaction, at most one job.

The transaction lives by state, not by time (must E6). All methods run on the worker's main thread, one RPC at a time,
never beside a forward pass. `Refusal` is the only way to say no; the caller turns it, and anything unforeseen, into a
reply (must E3).
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from dcr_daemon.canonical.layout import Layout
from dcr_daemon.vllm_plugin import calls
from dcr_daemon.vllm_plugin.calls import Code, JobKind, JobState, TxnState
from dcr_daemon.vllm_plugin.weights import faults
from dcr_daemon.vllm_plugin.weights.memory import uint_view
from dcr_daemon.vllm_plugin.weights.torch_memory import flip_bit
from dcr_daemon.vllm_plugin.worker.attachment import Attachment, attach
from dcr_daemon.vllm_plugin.worker.jobs import BackgroundThread, Job
from dcr_daemon.vllm_plugin.worker.prepare import Arena
from dcr_daemon.vllm_plugin.worker.transaction import Transaction

KEPT_OUTCOMES = 16
BEGUN_STATES = (TxnState.BEGUN, TxnState.ROLLED_BACK)


class Refusal(Exception):
    """A call that is answered with `ok = False`."""

    def __init__(self, code: Code, error: str, hint: str = "") -> None:
        super().__init__(error)
        self.code, self.error, self.hint = code, error, hint


class WorkerSession:
    """State of one worker.

    Args:
        rank: global rank of the worker.
        model: the live model; `config`: vLLM's `VllmConfig`, handed through to the rules of `eligibility`.
        platform: "cpu", "cuda", "rocm" …
    """

    def __init__(self, *, rank: int, model: torch.nn.Module, config: Any, platform: str, device: torch.device) -> None:
        self.rank = rank
        self._model, self._config, self._platform, self._device = model, config, platform, device
        self.dirty = False
        self.generation = 0
        self._changed_by = ""
        self._epoch = 0  # moves with every write of our own, and when what was prepared is dropped
        self._token = 0
        self._attachment: Attachment | None = None
        self._arena: Arena | None = None
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
            generation=self.generation,
            changed_by=self._changed_by,
            job=job.status if job is not None else None,
            outcomes=dict(self._outcomes),
        )

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
        """For tests: flip a bit of a tensor where this rank holds it."""
        here = self._attached()
        for number in here.placement.by_tensor.get(here.layout.index(tensor), [])[:1]:
            row = here.placement.rows[number]
            flip_bit(
                dict((*self._model.named_parameters(), *self._model.named_buffers()))[row.parameter],
                int(row.targets()[0]),
            )

    def note_external_write(self, name: str) -> None:
        """Somebody else is about to change weights: whatever we know of them is void (must F1)."""
        self._background.quiesce()
        self.generation += 1
        self._changed_by = name
        if self._state not in BEGUN_STATES:
            self._forget()

    # -- ownership -----------------------------------------------------------------------------------------------

    def require_token(self, token: int) -> None:
        if token != self._token:
            raise Refusal(Code.FENCED, f"fenced: token {token}, the owner has {self._token}")

    def attach(self, token: int, arg: calls.Attach) -> calls.AttachedRank:
        """Become the owner. While a transaction is begun, nothing but the token changes (must E6): recording or
        reserving anew would destroy the old values that a rollback needs."""
        if token <= self._token:
            raise Refusal(Code.FENCED, f"fenced: token {token} is not above {self._token}")
        if self._state in BEGUN_STATES:
            self._token = token
            return calls.AttachedRank(token=token, adopted=self._txn_id)
        self._background.quiesce()
        self._token = token
        self._forget()
        layout = Layout.decode(Path(arg.layout).read_bytes())
        if layout.digest != arg.layout_digest:
            raise Refusal(Code.CORRUPT, f"{arg.layout} is not the layout of digest {arg.layout_digest[:16]}…")
        placement = self._record(layout).placement
        if not placement.refusals:
            self._reserve(arg.cap)
            self._background.use_cpus(arg.cpus)
        return calls.AttachedRank(
            token=token,
            adopted=None,
            held=placement.held,
            boxes=placement.boxes,
            refusals=placement.refusals,
            parameters=len({row.parameter for row in placement.rows}),
        )

    def _record(self, layout: Layout) -> Attachment:
        """Find out where a layout lies now."""
        self._attachment = attach(
            self._model,
            self._config,
            layout,
            platform=self._platform,
            device=self._device,
            generation=self.generation,
            before=self._attachment,
        )
        return self._attachment

    def _reserve(self, cap: int) -> None:
        """Have exactly `cap` bytes for a transaction, those of an earlier attach if they are as many."""
        if self._arena is not None and self._arena.size == max(cap, 8):
            return
        self._arena = None
        try:
            self._arena = Arena(cap)
        except MemoryError:
            self._attachment = None
            raise Refusal(Code.EXHAUSTED, f"no {cap} bytes for a transaction", "lower the transaction cap") from None

    def _recorded(self) -> Attachment:
        """What attach found, whether or not somebody has written since."""
        if self._attachment is None:
            raise Refusal(Code.REFUSED, "no layout is attached", "attach first")
        if self._attachment.placement.refusals:
            raise Refusal(Code.REFUSED, "this model was refused at attach")
        return self._attachment

    def _attached(self) -> Attachment:
        here = self._recorded()
        if here.generation != self.generation:
            raise Refusal(Code.UNPROVED, f"weights may have been changed by {self._changed_by}", "attach again")
        return here

    # -- jobs ----------------------------------------------------------------------------------------------------

    def start(self, arg: calls.Start) -> calls.JobStatus:
        # Files may be checked in any state: no weight is looked at.
        here = self._recorded() if arg.kind is JobKind.CHECK else self._attached()
        job = self._background.job
        if job is not None and (job.kind is JobKind.SCRUB or arg.kind is JobKind.CHECK):
            # A scrub is in nobody's way; and before a load comes, whatever still runs has lost its owner.
            self._background.quiesce()
        elif job is not None and job.live:
            raise Refusal(Code.REFUSED, f"job {job.id} ({job.kind}) is {job.state}", "join or cancel it first")
        loading_now = self._state in BEGUN_STATES and self._kind == "load"
        if (
            self._state in BEGUN_STATES
            and arg.kind is not JobKind.CHECK
            and (not loading_now or arg.kind is JobKind.PREPARE)
        ):
            raise Refusal(Code.REFUSED, f"transaction {self._txn_id} is {self._state}")
        if arg.kind is JobKind.LOAD and not loading_now:
            raise Refusal(Code.REFUSED, "a load is begun first")
        if arg.kind is JobKind.PREPARE:
            self._forget()
        self._background.start(Job(arg.id, arg.kind, self._work(arg, here), (self.generation, self._epoch)))
        return self._job(arg.id).status

    def _work(self, arg: calls.Start, here: Attachment) -> Callable[[Job], Any]:
        """What the thread will do: read weights, except in a load, which is begun and dirty."""
        arena = self._arena
        assert arena is not None, "reserved at attach"
        return {
            JobKind.PREPARE: lambda job: here.prepare(job, arg.hops, arena),
            JobKind.FINGERPRINT: here.fingerprint,
            JobKind.SCRUB: lambda job: here.scrub(job, arg),
            JobKind.COMPARE: lambda job: here.read_computed([arg.loaded], arg.vector),
            JobKind.CHECK: lambda job: here.check_load(arg),
            JobKind.LOAD: lambda job: here.load(job, arg),
        }[arg.kind]

    def _job(self, name: str) -> Job:
        job = self._background.job
        if job is None or job.id != name:
            raise Refusal(Code.REFUSED, f"no job {name}")
        return job

    def poll(self, arg: calls.JobRef) -> calls.JobStatus:
        return self._job(arg.id).status

    def cancel(self, arg: calls.JobRef) -> calls.JobStatus:
        """Ask a job to stop; it may have finished by then. Poll until it is no longer live."""
        job = self._job(arg.id)
        job.cancelled.set()
        return job.status

    def join(self, arg: calls.JobRef) -> Any:
        """Take a finished job's result over. A result from before a write is void."""
        job = self._job(arg.id)
        if job.live:
            raise Refusal(Code.REFUSED, f"job {job.id} is {job.state}", "poll until it is done")
        if job.state is JobState.FAILED:
            raise Refusal(Code(job.code), job.error)
        if job.state is not JobState.DONE:
            raise Refusal(Code.REFUSED, f"job {job.id} was cancelled")
        if job.stamp != (self.generation, self._epoch):
            raise Refusal(Code.UNPROVED, f"job {job.id} is void: weights changed while it ran or since", "start again")
        if job.kind is JobKind.CHECK:
            return job.status
        if job.kind is JobKind.LOAD:
            self._attached().write_computed(job.result)
            self._applied = True
            return job.status
        if job.kind is JobKind.COMPARE:
            return calls.ComparedRank(id=job.id, differ=self._attached().differing(job.result))
        if job.kind in (JobKind.FINGERPRINT, JobKind.SCRUB):
            return job.result
        if self._txn is not job.result:
            self._attached().run_loader(job.result)
            self._txn, self._txn_id, self._kind = job.result, job.id, "delta"
            self._state, self._applied = TxnState.HELD, False
        return job.result.answer

    # -- the transaction -----------------------------------------------------------------------------------------

    def approve(self, arg: calls.TxnRef) -> calls.Status:
        """All ranks were judged jointly and found good: this transaction may begin (must E4)."""
        self._expect(arg.txn, TxnState.HELD, TxnState.PREPARED)
        self._state = TxnState.PREPARED
        return self.status()

    def check(self, arg: calls.TxnRef) -> calls.Status:
        """Whether it could begin now; the same that `begin` asks for, without doing it."""
        self._expect(arg.txn, TxnState.PREPARED, TxnState.BEGUN)
        self._require_unmoved()
        return self.status()

    def begin(self, arg: calls.Begin) -> calls.Status:
        """Dirty from here on, on all ranks before any of them writes (must E1). A dense load supersedes what can
        neither go forward nor back (must E5), an unfinished load too: it writes everything, so no old value is needed
        any more, nor does it matter who has written meanwhile, or where storages have moved to."""
        if arg.kind == "delta":
            if self._state in BEGUN_STATES:
                self._expect(arg.txn, TxnState.BEGUN)
                return self.status()
            self._expect(arg.txn, TxnState.PREPARED)
            self._require_unmoved()
            self._background.quiesce()
        else:
            self._background.quiesce()
            here = self._recorded()
            if here.generation != self.generation or here.live.moved_parameter() is not None:
                self._record(here.layout)
                self._recorded()
            self._forget()
            self._txn_id, self._kind = arg.txn, "load"
        self.dirty = True
        self._epoch += 1
        self._state, self._applied = TxnState.BEGUN, False
        return self.status()

    def apply(self, arg: calls.TxnRef) -> calls.Sums:
        """Write the new values. May be repeated, also after a rollback: values are absolute (must E5)."""
        txn, here = self._writable(arg.txn)
        self._state = TxnState.BEGUN
        sums = txn.apply(here.live, here.placement)
        self._applied = True
        return sums

    def rollback(self, arg: calls.TxnRef) -> calls.Sums:
        """Write the old values back. Still dirty: `close` ends it once the sums were judged."""
        txn, here = self._writable(arg.txn)
        sums = txn.rollback(here.live, here.placement)
        self._state, self._applied = TxnState.ROLLED_BACK, False
        return sums

    def commit(self, arg: calls.TxnRef) -> calls.Status:
        """Forget the old values; clean. Repeatable, because other ranks may have to be asked again."""
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
        """The old sums are back on all ranks: clean again, at the old version. Repeatable."""
        if self._outcomes.get(arg.txn) == "rolled back" and self._txn_id is None:
            return self.status()
        self._expect(arg.txn, TxnState.ROLLED_BACK)
        return self._end(arg.txn, "rolled back")

    def drop(self) -> calls.Status:
        """Forget what is prepared or being prepared."""
        if self._state in BEGUN_STATES:
            raise Refusal(Code.REFUSED, f"transaction {self._txn_id} is {self._state}; it ends in commit or rollback")
        self._background.quiesce()
        self._forget()
        return self.status()

    def _end(self, txn: str, outcome: str) -> calls.Status:
        self._outcomes[txn] = outcome
        for name in list(self._outcomes)[:-KEPT_OUTCOMES]:
            del self._outcomes[name]
        self._forget()
        self.dirty = False
        return self.status()

    def _forget(self) -> None:
        """Nothing is held any more, and no finished job may bring it back."""
        self._epoch += 1
        self._txn, self._txn_id, self._kind, self._applied = None, None, "", False
        self._state = TxnState.NONE

    def _expect(self, txn: str, *states: TxnState) -> None:
        if self._txn_id != txn or self._state not in states:
            held = f"{self._txn_id} is {self._state}" if self._txn_id else "there is none"
            raise Refusal(Code.REFUSED, f"transaction {txn} is not {' or '.join(states)}: {held}")

    def _require_unmoved(self) -> None:
        moved = self._attached().live.moved_parameter()
        if moved is not None:
            raise Refusal(Code.UNPROVED, f"storage of {moved} moved or was replaced", "attach again")

    def _writable(self, name: str) -> tuple[Transaction, Attachment]:
        """A begun delta and where to write it. Also after somebody else's write: then rollback is the way out."""
        self._expect(name, *BEGUN_STATES)
        here = self._attachment
        if self._txn is None or here is None:
            raise Refusal(Code.REFUSED, f"{name} is a dense load: it only goes forward", "load again, then commit")
        moved = here.live.moved_parameter()
        if moved is not None:
            raise Refusal(Code.UNPROVED, f"storage of {moved} moved or was replaced inside a transaction")
        return self._txn, here

"""The worker's background thread, and one job at a time on it: prepare, fingerprint, scrub, dense load (must E4).

Runs in the worker process; `session` starts, polls and joins jobs. A worker runs one RPC at a time and no forward pass
beside it, so long work happens on this thread and the RPCs stay short. A job never changes the worker's state: `join`,
on the main thread, takes over its result. The thread runs at nice 19 and sets its own cores, because it would inherit
the one core that vLLM pins the main thread to.
"""

from __future__ import annotations

import functools
import logging
import os
import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from dcr_daemon.engine.staged import unreadable
from dcr_daemon.errors import Corrupt, DcrError, ResourceExhausted
from dcr_daemon.vllm_plugin.calls import Code, JobKind, JobState, JobStatus
from dcr_daemon.vllm_plugin.job_flags import JobFlags

log = logging.getLogger("dcr.worker")

LIVE = (JobState.QUEUED, JobState.RUNNING)


class Cancelled(Exception):
    """The job was cancelled and stopped between two slices."""


@dataclass(slots=True)
class Job:
    """`stamp`: what the worker had counted when the job started (`external_writes`, `_invalidations`); a result that is
    joined under another stamp is void.
    """

    id: str
    kind: JobKind
    work: Callable[[Job], Any]
    stamp: tuple[int, int]
    state: JobState = JobState.QUEUED
    progress: float = 0.0
    result: Any = None
    code: str = ""
    error: str = ""
    done: threading.Event = field(default_factory=threading.Event)
    cancelled: threading.Event = field(default_factory=threading.Event)

    @property
    def live(self) -> bool:
        return self.state in LIVE

    def check_cancelled(self, size: int = 0) -> None:
        """Called between slices of `size` bytes; raises `Cancelled` if the job was cancelled."""
        if self.cancelled.is_set():
            raise Cancelled

    def rate_limited(self, rate: float) -> Callable[[int], None]:
        """A slice callback that limits the work to `rate` bytes per second (0: no limit); a cancel ends its sleep."""
        began, done = time.monotonic(), 0

        def after_slice(size: int) -> None:
            nonlocal done
            done += size
            ahead = done / rate - (time.monotonic() - began) if rate else 0.0
            if ahead > 0:
                self.cancelled.wait(ahead)
            self.check_cancelled()

        return after_slice

    def report_progress(self, progress: float) -> None:
        self.progress = progress
        self.check_cancelled()

    @property
    def status(self) -> JobStatus:
        return JobStatus(
            id=self.id, kind=self.kind, state=self.state, code=self.code, error=self.error, progress=self.progress
        )


def allowed_cpus() -> set[int]:
    """Cores that this worker may use: those of the engine process, and the one that its main thread is pinned to."""
    try:
        return os.sched_getaffinity(os.getppid()) | os.sched_getaffinity(0)
    except OSError:
        return os.sched_getaffinity(0)


class BackgroundThread:
    """The thread and its job. All methods are called on the worker's main thread only."""

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[Job] = queue.SimpleQueue()
        self._cpus = allowed_cpus()
        self._native = 0
        self._set_flag: Callable[[bool], None] | None = None
        self.job: Job | None = None
        ready = threading.Event()
        threading.Thread(target=self._run, args=(ready,), name="dcr-background", daemon=True).start()
        ready.wait()

    @property
    def flagged(self) -> bool:
        return self._set_flag is not None

    def use_flags(self, flags: JobFlags, rank: int) -> None:
        """From here on the rank's flag is set while no job is live."""
        self._set_flag = functools.partial(flags.set, rank)
        self._set_flag(self.job is None or not self.job.live)

    def use_cpus(self, cpus: list[int] | None) -> None:
        """Set the thread's cores; None: all that the engine may use."""
        try:
            os.sched_setaffinity(self._native, set(cpus) if cpus else self._cpus)
        except OSError as error:
            log.warning("the background thread keeps its cores: %s", error)

    def start(self, job: Job) -> None:
        assert self.job is None or not self.job.live, "one job at a time"
        self.job = job
        if self._set_flag is not None:
            self._set_flag(False)
        self._queue.put(job)

    def quiesce(self) -> None:
        """Cancel a live job and wait until it has stopped: at most one slice."""
        if self.job is not None and self.job.live:
            self.job.cancelled.set()
            self.job.done.wait()

    def _run(self, ready: threading.Event) -> None:
        self._native = threading.get_native_id()
        os.setpriority(os.PRIO_PROCESS, self._native, 19)
        self.use_cpus(None)
        ready.set()
        while True:
            job = self._queue.get()
            job.state = JobState.RUNNING
            ended = self._work(job)
            if self._set_flag is not None:
                self._set_flag(True)  # first: as soon as this job has ended, the next one may start and clear it
            job.state = ended
            job.done.set()

    def _work(self, job: Job) -> JobState:
        try:
            job.check_cancelled()
            job.result = job.work(job)
        except Cancelled:
            return JobState.CANCELLED
        except (DcrError, OSError, MemoryError, torch.OutOfMemoryError) as error:
            job.code, job.error = code_of(error), str(error)
            return JobState.FAILED
        except Exception as error:  # the thread must survive any job, and the caller must get the error
            log.exception("job %s failed", job.id)
            job.code, job.error = Code.FAILED, f"{type(error).__name__}: {error}"
            return JobState.FAILED
        job.progress = 1.0
        return JobState.DONE


def code_of(error: Exception) -> Code:
    """The code that tells the caller what to do about an error.

    An `OSError` and a lack of memory, of the host or of the device, say nothing about the bytes of a version, so they
    are never `CORRUPT` or `FAILED`: the subscriber counts those as refusals of the version (must P4).
    """
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)):
        return Code.EXHAUSTED
    if isinstance(error, OSError):
        error = unreadable(error.filename or "a file", error)
    if isinstance(error, Corrupt):
        return Code.CORRUPT
    if isinstance(error, ResourceExhausted):
        return Code.EXHAUSTED
    return Code.REFUSED

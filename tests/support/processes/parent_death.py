"""Child processes that never outlive a test run, however it ends: ^C, a closed terminal, kill -9."""

from __future__ import annotations

import ctypes
import signal
import threading
from collections.abc import Callable

PR_SET_PDEATHSIG = 1  #: linux/prctl.h

_libc = ctypes.CDLL(None)  # loaded here: between fork and exec is no time to look for libraries


def leash() -> None:
    """For the child, between fork and exec: the kernel kills it when the thread that forked it ends."""
    _libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def leash_here() -> Callable[[], None] | None:
    """The leash as a `preexec_fn`; none in a thread that may end while its child is needed."""
    return leash if threading.current_thread() is threading.main_thread() else None

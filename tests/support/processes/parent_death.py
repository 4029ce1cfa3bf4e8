"""Child processes that the kernel kills when the test run ends, however it ends: ^C, a closed terminal, kill -9."""

from __future__ import annotations

import ctypes
import signal
import threading
from collections.abc import Callable

PR_SET_PDEATHSIG = 1  #: linux/prctl.h

_libc = ctypes.CDLL(None)  # loaded here: between fork and exec is no time to look for libraries


def set_parent_death_signal() -> None:
    """For the child, between fork and exec: the kernel kills it when the thread that forked it ends."""
    _libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def parent_death_signal() -> Callable[[], None] | None:
    """`set_parent_death_signal` as a `preexec_fn`; None in a thread that may end while its child is needed."""
    return set_parent_death_signal if threading.current_thread() is threading.main_thread() else None

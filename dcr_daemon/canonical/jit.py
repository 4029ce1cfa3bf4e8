"""Compiled kernels: released GIL, compiled on first call, kept on disk where a cache can be kept.

Modules named `kernels` import this one (and so numba) at their top; everything else imports them inside functions,
so that a command that touches no weights never pays for numba.

numba notices when the file of a kernel changes, not when a kernel that it calls does: after editing one, touch its
callers' files too.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

from numba import njit

F = TypeVar("F", bound=Callable[..., Any])


def kernel(function: F) -> F:
    """Compile `function` lazily, once per combination of argument types.

    A read-only installation with no home directory has nowhere to keep compiled code; numba then refuses to
    cache, and the kernel is compiled anew in each process.
    """
    try:
        compiled = njit(nogil=True, error_model="numpy", cache=True)(function)
    except RuntimeError:
        compiled = njit(nogil=True, error_model="numpy")(function)
    return cast(F, compiled)

"""How much memory a piece of code may take."""

from __future__ import annotations

import contextlib
import tracemalloc
from collections.abc import Iterator


@contextlib.contextmanager
def memory_limit(size: int) -> Iterator[None]:
    """Fail if the body has more than `size` bytes allocated at any time."""
    tracemalloc.start()
    try:
        yield
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak <= size, f"{peak} bytes were allocated; {size} are allowed"

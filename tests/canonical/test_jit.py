"""Kernels compile wherever they are run."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import numba
import pytest

from dcr_daemon.canonical import jit


def twice(x: int) -> int:
    return 2 * x


def test_where_nothing_can_be_cached_kernels_still_compile(monkeypatch: pytest.MonkeyPatch) -> None:
    """A read-only installation without a home directory: numba refuses `cache=True` when it decorates."""

    def refusing(**options: Any) -> Any:
        if options.get("cache"):
            raise RuntimeError("cannot cache function: no locator available")
        return numba.njit(**options)

    monkeypatch.setattr(jit, "njit", refusing)
    assert jit.kernel(twice)(21) == 42


def test_kernels_release_the_gil() -> None:
    assert jit.kernel(twice).targetoptions["nogil"]  # type: ignore[attr-defined]


def test_importing_the_rooms_does_not_import_numba() -> None:
    """A command that touches no weights must not pay for the compiler."""
    modules = ["canonical.fingerprint", "codec.encode", "codec.decode", "codec.undo", "codec.warm", "codec.choose"]
    program = "import sys; " + "; ".join(f"import dcr_daemon.{module}" for module in modules)
    check = program + "; sys.exit('numba' in sys.modules or 'torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", check], check=False).returncode == 0

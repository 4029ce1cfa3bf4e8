"""The vector form of `detect` against the scalar one: every output bit for bit."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numba.core.errors import LoweringError

from dcr_daemon.codec import kernels, vector_kernels
from dcr_daemon.codec.vector_kernels import BLOCK, VECTOR, select_detect

LANES = ["u1", "<u2", "<u4", "<u8"]
KEY = np.uint64(0xA5A5_0123_4567_89AB)
SPECIAL = {  #: NaNs with payloads, quiet and signalling, both zeros, infinities; of other widths any bits
    "<u2": [0x7FC1, 0x7F81, 0xFFC0, 0x8000, 0x0000, 0x7F80, 0xFF80],
    "<u4": [0x7FC00001, 0x7F800001, 0xFFC00000, 0x80000000, 0, 0x7F800000],
}
needs_vectors = pytest.mark.skipif(select_detect(2) is kernels.detect, reason="this processor has no AVX-512 VBMI2")


def find(detect: Any, old: Any, new: Any, *, flat: bool, copy: Callable[[Any], Any] = np.copy) -> tuple[Any, ...]:
    """Everything that a detecting loop gives for copies of these, with the baseline that it leaves."""
    base, new, size = copy(old), copy(new), old.size
    where, was, now = np.empty(size + 1, "<u4"), np.empty(size + 1, old.dtype), np.empty(size + 1, old.dtype)
    shape, strides = (np.array([1, 1, size, 1]), np.array([0, 0, 3, 1])) if not flat else (np.ones(4, int),) * 2
    k, before, after = detect(base, new, where, was, now, 11, shape, strides, flat, KEY)
    return int(k), int(before), int(after), *(array.tobytes() for array in (where[:k], was[:k], now[:k], base))


def shifted(bits: Any) -> Any:
    """A copy that begins one element behind a multiple of eight bytes."""
    room = np.empty(bits.size + 1, dtype=bits.dtype)
    room[1:] = bits
    return room[1:]


@needs_vectors
@pytest.mark.parametrize("lane", LANES)
@pytest.mark.parametrize("rate", [0.0, 0.002, 0.01, 0.03, 1.0])
def test_both_find_the_same(lane: str, rate: float) -> None:
    random = np.random.default_rng(3)
    width = np.dtype(lane).itemsize
    lanes, block = VECTOR // width, BLOCK // width
    around = [lanes - 1, lanes, lanes + 1, 3 * lanes - 1, block - 1, block, block + 1, 2 * block + lanes + 1]
    for size in (1, 2, *around, 50_000 + lanes // 2):
        old = random.integers(0, 256, size * width, dtype=np.uint8).view(lane)
        if special := SPECIAL.get(lane):
            old[random.integers(0, size, size // 3)] = random.choice(special, size // 3)
        new = old.copy()
        new[random.random(size) < rate] ^= new.dtype.type(1 << (8 * width - 1))  # 0 becomes -0, a NaN another one
        for flat in (True, False):
            expected = find(kernels.detect, old, new, flat=flat)
            assert find(vector_kernels.detect, old, new, flat=flat) == expected, (size, flat)
            assert find(vector_kernels.detect, old, new, flat=flat, copy=shifted) == expected, (size, flat)


@needs_vectors
@pytest.mark.parametrize("lane", LANES)
def test_nothing_is_written_outside_the_outputs(lane: str) -> None:
    """The stores are whole vectors; the scalar form needs one slot more than elements, the vector form none."""
    for size in (VECTOR // np.dtype(lane).itemsize, 1000):
        old = np.zeros(size, lane)
        arrays = [np.full(size + 80, 77, dtype) for dtype in (lane, "<u4", lane, lane)]
        arrays[0][:size] = old
        axes = np.ones(4, int)
        vector_kernels.detect(
            arrays[0][:size], old + old.dtype.type(1), *(a[: size + 1] for a in arrays[1:]), 0, axes, axes, True, KEY
        )
        assert all((array[size + 1 :] == 77).all() for array in arrays)


def test_without_the_instructions_the_reference_is_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vector_kernels, "FEATURES", frozenset({"+no-processor-has-this"}))
    assert select_detect.__wrapped__(2) is kernels.detect


def test_where_the_vector_form_does_not_compile_the_reference_is_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise LoweringError("no such intrinsic")

    monkeypatch.setattr(vector_kernels, "FEATURES", frozenset())
    monkeypatch.setattr(vector_kernels, "detect", fail)
    assert select_detect.__wrapped__(2) is kernels.detect


PROGRAM = """
from dcr_daemon.codec import kernels, vector_kernels
chosen = vector_kernels.select_detect(2)
stats = vector_kernels.detect.stats
print(chosen is kernels.detect, sum(stats.cache_hits.values()), sum(stats.cache_misses.values()))
"""


@needs_vectors
def test_a_cache_of_another_processor_is_not_used(tmp_path: Path) -> None:
    """A shared home: what one machine compiled would be illegal instructions on the next."""

    def run(**environ: str) -> list[str]:
        home = {**os.environ, "NUMBA_CACHE_DIR": str(tmp_path), **environ}
        done = subprocess.run([sys.executable, "-c", PROGRAM], env=home, capture_output=True, text=True, check=True)
        return done.stdout.split()

    plain = {"NUMBA_CPU_NAME": "generic", "NUMBA_CPU_FEATURES": ""}
    assert run() == ["False", "0", "1"]
    assert run() == ["False", "1", "0"]
    assert run(**plain) == ["True", "0", "0"]
    other = {"NUMBA_CPU_NAME": "icelake-server", "NUMBA_CPU_FEATURES": ",".join(sorted(vector_kernels.FEATURES))}
    assert run(**other) == ["False", "0", "1"]  # it has the instructions, and is still another processor

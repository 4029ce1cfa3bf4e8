"""Compile the kernels ahead of need: a process that must not stall later calls this once (must E4)."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache

import numpy as np

from dcr_daemon.canonical.box import Box
from dcr_daemon.canonical.dtypes import bits_dtype
from dcr_daemon.canonical.fingerprint import sum_at, sum_box
from dcr_daemon.canonical.layout import Layout, TensorSpec
from dcr_daemon.codec.chunk import ChunkId, Codec
from dcr_daemon.codec.decode import open_chunk
from dcr_daemon.codec.encode import ChunkEncoder

_DTYPES = {1: "U8", 2: "U16", 4: "U32", 8: "U64"}
_SIZE = 4096


def compile_kernels(widths: Iterable[int]) -> None:
    """Send small chunks of every codec and density through encoder, decoder and sums, per element width in bytes.

    Once per process: a second call costs nothing."""
    for width in sorted(set(widths)):
        _compile(width)


@cache
def _compile(width: int) -> None:
    identity = ChunkId(stream="warm", attempt=0, base=0, version=1, group="warm", rank=0, nonce="warm", n=0)
    layout, dtype = Layout([TensorSpec("warm", _DTYPES[width], (_SIZE,))]), bits_dtype(width)
    for codec in Codec:
        encoder = ChunkEncoder(layout, codec=codec)
        for every in (_SIZE // 2, 64, 2, 1):  # gaps with and without low bits, a bitmask, all
            new = np.zeros(_SIZE, dtype=dtype)
            new[::every] = 1
            new[0] = 77  # a step of more than one
            encoder.add(0, Box.flat(0, _SIZE), np.zeros(_SIZE, dtype=dtype), new)
        chunk = open_chunk(encoder.finish(identity).data, layout)
        changes = [chunk.changes(i) for i in range(len(chunk.segments))]
    sum_at(changes[0].operands, changes[0].positions, key=0)
    Box(0, (16, 16), (1, 16)).canonical(changes[0].positions)
    sum_box(np.zeros((16, 16), dtype=dtype).T, Box(0, (16, 16), (1, 16)), key=0)

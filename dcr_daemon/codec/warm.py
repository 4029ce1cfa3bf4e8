"""Compile the kernels ahead of need: a process that must not stall later calls this once (must E4)."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from dcr_daemon.canonical.box import Box
from dcr_daemon.canonical.dtypes import lane_dtype
from dcr_daemon.canonical.fingerprint import sum_at, sum_box
from dcr_daemon.canonical.layout import Layout, TensorSpec
from dcr_daemon.codec.chunk import ChunkId, Codec
from dcr_daemon.codec.decode import open_chunk
from dcr_daemon.codec.encode import ChunkEncoder

_DTYPES = {1: "U8", 2: "U16", 4: "U32", 8: "U64"}


def compile_kernels(widths: Iterable[int]) -> None:
    """Send a tiny chunk through encoder, decoder and sums for each lane width in bytes (1, 2, 4, 8)."""
    identity = ChunkId(stream="warm", attempt=0, base=0, version=1, group="warm", rank=0, nonce="warm", n=0)
    for width in sorted(set(widths)):
        layout = Layout([TensorSpec("warm", _DTYPES[width], (256,))])
        base = np.zeros(256, dtype=lane_dtype(width))
        encoder = ChunkEncoder(layout, codec=Codec.AUTO)
        for step in (100, 2):  # few changes go as gaps, many as a bitmask
            new = base.copy()
            new[::step] += 1
            encoder.add(0, Box.flat(0, 256), base, new)
        chunk = open_chunk(encoder.finish(identity).data, layout)
        for i in range(len(chunk.segments)):
            sum_at(base[:1], chunk.changes(i).positions[:1], 0)
        sum_box(base.reshape(16, 16).T, Box(0, (16, 16), (1, 16)), 0)

"""The codec on this machine: speed as a ratio to memcpy of the same run, payload as a ratio to the iid bound.

    python benchmarks/codec.py [--json]

One thread, thread CPU time, medians. Weights are drawn at random in SmolLM2-135M's table; the new ones follow from
an AdamW-shaped step of fp32 masters. Nothing is tiled: zstd would find the repeats and flatter the payload.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from dcr_daemon.canonical.box import Box
from dcr_daemon.canonical.fingerprint import sum_run
from dcr_daemon.canonical.layout import Layout, TensorSpec
from dcr_daemon.codec.chunk import SEGMENT_BYTES, ChunkId
from dcr_daemon.codec.decode import open_chunk
from dcr_daemon.codec.encode import ChunkEncoder, EncodedChunk
from dcr_daemon.codec.warm import compile_kernels

Words = npt.NDArray[np.uint16]
ID = ChunkId(stream="bench", attempt=1, base=0, version=1, group="bench", rank=0, nonce="bench", n=0)
RATES = (2e-7, 5e-7, 1e-6, 3e-6, 1e-5)  #: learning rates; 0.2 to 7 % of these weights change
PART_ROW = 250  #: bytes of one chunk's row in a part
REPEATS = 5


def table() -> list[tuple[str, tuple[int, ...]]]:
    shapes: list[tuple[str, tuple[int, ...]]] = [("embed", (49152, 576)), ("norm", (576,))]
    for n in range(30):
        shapes += [(f"{n}.norm_in", (576,)), (f"{n}.norm_out", (576,)), (f"{n}.q", (576, 576)), (f"{n}.o", (576, 576))]
        shapes += [(f"{n}.k", (192, 576)), (f"{n}.v", (192, 576)), (f"{n}.gate", (1536, 576)), (f"{n}.up", (1536, 576))]
        shapes += [(f"{n}.down", (576, 1536))]
    return shapes


def bf16(values: npt.NDArray[np.float32]) -> Words:
    bits = values.view(np.uint32)
    return ((bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)).astype(np.uint16)


def step(random: np.random.Generator, elements: int, rate: float) -> tuple[Words, Words]:
    """One tensor before and after: masters N(0, 0.04), AdamW's normalised step of about half the learning rate."""
    masters = random.standard_normal(elements, dtype=np.float32) * np.float32(0.04)
    moment = np.clip(random.standard_normal(elements, dtype=np.float32) * np.float32(0.5), -1, 1)
    return bf16(masters), bf16(masters - np.float32(rate) * moment)


def seconds(work: Callable[[], Any], prepare: Callable[[], Any] = lambda: None) -> float:
    times = []
    for _ in range(REPEATS):
        prepare()
        start = time.thread_time()
        work()
        times.append(time.thread_time() - start)
    return statistics.median(times)


def encode(layout: Layout, base: list[Words], new: list[Words]) -> list[EncodedChunk]:
    encoder, chunks = ChunkEncoder(layout), []
    for tensor, (ours, theirs) in enumerate(zip(base, new, strict=True)):
        for start in range(0, ours.size, SEGMENT_BYTES // 2):
            piece = slice(start, start + SEGMENT_BYTES // 2)
            encoder.add(tensor, Box.flat(start, ours[piece].size), ours[piece], theirs[piece])
            if encoder.full:
                chunks.append(encoder.finish(ID))
    if encoder.changed:
        chunks.append(encoder.finish(ID))
    return chunks


def decode(layout: Layout, chunks: list[EncodedChunk]) -> None:
    for encoded in chunks:
        chunk = open_chunk(encoded.data, layout)
        for i in range(len(chunk.segments)):
            chunk.changes(i)


def bound(old: list[Words], new: list[Words]) -> float:
    """Bytes if positions and differences were iid, pooled over the version."""
    counts, elements = np.zeros(1 << 16, np.int64), sum(bits.size for bits in old)
    for a, b in zip(old, new, strict=True):
        counts += np.bincount((b - a)[a != b], minlength=1 << 16)
    changed = int(counts.sum())
    p, q = changed / elements, counts[counts > 0] / changed
    return float(-elements * (p * np.log2(p) + (1 - p) * np.log2(1 - p)) - changed * (q * np.log2(q)).sum()) / 8


def measure(layout: Layout, rate: float) -> dict[str, float]:
    random = np.random.default_rng(1)
    pairs = [step(random, spec.elements, rate) for spec in layout]
    old, new = [a for a, _ in pairs], [b for _, b in pairs]
    base = [bits.copy() for bits in old]

    def restore() -> None:
        for target, source in zip(base, old, strict=True):
            target[:] = source

    memcpy = seconds(restore)
    chunks: list[EncodedChunk] = []

    def run() -> None:
        chunks[:] = encode(layout, base, new)

    encoding = seconds(run, restore)
    decoding = seconds(lambda: decode(layout, chunks))
    summing = seconds(lambda: [sum_run(bits, 1) for bits in new])
    changed = sum(chunk.changed for chunk in chunks)
    payload = sum(len(chunk.data) + PART_ROW for chunk in chunks)
    return {
        "changed_percent": 100 * changed / sum(bits.size for bits in old),
        "memcpy_gbps": layout.nbytes / memcpy / 1e9,
        "encode_to_memcpy": memcpy / encoding,
        "decode_to_memcpy": memcpy / decoding,
        "fingerprint_to_memcpy": memcpy / summing,
        "payload_to_bound": payload / bound(old, new),
        "dense_to_payload": layout.nbytes / payload,
    }


def machine() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    names = [line.partition(":")[2].strip() for line in cpuinfo.read_text().splitlines() if "model name" in line]
    return f"{names[0] if names else platform.processor()}, Python {platform.python_version()}, one thread"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="one JSON object instead of a table")
    as_json = parser.parse_args().json
    compile_kernels((2,))
    layout = Layout([TensorSpec(name, "BF16", shape) for name, shape in table()])
    rows = [measure(layout, rate) for rate in RATES]
    if as_json:
        print(json.dumps({"benchmark": "codec", "machine": machine(), "rows": rows}))
        return
    print(machine())
    print("changed   memcpy    encode    decode    fingerprint  payload   smaller than")
    print("   %       GB/s    (x memcpy) (x memcpy) (x memcpy)  (x bound)  dense by")
    for row in rows:
        print("{:6.2f} {:8.1f} {:9.2f} {:10.2f} {:10.2f} {:11.3f} {:9.0f}".format(*row.values()))


if __name__ == "__main__":
    main()

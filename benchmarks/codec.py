"""The codec on this machine: speed as a ratio to memcpy and to a scan of the same run, payload as a ratio to the bound.

    python benchmarks/codec.py [--json]

One thread, thread CPU time, medians. Weights are drawn at random in SmolLM2-135M's table; the new ones follow from
an AdamW-shaped step of fp32 masters. Nothing is tiled: zstd would find the repeats and flatter the payload.

The scan reads both versions of the weights and does nothing else: no way to find what differs is faster. `detect` is
the kernel alone: positions, bits, sums, and the baseline brought up to date. `encode` makes chunks of it, `digest` is
with the SHA-256 of these. `2 threads` is by how much two encoders on two threads are faster than one, by the clock: on
a busy machine it says nothing.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import platform
import statistics
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from numba import njit

from dcr_daemon.canonical.box import Box
from dcr_daemon.canonical.fingerprint import sum_run
from dcr_daemon.canonical.layout import Layout, TensorSpec
from dcr_daemon.codec import kernels
from dcr_daemon.codec.chunk import SEGMENT_BYTES, ChunkId
from dcr_daemon.codec.decode import open_chunk
from dcr_daemon.codec.encode import ChunkEncoder, EncodedChunk
from dcr_daemon.codec.vector_kernels import select_detect
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


def seconds(
    work: Callable[[], Any],
    prepare: Callable[[], Any] = lambda: None,
    clock: Callable[[], float] = time.thread_time,
) -> float:
    times = []
    for _ in range(REPEATS):
        prepare()
        start = clock()
        work()
        times.append(clock() - start)
    return statistics.median(times)


@njit(nogil=True)  # type: ignore[untyped-decorator]  # numba has no types
def scan(one: Any, other: Any) -> Any:
    """Read both; nothing is found, and nothing written."""
    seen = np.uint64(0)
    for i in range(one.size):
        seen |= one[i] ^ other[i]
    return seen


Piece = tuple[int, int, Words, Words]


def pieces(base: list[Words], new: list[Words]) -> Iterator[Piece]:
    """As the publisher cuts them: tensor, first element, baseline and new bits."""
    for tensor, (ours, theirs) in enumerate(zip(base, new, strict=True)):
        for start in range(0, ours.size, SEGMENT_BYTES // 2):
            piece = slice(start, start + SEGMENT_BYTES // 2)
            yield tensor, start, ours[piece], theirs[piece]


def detect(layout: Layout, base: list[Words], new: list[Words]) -> None:
    where, axes = np.empty(SEGMENT_BYTES // 2 + 1, np.uint32), np.ones(4, np.int64)
    old, now = np.empty(where.size, np.uint16), np.empty(where.size, np.uint16)
    for tensor, start, ours, theirs in pieces(base, new):
        select_detect(2)(ours, theirs, where, old, now, start, axes, axes, True, layout.keys[tensor])


def encode(layout: Layout, work: list[Piece]) -> list[EncodedChunk]:
    encoder, chunks = ChunkEncoder(layout), []
    for tensor, start, ours, theirs in work:
        encoder.add(tensor, Box.flat(start, ours.size), ours, theirs)
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

    work = list(pieces(base, new))

    def run() -> None:
        chunks[:] = encode(layout, work)

    def run_two() -> None:
        with ThreadPoolExecutor(2) as pool:
            list(pool.map(lambda half: encode(layout, half), (work[::2], work[1::2])))

    scanning = seconds(lambda: [scan(a.view("<u8"), b.view("<u8")) for a, b in zip(base, new, strict=True)])
    detecting = seconds(lambda: detect(layout, base, new), restore)
    encoding = seconds(run, restore)
    digesting = seconds(lambda: [hashlib.sha256(chunk.data).digest() for chunk in chunks])
    one, two = seconds(run, restore, time.monotonic), seconds(run_two, restore, time.monotonic)
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
        "detect_to_scan": scanning / detecting,
        "encode_to_scan": scanning / encoding,
        "encode_and_digest_to_scan": scanning / (encoding + digesting),
        "two_threads": one / two,
    }


def machine() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    names = [line.partition(":")[2].strip() for line in cpuinfo.read_text().splitlines() if "model name" in line]
    loop = "scalar" if select_detect(2) is kernels.detect else "AVX-512"
    return f"{names[0] if names else platform.processor()}, Python {platform.python_version()}, {loop} detecting"


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
    print("         memcpy | times memcpy:             | payload,    dense to | times the scan:          | 2 threads,")
    print("changed   GB/s  | encode decode fingerprint | of bound    payload  | detect  encode   digest  | of one")
    for row in rows:
        print(
            "{:6.2f}% {:6.1f}  {:8.2f} {:6.2f} {:10.2f} {:12.3f} {:10.0f}  {:9.2f} {:8.2f} {:8.2f} {:9.2f}".format(
                *row.values()
            )
        )


if __name__ == "__main__":
    main()

"""Payload stays within the bounds that docs/FORMAT.md promises, everything counted, on generated and real updates."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from dcr_daemon.canonical.box import Box
from dcr_daemon.canonical.layout import Layout, TensorSpec
from dcr_daemon.codec import format as fmt
from dcr_daemon.codec.chunk import SEGMENT_BYTES, Codec
from dcr_daemon.codec.encode import ChunkEncoder
from dcr_daemon.ledger.records import ChunkRef, encode

Words = npt.NDArray[np.uint16]
UPDATES = Path(__file__).parents[3] / "shared" / "data" / "updates"
PIECE = SEGMENT_BYTES // 2


def bf16(values: npt.NDArray[np.float32]) -> Words:
    """Round to nearest even."""
    bits = values.view(np.uint32)
    return ((bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)).astype(np.uint16)


def adamw_step(random: np.random.Generator, elements: int, spread: float, rate: float) -> tuple[Words, Words]:
    """Weights before and after the fifth AdamW step on fp32 masters, from noisy gradients with a common direction."""
    masters = random.standard_normal(elements, dtype=np.float32) * np.float32(spread)
    drift = random.standard_normal(elements, dtype=np.float32) * np.float32(0.3)
    first, second = np.zeros(elements, np.float32), np.zeros(elements, np.float32)
    before = masters
    for step in range(1, 6):
        gradient = random.standard_normal(elements, dtype=np.float32) + drift
        first += np.float32(0.1) * (gradient - first)
        second += np.float32(0.001) * (gradient * gradient - second)
        moment, scale = first / np.float32(1 - 0.9**step), second / np.float32(1 - 0.999**step)
        before, masters = masters, masters - np.float32(rate) * moment / (np.sqrt(scale) + np.float32(1e-8))
    return bf16(before), bf16(masters)


@dataclass
class Tally:
    """A version's payload, container and part rows included, beside the counts its bound is made of."""

    bytes: int = 0
    objects: int = 0
    segments: int = 0
    changed: int = 0
    elements: int = 0
    differences: npt.NDArray[np.int64] = field(default_factory=lambda: np.zeros(1 << 16, np.int64))


def publish(shapes: list[tuple[str, tuple[int, ...]]], rate: float, identity: Any) -> Tally:
    layout = Layout([TensorSpec(name, "BF16", shape) for name, shape in shapes])
    random, encoder, tally = np.random.default_rng(20), ChunkEncoder(layout), Tally()

    def close() -> None:
        chunk = encoder.finish(identity)
        row = ChunkRef("data/1000/12345/" + "x" * 60, len(chunk.data), "0" * 64, len(chunk.segments), chunk.changed)
        tally.bytes += len(chunk.data) + len(encode(row)) + 1
        tally.objects += 1
        tally.segments += len(chunk.segments)

    for tensor, spec in enumerate(layout):
        old, new = adamw_step(random, spec.elements, 1.0 if len(spec.shape) == 1 else 0.03, rate)
        tally.elements += old.size
        tally.changed += int((old != new).sum())
        tally.differences += np.bincount((new - old)[old != new], minlength=1 << 16)
        for start in range(0, old.size, PIECE):
            base = old[start : start + PIECE]
            encoder.add(tensor, Box.flat(start, base.size), base, new[start : start + PIECE])
            if encoder.full:
                close()
    if encoder.pending:
        close()
    return tally


def decoder_stack(layers: int, hidden: int, inner: int, vocabulary: int) -> list[tuple[str, tuple[int, ...]]]:
    shapes: list[tuple[str, tuple[int, ...]]] = [("embed", (vocabulary, hidden)), ("norm", (hidden,))]
    for n in range(layers):
        shapes += [(f"{n}.{name}", (hidden,)) for name in ("norm_in", "norm_out")]
        shapes += [(f"{n}.{name}", (hidden, hidden)) for name in ("q", "o")]
        shapes += [(f"{n}.{name}", (hidden // 3, hidden)) for name in ("k", "v")]
        shapes += [(f"{n}.{name}", (inner, hidden)) for name in ("gate", "up", "down")]
    return shapes


@pytest.mark.parametrize("rate", [1.5e-6, 6e-6])
def test_from_250_000_changes_up_all_counted(rate: float, identity: Any, bound: Any) -> None:
    tally = publish(decoder_stack(8, 576, 1536, 12288), rate, identity)
    assert tally.changed >= 250_000
    assert tally.bytes <= 1.05 * bound(tally.changed, tally.elements, tally.differences)


@pytest.mark.parametrize("rate", [2e-7, 1e-6, 1e-5])
def test_small_versions_pay_for_their_objects_and_segments(rate: float, identity: Any, bound: Any) -> None:
    tally = publish(decoder_stack(2, 192, 512, 2048), rate, identity)
    assert 0 < tally.changed < 250_000
    allowed = 1.05 * bound(tally.changed, tally.elements, tally.differences) + 512 * tally.objects + 48 * tally.segments
    assert tally.bytes <= allowed


@pytest.mark.parametrize(
    ("name", "share"),
    [
        ("minilm_lr1e-6_step1", 1.05),
        ("minilm_lr1e-6_step12", 1.05),
        ("smollm2_lr1e-6_step1", 1.10),
        ("smollm2_lr1e-6_step2", 1.10),
    ],
)
def test_real_updates_streams_alone(name: str, share: float, flat: Any, bound_between: Any) -> None:
    path = UPDATES / f"{name}.npz"
    if not path.exists():
        pytest.skip(f"the measured updates are not on this machine ({UPDATES.name}/{path.name})")
    with np.load(path) as file:
        old, new = file["old"], file["new"]
    encoded, _ = flat("BF16", old, new)
    header, streams = fmt.HEADER.unpack_from(encoded.data), 0
    for i in range(header[-3]):
        kind, _, _, stored = fmt.ENTRY.unpack_from(encoded.data, fmt.HEADER.size + i * fmt.ENTRY.size)
        streams += stored if kind != fmt.Stream.TABLE else 0
    assert streams <= share * bound_between(old, new)
    forced = [len(flat("BF16", old, new, codec)[0].data) for codec in (Codec.ULP, Codec.XOR, Codec.OVERWRITE)]
    assert len(encoded.data) <= min(forced)


def test_clustered_changes_pay_for_their_gaps_not_for_the_tensor(flat: Any) -> None:
    """A few rows of an embedding: the rate of the whole tensor would choose a shift that costs 6 bits a change."""
    random = np.random.default_rng(21)
    old = random.integers(0, 1 << 16, 1 << 22, dtype=np.uint16)
    new = old.copy()
    rows = new.reshape(-1, 1024)
    rows[[17, 900]] += 1
    encoded, _ = flat("BF16", old, new)
    assert encoded.changed == 2048
    assert len(encoded.data) < 600

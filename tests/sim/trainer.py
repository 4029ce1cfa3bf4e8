"""What a trainer gives: versions of the toy model, with everything that a step may do to weights."""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from support.vllm.toy_model import LAYOUT, heldless
from support.vllm.worker_rig import random_lanes, step

from dcr_daemon.canonical.fingerprint import Bits, Vector, fingerprint
from dcr_daemon.canonical.layout import TensorSpec
from dcr_daemon.checkpoint.directory import write_checkpoint

Lanes = list[np.ndarray]
EXTRAS = {"config.json": b'{"model_type": "toy"}'}
KINDS = ("step", "step", "step", "nothing", "back", "special", "all")


@dataclass(frozen=True)
class ArraySource:
    """A tensor of the trainer, as the session takes it."""

    given: TensorSpec
    bits: Bits

    def read(self, start: int, count: int, dtype: str) -> Bits:
        return self.bits[start : start + count]


class Trainer:
    """Draws the next weights; `history` is everything it ever gave."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.history: list[Lanes] = [_loadable(random_lanes(LAYOUT, rng.randrange(1 << 30)))]
        self.steps = 0

    @property
    def base(self) -> Lanes:
        return self.history[0]

    def next(self, kind: str = "") -> Lanes:
        """Weights of the next step. `kind` as in `KINDS`."""
        kind = kind or self.rng.choice(KINDS)
        last = self.history[-1]
        seed = self.rng.randrange(1 << 30)
        match kind:
            case "nothing":
                lanes = last
            case "back":
                lanes = self.rng.choice(self.history)
            case "special":
                lanes = [_special(bits, seed) for bits in last]
            case "all":
                lanes = random_lanes(LAYOUT, seed)
            case _:
                lanes = step(last, self.rng.choice((0.02, 0.1, 0.4)), seed)
        self.history.append(_loadable(lanes))
        self.steps += 1
        return self.history[-1]


def _loadable(lanes: Lanes) -> Lanes:
    """What the toy's loader keeps bit for bit: no NaN in the scalar that it fills in, zeros where no rank looks."""
    kept = heldless(lanes)
    scale = LAYOUT.index("scale")
    kept[scale] = kept[scale] & np.uint16(0xBFFF)
    return kept


def sources(lanes: Lanes) -> list[tuple[int, ArraySource]]:
    return [(n, ArraySource(spec, bits)) for n, (spec, bits) in enumerate(zip(LAYOUT, lanes, strict=True))]


def vector_of(lanes: Lanes) -> Vector:
    return fingerprint(LAYOUT, lanes)


def same(one: Lanes, other: Lanes) -> bool:
    return all(np.array_equal(a, b) for a, b in zip(one, other, strict=True))


def save(lanes: Lanes, out: Path) -> Path:
    """A plain checkpoint, as a trainer leaves it."""
    write_checkpoint(
        out, LAYOUT, bits_of=lambda name: lanes[LAYOUT.index(name)], side_files=EXTRAS, shard_bytes=1 << 20
    )
    return out


def _special(bits: np.ndarray, seed: int) -> np.ndarray:
    """Sign flips (of zeros too), NaNs with payloads, zeros."""
    rng = np.random.default_rng(seed)
    fresh = bits.copy()
    if not bits.size:
        return fresh
    top = 8 * bits.itemsize - 1
    for value in (0, 1 << top, (1 << top) - 1, None):
        where = np.flatnonzero(rng.random(bits.size) < 0.1)
        fresh[where] = fresh[where] ^ np.array(1 << top, np.uint64).astype(bits.dtype) if value is None else value
    return fresh

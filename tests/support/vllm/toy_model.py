"""A sharded model with a loader of its own, in plain torch: fused, row-parallel, padded, repacked, replicated.

`Toy(rank, of)` is one tensor-parallel rank. Its `load_weights` does to real tensors what an engine's loader does, and
is what the recorder watches on meta tensors, so a fresh load of other values is the oracle of every update.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import torch

from dcr_daemon.canonical.layout import Layout, TensorSpec
from dcr_daemon.vllm_plugin.calls import TensorHandling
from dcr_daemon.vllm_plugin.loader.place_model import LoadFormat, place
from dcr_daemon.vllm_plugin.loader.recorder import DTYPES, record
from dcr_daemon.vllm_plugin.weights.memory import LiveTensors, holders_of
from dcr_daemon.vllm_plugin.weights.placement import Placement, Repack

HIDDEN, VOCABULARY, EXPERTS, INNER = 8, 5, 4, 6
LAYOUT = Layout(
    [
        TensorSpec("embed", "BF16", (VOCABULARY, HIDDEN)),
        TensorSpec("q", "BF16", (HIDDEN, HIDDEN)),
        TensorSpec("k", "BF16", (HIDDEN, HIDDEN)),
        TensorSpec("o", "BF16", (HIDDEN, HIDDEN)),
        TensorSpec("norm", "BF16", (HIDDEN,)),
        TensorSpec("bias", "F32", (HIDDEN,)),
        TensorSpec("mask", "U8", (HIDDEN, 3)),
        TensorSpec("steps", "I64", (7,)),
        TensorSpec("scale", "BF16", ()),
        TensorSpec("head", "BF16", (VOCABULARY, HIDDEN)),
        *(TensorSpec(f"expert.{e}", "BF16", (INNER, HIDDEN)) for e in range(EXPERTS)),
    ]
)
SHUFFLE = Repack(
    INNER * HIDDEN, INNER * HIDDEN + 4, np.random.default_rng(5).permutation(INNER * HIDDEN + 4)[:48].astype(np.uint32)
)


class Toy(torch.nn.Module):
    """Parameters in load format; `repacked()` then permutes the experts as some kernels want them."""

    def __init__(self, rank: int = 0, of: int = 1, device: str = "cpu") -> None:
        super().__init__()
        self.rank, self.of = rank, of
        part = HIDDEN // of

        def parameter(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.nn.Parameter:
            return torch.nn.Parameter(torch.zeros(shape, dtype=dtype, device=device), requires_grad=False)

        self.embed = parameter(VOCABULARY + 3, HIDDEN)
        self.qk = parameter(2 * part, HIDDEN)
        self.o = parameter(HIDDEN, part)
        self.norm = parameter(HIDDEN)
        self.mask = parameter(HIDDEN, 3, dtype=torch.uint8)
        self.steps = parameter(7, dtype=torch.int64)
        self.scale = parameter(1)
        self.experts = parameter(EXPERTS // of, INNER, HIDDEN)
        self.register_buffer("bias", torch.zeros(HIDDEN, dtype=torch.float32, device=device))

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        part, start = HIDDEN // self.of, self.rank * HIDDEN // self.of
        for name, tensor in weights:
            if name == "embed":
                self.embed[:VOCABULARY].data.copy_(tensor)
                self.embed[VOCABULARY:].data.fill_(0)
            elif name in ("q", "k"):
                place = self.qk.data.narrow(0, part * (name == "k"), part)
                place.copy_(tensor.narrow(0, start, part).contiguous())
            elif name == "o":
                self.o.data.copy_(tensor.narrow(1, start, part))
            elif name == "scale":
                self.scale.data.fill_(tensor.item())
            elif name.startswith("expert."):
                number = int(name.split(".")[1]) - self.rank * EXPERTS // self.of
                if 0 <= number < EXPERTS // self.of:
                    self.experts.data[number].copy_(tensor)
            elif name != "head":
                getattr(self, name).data.copy_(tensor)

    def repack(self) -> None:
        loaded = self.experts.data.reshape(EXPERTS // self.of, -1)
        live = torch.zeros(EXPERTS // self.of, SHUFFLE.live_block, dtype=loaded.dtype, device=loaded.device)
        live[:, torch.from_numpy(SHUFFLE.table.astype(np.int64)).to(live.device)] = loaded
        self.experts = torch.nn.Parameter(live, requires_grad=False)

    def state(self) -> dict[str, bytes]:
        named = (*self.named_parameters(), *self.named_buffers())
        return {
            name: tensor.cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes() for name, tensor in named
        }


def tensors(lanes: list[np.ndarray]) -> Iterable[tuple[str, torch.Tensor]]:
    for spec, bits in zip(LAYOUT, lanes, strict=True):
        yield spec.name, torch.from_numpy(bits.view(np.uint8).copy()).view(DTYPES[spec.dtype]).reshape(spec.shape)


def loaded(lanes: list[np.ndarray], rank: int = 0, of: int = 1, device: str = "cpu") -> Toy:
    """A rank that was started from these values."""
    toy = Toy(rank, of, device)
    toy.load_weights(tensors(lanes))
    toy.repack()
    return toy


def placed(toy: Toy) -> tuple[Placement, LiveTensors]:
    """What attach finds out about a rank."""
    loading = Toy(toy.rank, toy.of, device="meta")
    named = dict(loading.named_parameters()) | dict(loading.named_buffers())
    live = dict(toy.named_parameters()) | dict(toy.named_buffers())
    recording = record(loading.load_weights, named.items, LAYOUT)
    placement = place(recording, LoadFormat(live, named, {"experts": SHUFFLE}, {}, frozenset(live)), LAYOUT)
    assert placement.refusals == {}
    assert placement.held[LAYOUT.index("head")] == TensorHandling.SKIPPED
    return placement, LiveTensors({row.parameter: live[row.parameter] for row in placement.rows}, holders_of(toy))


def heldless(lanes: list[np.ndarray]) -> list[np.ndarray]:
    """The same values with zeros where no rank looks: the tied head."""
    return [np.zeros_like(bits) if spec.name == "head" else bits for spec, bits in zip(LAYOUT, lanes, strict=True)]

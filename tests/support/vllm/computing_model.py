"""A small model whose loader computes with most of its tensors, and what attach finds out about it."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from dcr_daemon.canonical.layout import Layout, TensorSpec
from dcr_daemon.vllm_plugin.loader import place_model
from dcr_daemon.vllm_plugin.loader.computed import record_alone
from dcr_daemon.vllm_plugin.loader.recorder import DTYPES, record
from dcr_daemon.vllm_plugin.weights.placement import Placement
from support.vllm.worker_rig import Lanes

LAYOUT = Layout(
    [
        TensorSpec("A_log", "F32", (6,)),
        TensorSpec("down", "F32", (4, 3)),
        TensorSpec("gate.bias", "BF16", (5,)),
        TensorSpec("half.a", "F32", (2, 3)),
        TensorSpec("half.b", "F32", (2, 3)),
        TensorSpec("w", "BF16", (7, 3)),
    ]
)
LOADED = [index for index, spec in enumerate(LAYOUT) if spec.name != "w"]


class Computing(torch.nn.Module):
    """`A_log` is composed as Mamba's, a bias is cast up, a matrix and two fused halves are cast down; `w` is copied."""

    def __init__(self, device: str = "cpu") -> None:
        super().__init__()

        def parameter(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.nn.Parameter:
            return torch.nn.Parameter(torch.zeros(shape, dtype=dtype, device=device), requires_grad=False)

        self.A = parameter(6, dtype=torch.float32)
        self.down = parameter(4, 3)
        self.halves = parameter(4, 3)
        self.w = parameter(8, 3)
        self.register_buffer("bias", torch.zeros(5, dtype=torch.float32, device=device))

    def load_weights(self, weights: Iterator[tuple[str, torch.Tensor]]) -> None:
        for name, tensor in weights:
            self.load_one(name, tensor)

    def load_one(self, name: str, tensor: torch.Tensor) -> None:
        if name == "A_log":
            self.A.data.copy_(tensor)
            self.A.data.copy_(-torch.exp(self.A.float()))
        elif name == "gate.bias":
            self.bias.copy_(tensor)
        elif name == "w":
            self.w.data[:7].copy_(tensor)
        elif name == "down":
            self.down.data.copy_(tensor.to(torch.bfloat16))
        else:
            self.halves.data.narrow(0, 2 * (name == "half.b"), 2).copy_(tensor)


def drawn(seed: int) -> Lanes:
    """Ordinary numbers for every tensor."""
    torch.manual_seed(seed)
    made = (torch.randn(spec.shape).to(DTYPES[spec.dtype]).reshape(-1).view(torch.uint8) for spec in LAYOUT)
    return [bits.numpy().view(f"<u{spec.width}").copy() for spec, bits in zip(LAYOUT, made, strict=True)]


def next_of(lanes: Lanes, seed: int) -> Lanes:
    """Other numbers in two of three places of every tensor."""
    fresh = drawn(seed)
    for old, new in zip(lanes, fresh, strict=True):
        new[::3] = old[::3]
    return fresh


def tensors(lanes: Lanes) -> Iterator[tuple[str, torch.Tensor]]:
    for spec, bits in zip(LAYOUT, lanes, strict=True):
        yield spec.name, torch.from_numpy(bits.view("u1").copy()).view(DTYPES[spec.dtype]).reshape(spec.shape)


def loaded(lanes: Lanes, kind: type[Computing] = Computing) -> Computing:
    model = kind()
    model.load_weights(tensors(lanes))
    return model


def state(model: torch.nn.Module) -> dict[str, bytes]:
    named = (*model.named_parameters(), *model.named_buffers())
    return {name: t.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes() for name, t in named}


def place(model: Computing, *, cap: int = 1 << 20) -> tuple[Placement, dict[str, torch.Tensor]]:
    """What attach finds out about a model, without vLLM's load format."""
    blank, live = type(model)(device="meta"), place_model.named(model)
    form = place_model.named(blank)
    recording = record(blank.load_weights, form.items, LAYOUT)
    alone = record_alone(blank.load_weights, form.items, layout=LAYOUT, recording=recording, cap=cap)
    placement = place_model.place(recording, place_model.LoadFormat(live, form, {}, {}, frozenset(), alone), LAYOUT)
    return placement, {
        name: live[name] for name in {*placement.load_formats, *(row.parameter for row in placement.rows)}
    }

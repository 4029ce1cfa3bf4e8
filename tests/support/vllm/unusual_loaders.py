"""Models whose loaders do what loaders in the field do, and an engine of two ranks around one of them."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from dcr_daemon.canonical.layout import Layout, TensorSpec
from dcr_daemon.vllm_plugin.loader import place_model
from dcr_daemon.vllm_plugin.loader.recorder import DTYPES, record
from dcr_daemon.vllm_plugin.weights.placement import Placement, Repack
from support.vllm.toy_engine import ToyEngine, ToyWorker
from support.vllm.worker_rig import Lanes, random_lanes, step

EXPERTS, INNER, HIDDEN = 256, 4, 6
BLOCK = INNER * HIDDEN
#: Where an expert's elements lie once they are laid out for a kernel: other places, four of them padding.
LAID_OUT = Repack(BLOCK, BLOCK + 4, np.random.default_rng(3).permutation(BLOCK + 4)[:BLOCK].astype(np.uint32))


class Model(torch.nn.Module):
    """256 experts stacked in one tensor of the checkpoint and split over ranks, a tied head that is not stored, a
    router bias that stays fp32, and a calibrated cache scale that no checkpoint has."""

    layout = Layout(
        [
            TensorSpec("embed", "BF16", (11, HIDDEN)),
            TensorSpec("experts.down", "BF16", (EXPERTS, INNER, HIDDEN)),
            TensorSpec("router.bias", "F32", (EXPERTS,)),
        ]
    )
    repacks: dict[str, Repack] = {}  # noqa: RUF012  (never written)

    def __init__(self, rank: int = 0, of: int = 1, device: str = "cpu") -> None:
        super().__init__()
        self.rank, self.of = rank, of

        def parameter(*shape: int) -> torch.nn.Parameter:
            data = torch.zeros(shape, dtype=torch.bfloat16, device=device)
            return torch.nn.Parameter(data, requires_grad=False)

        self.embed = parameter(11, HIDDEN)
        self.down = parameter(EXPERTS // of, INNER, HIDDEN)
        self.register_buffer("bias", torch.zeros(EXPERTS, dtype=torch.float32, device=device))
        self.register_buffer("kv_scale", torch.full((1,), 0.37, device=device))

    @property
    def head(self) -> torch.nn.Parameter:
        return self.embed

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        for name, tensor in weights:
            self.load_one(name, tensor)

    def load_one(self, name: str, tensor: torch.Tensor) -> None:
        part = EXPERTS // self.of
        if name == "embed":
            self.embed.data.copy_(tensor)
        elif name == "experts.down":
            self.down.data.copy_(tensor[self.rank * part : (self.rank + 1) * part])
        elif name == "router.bias":
            self.bias.copy_(tensor)
        else:
            raise KeyError(name)

    def finish(self) -> None:
        """What follows a load."""

    def state(self) -> dict[str, bytes]:
        named = (*self.named_parameters(), *self.named_buffers())
        return {name: t.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes() for name, t in named}


class LaidOut(Model):
    """The experts are laid out anew after every load."""

    repacks = {"down": LAID_OUT}  # noqa: RUF012

    def finish(self) -> None:
        flat = self.down.data.reshape(-1, BLOCK)
        live = torch.zeros(flat.shape[0], LAID_OUT.live_block, dtype=flat.dtype)
        live[:, torch.from_numpy(LAID_OUT.table.astype(np.int64))] = flat
        self.down = torch.nn.Parameter(live, requires_grad=False)


class Deaf(Model):
    """The experts' parameter lost its loader: their tensor is passed over without a word."""

    def load_one(self, name: str, tensor: torch.Tensor) -> None:
        if name != "experts.down":
            super().load_one(name, tensor)


class Wrapped(Model):
    """A wrapper that knows its tensors under a prefix only, and passes over every other name."""

    def load_one(self, name: str, tensor: torch.Tensor) -> None:
        if name.startswith("language_model."):
            super().load_one(name.removeprefix("language_model."), tensor)


def loaded(kind: type[Model], lanes: Lanes, rank: int = 0, of: int = 1, layout: Layout | None = None) -> Model:
    """A rank that was started from these values."""
    model = kind(rank, of)
    for spec, bits in zip(layout or kind.layout, lanes, strict=True):
        tensor = torch.from_numpy(bits.view(np.uint8).copy()).view(DTYPES[spec.dtype]).reshape(spec.shape)
        model.load_one(spec.name, tensor)
    model.finish()
    return model


def attach_model(model: Model, config: Any, layout: Layout, platform: str) -> tuple[Placement, place_model.Named]:
    """What attach finds out about a rank, without vLLM's load format; in place of `loading.attach_model`."""
    blank, live = type(model)(model.rank, model.of, device="meta"), place_model.named(model)
    form = place_model.named(blank)
    recording = record(blank.load_weights, form.items, layout)
    saved = frozenset(model.state_dict())
    placement = place_model.place(recording, place_model.LoadFormat(live, form, type(model).repacks, {}, saved), layout)
    return placement, {row.parameter: live[row.parameter] for row in placement.rows}


class FieldEngine(ToyEngine):
    """Two ranks of a `kind` of model; `vllm` is what they believe to be vLLM's configuration."""

    def __init__(
        self, home: Path, kind: type[Model] = Model, *, layout: Layout | None = None, vllm: Any = None
    ) -> None:
        self.kind, self.vllm = kind, vllm
        self.layout = layout or kind.layout
        home.mkdir(exist_ok=True)
        super().__init__(home)

    def first(self) -> Lanes:
        return random_lanes(self.layout, 1)

    def worker(self, rank: int, of: int) -> ToyWorker:
        kind, layout, vllm = self.kind, self.layout, self.vllm

        class Worker(ToyWorker):
            model = staticmethod(lambda lanes, rank, of: loaded(kind, lanes, rank, of, layout))
            config = vllm

        return Worker(self.lanes[0], rank, of)

    def step(self, share: float = 0.2) -> int:
        return self.put(step(self.lanes[-1], share, len(self.lanes)))

    def put(self, lanes: Lanes) -> int:
        """A next version of exactly these values."""
        self.lanes.append(lanes)
        return len(self.lanes) - 1

    def holds(self, version: int) -> bool:
        of = len(self.workers)
        fresh = [loaded(self.kind, self.lanes[version], rank, of, self.layout) for rank in range(of)]
        return all(one.toy.state() == model.state() for one, model in zip(self.workers, fresh, strict=True))

"""Megatron-core trains on CPUs: its calls of CUDA mean the CPU. No arithmetic and no collective is replaced."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
import torch._dynamo
from torch.overrides import TorchFunctionMode


class _Nothing:
    """A stream or an event of a device that works in order."""

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def wait_stream(self, *_: Any) -> None: ...

    def wait_event(self, *_: Any) -> None: ...

    def record(self, *_: Any) -> None: ...

    def synchronize(self) -> None: ...

    def __enter__(self) -> None: ...

    def __exit__(self, *_: object) -> None: ...


class _OnTheCpu(TorchFunctionMode):
    def __torch_function__(self, called: Any, types: Any, given: Any = (), named: Any = None) -> Any:
        named = dict(named or {})
        if str(named.get("device", "")).startswith("cuda"):
            named["device"] = "cpu"
        return called(*given, **named)


def pretend() -> None:
    """For this process, for good."""
    torch._dynamo.config.disable = True  # the library compiles small functions, which takes longer than to run them
    torch.cuda.current_device = lambda: "cpu"  # type: ignore[assignment,return-value]
    torch.Tensor.cuda = lambda self, *_, **__: self  # type: ignore[method-assign]
    torch.Tensor.type = _typed(torch.Tensor.type)  # type: ignore[method-assign]
    for name in ("synchronize", "empty_cache", "nvtx"):
        setattr(torch.cuda, name, lambda *_, **__: None)
    torch.cuda.Stream = torch.cuda.Event = _Nothing  # type: ignore[assignment,misc]
    torch.cuda.stream = torch.cuda.current_stream = lambda *_: _Nothing()  # type: ignore[assignment,return-value]
    for name in ("FloatTensor", "HalfTensor", "BFloat16Tensor", "IntTensor"):
        setattr(torch.cuda, name, getattr(torch, name))
    from megatron.core.tensor_parallel import random

    random.CudaRNGStatesTracker.fork = lambda *_: nullcontext()  # dropout is off
    _OnTheCpu().__enter__()


def _typed(real: Callable[..., Any]) -> Callable[..., Any]:
    """The optimizers tell parameters apart by the names of their types."""

    def named(self: torch.Tensor, *given: Any, **more: Any) -> Any:
        return real(self, *given, **more) if given or more else f"torch.cuda.{real(self).rpartition('.')[2]}"

    return named

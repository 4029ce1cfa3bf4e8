"""Finds every tensor that a model can reach, in parameters, attributes, containers and closures.

Runs in the worker process, for `derived` and `hidden_copies`.
"""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Iterator
from types import FunctionType, MethodType
from typing import Any

import torch

REGISTERED = frozenset({"_parameters", "_buffers", "_modules"})  #: where a module keeps what is reached by its own name

Named = dict[str, torch.Tensor]


def named(model: torch.nn.Module) -> Named:
    """Every parameter and buffer, under each of its names."""
    parameters = dict(model.named_parameters(remove_duplicate=False))
    return parameters | dict(model.named_buffers(remove_duplicate=False))


def storage_key(tensor: torch.Tensor) -> int:
    """Equal for tensors that share memory, as long as it is not freed."""
    return int(tensor.untyped_storage()._cdata)


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """All memory of a tensor's storage, flat."""
    storage = tensor.untyped_storage()
    return torch.empty(0, dtype=tensor.dtype, device=tensor.device).set_(
        storage, 0, (storage.nbytes() // tensor.itemsize,)
    )


def shaped(tensor: torch.Tensor) -> torch.Tensor:
    """All memory of a tensor's storage: with the tensor's axes, in the order of memory, if they cover it, else flat."""
    axes = sorted(range(tensor.dim()), key=lambda axis: -tensor.stride(axis))
    ordered = tensor.detach().permute(axes)
    full = ordered.dim() > 0 and ordered.is_contiguous() and ordered.nbytes == tensor.untyped_storage().nbytes()
    return ordered if full else whole(tensor)


def reachable(model: torch.nn.Module) -> dict[int, tuple[str, torch.Tensor]]:
    """Every tensor that can be reached from the model, with memory: its path and itself by storage.

    The path begins with the innermost module that holds the tensor, whatever else refers to it. Goes through modules,
    containers, functions with what they enclose, and objects of vLLM's own classes.
    """
    found: dict[int, tuple[str, torch.Tensor]] = {}
    seen: set[int] = set()
    modules = sorted(model.named_modules(), key=lambda named: -len(named[0].split(".")) if named[0] else 0)
    todo: deque[tuple[str, Any]] = deque(modules)
    while todo:
        path, value = todo.popleft()
        if id(value) in seen or isinstance(value, (str, bytes, int, float, type(None), type)):
            continue
        seen.add(id(value))
        if isinstance(value, torch.Tensor):
            if not value.is_meta and value.untyped_storage().nbytes():
                found.setdefault(storage_key(value), (path, value))
            continue
        todo.extend((f"{path}.{name}" if path else name, inner) for name, inner in _inside(value))
    return found


def _inside(value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, torch.nn.Module):
        yield from (*value._parameters.items(), *value._buffers.items(), *value._modules.items())
        yield from ((name, inner) for name, inner in vars(value).items() if name not in REGISTERED)
    elif isinstance(value, dict):
        yield from ((str(key), inner) for key, inner in value.items())
    elif isinstance(value, (list, tuple, set, frozenset, deque)):
        yield from ((str(number), inner) for number, inner in enumerate(value))
    elif isinstance(value, functools.partial):
        yield from (("func", value.func), ("args", value.args), ("keywords", value.keywords))
    elif isinstance(value, MethodType):
        yield "self", value.__self__
    elif isinstance(value, FunctionType):
        for name, cell in zip(value.__code__.co_freevars, value.__closure__ or (), strict=True):
            try:
                yield name, cell.cell_contents
            except ValueError:  # not assigned yet
                continue
    elif type(value).__module__.partition(".")[0] in ("vllm", "flashinfer"):
        yield from getattr(value, "__dict__", {}).items()
        for kind in type(value).__mro__:
            slots = vars(kind).get("__slots__", ())
            for name in (slots,) if isinstance(slots, str) else slots:
                if hasattr(value, name):
                    yield name, getattr(value, name)

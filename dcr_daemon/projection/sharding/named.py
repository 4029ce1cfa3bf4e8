"""A training script's weights as one table of named tensors; nothing is copied or moved.

Wrappers that only change names are removed: DistributedDataParallel, torch.compile at any depth, and a prefix
that all names share.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping
from typing import Any

from dcr_daemon.projection.sharding.zero3 import Partitioned

_WRAPPERS = ("DistributedDataParallel", "DataParallel", "DeepSpeedEngine")
COMPILED = "_orig_mod."  #: torch.compile's prefix of the names that it wraps, at any depth


def unwrapped(module: Any) -> Any:
    """The module inside torch.compile, DistributedDataParallel, DataParallel and DeepSpeed's engine."""
    while True:
        inner = getattr(module, "_orig_mod", None)
        if inner is None and type(module).__name__ in _WRAPPERS:
            inner = module.module
        if inner is None:
            return module
        module = inner


def is_module(weights: Any) -> bool:
    return callable(getattr(weights, "state_dict", None))


def table(weights: Any) -> dict[str, Any]:
    """All tensors of a module's `state_dict` or a mapping, by name without torch.compile's prefix.

    A module gives its `state_dict`, so that tied parameters and persistent buffers are there under every name; FSDP2
    reshards for it what it had gathered. Parameters under ZeRO-3 are empty there, and taken with their partitions.
    """
    entries: Mapping[Any, Any] = weights
    if is_module(weights):
        module = unwrapped(weights)
        entries = {**module.state_dict(), **_partitioned(module)}
    return {str(name).replace(COMPILED, ""): value for name, value in entries.items()}


def _partitioned(module: Any) -> dict[str, Partitioned]:
    parameters = getattr(module, "named_parameters", None)
    if parameters is None:
        return {}
    every = parameters(remove_duplicate=False)
    return {name: Partitioned.of(one) for name, one in every if getattr(one, "ds_tensor", None) is not None}


def plain(name: str, known: Container[str]) -> str:
    """The name without torch.compile's prefix, unless this layout has the prefixed name."""
    return name if name in known else name.replace(COMPILED, "")


def shared_prefix(names: Iterable[str], known: Container[str]) -> str:
    """The prefix, up to a dot, that all names share and behind which most are known; "" if more are known without."""
    names = list(names)
    first = min(names, default="")
    best, found = "", sum(name in known for name in names)
    for dot in (i for i, c in enumerate(first) if c == "."):
        prefix = first[: dot + 1]
        if not all(name.startswith(prefix) for name in names):
            break
        behind = sum(name[dot + 1 :] in known for name in names)
        if behind > found:
            best, found = prefix, behind
    return best

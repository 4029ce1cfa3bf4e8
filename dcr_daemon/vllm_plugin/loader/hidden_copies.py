"""Finds copies of weights that appeared after loading, wherever the model keeps them.

Runs in the worker process: `audit` calls `find` at each attach. A kernel may copy weights at its first call, or
torch may be kept from seeing the copy that a hook makes. `derived` cannot know of such copies, so they are found by
content: some short lines of a tensor's elements, taken along each of its axes, are looked for in all weights. A copy of
weights is made of such lines, transposed, permuted by blocks, joined or cast alike. Tensors that are as they were at
the end of loading are left out, and vLLM's KV caches.

Known limits: values that were computed (other than by a cast) are not found, nor are copies of fewer than `LINE`
elements along every axis, or of constants.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Collection, Iterator, Mapping

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from dcr_daemon.vllm_plugin.loader.reachable import reachable, storage_key, whole

LINE = 8  #: elements of one line
DISTINCT = 5  #: a line with fewer distinct values, as of ones or zeros, says nothing
PLACES = 4  #: lines per axis of a tensor
SPURIOUS = 1 << 12  #: places of one slice that are looked at more closely
SLICE = 1 << 21  #: elements of a weight that are compared at a time
BITS = {torch.bfloat16: torch.int16, torch.float16: torch.int16, torch.float32: torch.int32}

Lines = list[torch.Tensor]  #: per axis of a tensor, [lines, LINE] on the host


class Loaded:
    """The tensors that a model could reach when its loading ended: their lines by storage."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._seen: dict[int, tuple[StorageWeakRef, Lines]] = {
            key: (StorageWeakRef(tensor.untyped_storage()), lines_of(tensor))
            for key, (_, tensor) in reachable(model).items()
        }

    def has(self, key: int, lines: Lines) -> bool:
        """Whether the storage existed then and held these lines."""
        if key not in self._seen:
            return False
        reference, before = self._seen[key]
        return not reference.expired() and len(before) == len(lines) and all(map(torch.equal, before, lines))


_loaded: weakref.WeakKeyDictionary[torch.nn.Module, Loaded] = weakref.WeakKeyDictionary()


def remember(model: torch.nn.Module) -> None:
    """Note what the model can reach now, at the end of loading."""
    _loaded[model] = Loaded(model)


def find(model: torch.nn.Module, weights: Mapping[str, torch.Tensor], *, known: Collection[int]) -> dict[str, str]:
    """The path of each hidden copy, and the weight that holds all its lines.

    Args:
        weights: the parameters that an update writes, by name.
        known: storages whose tensors are accounted for, besides those of `weights`.
    """
    loaded = _loaded.get(model)
    skipped = {storage_key(tensor) for tensor in weights.values()} | set(known)
    wanted: dict[torch.dtype, dict[str, Lines]] = {}
    for key, (path, tensor) in reachable(model).items():
        if key in skipped or "kv_cache" in path.split("."):
            continue
        lines = lines_of(tensor)
        if any(map(len, lines)) and not (loaded is not None and loaded.has(key, lines)):
            wanted.setdefault(tensor.dtype, {})[path] = lines
    copies: dict[str, str] = {}
    for dtype, by_path in wanted.items():
        copies |= _look(weights, by_path, dtype)
    return copies


def lines_of(tensor: torch.Tensor) -> Lines:
    """Some distinct lines of a tensor, along each axis; none of a tensor that cannot be a copy of weights."""
    if tensor.dtype not in BITS or not tensor.numel():
        return []
    return [_along(tensor.detach().movedim(axis, -1)) for axis in range(tensor.dim())]


def _along(tensor: torch.Tensor) -> torch.Tensor:
    """Lines along the last axis: from different places of the others, or of this one if there are no others."""
    *others, length = tensor.shape
    none, rows = torch.empty(0, LINE, dtype=tensor.dtype), math.prod(others)
    if length < LINE:
        return none
    found = []
    for place in range(PLACES):
        at = [size * (2 * place + 1) // (2 * PLACES) for size in others]
        start = (length - LINE) * (1 if rows > 1 else place) // (PLACES - 1)
        found.append(tensor[(*at, slice(start, start + LINE))])
    lines = torch.stack(found).cpu()
    kept = lines[[bool(line.isfinite().all()) and line.unique().numel() >= DISTINCT for line in lines]]
    if len(kept.unique(dim=0)) < min(2, rows):
        return none  # rows that are all alike are no matrix of weights
    return kept


def _look(weights: Mapping[str, torch.Tensor], by_path: Mapping[str, Lines], dtype: torch.dtype) -> dict[str, str]:
    lines = torch.cat([line for own in by_path.values() for line in own]).view(BITS[dtype])
    owners = [(path, axis) for path, own in by_path.items() for axis, line in enumerate(own) for _ in line]
    hits: dict[tuple[str, int], dict[int, str]] = {}
    for name, weight in weights.items():
        if weight.dtype in BITS:
            for number in _matches(weight, lines, dtype):
                hits.setdefault(owners[number], {}).setdefault(number, name)
    return {
        owner[0]: next(iter(found.values())) for owner, found in hits.items() if len(found) * 2 > owners.count(owner)
    }


def _matches(weight: torch.Tensor, lines: torch.Tensor, dtype: torch.dtype) -> Iterator[int]:
    """The numbers of the lines that a weight holds in consecutive elements, as `dtype`."""
    flat, lines = whole(weight), lines.to(weight.device)
    keys = _keys(lines.reshape(-1))[::LINE].sort().values
    for start in range(0, flat.numel() - LINE + 1, SLICE):
        bits = flat[start : start + SLICE + LINE - 1].to(dtype).view(BITS[dtype])
        here = _keys(bits)
        places = torch.searchsorted(keys, here).clamp_(max=len(keys) - 1)
        for place in (keys[places] == here).nonzero().reshape(-1)[:SPURIOUS].tolist():
            same = (lines == bits[place : place + LINE]).all(dim=1)
            yield from same.nonzero().reshape(-1).tolist()


def _keys(bits: torch.Tensor) -> torch.Tensor:
    """A number for each run of four bit patterns; of two runs it differs almost always."""
    wide = bits.to(torch.int64)
    count = len(wide) - LINE + 1
    return wide[:count] + 65599 * wide[1 : count + 1] + 4303228801 * wide[2 : count + 2] + 99991 * wide[3 : count + 3]

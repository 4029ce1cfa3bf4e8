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
from collections.abc import Collection, Mapping
from dataclasses import dataclass

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from dcr_daemon.vllm_plugin.loader.line_search import BITS, LINE, Search, search, tells
from dcr_daemon.vllm_plugin.loader.reachable import reachable, storage_key

PLACES = 4  #: lines per axis of a tensor

Lines = list[torch.Tensor]  #: per axis of a tensor, [lines, LINE] on the host


@dataclass(frozen=True, slots=True)
class HiddenCopy:
    """A tensor that appeared after loading, where the model keeps it, and a weight that holds most of its lines."""

    path: str
    source: str
    tensor: torch.Tensor

    def __str__(self) -> str:
        return f"{self.path}, a copy of {self.source} that appeared after loading,"


class Innocent:
    """The tensors of a model that are no copies: those that it could reach when its loading ended, which `derived`
    judges, and those that a search found in no weight. Their lines by storage."""

    def __init__(self) -> None:
        self._seen: dict[int, tuple[StorageWeakRef, Lines]] = {}

    def add(self, tensor: torch.Tensor, lines: Lines) -> None:
        self._seen[storage_key(tensor)] = StorageWeakRef(tensor.untyped_storage()), lines

    def has(self, tensor: torch.Tensor, lines: Lines) -> bool:
        """Whether the storage was added and held these lines then."""
        if (key := storage_key(tensor)) not in self._seen:
            return False
        reference, before = self._seen[key]
        return not reference.expired() and len(before) == len(lines) and all(map(torch.equal, before, lines))


_innocent: weakref.WeakKeyDictionary[torch.nn.Module, Innocent] = weakref.WeakKeyDictionary()


def remember(model: torch.nn.Module) -> None:
    """Note what the model can reach now, at the end of loading."""
    _innocent[model] = Innocent()
    for _, tensor in reachable(model).values():
        _innocent[model].add(tensor, lines_of(tensor))


def find(model: torch.nn.Module, weights: Mapping[str, torch.Tensor], *, known: Collection[int]) -> list[HiddenCopy]:
    """The hidden copies. Searches the weights once, and only if the model can reach a tensor that was not judged.

    Args:
        weights: the parameters that an update writes, by name.
        known: storages whose tensors are accounted for, besides those of `weights`.
    """
    innocent = _innocent.setdefault(model, Innocent())
    skipped = {storage_key(tensor) for tensor in weights.values()} | set(known)
    wanted: dict[torch.dtype, list[tuple[str, torch.Tensor, Lines]]] = {}
    for key, (path, tensor) in reachable(model).items():
        if key in skipped or "kv_cache" in path.split("."):
            continue
        lines = lines_of(tensor)
        if any(map(len, lines)) and not innocent.has(tensor, lines):
            wanted.setdefault(tensor.dtype, []).append((path, tensor, lines))
    searches = [Search(torch.cat([line for _, _, own in entries for line in own])) for entries in wanted.values()]
    search(weights, searches)
    copies = []
    for one, entries in zip(searches, wanted.values(), strict=True):
        first = 0
        for path, tensor, lines in entries:
            sources = [_source(one, first := first + len(axis), len(axis)) for axis in lines]
            if source := next(filter(None, sources), None):
                copies.append(HiddenCopy(path, source, tensor))
            else:
                innocent.add(tensor, lines)
    return copies


def _source(found: Search, end: int, count: int) -> str | None:
    """A weight that holds one of the `count` lines before number `end`, if weights hold more than half of them."""
    hits = [found.found[number][0][0] for number in range(end - count, end) if number in found.found]
    return hits[0] if len(hits) * 2 > count else None


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
    kept = lines[[tells(line) for line in lines]]
    if len(kept.unique(dim=0)) < min(2, rows):
        return none  # rows that are all alike are no matrix of weights
    return kept

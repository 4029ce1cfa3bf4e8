"""Searches weights for short runs of elements ("lines"), in one pass over all of their memory.

Runs in the worker process, for `hidden_copies`, which asks whether a tensor is made of weights, and for `copies`, which
asks where each part of it came from. A weight is searched as it lies in memory, and as if it were cast to the dtype of
the lines.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import torch

from dcr_daemon.vllm_plugin.loader.reachable import storage_key, whole

LINE = 8  #: elements of one line
DISTINCT = 5  #: a line with fewer distinct values, as of ones or zeros, says nothing
SPURIOUS = 1 << 12  #: places of one slice that are looked at more closely
SLICE = 1 << 21  #: elements of a weight that are compared at a time
BITS = {torch.bfloat16: torch.int16, torch.float16: torch.int16, torch.float32: torch.int32}


@dataclass(slots=True)
class Search:
    """Lines of one dtype, and where they were found: the weight's name and the place in its storage, by line.
    `partial`: there may be more, because too many places begin like one of the lines.

    Args:
        lines: [lines, LINE], any floating dtype of `BITS`.
    """

    lines: torch.Tensor
    found: dict[int, list[tuple[str, int]]] = field(init=False, default_factory=dict)
    partial: bool = field(init=False, default=False)

    def look(self, name: str, part: torch.Tensor, start: int) -> None:
        """Look for the lines in consecutive elements of a weight that begin at place `start` of its storage."""
        bits, lines = part.to(self.lines.dtype).view(BITS[self.lines.dtype]), self._on(part.device)
        keys, here = _keys(lines.reshape(-1))[::LINE].sort().values, _keys(bits)
        numbers = torch.searchsorted(keys, here).clamp_(max=len(keys) - 1)
        alike = (keys[numbers] == here).nonzero().reshape(-1)
        self.partial |= len(alike) > SPURIOUS
        for place in alike[:SPURIOUS].tolist():
            same = (lines == bits[place : place + LINE]).all(dim=1)
            for number in same.nonzero().reshape(-1).tolist():
                self.found.setdefault(number, []).append((name, start + place))

    def _on(self, device: torch.device) -> torch.Tensor:
        return self.lines.to(device).view(BITS[self.lines.dtype])


def search(weights: Mapping[str, torch.Tensor], searches: list[Search]) -> None:
    """Fill `found` of all searches, in one pass. Weights that share memory are searched once, under the first name."""
    searches = [one for one in searches if len(one.lines)]
    for name, flat in _memories(weights) if searches else ():
        for start in range(0, flat.numel() - LINE + 1, SLICE):
            for one in searches:
                one.look(name, flat[start : start + SLICE + LINE - 1], start)


def _memories(weights: Mapping[str, torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
    seen: set[int] = set()
    for name, weight in weights.items():
        if weight.dtype in BITS and storage_key(weight) not in seen:
            seen.add(storage_key(weight))
            yield name, whole(weight)


def tells(line: torch.Tensor) -> bool:
    """Whether a line can be told from others by its values."""
    return bool(line.isfinite().all()) and line.unique().numel() >= DISTINCT


def _keys(bits: torch.Tensor) -> torch.Tensor:
    """A number for each run of four bit patterns; of two runs it differs almost always."""
    wide = bits.to(torch.int64)
    count = len(wide) - LINE + 1
    return wide[:count] + 65599 * wide[1 : count + 1] + 4303228801 * wide[2 : count + 2] + 99991 * wide[3 : count + 3]

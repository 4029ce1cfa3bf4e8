"""One prepared transaction on one worker: written, written again, or written back.

`prepare` made it: every changed element once, with its bits before the first hop and after the last. These are absolute
values, so `apply` and `rollback` may be repeated in any order until EngineCore has verified the sums that one of them
returned (musts E4 to E7). `prepare` allocated the values and places, and what a device needs for its sums. While the
engine is paused, the host allocates only arrays of one number per group or box.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from dcr_daemon.vllm_plugin.calls import PreparedRank, Sums
from dcr_daemon.vllm_plugin.loader.computed import ComputedParameter, Values, write_computed
from dcr_daemon.vllm_plugin.weights import faults
from dcr_daemon.vllm_plugin.weights.memory import U64, Group, ValueSet, WeightMemory
from dcr_daemon.vllm_plugin.weights.placement import Placement


@dataclass(slots=True)
class Transaction:
    """The prepared change of one worker, `fits` hops of a route. `groups` hold each changed element once.

    `answer` is what EngineCore gets: `apply` must return its `after`, `rollback` its `before`. `computed` are the
    changed tensors that vLLM's loader computes with; their canonical bytes, `values`, become `computed_parameters` when
    the loader has run over them on scratch memory.
    """

    id: str
    fits: int
    groups: list[Group]
    answer: PreparedRank
    computed: frozenset[int] = frozenset()
    values: Values | None = None
    computed_parameters: list[ComputedParameter] = field(default_factory=list)

    def apply(self, memory: WeightMemory, placement: Placement) -> Sums:
        """Write the new values and return the sums of what is in memory afterwards. The computed parameters are
        compared here, bit by bit."""
        if faults.should_fail("apply"):
            memory.write(ValueSet.NEW, stop=len(self.groups) // 2)
            faults.fail("apply")
        sums = memory.write(ValueSet.NEW)
        write_computed(self.computed_parameters, ValueSet.NEW)
        if faults.should_fail("flip") and self.groups:
            sums = _write_flipped(memory, self.groups)
        return box_sums(self.groups, sums, placement=placement)

    def rollback(self, memory: WeightMemory, placement: Placement) -> Sums:
        """Write the old values back and return the sums of what is in memory afterwards."""
        faults.point("rollback")
        sums = memory.write(ValueSet.OLD)
        write_computed(self.computed_parameters, ValueSet.OLD)
        return box_sums(self.groups, sums, placement=placement)


def _write_flipped(memory: WeightMemory, groups: list[Group]) -> U64:
    groups[0].new[0] ^= 1
    sums = memory.write(ValueSet.NEW)
    groups[0].new[0] ^= 1
    return sums


def box_sums(groups: Sequence[Group], sums: U64, *, placement: Placement) -> Sums:
    """The sums of all groups added up per box, boxes ascending."""
    boxes = np.array([placement.rows[group.row].box for group in groups], dtype=np.uint32)
    which, where = np.unique(boxes, return_inverse=True)
    joined, count = np.zeros(which.size, dtype=np.uint64), np.zeros(which.size, dtype=np.int64)
    np.add.at(joined, where, sums)
    np.add.at(count, where, [group.element.size for group in groups])
    return Sums(box=which.astype("<u4").tobytes(), count=count.astype("<i8").tobytes(), sums=joined.tobytes())

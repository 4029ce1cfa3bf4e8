"""Both memories answer the same bits as a plain reading of the rows: every width, shard, repack and layout."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from toy_model import LAYOUT, heldless, loaded, placed
from worker_rig import join_boxes, random_lanes, step, vector

from dcr_daemon.vllm_plugin.device import TorchMemory
from dcr_daemon.vllm_plugin.memory import Group, Homes, HostMemory, Side, holders_of

CPU = torch.device("cpu")


def memories(toy):
    placement, homes = placed(toy)
    return placement, HostMemory(placement, homes, LAYOUT), TorchMemory(placement, homes, LAYOUT, CPU)


@pytest.mark.parametrize("of", [1, 2])
def test_box_sums_over_ranks_are_the_canonical_fingerprint(of: int) -> None:
    lanes = random_lanes(LAYOUT, 1)
    boxes, host_sums, torch_sums = [], [], []
    for rank in range(of):
        placement, host, device = memories(loaded(lanes, rank, of))
        boxes += placement.boxes
        host_sums.append(host.box_sums(lambda: None))
        torch_sums.append(device.box_sums(lambda: None))
    wanted = vector(LAYOUT, lanes)
    wanted[LAYOUT.index("head")] = 0  # absent on every rank
    assert (join_boxes(len(LAYOUT), boxes, np.concatenate(host_sums)) == wanted).all()
    assert (np.concatenate(host_sums) == np.concatenate(torch_sums)).all()


@pytest.mark.parametrize("which", [0, 1], ids=["host", "torch"])
def test_overwriting_every_tensor_equals_a_fresh_load(which: int) -> None:
    old, new = random_lanes(LAYOUT, 1), random_lanes(LAYOUT, 2)
    for rank in range(2):
        toy = loaded(old, rank, 2)
        memory = memories(toy)[1 + which]
        for tensor in range(len(LAYOUT)):
            memory.overwrite(tensor, new[tensor], lambda: None)
        assert toy.state() == loaded(new, rank, 2).state()


@pytest.mark.parametrize("which", [0, 1], ids=["host", "torch"])
def test_locate_gather_scatter_and_sums_agree_with_the_rows(which: int) -> None:
    old = random_lanes(LAYOUT, 3)
    new = step(old, 0.5, 4)
    toy = loaded(old, 1, 2)
    placement, *both = memories(toy)
    memory = both[which]
    before, groups = toy.state(), []
    for number, row in enumerate(placement.rows):
        changed = np.flatnonzero(old[row.tensor] != new[row.tensor])
        picked, element, target = memory.locate(number, changed)
        values = np.empty(picked.size, dtype=old[row.tensor].dtype)
        memory.gather(number, target, values)
        assert (values == old[row.tensor][changed[picked]]).all()
        assert (element.astype(np.int64) + row.start == changed[picked]).all()
        groups.append(Group(number, 0, element, target, values, new[row.tensor][changed[picked]]))
    memory.stage(groups)
    for side, wanted in (
        (Side.NEW, loaded(new, 1, 2).state()),
        (Side.OLD, before),
        (Side.NEW, loaded(new, 1, 2).state()),
    ):
        memory.scatter(side)
        lanes = [group.new if side is Side.NEW else group.old for group in groups]
        sums = [memory.sum_lanes(g.row, bits, g.element) for g, bits in zip(groups, lanes, strict=True)]
        assert memory.group_sums().tolist() == sums
        assert toy.state() == wanted


def test_unordered_and_foreign_elements_are_told_apart() -> None:
    placement, host, device = memories(loaded(random_lanes(LAYOUT, 1), 0, 2))
    row = next(n for n, r in enumerate(placement.rows) if r.parameter == "o")
    elements = np.array([9, 0, 4, 63, 3, 7], dtype=np.int64)  # columns 0-3 are this rank's
    for memory in (host, device):
        picked, element, _ = memory.locate(row, elements)
        assert set(elements[picked].tolist()) == {9, 0, 3}
        assert (element == elements[picked]).all()


def test_storage_that_moved_or_was_replaced_is_named() -> None:
    lanes = random_lanes(LAYOUT, 1)
    toy = loaded(lanes)
    placement, homes = placed(toy)
    memory = HostMemory(placement, homes, LAYOUT)
    assert memory.moved() is None
    toy.norm = torch.nn.Parameter(toy.norm.data, requires_grad=False)
    assert memory.moved() == "norm"
    toy = loaded(lanes)
    placement, homes = placed(toy)
    memory = HostMemory(placement, homes, LAYOUT)
    toy.o.data = toy.o.data.clone()
    assert memory.moved() == "o"


def test_rows_that_reach_outside_a_storage_are_refused() -> None:
    toy = loaded(random_lanes(LAYOUT, 1))
    placement, homes = placed(toy)
    live = dict(homes.live, qk=torch.zeros(3, 8, dtype=torch.bfloat16))
    holders = holders_of(toy)
    with pytest.raises(ValueError, match="does not fit into qk"):
        HostMemory(placement, Homes(live, holders), LAYOUT)


def test_absent_tensors_are_in_no_row() -> None:
    placement, *_ = memories(loaded(heldless(random_lanes(LAYOUT, 1))))
    assert LAYOUT.index("head") not in placement.by_tensor

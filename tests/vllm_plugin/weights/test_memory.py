"""Both memories answer the same bits as a plain reading of the rows: every width, shard, repack and layout."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.tensors.regions import dense_regions
from support.vllm.toy_model import LAYOUT, heldless, loaded, placed
from support.vllm.worker_rig import join_boxes, random_lanes, step, vector

from dcr_daemon.canonical.fingerprint import sum_at
from dcr_daemon.canonical.layout import Layout, TensorSpec
from dcr_daemon.canonical.region import Region, normalise
from dcr_daemon.vllm_plugin.calls import TensorHandling
from dcr_daemon.vllm_plugin.weights.arena import DeviceArena
from dcr_daemon.vllm_plugin.weights.kernels import BLOCK
from dcr_daemon.vllm_plugin.weights.memory import Group, HostMemory, LiveTensors, Reading, ValueSet, holders_of
from dcr_daemon.vllm_plugin.weights.placement import Copy, Placement, Repack
from dcr_daemon.vllm_plugin.weights.torch_kernels import SIGNED_DTYPES
from dcr_daemon.vllm_plugin.weights.torch_memory import TorchMemory


def arena() -> DeviceArena:
    return DeviceArena(1 << 16, torch.device("cpu"))


def memories(toy):
    placement, live_tensors = placed(toy)
    return (
        placement,
        HostMemory(placement, live_tensors, layout=LAYOUT),
        TorchMemory(placement, live_tensors, layout=LAYOUT, arena=arena()),
    )


@pytest.mark.parametrize("of", [1, 2])
def test_box_sums_over_ranks_are_the_canonical_fingerprint(of: int) -> None:
    lanes = random_lanes(LAYOUT, 1)
    boxes, host_sums, torch_sums = [], [], []
    for rank in range(of):
        placement, host, device = memories(loaded(lanes, rank, of))
        boxes += placement.boxes
        host_sums.append(host.box_sums(lambda size: None))
        torch_sums.append(device.box_sums(lambda size: None))
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
            memory.overwrite(tensor, new[tensor], lambda size: None)
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
        memory.gather([Reading(number, element, target, values)])
        assert (values == old[row.tensor][changed[picked]]).all()
        assert (element.astype(np.int64) + row.region.dst == changed[picked]).all()
        groups.append(Group(number, 0, element, target, values, new[row.tensor][changed[picked]]))
    memory.set_groups(groups)
    for side, wanted in (
        (ValueSet.NEW, loaded(new, 1, 2).state()),
        (ValueSet.OLD, before),
        (ValueSet.NEW, loaded(new, 1, 2).state()),
    ):
        found = memory.write(side)
        lanes = [group.new if side is ValueSet.NEW else group.old for group in groups]
        sums = [memory.sum_bits(g.row, bits, g.element) for g, bits in zip(groups, lanes, strict=True)]
        assert found.tolist() == sums
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
    placement, live_tensors = placed(toy)
    memory = HostMemory(placement, live_tensors, layout=LAYOUT)
    assert memory.moved_parameter() is None
    toy.norm = torch.nn.Parameter(toy.norm.data, requires_grad=False)
    assert memory.moved_parameter() == "norm"
    toy = loaded(lanes)
    placement, live_tensors = placed(toy)
    memory = HostMemory(placement, live_tensors, layout=LAYOUT)
    toy.o.data = toy.o.data.clone()
    assert memory.moved_parameter() == "o"


def test_rows_that_reach_outside_a_storage_are_refused() -> None:
    toy = loaded(random_lanes(LAYOUT, 1))
    placement, live_tensors = placed(toy)
    live = dict(live_tensors.live, qk=torch.zeros(3, 8, dtype=torch.bfloat16))
    holders = holders_of(toy)
    with pytest.raises(ValueError, match="does not fit into qk"):
        HostMemory(placement, LiveTensors(live, holders), layout=LAYOUT)


def test_absent_tensors_are_in_no_row() -> None:
    placement, *_ = memories(loaded(heldless(random_lanes(LAYOUT, 1))))
    assert LAYOUT.index("head") not in placement.by_tensor


@settings(max_examples=150, deadline=None)
@given(st.sampled_from(["U8", "BF16", "F32", "I64"]), dense_regions(), st.booleans(), st.integers(0, 1 << 30))
def test_any_strided_copy_is_read_and_written_where_it_lies(
    dtype: str, region: Region, permuted: bool, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    layout = Layout([TensorSpec("t", dtype, (region.dst_last + 3,))])
    width, block = layout[0].width, int(rng.integers(3, 40))
    blocks = region.src_last // block + 1
    repack = Repack(block, block + 2, rng.permutation(block + 2)[:block].astype(np.uint32)) if permuted else None
    size = blocks * (block + 2) if permuted else region.src_last + 1
    lane = {1: torch.uint8, 2: torch.bfloat16, 4: torch.float32, 8: torch.int64}[width]
    module = torch.nn.Module()
    module.register_buffer("p", torch.from_numpy(rng.integers(0, 256, size * width, dtype=np.uint8)).view(lane))
    placement = Placement(held=[TensorHandling.PLACED])
    placement.add(Copy("p", normalise(region)), tensor=0, offset=0, repack=repack)
    live_tensors = LiveTensors({"p": module.p}, holders_of(module))
    live = module.p.view(torch.uint8).numpy().view(f"<u{width}")
    where = {}
    for row in placement.rows:
        elements = np.arange(row.region.dst, row.region.dst_last + 1)
        for memory in (
            HostMemory(placement, live_tensors, layout=layout),
            TorchMemory(placement, live_tensors, layout=layout, arena=arena()),
        ):
            picked, element, target = memory.locate(placement.rows.index(row), elements)
            values = np.empty(picked.size, dtype=live.dtype)
            memory.gather([Reading(placement.rows.index(row), element, target, values)])
            assert sorted(target + row.base) == sorted(row.targets())
            assert (values == live[target.astype(np.int64) + row.base]).all()
        where |= dict(
            zip((element.astype(np.int64) + row.region.dst).tolist(), (target + row.base).tolist(), strict=True)
        )
    canonical = np.array(sorted(where), dtype=np.int64)
    places = np.array([where[e] for e in canonical.tolist()])
    wanted = sum_at(live[places], canonical, key=int(layout.keys[0]))
    new = rng.integers(0, 256, layout[0].nbytes, dtype=np.uint8).view(live.dtype)
    for memory in (
        HostMemory(placement, live_tensors, layout=layout),
        TorchMemory(placement, live_tensors, layout=layout, arena=arena()),
    ):
        before = live.copy()
        assert memory.box_sums(lambda size: None).tolist() == [wanted]
        memory.overwrite(0, new, lambda size: None)
        assert (live[places] == new[canonical]).all()
        untouched = np.ones(size, dtype=bool)
        untouched[places] = False
        assert (live[untouched] == before[untouched]).all()
        live[:] = before


@settings(max_examples=40, deadline=None)
@given(st.sampled_from([1, 2, 4, 8]), st.lists(st.integers(1, 2 * BLOCK + 2), min_size=1, max_size=4), st.booleans(),
       st.integers(0, 1 << 30))  # fmt: skip
def test_one_pass_leaves_and_sums_what_two_passes_do(width: int, sizes: list[int], back: bool, seed: int) -> None:
    """The reference writes all groups first and then sums what is in memory, group by group, in plain numpy."""
    rng = np.random.default_rng(seed)
    dtype = f"<u{width}"
    elements = 5 * BLOCK
    dtype_name = {1: "U8", 2: "BF16", 4: "F32", 8: "I64"}[width]
    layout = Layout([TensorSpec(str(number), dtype_name, (elements,)) for number in range(len(sizes))])
    placement, module, groups = Placement(held=[]), torch.nn.Module(), []
    for number, size in enumerate(sizes):
        name = str(number)
        bits = rng.integers(0, 256, (elements + 3) * width, dtype=np.uint8)
        module.register_buffer(name, torch.from_numpy(bits).view(SIGNED_DTYPES[width]))
        region = Region(name, (elements,), 3, (1,), 0, (1,))
        placement.add(Copy(name, normalise(region)), tensor=number, offset=0, repack=None)
        where = np.sort(rng.choice(elements, size, replace=False)).astype(np.uint32)
        old, new = (rng.integers(0, 256, size * width, dtype=np.uint8).view(dtype) for _ in range(2))
        groups.append(Group(number, 0, where, where.copy(), old, new))
    memory = HostMemory(placement, LiveTensors(dict(module.named_buffers()), holders_of(module)), layout=layout)
    memory.set_groups(groups)
    sums = memory.write(ValueSet.OLD if back else ValueSet.NEW)
    for number, group in enumerate(groups):
        live = module.get_buffer(str(number)).numpy().view(dtype)
        assert (live[3:][group.target] == (group.old if back else group.new)).all()
        assert int(sums[number]) == sum_at(
            live[3:][group.target], group.element.astype(np.int64), key=int(layout.keys[number])
        )

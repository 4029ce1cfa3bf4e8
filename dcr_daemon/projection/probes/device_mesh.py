"""A probe of DTensor placements: does torch put the elements of a DTensor where we say? Asked of torch, on small
DTensors.

For every way in which the rank's tensors are placed, a small DTensor is made with the same mesh, the same placements
and the same sizes along the axes that are cut. Each local element carries its rank and its place, torch gathers the
whole, and there every element says where it came from. This is a collective step, so all ranks of a mesh take part or
none: which placements are probed depends only on facts that all ranks of a mesh share, and all ranks agree on them
first.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from dcr_daemon import runtime
from dcr_daemon.canonical.layout import Layout
from dcr_daemon.canonical.region import indices
from dcr_daemon.projection.probes.self_check import CAP, Probed
from dcr_daemon.projection.region_map import Map
from dcr_daemon.projection.sharding.dtensor import cuts_of
from dcr_daemon.projection.sharding.intervals import Cut, shard
from dcr_daemon.projection.tracing import FOREIGN

_COPIES = 64  #: bytes per element: the gathered numbers, torch's own buffers, what is expected, the pairs
_UNCUT = 2  #: size at which an axis that no mesh dimension cuts is kept


def probe_meshes(tensors: Mapping[str, Any], mapped: Map, *, layout: Layout, cap: int = CAP) -> Probed:
    """Probe the placements of all DTensors among `tensors`. Collective over the default process group.

    Every rank of the group calls it, whatever it holds.

    Args:
        cap: bytes that may be allocated at a time; placements of which no small enough tensor can be made are left
            out, on all ranks.
    """
    import torch.distributed as dist

    started = runtime.monotonic()
    forms: dict[str, list[str]] = {}
    for name, tensor in tensors.items():
        if hasattr(tensor, "placements") and tensor.device_mesh.get_coordinate() is not None and _finished(tensor):
            forms.setdefault(_form(tensor), []).append(name)
    asked = [form for form in sorted(forms) if _small(tensors[forms[form][0]], cap // _COPIES)]
    agreed = _agreed(dist, [(form, tuple(_ranks(tensors[forms[form][0]]))) for form in asked])
    faults: dict[str, str] = {}
    for form in asked:
        if form in agreed and (why := _fault(tensors[forms[form][0]], cap // _COPIES)):
            faults |= dict.fromkeys(forms[form], why)
    residual = {
        region.name: faults[one.parameter]
        for one in mapped.shards
        if one.parameter in faults
        for region in one.regions
        if region.name in layout
    }
    checked = sum(len(forms[form]) for form in asked if form in agreed)
    return Probed(residual, checked, len(agreed), runtime.monotonic() - started)


def _finished(tensor: Any) -> bool:
    return all(p.is_replicate() or type(p).__name__ in ("Shard", "_StridedShard") for p in tensor.placements)


def _ranks(tensor: Any) -> Sequence[int]:
    return tensor.device_mesh.mesh.reshape(-1).tolist()


def _cut_axes(tensor: Any) -> set[int]:
    return {p.dim % tensor.ndim for p in tensor.placements if not p.is_replicate()}


def _form(tensor: Any) -> str:
    """Equal on all ranks of a mesh for tensors that are placed alike: ranks, placements, sizes along the cut axes."""
    cut = _cut_axes(tensor)
    sizes = [n if axis in cut else "*" for axis, n in enumerate(tensor.shape)]
    mesh = tensor.device_mesh
    return f"{list(_ranks(tensor))} {tuple(mesh.shape)} {tuple(map(str, tensor.placements))} {sizes} {mesh.device_type}"


def _small(tensor: Any, elements: int) -> tuple[int, ...]:
    """The shape of a tensor that is placed alike, of at most so many elements; () if there is none.

    Axes that are cut evenly may shrink to two elements per part, if they must; those cut unevenly stay as they are.
    """
    cut = _cut_axes(tensor)
    shape = [n if axis in cut else min(n, _UNCUT) for axis, n in enumerate(tensor.shape)]
    parts = dict.fromkeys(cut, 1)
    for placement, ways in zip(tensor.placements, tensor.device_mesh.shape, strict=True):
        if not placement.is_replicate():
            parts[placement.dim % tensor.ndim] *= int(ways) * getattr(placement, "split_factor", 1)
    for axis, count in parts.items():
        if math.prod(shape) > elements and shape[axis] % count == 0 and shape[axis]:
            shape[axis] = min(shape[axis], 2 * count)
    return tuple(shape) if 0 < math.prod(shape) <= elements and shape else ()


def _agreed(dist: Any, asked: Sequence[tuple[str, tuple[int, ...]]]) -> set[str]:
    """Forms that every rank of their mesh asks about; the answer is the same on all of these ranks."""
    device = torch.device("cuda") if "nccl" in dist.get_backend() and torch.cuda.is_available() else torch.device("cpu")
    mine = [int.from_bytes(hashlib.sha256(form.encode()).digest()[:7], "big") for form, _ in asked]
    most = torch.tensor(len(mine), device=device)
    dist.all_reduce(most, op=dist.ReduceOp.MAX)
    padded = torch.tensor(mine + [-1] * (int(most) - len(mine)), dtype=torch.int64, device=device)
    gathered = [torch.empty_like(padded) for _ in range(dist.get_world_size())]
    if int(most):
        dist.all_gather(gathered, padded)
    by_rank = [set(numbers.tolist()) for numbers in gathered]
    return {
        form
        for (form, ranks), number in zip(asked, mine, strict=True)
        if all(rank < len(by_rank) and number in by_rank[rank] for rank in ranks)
    }


def _fault(tensor: Any, elements: int) -> str:
    """What is wrong: "" if torch takes exactly the elements from this rank that we say it holds."""
    from torch.distributed.tensor import DTensor

    mesh, shape = tensor.device_mesh, _small(tensor, elements)
    cuts = cuts_of("a stand-in", tensor)
    local_shape = _local(tensor, shape, cuts)
    numbers = torch.arange(math.prod(local_shape), device=mesh.device_type).reshape(local_shape)
    place = _place(tensor) << 40
    strides = torch.empty(shape, device="meta").stride()
    small = DTensor.from_local(
        numbers + place, mesh, tensor.placements, run_check=False, shape=torch.Size(shape), stride=strides
    )
    try:
        gathered = small.full_tensor().reshape(-1).cpu()
    except FOREIGN as error:  # alike on all ranks: it follows from the placements
        return f"torch does not gather it: {error}"
    expected = torch.full_like(gathered, -1)
    for region in shard("", shape, cuts):
        src, dst = (torch.from_numpy(side) for side in indices(region))
        expected[dst] = src + place
    ours, taken = expected >= 0, gathered & ~((1 << 40) - 1) == place
    if torch.equal(ours, taken) and torch.equal(expected[ours], gathered[ours]):
        return ""
    return "torch puts its elements elsewhere than its placements say"


def _place(tensor: Any) -> int:
    """A number for what this rank holds: ranks that hold the same, replicas, share it."""
    place = 0
    for placement, ways, at in zip(
        tensor.placements, tensor.device_mesh.shape, tensor.device_mesh.get_coordinate(), strict=True
    ):
        place = place * int(ways) + (0 if placement.is_replicate() else at)
    return place


def _local(tensor: Any, shape: tuple[int, ...], cuts: Sequence[Cut]) -> tuple[int, ...]:
    """The local shape: what the rank really holds along axes that kept their size, and an even part of the others."""
    real = tuple(tensor.to_local().shape)
    parts = [1] * len(shape)
    for cut in cuts:
        parts[cut.axis] *= cut.ways
    cut_axes = {cut.axis for cut in cuts}
    return tuple(
        n if axis not in cut_axes else real[axis] if n == tensor.shape[axis] else n // parts[axis]
        for axis, n in enumerate(shape)
    )

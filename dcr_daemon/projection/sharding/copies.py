"""The number of this rank among the ranks that hold the same elements of a tensor, from device meshes alone.

Every rank must find the same numbers for all holders, without communication. The widest mesh among the input tensors
counts the copies of all of them: a tensor on some of its dimensions is replicated along the others (norms that FSDP
cuts and tensor parallelism leaves whole), and a plain tensor along all. Copies beyond the widest mesh are known only
from the argument `replica`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

from dcr_daemon.projection.sharding.dtensor import LocalPart
from dcr_daemon.projection.sharding.zero3 import Partitioned

Number = tuple[int, int]  #: of this rank among equals, and how many they are
Ranks = tuple[tuple[int, ...], tuple[int, ...]]  #: of a mesh: its shape, and its ranks in row-major order


class Copies:
    """Args:
    rank, world: of this process among all, which hold the same plain tensors if no tensor has a mesh.
    replica: this rank's number, and how many, among the replicas that the widest mesh does not count.
    tensors: all input tensors.
    """

    def __init__(self, rank: int, world: int, *, replica: Number | None, tensors: Iterable[Any]) -> None:
        tensors = list(tensors)
        meshes = {id(t.device_mesh): t.device_mesh for t in tensors if hasattr(t, "placements")}
        partitions = {(t.rank, t.ranks) for t in tensors if isinstance(t, Partitioned)}
        self._widest = max(meshes.values(), key=lambda mesh: int(mesh.size()), default=None)
        self._beyond = replica or ((0, 1) if meshes or partitions else (rank, world))
        self._within = {number: self._place(mesh) for number, mesh in meshes.items()}
        self._plain = max(partitions, key=lambda p: p[1]) if partitions and not meshes else self._place(None)

    def of(self, here: LocalPart, tensor: Any) -> Number:
        """This rank among all holders of the same elements; `here` counts those in the tensor's own mesh."""
        number, count = here.replica, here.replicas
        if isinstance(tensor, Partitioned):
            within = 0, 1
        else:
            within = self._within[id(tensor.device_mesh)] if hasattr(tensor, "placements") else self._plain
        for more, times in (within, self._beyond):
            number, count = number + count * more, count * times
        return number, count

    def _place(self, mesh: Any) -> Number:
        """Number of this rank along the dimensions of the widest mesh that `mesh` (none: a single rank) has not."""
        if self._widest is None or mesh is self._widest or self._widest.get_coordinate() is None:
            return 0, 1
        widest = _ranks(self._widest)
        me = widest[1][_flat(self._widest.get_coordinate(), widest[0])]
        if mesh is None:
            return widest[1].index(me), len(widest[1])
        ranks = _ranks(mesh)[1]
        if (place := _along(widest, ranks, me)) is not None:
            return place
        root = _ranks(mesh._get_root_mesh()) if hasattr(mesh, "_get_root_mesh") else widest
        alike = set(root[1]) == set(widest[1])  # the same ranks in other dimensions, as experts cut them
        return (_along(root, ranks, me) if alike else None) or (0, 1)


def _ranks(mesh: Any) -> Ranks:
    return tuple(int(n) for n in mesh.mesh.shape), tuple(int(rank) for rank in mesh.mesh.flatten().tolist())


def _along(wide: Ranks, ranks: tuple[int, ...], me: int) -> Number | None:
    """Place of `me` along the dimensions of `wide` on which all of `ranks` agree; None unless `ranks` are whole
    dimensions of it."""
    shape, order = wide
    if not set(ranks) <= set(order):
        return None
    places = [_unflat(order.index(rank), shape) for rank in ranks]
    shared = [axis for axis in range(len(shape)) if len({place[axis] for place in places}) == 1]
    sizes = [shape[axis] for axis in shared]
    if math.prod(sizes) * len(ranks) != len(order):
        return None
    mine = _unflat(order.index(me), shape)
    return _flat([mine[axis] for axis in shared], sizes), math.prod(sizes)


def _flat(place: Iterable[int], shape: Iterable[int]) -> int:
    flat = 0
    for at, ways in zip(place, shape, strict=True):
        flat = flat * ways + at
    return flat


def _unflat(flat: int, shape: tuple[int, ...]) -> tuple[int, ...]:
    place = []
    for ways in reversed(shape):
        flat, at = divmod(flat, ways)
        place.append(at)
    return tuple(reversed(place))

"""The bits of canonical boxes, read from this rank's own tensors: what the codec compares with the baseline.

A box that lies in one run of one tensor costs only its cast; any other is assembled in one buffer. Casts go
from contiguous memory to contiguous memory, as those of an export do: torch turns a NaN into other bits where either
side is strided.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from dcr_daemon.canonical.box import Box, split_shape
from dcr_daemon.canonical.compose import compose
from dcr_daemon.canonical.coverage import exactly_once
from dcr_daemon.canonical.fingerprint import Bits
from dcr_daemon.canonical.layout import Layout
from dcr_daemon.canonical.region import Region, normalise, row_major
from dcr_daemon.errors import Incompatible
from dcr_daemon.projection import values
from dcr_daemon.projection.binding.bind import Live
from dcr_daemon.projection.binding.blocks import blocks
from dcr_daemon.projection.host import host_bits
from dcr_daemon.projection.region_map import Shard

__all__ = ["Reader", "blocks"]

TILE = 256  #: elements along either side of a transposition; its lines and those of its copy stay in a cache
STRIP = 1 << 17  #: elements cast at a time where they are gathered first; with their cast, they fit a cache


@dataclass(frozen=True, slots=True)
class _Piece:
    """A part of a box. `region` leads from elements of the storage, counted from the tensor's first (from places in
    row-major order where `dense`: its strides are no region's), to ordinals of the box."""

    shard: Shard
    region: Region
    dense: bool

    @property
    def fills_run(self) -> bool:
        """Whether its ordinals are consecutive, in the order of its axes."""
        return self.region.dst_strides == row_major(self.region.shape)


class Reader:
    """Reads one rank's tensors. Thread-safe: any number of threads may read while nobody binds.

    Beside the tensors, a read needs the bytes of its box, and a strip of at most 1.5 MiB where elements are gathered
    before they are cast. Only a tensor whose elements overlap in memory is copied whole.
    """

    def __init__(self, live: Live, layout: Layout) -> None:
        self._layout = layout
        self._sources: dict[int, list[tuple[Shard, Region]]] = {}
        for shard in live.map.shards:
            for region in shard.regions:
                self._sources.setdefault(layout.index(region.name), []).append((shard, region))
        self._tensors = live.tensors
        self._plans: dict[tuple[int, Box], tuple[_Piece, ...]] = {}

    def bind(self, live: Live) -> None:
        """Read the tensors of the next step from now on; they are bound to the same map."""
        if any(tensor.stride() != live.tensors[name].stride() for name, tensor in self._tensors.items()):
            self._plans = {}
        self._tensors = live.tensors

    def plan(self, blocks: Iterable[tuple[int, Box]]) -> None:
        """Plan ahead of time how each of these boxes is read. Raises as `read` does."""
        for tensor, box in blocks:
            self._plan(tensor, box)

    def read(self, tensor: int, box: Box) -> Bits:
        """The bits of `box` in canonical tensor number `tensor`: flat unsigned integers, in the box's row-major order.

        They may be the tensor's own memory, or a buffer of the calling thread: valid until the weights change or this
        thread reads again, and not to be written to.

        Raises:
            Incompatible: this rank does not hold the whole box.
        """
        import torch

        pieces = self._plan(tensor, box)
        with torch.no_grad():
            first = self._tensors[pieces[0].shard.parameter]
            if len(pieces) == 1 and pieces[0].fills_run and not (first.is_cpu and _transposed(pieces[0].region)):
                view = self._view(pieces[0], pieces[0].region)
                if isinstance(pieces[0].shard.value, values.Bits) or view.is_contiguous():
                    return host_bits(values.apply(pieces[0].shard.value, view.contiguous()))
            dtype = values.torch_dtype(self._layout[tensor].dtype)
            made = torch.empty(box.elements, dtype=dtype, device=first.device)
            for piece in pieces:
                self._fill(made, piece)
            return host_bits(made)

    def _fill(self, made: Any, piece: _Piece) -> None:
        """Copy a piece to its places in the buffer."""
        value, region = piece.shard.value, piece.region
        if made.device.type != "cpu" and not isinstance(value, values.Add):  # one kernel, which casts all NaNs alike
            made.as_strided(region.shape, region.dst_strides, region.dst).copy_(self._view(piece, region))
            return
        for part in _parts(region, whole=isinstance(value, values.Bits)):
            view = self._view(piece, part)
            if not isinstance(value, values.Bits):
                view = values.apply(value, view.contiguous())
            made.as_strided(part.shape, part.dst_strides, part.dst).copy_(view)
            del view  # before the next part is gathered

    def _view(self, piece: _Piece, region: Region) -> Any:
        """A view of the elements of a region of `piece`, in the order of the box."""
        tensor = self._tensors[piece.shard.parameter]
        if piece.dense:
            tensor = tensor.contiguous()
        return tensor.as_strided(region.shape, region.src_strides, tensor.storage_offset() + region.src)

    def _plan(self, tensor: int, box: Box) -> tuple[_Piece, ...]:
        found = self._plans.get((tensor, box))
        if found is None:
            found = tuple(self._pieces(tensor, box))
            self._check(tensor, box, found)
            self._plans[tensor, box] = found
        return found

    def _pieces(self, tensor: int, box: Box) -> Iterator[_Piece]:
        wanted = Region("", box.shape, box.dst, box.strides, 0, row_major(box.shape))
        for shard, region in self._sources.get(tensor, ()):
            if region.dst <= box.last and box.dst <= region.dst_last:
                for part in compose(region, wanted):
                    yield from self._in_memory(shard, normalise(part))

    def _in_memory(self, shard: Shard, part: Region) -> Iterator[_Piece]:
        """A part whose source counts places in row-major order, as elements of the storage."""
        strides = self._tensors[shard.parameter].stride()
        if all(n == 1 or a == b for n, a, b in zip(shard.shape, strides, row_major(shard.shape), strict=True)):
            yield _Piece(shard, part, dense=False)
            return
        try:
            axes = [(n, stride) for n, stride in zip(shard.shape, strides, strict=True) if n > 1]
            shape = tuple(n for n, _ in axes)
            storage = Region("", shape, 0, tuple(stride for _, stride in axes), 0, row_major(shape))
            found = [_Piece(shard, normalise(one), dense=False) for one in compose(storage, part)]
        except ValueError:  # expanded, or more axes than a region has
            found = [_Piece(shard, part, dense=True)]
        yield from found

    def _check(self, tensor: int, box: Box, pieces: tuple[_Piece, ...]) -> None:
        """Raise unless the pieces are the box, each element once."""
        held = sum(piece.region.elements for piece in pieces)
        twice = (
            held == box.elements
            and len(pieces) > 1
            and exactly_once((piece.region for piece in pieces), {"": (box.elements,)})
        )
        if held != box.elements or twice:
            name = self._layout[tensor].name
            raise Incompatible(
                f"{name}: this rank is not the source of each element of {box} once; it holds {held} of {box.elements}",
                hint="only what the rank's own map names can be read",
            )


def _parts(region: Region, *, whole: bool) -> Iterator[Region]:
    """A region in parts that are quick to copy: tiles where it is transposed, else strips, or the `whole` at once."""
    if _transposed(region):
        found = _tiles(region)
    elif whole:
        yield region
        return
    else:
        found = split_shape(region.shape, STRIP)
    for starts, sizes in found:
        src = sum(at * stride for at, stride in zip(starts, region.src_strides, strict=True))
        dst = sum(at * stride for at, stride in zip(starts, region.dst_strides, strict=True))
        yield region.shifted(src=src, dst=dst).with_axes(
            zip(sizes, region.src_strides, region.dst_strides, strict=True)
        )


def _transposed(region: Region) -> bool:
    """Whether neighbours in memory are far apart in the box: read row by row, every element is another cache line."""
    strides = region.src_strides
    return (
        region.elements > TILE * TILE and region.shape[strides.index(min(strides))] > 8 and strides[-1] > min(strides)
    )


def _tiles(region: Region) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Starts and sizes of tiles: `TILE` long where memory runs, and about as long where the box does."""
    along = region.src_strides.index(min(region.src_strides))
    room, steps = TILE, list(region.shape)
    for axis in reversed(range(len(steps))):
        if axis == along:
            steps[axis] = min(TILE, steps[axis])
            continue
        steps[axis] = min(max(1, room), steps[axis])
        room //= steps[axis]
    ranges = (range(0, n, step) for n, step in zip(region.shape, steps, strict=True))
    for starts in itertools.product(*ranges):
        yield starts, tuple(min(step, n - at) for at, step, n in zip(starts, steps, region.shape, strict=True))

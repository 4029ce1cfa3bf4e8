"""What an export does to elements, found by running it on tensors that have none.

A `Traced` tensor has a shape, a dtype and, instead of values, regions that say where each of its elements comes from.
Operations that only move elements (views, copies, concatenations) are followed exactly, at full size and without
allocating anything: a layer of a 235B model costs as much as one of a toy. An operation that computes makes its result
opaque, with the reason, and such a tensor is residual. The export is the framework's own code, so no formula of ours
can become outdated.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch.utils._pytree import tree_map

from dcr_daemon.canonical.compose import compose
from dcr_daemon.canonical.region import Region, row_major, slab, whole
from dcr_daemon.projection.values import dtype_of

Convert = Callable[[dict[str, Any]], Mapping[str, Any]]  #: whole tensors by local name -> by canonical name

FOREIGN = (ArithmeticError, AssertionError, AttributeError, LookupError, RuntimeError, TypeError, ValueError)
"""What an export, third-party code, may raise on tensors that it was not written for."""

_aten = torch.ops.aten
_COPIES = {
    _aten.clone.default,
    _aten.detach.default,
    _aten.alias.default,
    _aten.lift_fresh.default,
    _aten._unsafe_view.default,
    _aten._reshape_copy.default,
    _aten._reshape_alias.default,
    _aten.view_copy.default,
    _aten.contiguous.default,
}


@dataclass(frozen=True, slots=True)
class Conversion:
    """What an export makes of whole local tensors.

    Attributes:
        regions: of each local tensor, by its name; a tensor that is not exported has an empty list.
        tensors: canonical name -> (safetensors dtype, shape), as the export gave them.
        opaque: canonical names whose elements are computed, not moved, with the operation that computes.
        sources: canonical name -> the local tensors that it is made of, computed or moved: what the residual path has
            to gather to construct it.
    """

    regions: Mapping[str, list[Region]]
    tensors: Mapping[str, tuple[str, tuple[int, ...]]]
    opaque: Mapping[str, str] = field(default_factory=dict)
    sources: Mapping[str, tuple[str, ...]] = field(default_factory=dict)


def trace(export: Callable[[dict[str, Any]], Mapping[str, Any]], tensors: Mapping[str, Any]) -> Conversion:
    """Run `export` on traced stand-ins for `tensors` (anything with a shape and a dtype: parameters, DTensors, meta).

    Args:
        export: takes a table of whole tensors by local name, and gives one by canonical name. Its exceptions propagate.
    """
    with torch.no_grad():
        given = {
            name: Traced(tuple(tensor.shape), tensor.dtype, whole(name, tuple(tensor.shape)))
            for name, tensor in tensors.items()
        }
        written = _written.set({})
        try:
            exported, writes = export(dict(given)), _written.get()
        finally:
            _written.reset(written)
    regions: dict[str, list[Region]] = {name: [] for name in given}
    shapes, opaque, sources = {}, {}, {}
    for name, tensor in exported.items():
        if not isinstance(tensor, Traced):
            opaque[name] = "it comes from no parameter"
            continue
        shapes[name] = dtype_of(name, tensor), tuple(tensor.shape)
        sources[name] = tuple(sorted(tensor.sources))
        changed = next((writes[source] for source in sources[name] if source in writes), "")
        if why := tensor.opaque or changed:
            opaque[name] = why
            continue
        for piece in tensor.pieces:
            regions[piece.name].append(replace(piece, name=name))
    return Conversion(regions, shapes, opaque, sources)


#: source tensors that the export under way wrote to in place, and the operation: a view of one may be anywhere
_written: ContextVar[dict[str, str]] = ContextVar("written")


class Traced(torch.Tensor):  # type: ignore[misc]
    """A dense tensor without elements; `pieces` lead from source tensors (by name) to places in this one.

    An opaque one has no pieces, and `made_of` says which source tensors went into it.
    """

    pieces: list[Region]
    opaque: str
    made_of: frozenset[str]

    @staticmethod
    def __new__(
        cls,
        shape: tuple[int, ...],
        dtype: Any,
        pieces: list[Region],
        opaque: str = "",
        made_of: frozenset[str] = frozenset(),
    ) -> Traced:
        made = torch.Tensor._make_wrapper_subclass(cls, shape, dtype=dtype)
        made.pieces, made.opaque, made.made_of = pieces, opaque, made_of
        return made

    @property
    def sources(self) -> frozenset[str]:
        return self.made_of.union(piece.name for piece in self.pieces)

    def hidden(self, out: Any, why: str) -> Traced:
        """What an operation made of this tensor without saying how its elements moved."""
        return Traced(tuple(out.shape), out.dtype, [], why, self.sources)

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        return f"Traced({tuple(self.shape)}, {self.opaque or self.pieces})"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        stand_ins: list[Traced] = []

        def stand_in(value: Any) -> Any:
            if not isinstance(value, Traced):
                return value
            stand_ins.append(value)
            return torch.empty(value.shape, dtype=value.dtype, device="meta")

        on_meta = tree_map(stand_in, kwargs | {"": args})
        result = func(*on_meta.pop(""), **{key: "meta" if key == "device" else value for key, value in on_meta.items()})
        together = frozenset[str]().union(*(tensor.sources for tensor in stand_ins))
        if any(argument.alias_info is not None and argument.alias_info.is_write for argument in func._schema.arguments):
            _written.get({}).update(dict.fromkeys(together, f"{func} writes into it"))
        if opaque := next((tensor.opaque for tensor in stand_ins if tensor.opaque), ""):
            return _each(result, lambda out: Traced(tuple(out.shape), out.dtype, [], opaque, together))
        if func in (_aten.cat.default, _aten.stack.default):
            axis = args[1] if len(args) > 1 else kwargs.get("dim", 0)
            return _joined(stand_ins, result, axis % result.ndim, stacked=func is _aten.stack.default)
        (source, *others) = stand_ins
        if not others and (func in _COPIES or (func is _aten._to_copy.default and result.dtype == source.dtype)):
            return Traced(tuple(result.shape), result.dtype, source.pieces)
        if not others and _is_view(func):
            return _each(result, lambda out: _viewed(source, out, str(func)))
        return _each(result, lambda out: Traced(tuple(out.shape), out.dtype, [], f"{func} computes it", together))


def _each(result: Any, made: Callable[[Any], Traced]) -> Any:
    return tree_map(lambda out: made(out) if isinstance(out, torch.Tensor) else out, result)


def _is_view(func: Any) -> bool:
    """Whether the operation says of its first result that it is other places of its argument's memory."""
    alias = func._schema.returns[0].alias_info if func._schema.returns else None
    return alias is not None and not alias.is_write


def _viewed(source: Traced, out: Any, func: str) -> Traced:
    """A view of a dense tensor is a strided box of it; a broadcast is not, and is opaque."""
    shape, strides = tuple(out.shape), tuple(out.stride())
    if math.prod(shape) == 0:
        return Traced(shape, out.dtype, [])
    if out.dtype == source.dtype and out.numel() == source.numel() and out.is_contiguous():
        return Traced(shape, out.dtype, source.pieces)
    try:
        box = Region(
            "",
            shape,
            out.storage_offset(),
            tuple(s or 1 if n == 1 else s for n, s in zip(shape, strides, strict=True)),
            0,
            row_major(shape),
        )
    except ValueError:
        return source.hidden(out, f"{func} repeats elements")
    if out.dtype != source.dtype:
        return source.hidden(out, f"{func} reinterprets its bits")
    return Traced(shape, out.dtype, _through(source, box))


def _joined(parts: list[Traced], out: Any, axis: int, *, stacked: bool) -> Traced:
    """Tensors side by side along `axis`, each a slab of the result."""
    shape, at, pieces = tuple(out.shape), 0, []
    for part in parts:
        sizes = list(part.shape)
        if stacked:
            sizes.insert(axis, 1)
        elif part.ndim == 1 and part.numel() == 0:  # torch.cat takes such a tensor among any others
            continue
        starts = [at if a == axis else 0 for a in range(len(shape))]
        pieces += [moved for box in slab("", shape, starts=starts, sizes=sizes) for moved in _through(part, box)]
        at += sizes[axis]
    if any(part.dtype != out.dtype for part in parts):
        made_of = frozenset(piece.name for piece in pieces)
        return Traced(shape, out.dtype, [], "it joins tensors of several dtypes", made_of)
    return Traced(shape, out.dtype, pieces)


def _through(source: Traced, box: Region) -> list[Region]:
    """Where the source's elements go when `box` leads from it to a new tensor."""
    return [replace(moved, name=piece.name) for piece in source.pieces for moved in compose(piece, box)]

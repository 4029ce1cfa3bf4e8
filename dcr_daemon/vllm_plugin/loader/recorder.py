"""Records which canonical element the engine's own loader puts where.

Runs in the worker process; `place_model` and `computed` call `record`: a loader and a layout in, a `Recording` out. The
loader runs once over meta tensors with the checkpoint's names, shapes and dtypes, under a dispatch mode that sees every
operation. A plain copy is recorded and not executed. An operation that only moves elements is followed. An operation
that computes with a checkpoint tensor (a cast, arithmetic) rejects that tensor with its reason, and its result is
tracked to the parameters that it ends in. Nothing of the loader is re-implemented, so any fusing, sharding and padding
is followed; the fingerprint of the live weights proves later that it was followed correctly.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from dcr_daemon.canonical.layout import Layout
from dcr_daemon.vllm_plugin.loader import reorder
from dcr_daemon.vllm_plugin.weights.placement import Copy, Unplaceable, copy_region

aten = torch.ops.aten

DTYPES: dict[str, torch.dtype] = {
    "BOOL": torch.bool, "U8": torch.uint8, "I8": torch.int8, "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2, "F8_E8M0": torch.float8_e8m0fnu, "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    "F8_E5M2FNUZ": torch.float8_e5m2fnuz, "U16": torch.uint16, "I16": torch.int16, "F16": torch.float16,
    "BF16": torch.bfloat16, "U32": torch.uint32, "I32": torch.int32, "F32": torch.float32, "U64": torch.uint64,
    "I64": torch.int64, "F64": torch.float64, "C64": torch.complex64,
}  # fmt: skip


@dataclass(slots=True)
class Recording:
    """`offered`: the tensors that the loader was given; `rejected` maps names ("" for the model) to reasons; `copies`
    moved bits.

    `written` names for every parameter that was written, by copy or otherwise, the tensors that had a part in it.
    `zeroed`: parameters into which it copied a tensor that it had set to zero (a bias that only one rank adds).
    """

    offered: list[str] = field(default_factory=list)
    copies: list[Copy] = field(default_factory=list)
    rejected: dict[str, str] = field(default_factory=dict)
    written: dict[str, set[str]] = field(default_factory=dict)
    zeroed: set[str] = field(default_factory=set)


class Recorder(TorchDispatchMode):  # type: ignore[misc]  # torch is untyped here
    """Records copies from known sources to known parameters, told apart by their storages."""

    def __init__(self, parameters: Iterable[tuple[str, torch.Tensor]]) -> None:
        super().__init__()
        self.recording = Recording()
        self._sources: dict[int, str] = {}
        self._elements: dict[str, int] = {}
        self._targets: dict[int, str] = {}
        self._zeros: set[int] = set()  # storages of checkpoint tensors that the loader has set to zero
        # Storages that were computed from checkpoint tensors, or that hold copies of them.
        self._derived_from: dict[int, frozenset[str]] = {}
        self._alive: list[torch.Tensor] = []  # kept, because the address of a freed storage may be used again
        self._scalar: str | None = None
        self._reorders = reorder.ReorderTracker()
        self._deferred: list[tuple[torch.Tensor, torch.Tensor]] = []  # (target, source) of copies to unknown targets
        for name, tensor in parameters:
            self._alive.append(tensor)
            self._targets.setdefault(tensor.untyped_storage()._cdata, name)

    def offer(self, layout: Layout) -> Iterator[tuple[str, torch.Tensor]]:
        """The checkpoint as a loader reads it, on the meta device."""
        for spec in layout:
            tensor = torch.empty(spec.shape, dtype=DTYPES[spec.dtype], device="meta")
            self._alive.append(tensor)
            self._sources[tensor.untyped_storage()._cdata] = spec.name
            self._elements[spec.name] = spec.elements
            self.recording.offered.append(spec.name)
            yield spec.name, tensor

    def _source(self, tensor: torch.Tensor) -> str | None:
        return self._sources.get(tensor.untyped_storage()._cdata)

    def _target(self, tensor: torch.Tensor) -> str | None:
        return self._targets.get(tensor.untyped_storage()._cdata)

    def _from(self, *tensors: torch.Tensor) -> frozenset[str]:
        """The checkpoint tensors that these tensors are, hold copies of, or were computed from."""
        storages = [tensor.untyped_storage()._cdata for tensor in tensors]
        found = {self._sources[storage] for storage in storages if storage in self._sources}
        return frozenset(found).union(*(self._derived_from.get(storage, frozenset()) for storage in storages))

    def _mark_derived(self, into: Any, names: frozenset[str]) -> None:
        storage = into.untyped_storage()._cdata
        if names and storage not in self._sources:
            self._derived_from[storage] = self._derived_from.get(storage, frozenset()) | names
            self._alive.append(into)

    def _track(self, made: Any, names: frozenset[str]) -> Any:
        """Note that the result of an operation was made from the checkpoint tensors `names`."""
        for leaf in tree_leaves(made) if names else ():
            if isinstance(leaf, torch.Tensor) and not self._target(leaf):
                self._mark_derived(leaf, names)
        return made

    def _reject(self, names: Iterable[str | None], reason: str, target: torch.Tensor | None = None) -> None:
        """Reject tensors, or the last one offered if none is named; `target` is the tensor they were written into."""
        found = frozenset(name for name in names if name) or frozenset(self.recording.offered[-1:] or [""])
        for name in found:
            self.recording.rejected.setdefault(name, reason)
        if target is not None:
            self._wrote(target, found)

    def _wrote(self, target: torch.Tensor, names: frozenset[str]) -> None:
        self._mark_derived(target, names)
        if parameter := self._target(target):
            self.recording.written.setdefault(parameter, set()).update(names - {""})

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        sources, targets = [self._source(t) for t in tensors], [self._target(t) for t in tensors]
        names = self._from(*tensors)
        if not any(sources) and not any(targets):
            return self._track(func(*args, **kwargs), names)
        if func is aten.copy_.default:
            self._copy(args[0], args[1])
            return args[0]
        if func in (aten.fill_.Scalar, aten.zero_.default) and self._target(args[0]):
            self._fill(args[0])
            return args[0]
        if func is aten.zero_.default and sources[0] and args[0].numel() == self._elements[sources[0]]:
            self._zeros.add(args[0].untyped_storage()._cdata)
            return args[0]
        if func is aten._local_scalar_dense.default and sources[0]:
            self._scalar = sources[0]  # a loader that "broadcasts" a one-element tensor reads it here and then fills
            return 0.0
        if func in (aten.clone.default, aten._to_copy.default) and sources[0]:
            if kwargs.get("dtype") in (None, args[0].dtype):
                return args[0].view_as(args[0])  # the same elements: stay in canonical coordinates
            self._reject(sources, f"the loader casts it from {args[0].dtype} to {kwargs['dtype']}")
            return self._track(func(*args, **kwargs), names)
        if (moved := self._reordered(func, args, kwargs=kwargs, tensors=tensors, sources=sources)) is not None:
            return self._track(moved, names)
        if any(a.alias_info is not None and a.alias_info.is_write for a in func._schema.arguments):
            self._reject(names, f"the loader writes through {func}", args[0])
            return args[0]
        if not func.is_view and func not in (aten.detach.default, aten.alias.default) and any(sources):
            self._reject(sources, f"the loader computes with it ({func})")
        return self._track(func(*args, **kwargs), names)

    def _reordered(self, func: Any, args: Any, *, kwargs: Any, tensors: Any, sources: Any) -> torch.Tensor | None:
        """The result of an operation that only moves elements of one checkpoint tensor, None of any other."""
        if func in reorder.RESHAPES:
            try:
                return cast("torch.Tensor", func(*args, **kwargs))
            except RuntimeError:  # after a copy that was not executed, the result needs memory of its own
                if self._target(args[0]):
                    raise
        elif func not in reorder.JOINS or len(set(sources)) > 1 or len({tensor.dtype for tensor in tensors}) > 1:
            return None
        try:
            result = self._reorders.follow(func, args, kwargs=kwargs)
        except ValueError as error:
            self._reject(sources, str(error))
            return None
        self._alive.append(result)
        self._sources[result.untyped_storage()._cdata] = sources[0]
        return result

    def resolve_deferred(self, parameters: Iterable[tuple[str, torch.Tensor]]) -> None:
        """After the loader has ended, resolve copies into parameters that it registered itself."""
        for name, tensor in parameters:
            self._targets.setdefault(tensor.untyped_storage()._cdata, name)
        deferred, self._deferred = self._deferred, []
        for target, source in deferred:
            if self._target(target) is None:
                self._reject([self._source(source)], "a staged copy")
            else:
                self._copy(target, source)

    def _copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        name, parameter = self._source(source), self._target(target)
        if parameter is not None and source.untyped_storage()._cdata in self._zeros:
            self.recording.zeroed.add(parameter)
            self._wrote(target, frozenset())
        elif name is not None and parameter is None:
            self._mark_derived(target, frozenset({name}))
            self._deferred.append((target, source))
        elif name is None or parameter is None:
            reason = f"a staged or computed copy{f' into {parameter}' if parameter else ''}"
            self._reject(self._from(source), reason, target)
        elif target.dtype != source.dtype:
            self._reject([name], f"the loader casts it from {source.dtype} to {target.dtype}", target)
        elif target.shape != source.shape:
            self._reject([name], f"the loader broadcasts {tuple(source.shape)} to {tuple(target.shape)}", target)
        elif target.numel():
            self._record(name, source, parameter, target)

    def _fill(self, target: torch.Tensor) -> None:
        """A fill is padding, unless its value was just read from a one-element checkpoint tensor."""
        name, self._scalar = self._scalar, None
        if name is None:
            self._wrote(target, frozenset())
            return
        source = next(t for t in self._alive if self._source(t) == name)
        if target.numel() != 1 or source.dtype != target.dtype:
            self._reject([name], "the loader broadcasts or casts a scalar", target)
            return
        self._record(name, source.reshape(target.shape), str(self._target(target)), target)

    def _record(self, name: str, source: torch.Tensor, parameter: str, target: torch.Tensor) -> None:
        self._wrote(target, frozenset({name}))
        start, strides = target.storage_offset(), tuple(target.stride())
        try:
            if source in self._reorders:
                regions = reorder.regions(name, self._reorders.numbers(source), strides)
            else:
                axes = zip(source.shape, strides, source.stride(), strict=True)
                regions = [copy_region(name, 0, element=source.storage_offset(), axes=axes)]
        except Unplaceable as error:
            self._reject([name], str(error))
            return
        if regions is None:
            self._reject([name], "the loader reorders single elements of it")
        self.recording.copies += [Copy(parameter, region.shifted(src=start)) for region in regions or ()]


def record(
    load: Callable[[Any], Any], parameters: Callable[[], Iterable[tuple[str, torch.Tensor]]], layout: Layout
) -> Recording:
    """Run a loader over meta tensors of `layout`.

    Args:
        load: takes an iterable of (name, tensor), as a model's `load_weights` does.
        parameters: where it may write, by name, in load format; never written here. Asked again afterwards, because
            a loader may register parameters of its own.

    A loader that raises rejects the whole model.
    """
    recorder = Recorder(parameters())
    with torch.no_grad(), recorder:
        try:
            load(recorder.offer(layout))
            recorder.resolve_deferred(parameters())
        except Exception as error:  # noqa: BLE001 - a model's loader may raise anything; all of it means "refused"
            last = recorder.recording.offered[-1] if recorder.recording.offered else "nothing"
            reason = f"the model's loader failed on meta tensors, last given {last}: {type(error).__name__}: {error}"
            recorder.recording.rejected[""] = reason
    return recorder.recording

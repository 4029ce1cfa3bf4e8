"""Finds the tensors that vLLM makes from a model's weights once, after loading them, and then computes with.

Runs in the worker process. `install` is called before the model is loaded, and `stale_after_update` by `audit` at
attach. vLLM's `process_weights_after_loading` may keep anything: an fp32 copy of attention sinks in an attribute of
an attention backend, matrices split off a projection, a gathered copy. A refit changes the parameters in place; what
was derived from them stays as it was, and no fingerprint of parameters shows it. So that function runs under a mode
that sees every operation on tensors and follows their storages: no rule names a model or an attribute. A view shares
its parameter's storage and changes with it, so it is not derived.

Known limits: a kernel that is not an operation of torch (a Triton kernel called from Python) is not seen; memory that
was allocated meanwhile without a value, and that no operation was seen writing to, counts as derived from an unknown
source, memory that was cleared first does not. Copies that appear after loading are found by `hidden_copies`.
"""

from __future__ import annotations

import functools
import sys
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from dcr_daemon.vllm_plugin import compat
from dcr_daemon.vllm_plugin.loader import hidden_copies
from dcr_daemon.vllm_plugin.loader.reachable import reachable, shaped, storage_key

HOOK = "process_weights_after_loading"
LOADERS = "vllm.model_executor.model_loader"
UNKNOWN = ""  #: the source of memory that was written by something other than an operation of torch
Result = TypeVar("Result")
_ALLOCATIONS = frozenset({"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "empty_permuted"})
#: Operations that keep values, or only cast them.
MOVES = _ALLOCATIONS | {"clone", "copy_", "_to_copy", "cat", "stack"}
WIDE = (torch.float32, torch.float64)  #: dtypes that hold every number of the dtypes of weights

_found: weakref.WeakKeyDictionary[torch.nn.Module, list[Derived]] = weakref.WeakKeyDictionary()


@dataclass(frozen=True, slots=True)
class Derived:
    """A live tensor with values that came from weights of other storage.

    `path`: where the model keeps it, from the model's root. `sources`: the parameters and buffers that it came from,
    or `UNKNOWN`. `operations`: what made it, by torch's names, and the dtypes of casts that may have lost bits.
    `tensor`: itself, over its whole memory (`shaped`). `names`: if it is a parameter or buffer, all that it has; a
    layer may be reached under several.
    """

    path: str
    sources: frozenset[str]
    operations: frozenset[str]
    tensor: torch.Tensor
    names: frozenset[str] = frozenset()

    @property
    def moved_or_cast(self) -> bool:
        """Whether nothing computed with the weights on the way, so that the tensor is a copy of them, maybe cast, but
        over no other dtype that may lose bits."""
        return UNKNOWN not in self.sources and self.operations <= MOVES | {str(self.tensor.dtype)}

    def __str__(self) -> str:
        made = ", ".join(sorted(self.operations)) or "an unknown kernel"
        source = ", ".join(sorted(self.sources - {UNKNOWN})) or "an unknown source"
        return f"{self.path}, which vLLM made from {source} after loading ({made})"


def install() -> None:
    """Follow the weights of every model that vLLM loads in this process from now on. Repeatable.

    Raises `UnsupportedVllm` if this vLLM has no such function.
    """
    compat.require(compat.WORKER_NAMES)
    from vllm.model_executor.model_loader import base_loader, utils  # noqa: F401  # both must be imported by now

    original = getattr(utils, HOOK)
    if getattr(original, "follows_weights", False):
        return

    @functools.wraps(original)
    def process_weights_after_loading(model: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        return follow(model, functools.partial(original, model, *args, **kwargs))

    process_weights_after_loading.follows_weights = True  # type: ignore[attr-defined]  # marks our own wrapper
    for name, module in list(sys.modules.items()):  # it is imported by name, so each holder has to be changed
        if name.startswith(LOADERS) and getattr(module, HOOK, None) is original:
            setattr(module, HOOK, process_weights_after_loading)


def follow(model: torch.nn.Module, process: Callable[[], Result]) -> Result:
    """Run `process`, which changes `model` after its weights were loaded, and remember what it derived."""
    names: dict[int, set[str]] = {}
    references = []  # of memory that may be freed meanwhile, so that its key is not given again
    for name, tensor in _named(model):
        names.setdefault(storage_key(tensor), set()).add(name)
        references.append(StorageWeakRef(tensor.untyped_storage()))
    mode = _Follow({key: frozenset(held) for key, held in names.items()})
    with mode:
        result = process()
    own = _registered(model)
    derived = []
    for key, (path, tensor) in reachable(model).items():
        history = mode.history.get(key)
        # A weight that was changed in place came from itself, and is proved by its sums.
        if history is not None and history.sources - names.get(key, set()):
            registered, operations = own.get(key, ()), frozenset(history.operations)
            path = next(iter(registered), path)
            derived.append(Derived(path, history.sources, operations, shaped(tensor), frozenset(registered)))
    references.clear()
    _found[model] = derived
    hidden_copies.remember(model)
    return result


def stale_after_update(model: torch.nn.Module, filled: Collection[str]) -> list[Derived]:
    """What an update of the parameters `filled` would leave as it was, what came from an unknown source included.

    A parameter that the layout fills itself is written by the update, whatever it was made from.

    Raises:
        LookupError: the model was loaded before `install`, so nothing is known.
    """
    if model not in _found:
        raise LookupError("vLLM loaded this model before DCR could follow what it derives from weights")
    found = {UNKNOWN, *filled}
    return [one for one in _found[model] if not one.names & found and one.sources & found]


class _History:
    """Where the content of one storage came from. The weak reference keeps its key from being given again."""

    __slots__ = ("operations", "reference", "sources")

    def __init__(self, tensor: torch.Tensor, sources: frozenset[str], operations: set[str]) -> None:
        self.reference = StorageWeakRef(tensor.untyped_storage())
        self.sources = sources
        self.operations = operations


class _Follow(TorchDispatchMode):  # type: ignore[misc]  # torch does not say what it is
    """`history`: of every storage with content that came from `weights` (names by storage), or from nowhere."""

    def __init__(self, weights: Mapping[int, frozenset[str]]) -> None:
        super().__init__()
        self._weights = weights
        self.history: dict[int, _History] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        taken = [value for value in tree_leaves((args, kwargs)) if isinstance(value, torch.Tensor)]
        result = func(*args, **kwargs)
        if func.is_view:
            return result
        name = func._schema.name.rpartition("::")[2]
        made = [value for value in tree_leaves(result) if isinstance(value, torch.Tensor)]
        written = _written(func, args, kwargs)
        targets = {storage_key(tensor): tensor for tensor in (*made, *written)}
        sources, operations = frozenset({UNKNOWN}) if name in _ALLOCATIONS else frozenset[str](), {name}
        for key in {storage_key(tensor) for tensor in taken} - targets.keys():
            sources |= self._weights.get(key, frozenset())
            if (before := self.history.get(key)) is not None:
                sources |= before.sources
                operations |= before.operations
        for key, tensor in targets.items():
            casts = {str(tensor.dtype)} if _may_lose_bits(taken, tensor.dtype) else set()
            if (before := self.history.get(key)) is not None:  # it is known now what wrote there
                before.sources = before.sources - {UNKNOWN} | sources
                before.operations |= operations | casts
            elif sources:
                self.history[key] = _History(tensor, sources, operations | casts)
        return result


def _may_lose_bits(taken: Iterable[torch.Tensor], dtype: torch.dtype) -> bool:
    """Whether an operation on these tensors casts floating-point numbers to one of the narrower dtypes."""
    return dtype not in WIDE and any(one.dtype.is_floating_point and one.dtype != dtype for one in taken)


def _written(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[torch.Tensor]:
    """The arguments that an operation writes to."""
    values: list[Any] = []
    for position, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            values.append(args[position] if position < len(args) else kwargs.get(argument.name))
    return [value for value in tree_leaves(values) if isinstance(value, torch.Tensor)]


def _named(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    yield from model.named_parameters(remove_duplicate=False)
    yield from model.named_buffers(remove_duplicate=False)


def _registered(model: torch.nn.Module) -> dict[int, tuple[str, ...]]:
    """By storage, all names of the largest parameter or buffer in it; others there are views of it."""
    named: dict[int, list[str]] = {}
    largest: dict[int, torch.Tensor] = {}
    for name, tensor in _named(model):
        named.setdefault(id(tensor), []).append(name)
        key = storage_key(tensor)
        if key not in largest or tensor.nbytes > largest[key].nbytes:
            largest[key] = tensor
    return {key: tuple(named[id(tensor)]) for key, tensor in largest.items()}

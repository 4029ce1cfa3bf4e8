"""Loader-computed tensors: vLLM's loader runs over them on copies of the parameters, and the result is written.

Runs in the worker process. A cast router bias, `A_log`, a norm kept in another dtype: their bits are in no parameter,
so they can neither be summed nor changed element by element. But the model's own `load_weights`, given just these
tensors, computes what the parameters must hold. It runs on copies of the parameters, while the engine is clean and
before anything is written. The result is absolute bits, which a transaction can write, write again and take back like
all others (must E5).

Canonical bytes come in (`Values`), parameters with old and new bits go out (`ComputedParameter`); `worker.attachment`
calls it. Promises: a loader writes no live tensor (`WriteGuard` raises first), and its result does not depend on what
was there before (a second run must give the same). It does not prove that the live values are a version's: the caller
compares them with the result, and knows which version's bytes it gave.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from dcr_daemon.canonical.dtypes import bits_dtype
from dcr_daemon.canonical.fingerprint import sum_run
from dcr_daemon.canonical.layout import Layout
from dcr_daemon.engine.staged import read_vector
from dcr_daemon.errors import Corrupt, DcrError, EngineRefused
from dcr_daemon.vllm_plugin.loader.recorder import DTYPES, Recording, record
from dcr_daemon.vllm_plugin.weights import faults
from dcr_daemon.vllm_plugin.weights.dense import DenseFiles
from dcr_daemon.vllm_plugin.weights.memory import Bits, ValueSet
from dcr_daemon.wording import shorten

if TYPE_CHECKING:
    from dcr_daemon.vllm_plugin.weights.placement import Placement

Values = dict[int, Bits]  #: all canonical bits of each tensor, by its number in the layout
Load = Callable[[Any], Any]

_SIGNED_DTYPES = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def record_alone(
    load: Load,
    parameters: Callable[[], Iterable[tuple[str, torch.Tensor]]],
    *,
    layout: Layout,
    recording: Recording,
    cap: int,
) -> Recording:
    """What the loader does when it is given only the tensors that it was seen to compute with.

    If they are more than `cap` bytes, nothing is run, and the reason is under the name "", as for a loader that raises.
    """
    specs = [spec for spec in layout if spec.name in recording.rejected]
    size = sum(spec.nbytes for spec in specs)
    if size > cap:
        reason = f"each change would load {size} bytes of such tensors whole, the cap is {cap} (DCR_LOADED_CAP)"
        return Recording(rejected={"": reason})
    return record(load, parameters, Layout(specs))


def plan_computed(
    recording: Recording, alone: Recording, *, obstacle: Callable[[str], str | None], layout: Layout
) -> tuple[dict[int, tuple[str, ...]], dict[str, str]]:
    """The tensors that can be loaded whole, with the parameters that they fill, and the reasons against the others.

    Args:
        recording: of the whole checkpoint. `alone`: of the tensors that `recording` rejected.
        obstacle: gives the reason why a parameter must not be written as the loader leaves it, or None.
    """
    names = [name for name in recording.rejected if name in layout]
    if "" in alone.rejected:
        return {}, {name: f"{recording.rejected[name]}; {alone.rejected['']}" for name in names}
    exact = {copy.parameter for copy in recording.copies if copy.tensor not in recording.rejected}
    fills: dict[str, set[str]] = {name: set() for name in names}
    for parameter, writers in alone.written.items():
        for name in writers or names:
            fills[name].add(parameter)
    refusals, loaded = dict[str, str](), dict[int, tuple[str, ...]]()
    for name, parameters in fills.items():
        fused = sorted(parameters & exact)
        reasons = [f"{fused[0]} also holds tensors that are copied as they are"] if fused else []
        reasons += [reason for reason in map(obstacle, sorted(parameters)) if reason]
        if not parameters:
            reasons.append("given alone, it fills no parameter")
        if reasons:
            refusals[name] = f"{recording.rejected[name]}; {reasons[0]}"
        else:
            loaded[layout.index(name)] = tuple(sorted(parameters))
    return loaded, refusals


def read_values(paths: Sequence[str], layout: Layout, *, tensors: Sequence[int], vector: str) -> Values:
    """The canonical bytes of some tensors, summed against a version's vector file.

    Raises:
        Corrupt: the files lack one of them, or hold other bytes than the version's.
    """
    expected = read_vector(vector, layout)
    with DenseFiles(paths, layout) as files:
        if missing := files.missing(tensors):
            raise Corrupt(f"{', '.join(paths)} lacks {shorten(missing)}")
        values = {tensor: np.array(files.bits(tensor)) for tensor in tensors}
    for tensor, bits in values.items():
        if sum_run(bits, int(layout.keys[tensor])) != int(expected[tensor]):
            raise Corrupt(f"{layout[tensor].name} does not have the bytes of its version", hint="make the file again")
    return values


class WriteGuard(TorchDispatchMode):  # type: ignore[misc]  # torch is untyped here
    """While active, an operation that would write a live tensor raises before it runs."""

    def __init__(self, live: Iterable[torch.Tensor]) -> None:
        super().__init__()
        self._live = {tensor.untyped_storage()._cdata for tensor in live}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        for place, argument in enumerate(func._schema.arguments):
            if argument.alias_info is None or not argument.alias_info.is_write:
                continue
            value = args[place] if place < len(args) else kwargs.get(argument.name)
            if isinstance(value, torch.Tensor) and value.untyped_storage()._cdata in self._live:
                raise EngineRefused(f"the loader would write a live parameter that it was not given ({func})")
        return func(*args, **kwargs)


@dataclass(slots=True)
class ComputedParameter:
    """One parameter that the loader fills: its bits before, and what the loader computes from the given values.

    `_differ` and `_any` are for the comparison in the pause, which must not ask a device for memory.
    """

    name: str
    live: torch.Tensor
    old: torch.Tensor
    new: torch.Tensor
    _differ: torch.Tensor = field(init=False)
    _any: torch.Tensor = field(init=False)

    def __post_init__(self) -> None:
        self._differ = torch.empty_like(self.live, dtype=torch.bool)
        self._any = torch.empty((), dtype=torch.bool, device=self.live.device)

    def write(self, side: ValueSet) -> None:
        self.live.data.copy_(self._values(side))

    def holds(self, side: ValueSet) -> bool:
        """Whether live memory holds exactly these bits."""
        dtype = _SIGNED_DTYPES[self.live.element_size()]
        torch.ne(self.live.detach().view(dtype), self._values(side).detach().view(dtype), out=self._differ)
        return not torch.any(self._differ, out=self._any).item()

    def _values(self, side: ValueSet) -> torch.Tensor:
        return self.new if side is ValueSet.NEW else self.old


class ComputedLoader:
    """Runs the model's loader over the loader-computed tensors of one worker.

    Args:
        live: live tensors by name, those of `placement.computed` among them.
        dtype: torch's default dtype while vLLM loads a model.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        placement: Placement,
        *,
        live: Mapping[str, torch.Tensor],
        layout: Layout,
        dtype: torch.dtype | None,
    ) -> None:
        self.tensors = tuple(sorted(placement.computed))
        self._model, self._layout, self._dtype = model, layout, dtype
        names = sorted({name for parameters in placement.computed.values() for name in parameters})
        self._live = {name: live[name] for name in names}
        self._load_formats = {name: placement.load_formats[name] for name in names}
        for width in {layout[tensor].width for tensor in self.tensors}:
            sum_run(np.zeros(8, dtype=bits_dtype(width)), 0)  # compile the kernel at attach, not in a job

    def compute(self, values: Values) -> list[ComputedParameter]:
        """Run the loader over `values` on copies and return the parameters that would change. Writes nothing live.

        Raises `EngineRefused` if the loader fails, writes other parameters, or gives another result the second time.
        """
        if not self.tensors:
            return []
        before = {name: tensor.detach().clone() for name, tensor in self._live.items()}
        made = self._run(values, before)
        again = self._run(values, made)
        if unsteady := [name for name in made if not same_bits(made[name], again[name])]:
            raise EngineRefused(f"loading {unsteady[0]} twice gives other values than loading it once")
        return [
            ComputedParameter(name, live, before[name], made[name])
            for name, live in self._live.items()
            if not same_bits(before[name], made[name])
        ]

    def _run(self, values: Values, start: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Run the model's own loader once, on copies that begin with `start`; returns the copies."""
        scratch = {name: _scratch_copy(self._load_formats[name], start[name]) for name in self._live}
        everything = (*self._model.parameters(), *self._model.buffers())
        with self._replacing_live(scratch), default_dtype(self._dtype), torch.no_grad(), WriteGuard(everything):
            try:
                self._model.load_weights(self._tensors(values))
            except (DcrError, MemoryError, torch.OutOfMemoryError):
                raise
            except Exception as error:  # a model's loader may raise anything; nothing was written
                names = shorten(self._layout[tensor].name for tensor in self.tensors)
                raise EngineRefused(f"the model's loader failed on {names}: {type(error).__name__}: {error}") from error
        return {name: scratch_copy.detach() for name, scratch_copy in scratch.items()}

    def _tensors(self, values: Values) -> Iterator[tuple[str, torch.Tensor]]:
        for tensor in self.tensors:
            spec = self._layout[tensor]
            # A copy, because a loader may change its input.
            bits = torch.from_numpy(np.array(values[tensor]).view(np.uint8))
            yield spec.name, bits.view(DTYPES[spec.dtype]).reshape(spec.shape)

    @contextmanager
    def _replacing_live(self, scratch: Mapping[str, torch.Tensor]) -> Iterator[None]:
        """While active, every module holds the copy of each loader-filled parameter in place of the live one."""
        by_identity = {id(live): scratch[name] for name, live in self._live.items()}
        slots = [
            (kept, key, tensor)
            for module in self._model.modules()
            for kept in (module._parameters, module._buffers)
            for key, tensor in kept.items()
            if id(tensor) in by_identity
        ]
        replaced = ""
        try:
            for kept, key, live in slots:
                kept[key] = by_identity[id(live)]
            yield
        finally:
            for kept, key, live in slots:
                replaced = replaced if kept.get(key) is by_identity[id(live)] else key
                kept[key] = live
        if replaced:
            raise EngineRefused(f"the loader replaces {replaced} instead of filling it")


def write_computed(parameters: Sequence[ComputedParameter], side: ValueSet) -> None:
    """Write the old or new bits and read them back. Raises `DcrError` unless live memory then holds them."""
    with torch.no_grad():
        for parameter in parameters:
            parameter.write(side)
            if faults.should_fail("feed"):
                parameter.live.data.view(_SIGNED_DTYPES[parameter.live.element_size()]).bitwise_xor_(1)
        wrong = [parameter.name for parameter in parameters if not parameter.holds(side)]
    if wrong:
        raise DcrError(f"{shorten(wrong)} did not take what was written", hint="this worker's memory is damaged")


def _scratch_copy(form: torch.Tensor, start: torch.Tensor) -> torch.Tensor:
    """A copy of `start` with the class and attributes of the load format, so that a weight loader accepts it."""
    scratch_copy = torch.empty_strided(start.size(), start.stride(), dtype=start.dtype, device=start.device)
    scratch_copy.copy_(start)
    scratch_copy.__class__ = form.__class__
    scratch_copy.__dict__ = form.__dict__.copy()
    return scratch_copy


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether all bits are equal, also those of NaNs and signed zeros."""
    dtype = _SIGNED_DTYPES[one.element_size()]
    return torch.equal(one.detach().view(dtype), other.detach().view(dtype))


@contextmanager
def default_dtype(dtype: torch.dtype | None) -> Iterator[None]:
    """Set torch's default dtype as vLLM does while it loads a model: a loader's result may depend on it."""
    before = torch.get_default_dtype()
    try:
        if dtype is not None:
            torch.set_default_dtype(dtype)
        yield
    finally:
        torch.set_default_dtype(before)

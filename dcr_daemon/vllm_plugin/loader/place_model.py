"""Makes the placement of a layout in a loaded vLLM model, by running the model's own loader over meta tensors.

Runs in the worker process, on its main thread, so never beside a forward pass; `worker.attachment` calls
`attach_model`. vLLM keeps, for every layer, the metadata that its loader needs (shapes, strides, loaders), whatever
happened to the weights since. With it the model is put into load format for the duration of the recording, and then
gets the very same parameters back; no weight is read or written.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from dcr_daemon.canonical.layout import Layout
from dcr_daemon.vllm_plugin.calls import TensorHandling
from dcr_daemon.vllm_plugin.loader import audit, eligibility
from dcr_daemon.vllm_plugin.loader.computed import plan_computed, record_alone
from dcr_daemon.vllm_plugin.loader.permutation import expert_repacks, require_kept
from dcr_daemon.vllm_plugin.loader.reachable import Named, named, storage_key
from dcr_daemon.vllm_plugin.loader.recorder import Recording, record
from dcr_daemon.vllm_plugin.settings import Settings, computed_cap
from dcr_daemon.vllm_plugin.weights.placement import Copy, Placement, Repack, Unplaceable, same_places
from dcr_daemon.wording import shorten


@dataclass(frozen=True, slots=True)
class LoadFormat:
    """A model as its loader sees it.

    `live`: the model's tensors by name; `loading`: the same in load format (meta). `repacks`, `refusals`: by parameter
    name. `saved`: names that a checkpoint of the model would hold. `alone`: what the loader does when it is given only
    the tensors that it computes with. `beside`: names of what does not belong to the language model of a class that
    serves other media as well; empty for others.
    """

    live: Named
    loading: Named
    repacks: dict[str, Repack]
    refusals: dict[str, str]
    saved: frozenset[str]
    alone: Recording | None = None
    beside: frozenset[str] = frozenset()


@contextmanager
def load_format(model: torch.nn.Module) -> Iterator[None]:
    """While active, the model's parameters are vLLM's load-format meta tensors.

    Raises `Unplaceable` if this vLLM lacks the metadata for it.
    """
    try:
        from vllm.model_executor.model_loader.reload.layerwise import _place_kernel_tensors, get_layerwise_info
        from vllm.model_executor.model_loader.reload.meta import restore_layer_on_meta
        from vllm.model_executor.model_loader.reload.utils import get_layer_params_buffers
    except ImportError as error:
        raise Unplaceable(f"this vLLM keeps no load-format metadata where version 0.32 does ({error})") from error
    placed = []
    try:
        for layer in model.modules():
            info = get_layerwise_info(layer)
            if info.can_load():
                raise Unplaceable("a reload of the weights is in progress")
            info.kernel_tensors = get_layer_params_buffers(layer)
            info.kernel_non_persistent_buffers = set(layer._non_persistent_buffers_set)
            placed.append((layer, info))
            restore_layer_on_meta(layer, info)
        yield
    finally:
        for layer, info in placed:
            _place_kernel_tensors(layer, info)
            info.reset()


def record_model(model: torch.nn.Module, layout: Layout, *, platform: str) -> tuple[Recording, LoadFormat]:
    """Run the model's loader over meta tensors; afterwards the model is unchanged."""
    live, saved = named(model), frozenset(model.state_dict())
    repacks: dict[str, Repack] = {}
    refusals: dict[str, str] = {}
    with load_format(model):
        loading = named(model)
        for path, module in model.named_modules():
            own = [f"{path}.{name}" if path else name for name in (*module._parameters, *module._buffers)]
            reason = eligibility.module_refusal(module, platform)
            method = getattr(module, "quant_method", None)
            if reason is None and hasattr(method, "unquantized_backend"):
                try:
                    found = expert_repacks(method, module)
                    repacks |= {f"{path}.{name}" if path else name: repack for name, repack in found.items()}
                except Unplaceable as error:
                    reason = f"{error}{eligibility.on_a_cpu(next(module.parameters()))}"
            if reason is not None:
                refusals |= dict.fromkeys(own, reason)

        def parameters() -> list[tuple[str, torch.Tensor]]:
            return [(n, t) for n, t in named(model).items() if n in live]

        recording = record(model.load_weights, parameters, layout)
        alone: Recording | None = None
        if recording.rejected and "" not in recording.rejected:
            cap = computed_cap(Settings.read().computed_cap, layout.nbytes)
            alone = record_alone(model.load_weights, parameters, layout=layout, recording=recording, cap=cap)
    return recording, LoadFormat(live, loading, repacks, refusals, saved, alone, beside_language_model(model))


def beside_language_model(model: torch.nn.Module) -> frozenset[str]:
    """Names of the parameters and buffers that share no memory with what vLLM counts as a multimodal model's language
    model."""
    if not getattr(model, "supports_multimodal", False):
        return frozenset()
    try:
        language_model = model.get_language_model()
    except NotImplementedError:
        return frozenset()
    inside = {storage_key(tensor) for tensor in named(language_model).values()}
    return frozenset(name for name, tensor in named(model).items() if storage_key(tensor) not in inside)


def _shape_refusal(name: str, form: LoadFormat) -> str | None:
    """The reason why a parameter's live form cannot be derived from its load format, or None."""
    live, loading, repack = form.live[name], form.loading[name], form.repacks.get(name)
    if live.dtype != loading.dtype:
        return f"{name} was retyped after loading, from {loading.dtype} to {live.dtype}"
    if repack is not None:
        blocks = loading.numel() // repack.block
        if not (live.is_contiguous() and loading.is_contiguous()) or live.numel() != blocks * repack.live_block:
            return f"{name} is repacked into a form that its probe did not have"
        return None
    if live.shape != loading.shape or live.stride() != loading.stride():
        shape = "removed" if live.numel() == 0 else f"repacked to {tuple(live.shape)}"
        return f"{name} was {shape} after loading from {tuple(loading.shape)}{eligibility.on_a_cpu(live)}"
    return None


def place(recording: Recording, form: LoadFormat, layout: Layout) -> Placement:
    """Join the recording with the live model into a placement: every tensor has a class, or a reason for its
    refusal."""
    by_tensor: dict[str, list[Copy]] = {}
    for copy in recording.copies:
        by_tensor.setdefault(copy.tensor, []).append(copy)
    placement = Placement(held=[])
    refusals = _plan(placement, recording, form=form, layout=layout)
    whole = recording.rejected.get("")
    if whole is not None:
        placement.refusals[""] = whole
    for index, spec in enumerate(layout):
        copies = by_tensor.get(spec.name, [])
        if index in placement.computed:
            placement.held.append(TensorHandling.LOADER_COMPUTED)
            continue
        reason = refusals.get(spec.name) or recording.rejected.get(spec.name)
        for copy in copies:
            reason = reason or form.refusals.get(copy.parameter) or _shape_refusal(copy.parameter, form)
        if reason is None:
            reason = _add(placement, index, copies=copies, form=form)
        if reason is not None:
            placement.refusals[spec.name] = reason
            placement.held.append(TensorHandling.REFUSED)
        elif copies:
            placement.held.append(TensorHandling.PLACED)
        else:
            placement.held.append(TensorHandling.SKIPPED)
    _refuse_shared(placement, layout, form)
    for name in sorted(recording.zeroed):
        if form.live[name].any():
            placement.refusals[""] = f"the loader fills {name} with zeros on this rank, and it holds others"
    skipped = {spec.name for spec, held in zip(layout, placement.held, strict=True) if held is TensorHandling.SKIPPED}
    filled = [*placement.load_formats, *recording.zeroed, *(copy.parameter for copy in recording.copies)]
    unfilled = _unfilled(form, filled, skipped=skipped)
    if form.beside.issuperset(unfilled) and form.beside.isdisjoint(filled):
        placement.unnamed, unfilled = unfilled, []
    if unfilled and not placement.refusals:  # a refused tensor explains its own gap
        placement.refusals[""] = (
            f"no tensor of this layout fills {shorten(unfilled)}{_why_unfilled(form, filled, skipped=skipped)}"
        )
    return placement


def _plan(placement: Placement, recording: Recording, *, form: LoadFormat, layout: Layout) -> dict[str, str]:
    """Find the rejected tensors that can be loaded whole; returns the reasons against the others.

    If the loader copies no tensor at all (a checkpoint in another dtype), none is: no sum could show the live version.
    """
    copied = {copy.parameter for copy in recording.copies if copy.tensor not in recording.rejected}
    if form.alone is None or not copied:
        return {}
    homes: dict[int, set[str]] = {}
    for name in copied | form.alone.written.keys():
        homes.setdefault(form.live[name].untyped_storage()._cdata, set()).add(name)

    def obstacle(name: str) -> str | None:
        if name in form.repacks:
            return f"{name} is repacked after loading"
        if shared := sorted(homes[form.live[name].untyped_storage()._cdata] - {name}):
            return f"{name} shares its memory with {shared[0]}"
        return form.refusals.get(name) or _shape_refusal(name, form)

    placement.computed, refusals = plan_computed(recording, form.alone, obstacle=obstacle, layout=layout)
    placement.load_formats = {name: form.loading[name] for names in placement.computed.values() for name in names}
    return refusals


def _unfilled(form: LoadFormat, names: Iterable[str], *, skipped: set[str]) -> list[str]:
    """Parameters besides `names` that no canonical tensor fills: an update would never change them.

    The same holds for a buffer whose tensor the loader skipped; a buffer that has no tensor is a constant of the model.
    """
    filled = {id(form.live[name]) for name in names}
    wanted = {name.rpartition(".")[2] for name in skipped}
    return [
        name
        for name, tensor in form.live.items()
        if id(tensor) not in filled
        and name in form.loading  # else a view of a parameter, as Mamba's convolution keeps one
        and form.loading[name].numel()
        and (isinstance(tensor, torch.nn.Parameter) or (name in form.saved and name.rpartition(".")[2] in wanted))
    ]


def _why_unfilled(form: LoadFormat, filled: Iterable[str], *, skipped: set[str]) -> str:
    """What is known of the reason: a part of the model that the stream does not have, or tensors that vLLM drops."""
    touched = {name.partition(".")[0] for name in filled}
    parts = {name.partition(".")[0] for name in form.live} - touched
    if skipped:
        return f"; vLLM's loader drops {shorten(sorted(skipped))}"
    if parts and touched:
        return (
            f": the layout has nothing of {shorten(sorted(parts))}, and what no version holds cannot be proved; "
            "publish the whole checkpoint instead of a part (its text model)"
        )
    return ": the layout is another model's"


def _add(placement: Placement, index: int, *, copies: list[Copy], form: LoadFormat) -> str | None:
    """Add a tensor's copies; returns the reason if one of them cannot be placed."""
    for copy in copies:
        name = copy.parameter
        inside = Copy(name, copy.region.shifted(src=-form.loading[name].storage_offset()))
        repack = form.repacks.get(name)
        try:
            if repack is not None:
                require_kept(name, inside.region, repack)
            placement.add(inside, tensor=index, offset=form.live[name].storage_offset(), repack=repack)
        except Unplaceable as error:
            return str(error)
    return None


def _refuse_shared(placement: Placement, layout: Layout, form: LoadFormat) -> None:
    """Refuse canonical tensors that share live elements: an update of one would silently change the other.

    Accepted as aliases are only a tensor and a whole copy of it (a tied head that the checkpoint stores as well).
    """
    memory = {row.parameter: form.live[row.parameter].untyped_storage()._cdata for row in placement.rows}
    for number, twin_number in placement.overlaps(memory):
        row, other = placement.rows[number], placement.rows[twin_number]
        if same_places(row.in_storage(), other.in_storage()) and layout[row.tensor].shape == layout[other.tensor].shape:
            placement.aliases.append((number, twin_number))
            continue
        a, b = layout[row.tensor].name, layout[other.tensor].name
        for index, name, twin in ((row.tensor, a, b), (other.tensor, b, a)):
            placement.refusals[name] = f"shares memory ({row.parameter}) with {twin}"
            placement.held[index] = TensorHandling.REFUSED


def attach_model(model: torch.nn.Module, config: Any, layout: Layout, platform: str) -> tuple[Placement, Named]:
    """The placement of a layout in a live vLLM model, and the live tensors by name.

    A model refused as a whole has the refusal under the name "" and no rows.
    """
    reasons = eligibility.model_refusals(config, caches=Settings.read().caches)
    if reasons:
        refusals = {"": "; ".join(reasons)}
        return Placement(held=[TensorHandling.REFUSED] * len(layout), refusals=refusals), {}
    try:
        recording, form = record_model(model, layout, platform=platform)
    except Unplaceable as error:
        return Placement(held=[TensorHandling.REFUSED] * len(layout), refusals={"": str(error)}), {}
    placement = place(recording, form, layout)
    if not placement.refusals:
        audit.audit(placement, model, config, layout=layout)
    if not placement.rows and not placement.refusals:
        placement.refusals[""] = (
            "the loader copied nothing: it was used since the model was loaded (a reload?); restart vLLM"
        )
    used = {row.parameter for row in placement.rows} | placement.load_formats.keys()
    return placement, {name: form.live[name] for name in (*used, *placement.unnamed)}

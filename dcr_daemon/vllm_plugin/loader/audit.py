"""Judges, at each attach, what vLLM derived from the weights that an update writes: made again with them, or refused.

Runs in the worker process; `place_model` calls `audit` with a placement that is complete so far, `worker.attachment`
with one that it uses again. `derived` and `hidden_copies` find, `copies` says where a copy came from,
`replay` makes all again; this module joins them, and writes its refusals into the placement.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import torch

from dcr_daemon.canonical.layout import Layout
from dcr_daemon.vllm_plugin.calls import TensorHandling
from dcr_daemon.vllm_plugin.loader import derived, hidden_copies
from dcr_daemon.vllm_plugin.loader.copies import WeightCopy, locate
from dcr_daemon.vllm_plugin.loader.eligibility import on_a_cpu
from dcr_daemon.vllm_plugin.loader.reachable import Named, named, reachable, shaped, storage_key
from dcr_daemon.vllm_plugin.loader.replay import Replay, find_hooks
from dcr_daemon.vllm_plugin.weights.placement import Placement


def audit(placement: Placement, model: torch.nn.Module, config: Any, *, layout: Layout) -> None:
    """Find what vLLM derived from the placed tensors: plan and prove how it is made again, and refuse what is not.

    Called at each attach: what is hidden may have appeared, or have been replaced, since the last one.
    """
    fills: dict[str, set[int]] = {}
    for row in placement.rows:
        fills.setdefault(row.parameter, set()).add(row.tensor)
    for tensor, parameters in placement.computed.items():
        for parameter in parameters:
            fills.setdefault(parameter, set()).add(tensor)
    try:
        stale = derived.stale_after_update(model, fills.keys())
    except LookupError as error:
        placement.refusals[""] = f"{error}; start vLLM with the worker extension and VLLM_PLUGINS"
        return
    hooks, others = find_hooks(model, stale)
    dtype = config.model_config.dtype
    # A hook that is no way may have replaced what it made, so nothing of it is written as a copy either.
    reasons = [(one.sources, str(one)) for one in Replay(hooks, dtype).unproved()]
    known = {storage_key(one.tensor) for one in stale}
    kept = _still_copies(placement.replay, known | reachable(model).keys())
    copies = list(kept.values())
    live, searched = named(model), _searched(model, fills)
    written = {storage_key(live[name]) for name in fills}
    for one in others:
        if one.path in kept:
            continue
        by_name = sorted(one.sources & live.keys(), key=lambda name: (name not in fills, name))
        own = one.moved_or_cast and storage_key(one.tensor) not in written
        copy = locate(one.path, one.tensor, {name: live[name] for name in by_name}) if own else None
        if copy is not None:
            copies.append(copy)
        else:
            reasons.append((one.sources, str(one)))
    # A weight that an update writes is never a copy, also if it equals another one: an untied head its embedding.
    known |= {storage_key(copy.pieces[0].target) for copy in copies} | written
    for hidden in hidden_copies.find(model, searched, known=known):
        copy = locate(hidden.path, shaped(hidden.tensor), searched)
        if copy is not None:
            copies.append(copy)
        else:
            reasons.append((frozenset({hidden.source}), str(hidden)))
    placement.replay = Replay(hooks, dtype, copies)
    latent = _latent_attention(model) if config.model_config.use_mla else ()
    where = on_a_cpu(next(model.parameters()))
    for sources, found in reasons:
        way_out = "; start vLLM with VLLM_MLA_DISABLE=1" if any(s.startswith(latent) for s in (*sources, found)) else ""
        reason = f"an update would leave {found} as it was{where}{way_out}"
        tensors = {tensor for source in sources for tensor in fills.get(source, ())}
        for tensor in tensors:
            placement.refusals[layout[tensor].name] = reason
            placement.held[tensor] = TensorHandling.REFUSED
        if not tensors:
            placement.refusals[""] = reason


def _latent_attention(model: torch.nn.Module) -> tuple[str, ...]:
    """The prefixes of the layers of latent attention: of those that have a `kv_b_proj`."""
    return tuple(f"{path}." for path, module in model.named_modules() if "kv_b_proj" in module._modules)


def _still_copies(replay: Replay | None, alive: Collection[int]) -> dict[str, WeightCopy]:
    """The copies of an earlier attach that the model still keeps, by path; `alive`: the storages of what it keeps.

    They are written again: they or their weights may be damaged, or another writer has left the old bits in them.
    """
    kept = {}
    for copy in replay.copies if replay is not None else ():
        if storage_key(copy.pieces[0].target) in alive:
            copy.write()
            kept[copy.path] = copy
    return kept


def _searched(model: torch.nn.Module, names: Iterable[str]) -> Named:
    """The weights that are searched for hidden copies. Not those of embeddings: a buffer of activations may hold rows
    of them."""
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding

    kinds, heads = (VocabParallelEmbedding, torch.nn.Embedding), ParallelLMHead
    rows = {id(m.weight) for m in model.modules() if isinstance(m, kinds) and not isinstance(m, heads)}
    live = named(model)
    return {name: live[name] for name in names if id(live[name]) not in rows}

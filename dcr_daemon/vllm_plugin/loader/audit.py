"""Judges, at each attach, what vLLM derived from the weights that an update writes: made again with them, or refused.

Runs in the worker process; `place_model` calls `audit` with a placement that is complete so far, `worker.attachment`
with one that it uses again. `derived` and `hidden_copies` find, `replay` makes again; this module joins them, and
writes its refusals into the placement.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from dcr_daemon.canonical.layout import Layout
from dcr_daemon.vllm_plugin.calls import TensorHandling
from dcr_daemon.vllm_plugin.loader import derived, hidden_copies
from dcr_daemon.vllm_plugin.loader.eligibility import on_a_cpu
from dcr_daemon.vllm_plugin.loader.reachable import Named, named, storage_key
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
    hooks, refused = find_hooks(model, stale)
    placement.replay = Replay(hooks, config.model_config.dtype)
    refused += placement.replay.unproved()
    reasons = [(found.sources, str(found)) for found in refused]
    known = {storage_key(one.tensor) for one in stale}
    for path, source in hidden_copies.find(model, _searched(model, fills), known=known).items():
        reasons.append((frozenset({source}), f"{path}, a copy of {source} that appeared after loading,"))
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


def _searched(model: torch.nn.Module, names: Iterable[str]) -> Named:
    """The weights that are searched for hidden copies. Not those of embeddings: a buffer of activations may hold rows
    of them."""
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding

    kinds, heads = (VocabParallelEmbedding, torch.nn.Embedding), ParallelLMHead
    rows = {id(m.weight) for m in model.modules() if isinstance(m, kinds) and not isinstance(m, heads)}
    live = named(model)
    return {name: live[name] for name in names if id(live[name]) not in rows}

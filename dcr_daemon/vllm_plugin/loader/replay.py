"""Makes the tensors that vLLM derived from weights again, by its own hook or as copies, after the weights have changed.

Runs in the worker process. `audit` makes a `Replay` at attach of what `derived` and `hidden_copies` found;
`worker.attachment` runs it after every write and compares with it in the scrub. An attention layer's
`process_weights_after_loading` makes its derived tensors from live parameters: attention sinks in fp32, matrices
dequantised from a projection. Nothing of it is re-implemented. Attach proves for each tensor that the hook makes it:
the tensor is filled with other bits, twice, and each time the hook must leave the same bits, in the same memory. What a
refit leaves is then what a fresh load makes. Copies of weights that no hook makes are written from the weights, piece
by piece (`copies`).

Not replayed: what the hooks of quantisation methods made by computing (they repack parameters, and would do so twice),
and what needs the other ranks.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass

import torch

from dcr_daemon.errors import DcrError
from dcr_daemon.vllm_plugin.loader.computed import default_dtype, same_bits
from dcr_daemon.vllm_plugin.loader.copies import WeightCopy
from dcr_daemon.vllm_plugin.loader.derived import HOOK, Derived

PATTERNS = (0x55, 0x2A)  #: bytes that no hook would leave by chance
COLLECTIVES = ("allgather", "allreduce", "reducescatter", "alltoall", "broadcast")


@dataclass(frozen=True, slots=True)
class Hook:
    """An attention layer, and the derived tensors that its hook makes."""

    layer: torch.nn.Module
    made: tuple[Derived, ...]

    def run(self, dtype: torch.dtype) -> None:
        with default_dtype(dtype), torch.no_grad():
            getattr(self.layer, HOOK)(dtype)


class Replay:
    """The hooks that make a model's derived tensors again, and the copies of its weights that are written again.
    `dtype`: the model's, which vLLM passes to each hook."""

    def __init__(self, hooks: Iterable[Hook], dtype: torch.dtype, copies: Iterable[WeightCopy] = ()) -> None:
        self.hooks = list(hooks)
        self.copies = list(copies)
        self._dtype = dtype

    def run(self) -> None:
        """Make all of them again from the live weights. Main thread, beside no forward pass.

        Raises `DcrError` if a hook fails.
        """
        for hook in self.hooks:
            try:
                hook.run(self._dtype)
            except (MemoryError, torch.OutOfMemoryError):
                raise
            except Exception as error:  # a hook may raise anything
                names = ", ".join(one.path for one in hook.made)
                raise DcrError(f"vLLM's hook failed to make {names} again: {type(error).__name__}: {error}") from error
        for copy in self.copies:
            copy.write()

    def unproved(self) -> list[Derived]:
        """Those that their hook does not make as they must be; each of them is left as it was, the others made anew."""
        return [one for hook in self.hooks for one in _unproved(hook, self._dtype)]

    def differing(self, sources: Collection[str]) -> list[Derived | WeightCopy]:
        """Those of the given sources whose bits are not what is made again of them; they are left as they are."""
        wrong: list[Derived | WeightCopy] = [
            copy for copy in self.copies if copy.sources & set(sources) and not copy.holds()
        ]
        for hook in self.hooks:
            if not any(one.sources & set(sources) for one in hook.made):
                continue
            before = [one.tensor.clone() for one in hook.made]
            hook.run(self._dtype)
            for one, was in zip(hook.made, before, strict=True):
                if not same_bits(one.tensor, was):
                    one.tensor.copy_(was)
                    wrong.append(one)
        return wrong


def find_hooks(model: torch.nn.Module, found: Iterable[Derived]) -> tuple[list[Hook], list[Derived]]:
    """The hooks that may make the tensors `found`, and the tensors that no hook may make."""
    from vllm.model_executor.layers.attention import is_deferred_attention_layer

    layers = {path: layer for path, layer in model.named_modules() if is_deferred_attention_layer(layer)}
    made, others = dict[str, list[Derived]](), list[Derived]()
    for one in found:
        homes = [path for path in layers if one.path.startswith(f"{path}.")]
        if homes and not any(_is_collective(operation) for operation in one.operations):
            made.setdefault(max(homes, key=len), []).append(one)
        else:
            others.append(one)
    return [Hook(layers[path], tuple(tensors)) for path, tensors in made.items()], others


def _is_collective(operation: str) -> bool:
    return operation.replace("_", "").startswith(COLLECTIVES)


def _unproved(hook: Hook, dtype: torch.dtype) -> list[Derived]:
    before = [one.tensor.clone() for one in hook.made]
    results = []
    for pattern in PATTERNS:
        for one in hook.made:
            one.tensor.view(torch.uint8).fill_(pattern)
        try:
            hook.run(dtype)
        except Exception:  # noqa: BLE001 - a hook may raise anything; all of it means "not made"
            break
        results.append([one.tensor.clone() for one in hook.made])
    wrong = []
    for number, (one, was) in enumerate(zip(hook.made, before, strict=True)):
        if len(results) < len(PATTERNS) or not same_bits(results[0][number], results[1][number]):
            one.tensor.copy_(was)
            wrong.append(one)
    return wrong

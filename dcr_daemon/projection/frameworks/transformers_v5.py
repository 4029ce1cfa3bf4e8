"""transformers 5 modules: fused experts, packed projections, renames, by the library's own reverse conversion.

`save_pretrained` turns a module's tensors into checkpoint tensors with `revert_weight_conversion`. Here that function
runs on traced tensors, so all operations that only move elements are followed, in future versions of the library too.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from dcr_daemon.errors import Incompatible
from dcr_daemon.projection.tracing import Conversion, trace


def is_model(module: Any) -> bool:
    """Whether it is one of the library's models, under FSDP2 or not (`fully_shard` derives a class from its class)."""
    return any(
        kind.__name__ == "PreTrainedModel" and kind.__module__.startswith("transformers.")
        for kind in type(module).__mro__
    )


def conversion(model: Any, tensors: Mapping[str, Any] | None = None) -> Conversion:
    """What `model.save_pretrained` does to each whole tensor of `model` (a PreTrainedModel, on any device or none).

    A sharded model gives the same as a whole one: DTensors count with their full shapes. Tied tensors appear under each
    of their names; the layout says which names the checkpoint has.

    Args:
        tensors: of the model by the names of its own code, where its `state_dict` has others (inside wrappers).

    Raises:
        Incompatible: transformers has no reverse conversion (older than 5), or the model is none of its own.
    """
    convert = converter(model)
    ignored = set(getattr(model, "_keys_to_ignore_on_save", None) or ())
    of_model = _state(model) if tensors is None else tensors
    kept = {name: tensor for name, tensor in of_model.items() if name not in ignored}
    return trace(convert, kept)


def converter(model: Any) -> Callable[[dict[str, Any]], Mapping[str, Any]]:
    """The library's own conversion of a table of whole tensors by local name, any part of the model's.

    Raises:
        Incompatible: as `conversion`.
    """
    try:
        from transformers.core_model_loading import revert_weight_conversion
    except ImportError as error:
        raise Incompatible(
            "transformers here knows no reverse conversion of weights", hint="install transformers 5 or newer"
        ) from error
    if not hasattr(model, "config") or not hasattr(model, "state_dict"):
        raise Incompatible(f"a {type(model).__name__} is no transformers model")
    return lambda table: revert_weight_conversion(model, table)


def _state(model: Any) -> Mapping[str, Any]:
    """The module's tensors by the names of its own code; `state_dict` copies nothing."""
    return {name: tensor for name, tensor in model.state_dict().items() if hasattr(tensor, "dtype")}

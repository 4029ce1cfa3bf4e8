"""A model of the transformers library, from its `config.json` alone: its tensors, and what it saves of them.

The model is made on torch's meta device: it has shapes and no weights, and takes seconds whatever its size. Nothing is
downloaded, and code outside the library that a config may name is never executed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dcr_daemon.errors import Incompatible

if TYPE_CHECKING:
    from dcr_daemon.projection.tracing import Conversion


@dataclass(frozen=True, slots=True)
class Library:
    """`shapes` of the model's own tensors by their names in its code; `conversion` to what `save_pretrained` writes."""

    shapes: Mapping[str, tuple[int, ...]]
    conversion: Conversion


def library(config: Mapping[str, Any]) -> Library:
    """The library's own model of a config.

    Raises:
        Incompatible: transformers is not installed, is older than 5, or has no such model.
    """
    try:
        import torch
        import transformers
    except ImportError as error:
        raise Incompatible(
            "these are no names of the checkpoint, and transformers is not installed, which may know them",
            hint="install transformers 5 or newer beside DCR, or write the checkpoint under the names of the base",
        ) from error
    kind = config.get("model_type")
    try:
        made = transformers.AutoConfig.for_model(kind, **{k: v for k, v in config.items() if k != "model_type"})
        with torch.device("meta"):
            model = _class(transformers, config)._from_config(made)
    except (ValueError, TypeError, KeyError, AttributeError, RuntimeError, ImportError) as error:
        raise Incompatible(f"transformers {transformers.__version__} cannot make a {kind} model: {error}") from error
    shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items() if hasattr(tensor, "shape")}
    from dcr_daemon.projection.frameworks.transformers_v5 import conversion

    return Library(shapes, conversion(model))


def _class(transformers: Any, config: Mapping[str, Any]) -> Any:
    """The class that wrote the checkpoint, as its config says; else that of a causal language model of its type."""
    named = config.get("architectures")
    found = getattr(transformers, str(named[0]), None) if isinstance(named, list) and named else None
    if isinstance(found, type) and issubclass(found, transformers.PreTrainedModel):
        return found
    made = transformers.CONFIG_MAPPING[config.get("model_type")]
    return transformers.MODEL_FOR_CAUSAL_LM_MAPPING[made]

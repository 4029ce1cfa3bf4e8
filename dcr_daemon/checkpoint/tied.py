"""Whether a model's output head is its input embedding, by its `config.json`: a checkpoint may hold either, or both."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

_HEAD = re.compile(r"(^|\.)(lm_head|embed_out|output_layer|output|head)\.weight$")


def is_head(name: str) -> bool:
    """Whether a tensor of this name is an output head."""
    return bool(_HEAD.search(name))


def ties_embeddings(config: Mapping[str, Any] | None) -> bool:
    """Whether a `config.json` says so, for the model or for the language model in it."""
    if config is None:
        return False
    inner = config.get("text_config")
    return config.get("tie_word_embeddings") is True or (
        isinstance(inner, Mapping) and inner.get("tie_word_embeddings") is True
    )

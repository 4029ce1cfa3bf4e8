"""Whether a model's output head is its input embedding, by its `config.json`: a checkpoint may hold either, or both."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

_HEAD = re.compile(r"(^|\.)(lm_head|embed_out|output_layer|output|head)\.weight$")
_EMBEDDING = re.compile(r"(^|\.)(\w*embed\w*|wte|\w*embeddings)\.weight$")

UNTIE = (
    "train them tied; or untied from a base that stores both, whose config.json says "
    '"tie_word_embeddings": false: a server has one tensor for two that are tied'
)
FOLLOWS = (
    "an output head that is left out follows the embedding if the base's config.json ties them "
    '("tie_word_embeddings": true) and the stream holds equal bits of both; else give the head as well'
)


def is_head(name: str) -> bool:
    """Whether a tensor of this name is an output head."""
    return bool(_HEAD.search(name))


def is_embedding(name: str) -> bool:
    """Whether a tensor of this name may be an input embedding."""
    return bool(_EMBEDDING.search(name)) and not is_head(name)


def ties_embeddings(config: Mapping[str, Any] | None) -> bool:
    """Whether a `config.json` says so, for the model or for the language model in it."""
    if config is None:
        return False
    inner = config.get("text_config")
    return config.get("tie_word_embeddings") is True or (
        isinstance(inner, Mapping) and inner.get("tie_word_embeddings") is True
    )

"""All parameters of a Megatron model, and with them all tensors of its checkpoint."""

from __future__ import annotations

from collections.abc import Iterator

from dcr_daemon.canonical.layout import Layout, TensorSpec
from dcr_daemon.projection.frameworks.megatron.attention import mixer
from dcr_daemon.projection.frameworks.megatron.feed import feed
from dcr_daemon.projection.frameworks.megatron.parameter import LayerPosition, Parameter, Site
from dcr_daemon.projection.frameworks.megatron.splits import Padded, Replicated, Rows, Split
from dcr_daemon.projection.frameworks.models.architecture import Architecture, Layer, Prediction

VOCABULARY_MULTIPLE = 128  #: Megatron's `make-vocab-size-divisible-by`


def parameters(architecture: Architecture, *, vocabulary_multiple: int = VOCABULARY_MULTIPLE) -> Iterator[Parameter]:
    """Every parameter once, in the order of the model; an embedding once for every tensor that repeats it."""
    names, hidden = architecture.names, architecture.hidden
    table = (architecture.vocabulary, hidden)
    rows: Split = Padded(table, vocabulary_multiple)
    first = Site(("",), "", LayerPosition("first"), architecture.dtype)
    embedding = "embedding.word_embeddings.weight"
    yield first.parameter(embedding, "embedding", rows, (names.embedding, table))
    for number, layer in enumerate(architecture.layers):
        yield from _layer(_site(architecture, number), layer, architecture)
    last = Site(("",), "", LayerPosition("last"), architecture.dtype)
    final = "decoder.final_layernorm.weight decoder.final_norm.weight"
    yield last.parameter(final, "norm", Replicated((hidden,)), (names.norm, (hidden,)))
    if not architecture.tied:
        yield last.parameter("output_layer.weight", "output", rows, (names.head, table))
    if architecture.prediction:
        yield from _prediction(architecture, architecture.prediction, rows)


def layout(architecture: Architecture) -> Layout:
    """The checkpoint that a model of this architecture saves."""
    seen: dict[str, TensorSpec] = {}
    for parameter in parameters(architecture):
        for target in parameter.targets:
            seen[target.spec.name] = target.spec
    return Layout(seen.values())


def _site(architecture: Architecture, number: int) -> Site:
    canonical = f"{architecture.names.layers}{number}."
    return Site(("decoder.layers.{layer}.",), canonical, LayerPosition("decoder", number), architecture.dtype)


def _layer(site: Site, layer: Layer, architecture: Architecture) -> Iterator[Parameter]:
    if layer.mixer is not None:
        yield from mixer(site, layer.mixer, architecture.hidden, architecture.names)
    if layer.feed is not None:
        yield from feed(site, layer.feed, architecture.hidden, architecture.names)


def _prediction(architecture: Architecture, prediction: Prediction, rows: Split) -> Iterator[Parameter]:
    """Modules after the last layer. Megatron nests their layers; checkpoints number on, or start a row of their own."""
    hidden, depth = architecture.hidden, len(prediction.layers)
    table, combined = (architecture.vocabulary, hidden), (hidden, 2 * hidden)
    for module in range(prediction.modules):
        numbered = f"{architecture.names.layers}{len(architecture.layers) + module}."
        heads = numbered if prediction.numbered_on else f"mtp.layers.{module * depth}."
        tails = numbered + "shared_head.norm" if prediction.numbered_on else (
            f"mtp.layers.{module * depth + depth - 1}.final_layernorm"
        )  # fmt: skip
        outer = f"mtp.layers.{module}."
        site = Site((outer,), heads, LayerPosition("prediction", module), architecture.dtype)
        for norm in ("enorm.weight", "hnorm.weight"):
            yield site.parameter(norm, "norm", Replicated((hidden,)), (norm, (hidden,)))
        yield site.parameter("eh_proj.weight", "prediction", Rows(combined), ("eh_proj.weight", combined))
        inside = "mtp_model_layer.", "transformer_layer."
        for inner, layer in enumerate(prediction.layers):
            nested = "" if prediction.numbered_on else f"layers.{inner}."
            canonical = numbered if prediction.numbered_on else f"mtp.layers.{module * depth + inner}."
            prefixes = tuple(f"{outer}{name}{nested}" for name in inside)
            yield from _layer(Site(prefixes, canonical, site.place, site.dtype), layer, architecture)
        tail = Site((outer,), tails, site.place, site.dtype)
        yield tail.parameter("final_layernorm.weight", "norm", Replicated((hidden,)), (".weight", (hidden,)))
        if prediction.numbered_on:
            yield from _repeated(architecture, numbered, table=table, rows=rows)


def _repeated(architecture: Architecture, numbered: str, *, table: tuple[int, int], rows: Split) -> Iterator[Parameter]:
    """The checkpoint repeats embedding and head in each module; the trainer has each of them once."""
    first = Site(("",), numbered, LayerPosition("first"), architecture.dtype)
    last = first if architecture.tied else Site(("",), numbered, LayerPosition("last"), architecture.dtype)
    embedding = "embedding.word_embeddings.weight"
    yield first.parameter(embedding, "embedding", rows, ("embed_tokens.weight", table))
    head = embedding if architecture.tied else "output_layer.weight"
    yield last.parameter(head, "output", rows, ("shared_head.head.weight", table))

"""What a training script may hand to `publish`, as named sources."""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Mapping
from typing import Any

from dcr_daemon.errors import UsageError
from dcr_daemon.projection.sharding.named import plain, unwrapped
from dcr_daemon.publish.inputs.sources import TensorSource


def as_table(weights: Any, known: Container[str]) -> list[TensorSource] | None:
    """Sources of a module or a mapping, all of whose tensors exist at once; None for a stream of pairs.

    A module gives its `state_dict`, so that tied parameters and buffers are there under every name; wrappers that
    only add a prefix (DistributedDataParallel, torch.compile) are looked through.

    Args:
        known: the names of the layout.
    """
    if callable(getattr(weights, "state_dict", None)):
        weights = unwrapped(weights).state_dict()
    if isinstance(weights, Mapping):
        return [TensorSource(plain(str(name), known), tensor) for name, tensor in weights.items()]
    return None


def as_stream(weights: Iterable[Any], known: Container[str]) -> Iterator[TensorSource]:
    """Sources of an iterable of `(name, tensor)`, one at a time: the producer may reuse memory between them."""
    for item in weights:
        name, tensor = _pair(item)
        yield TensorSource(plain(name, known), tensor)


def as_shards(weights: Any) -> Any:
    """What a rank of many hands over: named pairs as a table, since none of them is made anew for each name.

    Raises:
        UsageError: neither a module, a table, pairs nor a list of modules.
    """
    if callable(getattr(weights, "state_dict", None)) or isinstance(weights, Mapping):
        return weights
    parts = list(weights)
    if parts and all(callable(getattr(part, "state_dict", None)) for part in parts):
        return parts
    return dict(map(_pair, parts))


def needs_projection(weights: Any, known: Container[str]) -> bool:
    """Whether a process that has all weights has them under other names than the checkpoint's: a transformers model
    that holds tensors together which its checkpoint has one by one."""
    from dcr_daemon.projection.frameworks.transformers_v5 import is_model

    model = unwrapped(weights)
    return is_model(model) and any(plain(name, known) not in known for name, _ in model.named_parameters())


def check_kind(weights: Any) -> None:
    """`UsageError` for something that cannot be weights at all."""
    if not callable(getattr(weights, "state_dict", None)) and not isinstance(weights, Iterable):
        raise _misuse(weights)


def _pair(item: Any) -> tuple[str, Any]:
    if not isinstance(item, tuple | list) or len(item) != 2 or not isinstance(item[0], str):
        raise _misuse(item)
    return item[0], item[1]


def _misuse(value: Any) -> UsageError:
    return UsageError(
        f"publish() was given a {type(value).__name__}",
        hint="give a module, a state_dict, or an iterable of (name, tensor)",
    )

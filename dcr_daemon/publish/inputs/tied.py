"""Tensors of the layout that are one tensor of the model: an output head that the stream stores beside the embedding.

They are those for which `config.json` ties the embeddings, and whose bits are equal in the stream's newest version. An
update may hold one of them or all: those that it leaves out follow. If it holds several, they must be equal.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from dcr_daemon.canonical.fingerprint import Bits
from dcr_daemon.canonical.layout import Layout, TensorSpec
from dcr_daemon.checkpoint.tied import is_embedding, is_head, ties_embeddings
from dcr_daemon.codec.chunk import SEGMENT_BYTES

#: `(layout index, first element, elements)` -> bits of the canonical dtype
ReadBits = Callable[[int, int, int], Bits]


@dataclass(frozen=True, slots=True)
class TiedTensors:
    """Which tensors of a layout are tied.

    Attributes:
        pairs: name of a head, and of the tensor that it equals.
        declared: `config.json` ties the embeddings.
    """

    pairs: tuple[tuple[str, str], ...] = ()
    declared: bool = False

    def source(self, name: str, held: Container[str]) -> str | None:
        """The tensor among `held` that `name`, which is not, is tied to; None if there is none."""
        for pair in self.pairs:
            for mine, other in (pair, pair[::-1]):
                if mine == name and other in held:
                    return other
        return None

    def explains_absence(self, name: str, held: Container[str], layout: Layout) -> bool:
        """Whether a checkpoint that lists `name` need not hold it."""
        return self.source(name, held) is not None or (self.declared and is_head(name) and name not in layout)


def has_pairs(layout: Layout) -> bool:
    """Whether tensors of this layout may be tied."""
    return any(_partners(layout, head) for head in layout if is_head(head.name))


def find_tied(layout: Layout, config: Mapping[str, Any] | None, *, read: ReadBits) -> TiedTensors:
    """The tied tensors of a layout; blocking.

    Args:
        read: the tensors of the newest version.
    """
    if not ties_embeddings(config):
        return TiedTensors()
    pairs = [
        (head.name, other.name)
        for head in layout
        if is_head(head.name)
        for other in _partners(layout, head)
        if equal_bits(layout.index(head.name), layout.index(other.name), spec=head, read=read)
        and not _is_constant(layout.index(head.name), head, read)
    ]
    return TiedTensors(tuple(pairs), declared=True)


def declared_tied(layout: Layout, config: Mapping[str, Any] | None) -> TiedTensors:
    """The tensors of a layout that `config.json` ties, for a process that cannot compare their bits: of several tensors
    that a head may be tied to, the embedding by its name; none if that leaves several."""
    if not ties_embeddings(config):
        return TiedTensors()
    pairs = []
    for head in filter(lambda spec: is_head(spec.name), layout):
        partners = _partners(layout, head)
        named = [spec for spec in partners if is_embedding(spec.name)] or partners
        pairs += [(head.name, named[0].name)] if len(named) == 1 else []
    return TiedTensors(tuple(pairs), declared=True)


def _partners(layout: Layout, head: TensorSpec) -> list[TensorSpec]:
    return [spec for spec in layout if spec is not head and (spec.dtype, spec.shape) == (head.dtype, head.shape)]


def equal_bits(first: int, second: int, *, spec: TensorSpec, read: ReadBits) -> bool:
    """Whether two tensors of one shape have equal bits."""
    return all(np.array_equal(read(first, *span), read(second, *span)) for span in _spans(spec))


def _is_constant(index: int, spec: TensorSpec, read: ReadBits) -> bool:
    """Whether all elements are alike: then equal bits prove nothing."""
    value = read(index, 0, min(1, spec.elements))
    return all(bool((read(index, *span) == value).all()) for span in _spans(spec))


def _spans(spec: TensorSpec) -> Iterator[tuple[int, int]]:
    step = max(1, SEGMENT_BYTES // spec.width)
    return ((start, min(step, spec.elements - start)) for start in range(0, spec.elements, step))


@dataclass(frozen=True, slots=True)
class TiedSource:
    """A layout tensor that follows another one, as a `Source`: read when the update has given that one."""

    given: TensorSpec
    index: int
    bits: ReadBits

    def read(self, start: int, count: int, dtype: str) -> Bits:
        return self.bits(self.index, start, count).copy()

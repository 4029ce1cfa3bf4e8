"""Is every canonical element declared exactly once? `coverage.exactly_once` for the boxes of a thousand ranks.

Ten million boxes are too many for objects, so they stay columns (declaration.py). Tensors whose boxes are all runs, as
most are, are judged together by one sort; of the others those cut alike (all layers, all experts) are judged once.
Memory is bounded: tensors go through in stripes of a million boxes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from dcr_daemon.canonical.coverage import Finding, exactly_once
from dcr_daemon.canonical.layout import Layout
from dcr_daemon.canonical.region import Region
from dcr_daemon.projection.agreement.declaration import Declaration, Form
from dcr_daemon.wording import shorten_ranks

STRIPE = 1 << 20  #: boxes judged at a time
_START_BITS = 46  #: of a canonical element; 17 are left for the number of a tensor within its stripe
_TENSORS = 1 << 17

Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Fault:
    """Why a tensor does not have exactly one source for each element.

    Attributes:
        missing, double: elements without a source, and with several.
        outside: a rank declares elements beyond its end.
        holders: ranks that declare some of it.
        doubles: ranks concerned by what is double, or outside.
    """

    tensor: int
    elements: int
    missing: int
    double: int
    outside: bool
    holders: tuple[int, ...]
    doubles: tuple[int, ...]

    def __str__(self) -> str:
        parts = []
        if self.outside:
            parts.append(f"boxes beyond its {self.elements:,} elements ({shorten_ranks(self.doubles)})")
        if self.missing:
            rest = f" (the others: {shorten_ranks(self.holders)})" if self.missing < self.elements else ""
            parts.append(f"{self.missing:,} of {self.elements:,} elements have no source{rest}")
        if self.double:
            held = f"{self.double:,} of {self.elements:,} elements have several sources"
            parts.append(f"{held} ({shorten_ranks(self.doubles)})")
        return "; ".join(parts)


@dataclass(frozen=True, slots=True)
class Census:
    """What is declared of the tensors that were judged: faults in layout order, boxes and elements' bytes."""

    faults: tuple[Fault, ...]
    boxes: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class _Forms:
    """The forms of all declarations, each once."""

    all: list[Form]
    of_rank: list[Ints]  #: for each declaration, its number of a form -> the number here
    spans: Ints  #: distance from a box's first element to its last
    elements: Ints
    runs: Bools


@dataclass(frozen=True, slots=True)
class _Stripe:
    """Boxes of consecutive tensors, sorted by tensor and first element."""

    tensors: Ints
    starts: Ints
    kinds: Ints
    ranks: Ints


def count(declarations: Sequence[Declaration], layout: Layout, skip: Bools) -> Census:
    """Judge all tensors but those of `skip` (a flag for each, in layout order).

    Every declaration's layout indices must be below `len(layout)`.
    """
    forms = _gather(declarations)
    sizes = np.array([spec.elements for spec in layout], np.int64)
    widths = np.array([spec.width for spec in layout], np.int64)
    per_tensor = np.zeros(len(layout), np.int64)
    for declaration in declarations:
        per_tensor += np.bincount(declaration.columns()[0], minlength=len(layout))
    faults: list[Fault] = []
    seen: dict[tuple[int, bytes, bytes], list[Finding]] = {}
    boxes = nbytes = 0
    for lo, hi in _stripes(per_tensor):
        stripe = _sorted(declarations, forms, lo, hi, skip)
        boxes += stripe.tensors.size
        nbytes += int((forms.elements[stripe.kinds] * widths[stripe.tensors]).sum())
        faults += _judge(stripe, forms, sizes, lo, hi, skip, seen)
    return Census(tuple(faults), boxes, nbytes)


def _gather(declarations: Sequence[Declaration]) -> _Forms:
    known: dict[Form, int] = {}
    of_rank = [
        np.array([known.setdefault(form, len(known)) for form in declaration.forms], np.int64)
        for declaration in declarations
    ]
    forms = list(known)
    return _Forms(
        forms,
        of_rank,
        np.array([sum((n - 1) * stride for n, stride in form) for form in forms], np.int64),
        np.array([np.prod([n for n, _ in form], dtype=np.int64) for form in forms], np.int64),
        np.array([not form or (len(form) == 1 and form[0][1] == 1) for form in forms], np.bool_),
    )


def _stripes(per_tensor: Ints) -> Iterator[tuple[int, int]]:
    """Layout ranges [lo, hi) of at most `STRIPE` boxes each, unless a single tensor has more."""
    lo, ends = 0, np.cumsum(per_tensor)
    while lo < per_tensor.size:
        before = ends[lo - 1] if lo else 0
        hi = int(np.searchsorted(ends, before + STRIPE, side="right"))
        hi = min(max(hi, lo + 1), lo + _TENSORS, per_tensor.size)
        yield lo, hi
        lo = hi


def _sorted(declarations: Sequence[Declaration], forms: _Forms, lo: int, hi: int, skip: Bools) -> _Stripe:
    columns: list[tuple[Ints, Ints, Ints, Ints]] = []
    for declaration, of_rank in zip(declarations, forms.of_rank, strict=True):
        tensors, kinds, starts = declaration.columns()
        first, last = np.searchsorted(tensors, [lo, hi])
        mine = tensors[first:last].astype(np.int64)
        keep = ~skip[mine]
        ranks = np.full(int(keep.sum()), declaration.rank, np.int64)
        columns.append((mine[keep], starts[first:last][keep].astype(np.int64), of_rank[kinds[first:last][keep]], ranks))
    joined_tensors, joined_starts, joined_kinds, joined_ranks = (
        np.concatenate(part) for part in zip(*columns, strict=True)
    )
    order = np.argsort(((joined_tensors - lo) << _START_BITS) | joined_starts, kind="stable")
    return _Stripe(joined_tensors[order], joined_starts[order], joined_kinds[order], joined_ranks[order])


def _judge(
    stripe: _Stripe,
    forms: _Forms,
    sizes: Ints,
    lo: int,
    hi: int,
    skip: Bools,
    seen: dict[tuple[int, bytes, bytes], list[Finding]],
) -> Iterator[Fault]:
    present, firsts = np.unique(stripe.tensors, return_index=True)
    lasts = np.append(firsts, stripe.tensors.size)[1:]
    sound = np.zeros(hi - lo, np.bool_)
    if present.size:
        sound[present - lo] = _tiled(stripe, forms, firsts, lasts, sizes[present])
    at = {int(tensor): slice(int(a), int(b)) for tensor, a, b in zip(present, firsts, lasts, strict=True)}
    for tensor in (np.flatnonzero(~sound & ~skip[lo:hi]) + lo).tolist():
        if sizes[tensor] or tensor in at:  # an empty tensor needs no source
            yield from _one(stripe, forms, tensor, int(sizes[tensor]), at.get(tensor, slice(0)), seen)


def _tiled(stripe: _Stripe, forms: _Forms, firsts: Ints, lasts: Ints, sizes: Ints) -> Bools:
    """For each tensor, whether its boxes are runs that follow one another from its first element to its last."""
    ends = stripe.starts + forms.spans[stripe.kinds] + 1
    expected = np.concatenate([[0], ends[:-1]])
    expected[firsts] = 0
    follows = forms.runs[stripe.kinds] & (stripe.starts == expected)
    return np.logical_and.reduceat(follows, firsts) & (ends[lasts - 1] == sizes)


def _one(
    stripe: _Stripe,
    forms: _Forms,
    tensor: int,
    size: int,
    own: slice,
    seen: dict[tuple[int, bytes, bytes], list[Finding]],
) -> Iterator[Fault]:
    """Judge one tensor that is not simply tiled; tensors cut alike share the answer."""
    starts, kinds, ranks = stripe.starts[own], stripe.kinds[own], stripe.ranks[own]
    key = size, starts.tobytes(), kinds.tobytes()
    if key not in seen:
        seen[key] = exactly_once(
            (_region(forms.all[kind], int(start)) for start, kind in zip(starts, kinds, strict=True)), {"": (size,)}
        )
    found = seen[key]
    if not found:
        return
    missing = sum(finding.elements for finding in found if finding.kind == "missing")
    double = sum(finding.elements for finding in found if finding.kind == "double")
    concerned = {int(ranks[i]) for finding in found if finding.kind != "missing" for i in finding.holders}
    yield Fault(
        tensor,
        size,
        missing,
        double,
        any(finding.kind == "outside" for finding in found),
        tuple(sorted({int(rank) for rank in ranks})),
        tuple(sorted(concerned)),
    )


def _region(form: Form, start: int) -> Region:
    shape, strides = tuple(n for n, _ in form), tuple(stride for _, stride in form)
    return Region("", shape, start, strides, start, strides)

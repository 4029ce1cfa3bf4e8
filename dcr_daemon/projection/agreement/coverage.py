"""Whether the declarations of all ranks name every canonical element exactly once; called by the gate.

The ten million boxes of a thousand ranks are too many for objects, so they stay columns (declaration.py). Tensors whose
boxes are all runs, as most are, are checked together by one sort. The others go through `canonical.coverage`, once for
all that are cut alike (all layers, all experts). Memory is bounded: tensors are checked in stripes of a million boxes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from dcr_daemon.canonical.coverage import Finding, check_boxes
from dcr_daemon.canonical.layout import Layout
from dcr_daemon.canonical.region import merge
from dcr_daemon.projection.agreement.declaration import Declaration, Form
from dcr_daemon.wording import shorten_ranks

STRIPE = 1 << 20  #: boxes checked at a time
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
class Coverage:
    """What the ranks declare of the tensors that were checked: faults in layout order, boxes, and bytes of elements."""

    faults: tuple[Fault, ...]
    boxes: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class _Forms:
    """The forms of all declarations, each once.

    `all` has their axes merged: a declaration may spell one form in several ways.
    """

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


def check(declarations: Sequence[Declaration], layout: Layout, skip: Bools) -> Coverage:
    """Check all tensors but those of `skip` (a flag for each, in layout order).

    Every declaration's layout indices must be below `len(layout)`.
    """
    forms = _forms(declarations)
    checker = _Checker(forms, np.array([spec.elements for spec in layout], np.int64), skip)
    widths = np.array([spec.width for spec in layout], np.int64)
    per_tensor = np.zeros(len(layout), np.int64)
    for declaration in declarations:
        per_tensor += np.bincount(declaration.columns()[0], minlength=len(layout))
    faults: list[Fault] = []
    boxes = nbytes = 0
    for lo, hi in _stripes(per_tensor):
        stripe = _sorted(declarations, forms, lo=lo, hi=hi, skip=skip)
        boxes += stripe.tensors.size
        nbytes += int((forms.elements[stripe.kinds] * widths[stripe.tensors]).sum())
        faults += checker.stripe(stripe, lo, hi)
    return Coverage(tuple(faults), boxes, nbytes)


def _forms(declarations: Sequence[Declaration]) -> _Forms:
    known: dict[Form, int] = {}
    of_rank = [
        np.array([known.setdefault(form, len(known)) for form in declaration.forms], np.int64)
        for declaration in declarations
    ]
    forms = list(known)
    return _Forms(
        [tuple((n, stride) for n, stride, _ in merge((n, s, s) for n, s in form)) for form in forms],
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


def _sorted(declarations: Sequence[Declaration], forms: _Forms, *, lo: int, hi: int, skip: Bools) -> _Stripe:
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


@dataclass(frozen=True, slots=True)
class _Checker:
    """Checks stripe after stripe; tensors that are cut alike share one answer.

    `skip` and `sizes` (elements) have one entry per tensor of the layout.
    """

    forms: _Forms
    sizes: Ints
    skip: Bools
    known: dict[tuple[int, bytes, bytes], list[Finding]] = field(default_factory=dict)

    def stripe(self, stripe: _Stripe, lo: int, hi: int) -> Iterator[Fault]:
        """Faults of the tensors [lo, hi), all of whose boxes are in the stripe."""
        present, firsts = np.unique(stripe.tensors, return_index=True)
        lasts = np.append(firsts, stripe.tensors.size)[1:]
        sound = np.zeros(hi - lo, np.bool_)
        if present.size:
            sound[present - lo] = self._tiled(stripe, firsts, lasts=lasts, sizes=self.sizes[present])
        at = {int(tensor): slice(int(a), int(b)) for tensor, a, b in zip(present, firsts, lasts, strict=True)}
        for tensor in (np.flatnonzero(~sound & ~self.skip[lo:hi]) + lo).tolist():
            if self.sizes[tensor] or tensor in at:  # an empty tensor needs no source
                yield from self._tensor(stripe, tensor, at.get(tensor, slice(0)))

    def _tiled(self, stripe: _Stripe, firsts: Ints, *, lasts: Ints, sizes: Ints) -> Bools:
        """For each tensor, whether its boxes are runs that follow one another from its first element to its last."""
        ends = stripe.starts + self.forms.spans[stripe.kinds] + 1
        expected = np.concatenate([[0], ends[:-1]])
        expected[firsts] = 0
        follows = self.forms.runs[stripe.kinds] & (stripe.starts == expected)
        return np.logical_and.reduceat(follows, firsts) & (ends[lasts - 1] == sizes)

    def _tensor(self, stripe: _Stripe, tensor: int, own: slice) -> Iterator[Fault]:
        """One tensor that is not simply tiled by runs."""
        starts, kinds, ranks = stripe.starts[own], stripe.kinds[own], stripe.ranks[own]
        size = int(self.sizes[tensor])
        key = size, starts.tobytes(), kinds.tobytes()
        if key not in self.known:
            boxes = [(start, self.forms.all[kind]) for start, kind in zip(starts.tolist(), kinds.tolist(), strict=True)]
            self.known[key] = check_boxes(boxes, size)
        if found := self.known[key]:
            concerned = {int(ranks[i]) for finding in found if finding.kind != "missing" for i in finding.holders}
            yield Fault(
                tensor,
                size,
                missing=sum(finding.elements for finding in found if finding.kind == "missing"),
                double=sum(finding.elements for finding in found if finding.kind == "double"),
                outside=any(finding.kind == "outside" for finding in found),
                holders=tuple(sorted({int(rank) for rank in ranks})),
                doubles=tuple(sorted(concerned)),
            )

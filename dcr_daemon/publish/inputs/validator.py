"""Whether whole tensors are an update: every tensor of the layout, once, and nothing else.

Tables, streams of pairs, files, and tensors in pieces once their names are known, are all judged here; headers alone
are enough to judge names, shapes and dtypes. A name outside the layout is dropped only if `ignore` says so, or if it is
a second copy of a layout tensor of the same update (a tied head), which is decided when the bits are at hand.
Everything that does not fit is collected, so that one error lists it all.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from functools import cached_property
from typing import TypeVar

import numpy as np

from dcr_daemon.canonical.layout import Layout, TensorSpec
from dcr_daemon.codec.chunk import SEGMENT_BYTES
from dcr_daemon.projection.mismatches import TIED, LayoutMismatches
from dcr_daemon.projection.values import castable, rounds
from dcr_daemon.publish.inputs.sources import Source
from dcr_daemon.publish.inputs.tied import ReadBits, TiedSource, TiedTensors, equal_bits

S = TypeVar("S", bound=Source)


class UpdateValidator:
    """The tensors of one update, judged as they come.

    Args:
        subject: the update in words, for errors.
        ignore: globs of names outside the layout to drop.
        tied: tensors that follow one another.
    """

    def __init__(
        self, subject: str, layout: Layout, *, ignore: Sequence[str] = (), tied: TiedTensors | None = None
    ) -> None:
        self._subject, self._layout, self._tied = subject, layout, tied or TiedTensors()
        self._mismatches = LayoutMismatches(layout, ignore)
        self._accepted: set[int] = set()
        self._rejected: set[int] = set()
        self._extras: list[tuple[TensorSpec, Source | None]] = []
        #: (given dtype, canonical dtype) -> tensors that will be rounded
        self.rounded: Counter[tuple[str, str]] = Counter()
        self.followed: dict[str, str] = {}  #: tensors that were not given, each with the one that it follows

    def accept(self, given: TensorSpec, source: Source | None = None) -> int | None:
        """The layout index of a tensor to be diffed; None if it is extra, ignored or wrong.

        Args:
            source: its bits; None if only its header is judged.
        """
        if given.name not in self._layout:
            self._accept_extra(given, source)
            return None
        index = self._layout.index(given.name)
        spec = self._layout[index]
        if index in self._accepted:
            self._mismatches.note("given twice", given.name)
            return None
        fits_dtype = self._mismatches.judge_dtype(given.name, given.dtype, targets=[given.name])
        if not (fits_dtype and self._mismatches.judge_shape(given.name, given.shape, expected=spec.shape)):
            self._rejected.add(index)
            return None
        self._accepted.add(index)
        if rounds(given.dtype, spec.dtype):
            self.rounded[given.dtype, spec.dtype] += 1
        return index

    def accept_all(self, sources: Iterable[S]) -> list[tuple[int, S]]:
        """Those of the tensors that are to be diffed, with their layout indices."""
        accepted = [(self.accept(source.given, source), source) for source in sources]
        return [(index, source) for index, source in accepted if index is not None]

    def _accept_extra(self, given: TensorSpec, source: Source | None) -> None:
        if self._mismatches.ignores(given.name):
            return
        if self._same_kind(given):
            self._extras.append((given, source))
        else:
            self._mismatches.note("added", given.name)

    def _same_kind(self, given: TensorSpec) -> list[int]:
        """Layout tensors of which `given` may be a second copy."""
        return [i for i in self._of_shape.get(given.shape, ()) if castable(given.dtype, self._layout[i].dtype)]

    @cached_property
    def _of_shape(self) -> dict[tuple[int, ...], list[int]]:
        """Layout tensors by their shape."""
        shapes: dict[tuple[int, ...], list[int]] = {}
        for i, spec in enumerate(self._layout):
            shapes.setdefault(spec.shape, []).append(i)
        return shapes

    def _not_given(self) -> list[int]:
        """Layout tensors of which nothing was given: a set union for each of them would be quadratic."""
        given = self._accepted | self._rejected
        return [i for i in range(len(self._layout)) if i not in given]

    def followers(self, read: ReadBits) -> list[tuple[int, TiedSource]]:
        """Layout tensors that were not given and follow one that was, to be diffed when no tensor will come any more.

        Args:
            read: the layout tensors as this update has them.
        """
        held = {self._layout[i].name for i in self._accepted}
        sources = [
            (i, self._layout.index(source))
            for i in self._not_given()
            if (source := self._tied.source(self._layout[i].name, held))
        ]
        self._accepted.update(i for i, _ in sources)
        self.followed |= {self._layout[i].name: self._layout[source].name for i, source in sources}
        return [(i, TiedSource(self._layout[i], source, read)) for i, source in sources]

    def _check_tied(self, read: ReadBits) -> None:
        """Tied tensors that were both given must be equal: a server has one tensor for them."""
        for names in self._tied.pairs:
            first, second = map(self._layout.index, names)
            if {first, second} <= self._accepted and not equal_bits(first, second, spec=self._layout[first], read=read):
                self._mismatches.note(TIED, f"{names[0]} (from {names[1]})")

    def check(self) -> None:
        """Raise `Incompatible` for what is already known to be wrong; more tensors may still come."""
        self._mismatches.check(self._subject)

    def check_complete(self) -> None:
        """Raise `Incompatible` for what is known to be wrong when no tensor will come any more."""
        held = {self._layout[i].name for i in self._accepted}
        missing = [self._layout[i].name for i in self._not_given()]
        missing = [name for name in missing if not self._tied.source(name, held)]
        for name in missing:
            self._mismatches.note("missing", name)
        if missing:  # then an extra tensor that may be a copy may as well be a renamed one
            for given, _ in self._extras:
                self._mismatches.note("added", given.name)
        self.check()

    def finish(self, read: ReadBits, aliases: Callable[[Source, int], bool] = lambda source, index: False) -> None:
        """All tensors were given, with their sources. Raises `Incompatible` that lists everything wrong with them.

        Args:
            read: the layout tensors as this update has them.
            aliases: whether an extra tensor is the very memory of the one given for a layout tensor.
        """
        self._check_tied(read)
        extras, self._extras = self._extras, []
        for given, source in extras:
            assert source is not None
            candidates = [i for i in self._same_kind(given) if i in self._accepted]
            if not any(aliases(source, i) for i in candidates) and not any(
                is_copy(source, i, spec=self._layout[i], read=read) for i in candidates
            ):
                self._mismatches.note("added", given.name)
        self.check_complete()


def is_copy(source: Source, index: int, *, spec: TensorSpec, read: ReadBits) -> bool:
    """Whether `source` has exactly the bits of layout tensor `index`.

    A tensor whose elements are all alike proves nothing: a new norm of ones is no copy of another one.
    """
    step, first, constant = SEGMENT_BYTES // spec.width, None, True
    for start in range(0, spec.elements, step):
        count = min(step, spec.elements - start)
        bits = source.read(start, count, spec.dtype)
        if not np.array_equal(bits, read(index, start, count)):
            return False
        first = bits[0] if first is None else first
        constant = constant and bool((bits == first).all())
    return not constant

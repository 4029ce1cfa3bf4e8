"""One rule for names, whatever the input: an update is every tensor of the layout, once, and nothing else.

A name outside the layout is dropped only if it is a second copy of a layout tensor of the same update (a tied head)
or if `ignore` says so. Everything that does not fit is collected, so that one error lists it all.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence

import numpy as np

from dcr_daemon.canonical.fingerprint import Bits
from dcr_daemon.canonical.layout import Layout, TensorSpec
from dcr_daemon.codec.chunk import SEGMENT_BYTES
from dcr_daemon.projection.mismatches import MISMATCHES, LayoutMismatches
from dcr_daemon.projection.values import castable, rounds
from dcr_daemon.publish.inputs.sources import Source
from dcr_daemon.wording import shorten

#: `(layout index, first element, elements)` -> lanes of the canonical dtype, as this update has them
ReadBits = Callable[[int, int, int], Bits]


class UpdateValidator:
    """The inputs of one update, checked as they come.

    Args:
        what: the update in words, for errors.
        ignore: globs of names outside the layout to drop.
    """

    def __init__(self, what: str, layout: Layout, ignore: Sequence[str] = ()) -> None:
        self._layout, self._misfits = layout, LayoutMismatches(what, layout, ignore)
        self._seen: set[int] = set()
        self._unfit: set[int] = set()
        self._extras: list[Source] = []
        #: (given, canonical) -> tensors that will be rounded
        self.rounded: Counter[tuple[str, str]] = Counter()

    def take(self, source: Source) -> int | None:
        """The layout index of an input to be diffed; None if it is extra, ignored or wrong."""
        given = source.given
        if given.name not in self._layout:
            self._take_extra(source)
            return None
        index = self._layout.index(given.name)
        spec = self._layout[index]
        if index in self._seen:
            self._misfits.note("given twice", given.name)
        elif not castable(given.dtype, spec.dtype):
            self._unfit.add(index)
            self._misfits.note("retyped", f"{given.name} (is {given.dtype}, should be {spec.dtype})")
        elif given.shape != spec.shape:
            self._unfit.add(index)
            self._misfits.note("reshaped", f"{given.name} (is {list(given.shape)}, should be {list(spec.shape)})")
        else:
            self._seen.add(index)
            if rounds(given.dtype, spec.dtype):
                self.rounded[given.dtype, spec.dtype] += 1
            return index
        return None

    def _take_extra(self, source: Source) -> None:
        name = source.given.name
        if self._misfits.ignores(name):
            return
        if self._twins(source.given):
            self._extras.append(source)
        else:
            self._misfits.note("added", name)

    def _twins(self, given: TensorSpec) -> list[int]:
        """Layout tensors of which `given` may be a second copy."""
        return [i for i, s in enumerate(self._layout) if s.shape == given.shape and castable(given.dtype, s.dtype)]

    @property
    def missing(self) -> list[str]:
        """Layout tensors not given so far."""
        return [spec.name for i, spec in enumerate(self._layout) if i not in self._seen | self._unfit]

    def check(self) -> None:
        """Raise `Incompatible` for what is already known to be wrong; more may still come."""
        self._misfits.check()

    def finish(self, read: ReadBits, aliases: Callable[[Source, int], bool] = lambda source, index: False) -> None:
        """All inputs were given. Raises `Incompatible` that lists everything wrong with them.

        Args:
            read: the layout tensors as this update has them.
            aliases: whether an extra input is the very memory of the input for a layout tensor.
        """
        extras, self._extras = self._extras, []
        for source in extras:
            twins = [i for i in self._twins(source.given) if i in self._seen]
            known = any(aliases(source, i) for i in twins)
            if not known and not any(is_copy(source, i, self._layout[i], read) for i in twins):
                self._misfits.note("added", source.given.name)
        self.check_complete()

    def check_complete(self) -> None:
        """Raise `Incompatible` for what is known to be wrong, now that no input will come any more."""
        for name in self.missing:
            self._misfits.note("missing", name)
        if "missing" in self._misfits:  # then an extra that may be a copy may as well be a new name
            for source in self._extras:
                self._misfits.note("added", source.given.name)
        self.check()


def is_copy(source: Source, index: int, spec: TensorSpec, read: ReadBits) -> bool:
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


def differences(want: Layout, have: Layout) -> str:
    """In words, where `have` differs from `want`."""
    wanted, found = {s.name: s for s in want}, {s.name: s for s in have}
    groups: dict[str, Iterable[str]] = {
        "missing": [name for name in wanted if name not in found],
        "added": [name for name in found if name not in wanted],
        "retyped or reshaped": [name for name in wanted if name in found and wanted[name] != found[name]],
    }
    return "; ".join(f"{kind}: {shorten(names, limit=MISMATCHES)}" for kind, names in groups.items() if names)

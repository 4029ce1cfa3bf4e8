"""What an update is judged by costs as much as it has tensors, not the square of it."""

from __future__ import annotations

from typing import Any

import pytest

from dcr_daemon.canonical.layout import Layout, TensorSpec
from dcr_daemon.errors import Incompatible
from dcr_daemon.publish.inputs.validator import UpdateValidator

TENSORS = 2000


class CountedSet(set[int]):
    """Counts how often it was made into another set."""

    unions = 0

    def __or__(self, other: Any) -> Any:
        CountedSet.unions += 1
        return set(self).union(other)


class CountedLayout(Layout):
    """Counts how often it was gone through."""

    passes = 0

    def __iter__(self) -> Any:
        CountedLayout.passes += 1
        return super().__iter__()


def specs() -> list[TensorSpec]:
    return [TensorSpec(f"layers.{n}.weight", "BF16", (n % 7 + 1, 4)) for n in range(TENSORS)]


def test_missing_tensors_are_found_with_one_set() -> None:
    validator = UpdateValidator("the update", Layout(specs()))
    validator._accepted, CountedSet.unions = CountedSet(), 0
    for spec in specs()[1:]:
        assert validator.accept(spec) is not None
    assert validator.followers(lambda *_: pytest.fail("nothing is read")) == []
    with pytest.raises(Incompatible, match=r"missing: layers\.0\.weight"):
        validator.check_complete()
    assert CountedSet.unions == 2


def test_extra_tensors_do_not_each_go_through_the_layout() -> None:
    layout = CountedLayout(specs())
    validator = UpdateValidator("the update", layout)
    CountedLayout.passes = 0
    for n in range(TENSORS):
        validator.accept(TensorSpec(f"copy.{n}", "BF16", (n % 7 + 1, 4)))
    assert CountedLayout.passes == 1
    with pytest.raises(Incompatible, match="added"):
        validator.check_complete()

"""An attempt's fate is told once, in one piece, and with the reason that came first."""

from __future__ import annotations

import pytest

from dcr_daemon.errors import Fenced, StoreUnavailable, UpdateAborted, UsageError
from dcr_daemon.publish.version.fate import AttemptFate, reason_of
from dcr_daemon.publish.version.versions import SealedVersion

SEALED = SealedVersion(version=3, step=7, changed=1, elements=10, bytes=5, dense_bytes=20, seq=9)


def test_an_open_fate_is_nothing_else() -> None:
    fate = AttemptFate(3)
    assert fate.open
    assert (fate.sealed, fate.error, fate.unknown, fate.aborted) == (None, None, False, False)
    with pytest.raises(TimeoutError):
        fate.wait(0)


def test_the_first_decision_stands() -> None:
    fate = AttemptFate(3)
    fate.set_sealed(SEALED)
    fate.set_aborted("too late")
    assert fate.wait(0) is SEALED
    assert not fate.aborted


def test_an_unknown_fate_is_decided_later_and_never_seems_aborted_before() -> None:
    fate = AttemptFate(3)
    fate.set_unknown(StoreUnavailable("the bucket is silent"))
    assert fate.unknown
    assert not fate.aborted
    with pytest.raises(StoreUnavailable, match="is not known: the bucket is silent"):
        fate.wait(0)
    fate.set_sealed(SEALED)
    assert (fate.sealed, fate.unknown) == (SEALED, False)


def test_an_update_that_was_unknown_is_aborted_for_the_reason_that_came_first() -> None:
    fate = AttemptFate(3)
    fate.set_unknown(StoreUnavailable("the bucket is silent"))
    fate.set_aborted("the next update began")
    assert fate.aborted
    with pytest.raises(StoreUnavailable, match=r"^the bucket is silent$"):
        fate.wait(0)


def test_a_reason_in_the_ledger_has_the_stable_name_of_an_error() -> None:
    assert reason_of(UsageError("no such rank", hint="give rank=")) == "Misuse: no such rank (give rank=)"
    assert reason_of(ValueError("no")) == "ValueError: no"
    assert reason_of("the trainer has ended") == "the trainer has ended"


def test_what_is_no_error_of_ours_becomes_one() -> None:
    fate = AttemptFate(3)
    fate.set_aborted(ValueError("no"))
    assert isinstance(fate.error, UpdateAborted)
    other = AttemptFate(4)
    other.set_aborted(Fenced("claimed by another"))
    assert isinstance(other.error, Fenced)

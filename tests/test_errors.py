"""What callers rely on of the errors: names, kinds and exit codes."""

from __future__ import annotations

import pytest

from dcr_daemon import errors


@pytest.mark.parametrize(
    ("old", "present"),
    [
        ("Misuse", errors.UsageError),
        ("Exhausted", errors.ResourceExhausted),
        ("Given", errors.UpdateAborted),
        ("Missing", errors.KeyNotFound),
    ],
)
def test_an_old_name_is_an_alias_that_warns(old: str, present: type[Exception]) -> None:
    with pytest.warns(DeprecationWarning, match=present.__name__):
        assert getattr(errors, old) is present


def test_another_name_is_no_attribute() -> None:
    with pytest.raises(AttributeError, match="Nonsense"):
        getattr(errors, "Nonsense")  # noqa: B009  the attribute does not exist, which mypy would say


def test_kinds_and_exit_codes_do_not_change() -> None:
    kinds = {
        kind.kind: kind.exit_code for kind in errors.DcrError.__subclasses__() if kind.__module__ == errors.__name__
    }
    assert kinds == {
        "Misuse": 2, "Incompatible": 10, "NotFound": 11, "Fenced": 12, "Corrupt": 13, "Exhausted": 14,
        "StoreUnavailable": 15, "EngineRefused": 16, "InputIncomplete": 17, "Given": 1,
    }  # fmt: skip

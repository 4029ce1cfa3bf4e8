"""Rates, times, shares and counts as people write them."""

from __future__ import annotations

import pytest

from dcr_daemon.cli.units import count, duration, fraction, link_rate
from dcr_daemon.errors import UsageError


@pytest.mark.parametrize(
    ("text", "rate"),
    [("10Gbps", 1.25e9), ("200Mbit/s", 25e6), ("1.25GB/s", 1.25e9), ("1 gbps", 125e6), ("8b/s", 1.0), ("5B/s", 5.0)],
)
def test_rates_are_bytes_per_second(text: str, rate: float) -> None:
    assert link_rate(text) == rate


def test_times_shares_and_counts() -> None:
    assert (duration("50ms"), duration("0.05"), duration("2s")) == (0.05, 0.05, 2.0)
    assert (fraction("1%"), fraction("0.03")) == (0.01, 0.03)
    assert (count("1T"), count("7.5B"), count("380M"), count("12")) == (1e12, 7.5e9, 380e6, 12)


@pytest.mark.parametrize(
    "text", ["", "fast", "10", "10G", "-1Gbps", "10XB/s", "0bps", "0.0Gbps", "1e400Gbps", "1e308GB/s"]
)
def test_what_is_no_rate_is_refused(text: str) -> None:
    with pytest.raises(UsageError):
        link_rate(text)


@pytest.mark.parametrize(
    ("parse", "text"),
    [(duration, "5m"), (duration, "1e400"), (fraction, "120%"), (fraction, "2"), (count, "7X"), (count, "0"),
     (count, "1e400"), (count, "1e300T")],
)  # fmt: skip
def test_other_units_are_refused(parse: object, text: str) -> None:
    with pytest.raises(UsageError):
        parse(text)  # type: ignore[operator]

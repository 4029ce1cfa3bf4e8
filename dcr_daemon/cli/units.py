"""Quantities on the command line: rates of links, times, shares, counts."""

from __future__ import annotations

import math
import re

from dcr_daemon.errors import UsageError

_NUMBER = re.compile(r"\s*([0-9]*\.?[0-9]+(?:e[0-9]+)?)\s*([a-z%/]*)\s*", re.IGNORECASE)
_PREFIX = {"": 1.0, "k": 1e3, "m": 1e6, "g": 1e9, "t": 1e12}
_RATE = re.compile(r"([kKmMgGtT]?)(bps|bit/s|b/s|B/s)")
_TIMES = {"": 1.0, "s": 1.0, "ms": 1e-3, "us": 1e-6}
_COUNTS = _PREFIX | {"b": 1e9}


def link_rate(text: str) -> float:
    """Bytes per second of `10Gbps`, `200Mbit/s`, `1.25GB/s`; more than 0.

    Raises:
        UsageError: it is none of these.
    """
    number, unit = _parse(text, "10Gbps, 200Mbit/s or 1.25GB/s")
    match = _RATE.fullmatch(unit)
    rate = number * _PREFIX[match[1].lower()] / (1 if match[2] == "B/s" else 8) if match else 0.0
    if not 0 < rate < math.inf:
        raise UsageError(f"{text!r} is no rate of a link", hint="e.g. 10Gbps, 200Mbit/s or 1.25GB/s")
    return rate


def duration(text: str) -> float:
    """Seconds of `50ms`, `0.05`, `2s`."""
    number, unit = _parse(text, "50ms or 0.05")
    if unit.lower() not in _TIMES:
        raise UsageError(f"{text!r} is no time", hint="e.g. 50ms or 0.05")
    return number * _TIMES[unit.lower()]


def fraction(text: str) -> float:
    """A number from 0 to 1 of `1%`, `0.01`."""
    number, unit = _parse(text, "1% or 0.01")
    value = number / 100 if unit == "%" else number
    if unit not in ("", "%") or not 0 <= value <= 1:
        raise UsageError(f"{text!r} is no share", hint="e.g. 1% or 0.01")
    return value


def count(text: str) -> float:
    """A number above 0 of `1T`, `7B`, `380M`, `1000000`."""
    number, unit = _parse(text, "1T, 7B or 380M")
    value = number * _COUNTS.get(unit.lower(), 0.0)
    if not 0 < value < math.inf:
        raise UsageError(f"{text!r} is no number", hint="e.g. 1T, 7B or 380M")
    return value


def _parse(text: str, example: str) -> tuple[float, str]:
    match = _NUMBER.fullmatch(text)
    if not match or float(match[1]) == math.inf:
        raise UsageError(f"{text!r} is not understood", hint=f"e.g. {example}")
    return float(match[1]), match[2]

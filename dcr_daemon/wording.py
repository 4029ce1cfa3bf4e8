"""How lists of names are written in messages, so that an error about 10,000 tensors stays readable."""

from __future__ import annotations

from collections.abc import Iterable

LIMIT = 12  #: names that a message shows


def shorten(names: Iterable[object], *, limit: int = LIMIT, separator: str = ", ") -> str:
    """The first `limit` names, then how many more there are.

    Example:
        >>> shorten(["a", "b", "c", "d"], limit=2)
        'a, b and 2 more'
        >>> shorten(["x: gone", "y: gone"], limit=1, separator="; ")
        'x: gone; and 1 more'
    """
    shown = [str(name) for name in names]
    more = f"{separator.replace(',', '')}and {len(shown) - limit} more" if len(shown) > limit else ""
    return separator.join(shown[:limit]) + more


def shorten_ranks(ranks: Iterable[int]) -> str:
    """Ranks as ranges, ascending: "rank 5", "ranks 0-3, 7, 9"."""
    ordered = sorted(ranks)
    ranges: list[list[int]] = []
    for rank in ordered:
        if ranges and rank == ranges[-1][1] + 1:
            ranges[-1][1] = rank
        else:
            ranges.append([rank, rank])
    shown = shorten(f"{lo}" if lo == hi else f"{lo}-{hi}" for lo, hi in ranges)
    return f"rank{'s' if len(ordered) > 1 else ''} {shown}"

"""Lists of names in messages."""

from __future__ import annotations

from dcr_daemon.wording import shorten, shorten_ranks


def test_a_long_list_of_names_is_cut_and_counted() -> None:
    assert shorten(f"t{i}" for i in range(12)).endswith("t10, t11")
    assert shorten(f"t{i}" for i in range(15)).endswith("t11 and 3 more")
    assert shorten(["x: gone", "y: gone"], limit=1, separator="; ") == "x: gone; and 1 more"
    assert shorten([]) == ""


def test_ranks_are_written_as_ranges() -> None:
    assert shorten_ranks([5]) == "rank 5"
    assert shorten_ranks([9, 2, 1, 0]) == "ranks 0-2, 9"
    assert shorten_ranks(range(0, 40, 2)).endswith("22 and 8 more")

"""Names in messages: many of them, and hostile ones."""

from __future__ import annotations

import json
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from dcr_daemon.wording import cut, json_line, printable, shorten, shorten_ranks


def test_a_long_list_of_names_is_cut_and_counted() -> None:
    assert shorten(f"t{i}" for i in range(12)).endswith("t10, t11")
    assert shorten(f"t{i}" for i in range(15)).endswith("t11 and 3 more")
    assert shorten(["x: gone", "y: gone"], limit=1, separator="; ") == "x: gone; and 1 more"
    assert shorten([]) == ""


def test_ranks_are_written_as_ranges() -> None:
    assert shorten_ranks([5]) == "rank 5"
    assert shorten_ranks([9, 2, 1, 0]) == "ranks 0-2, 9"
    assert shorten_ranks(range(0, 40, 2)).endswith("22 and 8 more")


HOSTILE = "\x1b[31mred\x1b]0;title\x07\r\n\u202egnp.\u2028\x9b\udcff\U000e0001"


def test_nothing_in_a_name_controls_a_terminal_or_ends_a_line() -> None:
    shown = printable(HOSTILE)
    assert shown == r"\x1b[31mred\x1b]0;title\x07\r\n\u202egnp.\u2028\x9b\udcff\U000e0001"
    assert printable("plain, ünïcode, 模型 and spaces") == "plain, ünïcode, 模型 and spaces"


@given(st.text(st.characters(exclude_categories=[])))
def test_json_has_the_exact_text_and_only_printable_characters(text: str) -> None:
    line = json_line({"name": text, "path": Path("/x")})
    assert line.isprintable()
    assert json.loads(line) == {"name": text, "path": "/x"}
    assert printable(text).isprintable()


def test_what_a_cut_leaves_out_is_counted() -> None:
    assert cut("abcdef", 6) == "abcdef"
    assert cut("abcdefg", 6) == "abcdef… and 1 more characters"

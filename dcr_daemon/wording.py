"""How names and texts from outside are written in messages.

Lists are cut, so that an error about 10,000 tensors stays readable. Control characters are escaped, since a name is
anybody's: of a directory, a tensor, a replica. That is done where a text leaves the process (a terminal, a log), so
errors, events and records have the exact names.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from typing import Any

import msgspec

LIMIT = 12  #: names that a message shows
LINE_BYTES = 16 << 10  #: of a line that is printed or logged

_NOT_ASCII = re.compile(r"[^ -~]")


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


def printable(text: str) -> str:
    """`text` as one line without control characters, bidirectional controls and other invisible characters: they are
    escaped as in Python. No text can move a terminal's cursor, colour it, or add a line to a log.

    Example:
        >>> print(printable("step\x1b[31m-5\\nsealed"))
        step\x1b[31m-5\nsealed
    """
    return text if text.isprintable() else _NOT_ASCII.sub(lambda found: _escape(found[0], as_json=False), text)


def json_line(value: Any) -> str:
    """`value` as compact JSON with the same escapes, so that it decodes to the exact names; objects of unknown types as
    text. A file name that is not UTF-8 has lone surrogates, as Python shows it."""
    try:
        document = msgspec.json.encode(value, enc_hook=str).decode()
    except UnicodeEncodeError:
        return json.dumps(msgspec.to_builtins(value, enc_hook=str), separators=(",", ":"))
    return (
        document if document.isprintable() else _NOT_ASCII.sub(lambda found: _escape(found[0], as_json=True), document)
    )


def _escape(character: str, *, as_json: bool) -> str:
    if character.isprintable():
        return character
    if not as_json:
        return character.encode("unicode_escape").decode()
    units = character.encode("utf-16-be", "surrogatepass").hex()
    return "".join(f"\\u{units[at : at + 4]}" for at in range(0, len(units), 4))


def cut(text: str, limit: int) -> str:
    """The first `limit` characters, then how many more there are."""
    return text if len(text) <= limit else f"{text[:limit]}… and {len(text) - limit} more characters"

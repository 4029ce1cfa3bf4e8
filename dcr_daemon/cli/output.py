"""What commands print: results on stdout; errors on stderr, with --json as one JSON object each.

Whatever is printed may hold names from outside; their control characters are escaped here (`wording.printable`).
"""

from __future__ import annotations

import contextlib
import re
import sys
from collections.abc import Iterable, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from dcr_daemon.errors import ResourceExhausted
from dcr_daemon.observe.streams import put
from dcr_daemon.wording import LINE_BYTES, cut, json_line, printable

_WIDEST = 250  #: characters of a table
_PADDING = re.compile(r"[ ]+((?:\x1b\[[0-9;]*m[ ]*)*)$", re.MULTILINE)  #: at the end of a line, inside its colours too


def wants_json(arguments: Sequence[str]) -> bool:
    """Whether --json is among the arguments. Known before they are parsed, so that a usage error is JSON too."""
    return "--json" in arguments


def print_json(value: Any) -> None:
    """One compact JSON document and a newline on stdout."""
    _put(json_line(value) + "\n")


def print_table(columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> None:
    """A table for people on stdout. Columns whose name ends in a blank are aligned right."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in columns:
        table.add_column(column.strip(), justify="right" if column.endswith(" ") else "left", overflow="fold")
    for row in rows:
        table.add_row(*("" if cell is None else printable(str(cell)) for cell in row))
    # Wider than a terminal: one wrapped line reads better than folded cells.
    console = Console(width=_WIDEST, markup=False, emoji=False)
    with console.capture() as text:
        console.print(table)
    # rich pads the last column too: after one long cell, padded rows would wrap into blank lines.
    _put(_PADDING.sub(r"\1", text.get()))


def clear_screen(wanted: bool) -> None:
    """Before something that is shown anew: clear a terminal; anywhere else nothing."""
    if wanted and sys.stdout.isatty():
        _put("\x1b[H\x1b[2J\x1b[3J")


def print_fields(fields: dict[str, Any]) -> None:
    """Name and value per line on stdout."""
    width = max(len(name) for name in fields)
    _put(
        "".join(
            f"{name:<{width}}  {'-' if value is None else printable(str(value))}\n" for name, value in fields.items()
        )
    )


def _put(text: str) -> None:
    """Write to stdout. If the reader has closed it (`| head`), the text is dropped; the exit code stays."""
    try:
        put(sys.stdout, text)
    except OSError as error:
        raise ResourceExhausted(f"stdout cannot be written: {error.strerror or error}") from error


def report_error(message: str, hint: str, kind: str, code: int, *, json: bool) -> int:
    """Print an error and its hint on stderr; returns `code`."""
    if json:
        error = {"error": {"kind": kind, "message": message, "hint": hint, "exit_code": code}}
        text = json_line(error) + "\n"
    else:
        text = f"dcr: {_line(message)}\n" + (f"     → {_line(hint)}\n" if hint else "")
    with contextlib.suppress(OSError):  # the exit code reports it too
        put(sys.stderr, text)
    return code


def _line(text: str) -> str:
    return cut(printable(text), LINE_BYTES)


def size(count: float) -> str:
    """Bytes for people: 1,234 B, 4.2 MB."""
    if count < 10_000:
        return f"{count:,.0f} B"
    for unit in ("kB", "MB", "GB"):
        count /= 1000
        if count < 1000:
            return f"{count:.1f} {unit}"
    return f"{count / 1000:.1f} TB"


def clock(at: str | None) -> str:
    """A time of a record for people, UTC: 2026-01-31 23:59:59; nothing if there is none."""
    return (at or "")[:19].replace("T", " ")


def share(part: float, whole: float) -> str:
    """`part` of `whole` as a percentage; `-` if `whole` is 0."""
    return f"{part / whole:.3%}" if whole else "-"

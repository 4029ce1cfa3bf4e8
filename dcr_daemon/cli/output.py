"""How commands speak: results on stdout, people's things on stderr, one JSON object per error with --json."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec
from rich.console import Console
from rich.table import Table


def wants_json(arguments: Sequence[str]) -> bool:
    """Whether --json stands among the arguments; asked before they are parsed, for errors in parsing."""
    return "--json" in arguments


def print_json(value: Any) -> None:
    """One compact JSON document and a newline on stdout."""
    sys.stdout.write(msgspec.json.encode(value, enc_hook=str).decode() + "\n")
    sys.stdout.flush()


def print_table(columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> None:
    """A table for people on stdout. Columns whose name ends in a blank are aligned right."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in columns:
        table.add_column(column.strip(), justify="right" if column.endswith(" ") else "left", overflow="fold")
    for row in rows:
        table.add_row(*("" if cell is None else str(cell) for cell in row))
    Console(width=None if sys.stdout.isatty() else 250).print(table)


def print_fields(fields: dict[str, Any]) -> None:
    """Name and value per line on stdout."""
    width = max(len(name) for name in fields)
    for name, value in fields.items():
        sys.stdout.write(f"{name:<{width}}  {'-' if value is None else value}\n")


def report_error(message: str, hint: str, kind: str, code: int, *, json: bool) -> int:
    """Say what went wrong and what to do next, on stderr; returns `code`."""
    if json:
        error = {"error": {"kind": kind, "message": message, "hint": hint, "exit_code": code}}
        sys.stderr.write(msgspec.json.encode(error).decode() + "\n")
    else:
        sys.stderr.write(f"dcr: {message}\n" + (f"     → {hint}\n" if hint else ""))
    sys.stderr.flush()
    return code


def size(count: float) -> str:
    """Bytes for people: 1,234 B, 4.2 MB."""
    if count < 10_000:
        return f"{count:,.0f} B"
    for unit in ("kB", "MB", "GB"):
        count /= 1000
        if count < 1000:
            return f"{count:.1f} {unit}"
    return f"{count / 1000:.1f} TB"


def share(part: float, whole: float) -> str:
    """A percentage, or nothing to divide by."""
    return f"{part / whole:.3%}" if whole else "-"

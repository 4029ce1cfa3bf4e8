"""Plots as self-contained SVG, without a library: horizontal bars, stacked, each with what it stands for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape

_WIDTH, _LEFT, _RIGHT, _ROW, _TOP = 900, 230, 70, 26, 62
_COLOURS = (
    "#2f7ed8",
    "#f28f43",
    "#8bbc21",
    "#c42525",
    "#77a1e5",
    "#0d9488",
    "#a6517f",
    "#c9a227",
    "#9aa5b1",
    "#6b4c9a",
)


@dataclass(frozen=True, slots=True)
class Bar:
    """`parts` by name lie one behind the other; `mark` is a value that a line shows."""

    name: str
    parts: Mapping[str, float]
    mark: float | None = None


def bars(title: str, unit: str, rows: Sequence[Bar], *, mark: str = "") -> str:
    """An SVG document. `mark` names what the line of each bar is."""
    names = list(dict.fromkeys(name for row in rows for name in row.parts))
    colours = {name: _COLOURS[n % len(_COLOURS)] for n, name in enumerate(names)}
    top = max(max(sum(row.parts.values()), row.mark or 0.0) for row in rows) or 1.0
    scale, height = (_WIDTH - _LEFT - _RIGHT) / top, _TOP + _ROW * len(rows) + 16
    found = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" width="{_WIDTH}" height="{height}">',
        "<style>text{font:12px sans-serif;fill:#222}</style>",
        '<rect width="100%" height="100%" fill="white"/>',
        f'<text x="10" y="20" style="font-size:15px;font-weight:bold">{escape(title)}</text>',
        *_legend(colours, mark),
    ]
    for number, row in enumerate(rows):
        y, x = _TOP + _ROW * number, float(_LEFT)
        found.append(f'<text x="{_LEFT - 8}" y="{y + 15}" text-anchor="end">{escape(row.name)}</text>')
        for name, value in row.parts.items():
            tip = f"<title>{escape(f'{name}: {value:.3g} {unit}')}</title>"
            size = f'width="{max(0.0, value * scale):.1f}" height="{_ROW - 8}"'
            found.append(f'<rect x="{x:.1f}" y="{y + 2}" {size} fill="{colours[name]}">{tip}</rect>')
            x += value * scale
        found.append(f'<text x="{x + 6:.1f}" y="{y + 15}">{sum(row.parts.values()):.3g} {escape(unit)}</text>')
        if row.mark is not None:
            at = _LEFT + row.mark * scale
            found.append(f'<path d="M{at:.1f} {y}v{_ROW - 4}" stroke="#111" stroke-width="2"/>')
    return "\n".join([*found, "</svg>", ""])


def _legend(colours: Mapping[str, str], mark: str) -> list[str]:
    found, x = [], 10.0
    for name, colour in colours.items():
        found.append(f'<rect x="{x:.0f}" y="32" width="12" height="12" fill="{colour}"/>')
        found.append(f'<text x="{x + 16:.0f}" y="43">{escape(name)}</text>')
        x += 30 + 7 * len(name)
    if mark:
        found.append(f'<path d="M{x + 4:.0f} 31v14" stroke="#111" stroke-width="2"/>')
        found.append(f'<text x="{x + 12:.0f}" y="43">{escape(mark)}</text>')
    return found

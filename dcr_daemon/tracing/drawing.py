"""Draws refits as one self-contained SVG: a panel per version, a band per process, a row per phase, over time."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from dcr_daemon.tracing.refits import PHASES, Refit
from dcr_daemon.tracing.timeline import Slice

WIDTH = 1200
_LEFT, _RIGHT, _ROW, _HEAD = 190, 20, 16, 46  #: pixels: of names, of a margin, of a row, of a panel's title and axis
_COLOURS = {
    "open": "#9aa5b1", "construct": "#2f7ed8", "upload": "#1aadce", "seal": "#77a1e5", "see": "#b0b0b0",
    "download": "#0d9488", "stage": "#8bbc21", "prepare": "#f28f43", "rest": "#e5c07b", "begin": "#c9a227",
    "apply": "#c42525", "sums": "#a6517f", "commit": "#6b4c9a", "resume": "#d98cb3",
}  # fmt: skip


def draw(refits: Sequence[Refit], *, rate: float | None = None, rtt: float = 0.0) -> str:
    """An SVG document; with `rate` (bytes per second) each panel also shows the lower bound as a line."""
    panels, top = list[str](), 10
    for refit in refits:
        panel, height = _panel(refit, top, refit.lower_bound(rate, rtt) if rate else None)
        panels += panel
        top += height
    style = "text{font:11px sans-serif;fill:#222}.t{font-size:14px;font-weight:bold}.p{font-weight:bold}"
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{top + 10}" '
            f'viewBox="0 0 {WIDTH} {top + 10}">',
            f'<style>{style}</style><rect width="100%" height="100%" fill="white"/>',
            *panels,
            "</svg>",
            "",
        ]
    )


def as_page(svg: str) -> str:
    """The SVG in an HTML document."""
    head = '<!doctype html>\n<html lang="en"><meta charset="utf-8"><title>dcr trace</title>'
    return f"{head}\n<body>\n{svg}</body></html>\n"


def _panel(refit: Refit, top: int, bound: float | None) -> tuple[list[str], int]:
    """The panel's elements, and its height."""
    scale = (WIDTH - _LEFT - _RIGHT) / (refit.seconds or 1e-6)
    title = f"version {refit.version}: {refit.seconds:.3f} s"
    if refit.bytes is not None:
        title += f", {refit.bytes:,} bytes"
    if bound:
        title += f", lower bound {bound:.3f} s ({refit.seconds / bound:.2f} ×)"
    found = [f'<text class="t" x="10" y="{top + 16}">{escape(title)}</text>']
    y = top + _HEAD
    for process in dict.fromkeys(one.process for one in refit.slices):
        mine = [one for one in refit.slices if one.process == process]
        found.append(f'<text class="p" x="10" y="{y + 12}">{escape(process)}</text>')
        y += _ROW
        for name in PHASES:
            row = [one for one in mine if one.name == name and not one.instant]
            if row:
                found.append(f'<text x="24" y="{y + 12}">{name}</text>')
                found += [_bar(one, refit.begin, scale, y) for one in row]
                y += _ROW
    axis = _axis(refit, scale, top + _HEAD - 8, y)
    if bound:
        x = _LEFT + bound * scale
        axis.append(f'<path d="M{x:.1f} {top + _HEAD - 8}V{y}" stroke="#d00" stroke-dasharray="4 3" fill="none"/>')
    return axis + found, y - top + 14


def _bar(one: Slice, begin: float, scale: float, y: int) -> str:
    x, width = _LEFT + (one.begin - begin) * scale, max(1.0, (one.end - one.begin) * scale)
    facts = ", ".join(f"{key} {value}" for key, value in one.args.items() if key != "version")
    tip = escape(f"{one.name} {one.end - one.begin:.4f} s, {facts}")
    colour = _COLOURS[one.name]
    return (
        f'<rect x="{x:.1f}" y="{y + 2}" width="{width:.1f}" height="{_ROW - 4}" fill="{colour}" fill-opacity="0.8">'
        f"<title>{tip}</title></rect>"
    )


def _axis(refit: Refit, scale: float, top: int, bottom: int) -> list[str]:
    step = _tick(refit.seconds)
    found = []
    for number in range(int(refit.seconds / step) + 1):
        x = _LEFT + number * step * scale
        found.append(f'<path d="M{x:.1f} {top}V{bottom}" stroke="#ddd" fill="none"/>')
        found.append(f'<text x="{x + 2:.1f}" y="{top}">{number * step:g} s</text>')
    return found


def _tick(seconds: float) -> float:
    """A step of 1, 2 or 5 times a power of ten, at most twelve of them in `seconds`."""
    step = 1e-6
    while seconds / step > 12:
        for factor in (2, 2.5, 2):
            if seconds / step > 12:
                step *= factor
    return round(step, 9)

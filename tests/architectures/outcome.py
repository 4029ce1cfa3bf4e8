"""What became of an architecture, and the table of all."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

MARKS = ("<!-- architectures -->\n", "<!-- end of architectures -->\n")
#: In the order of the table.
RESULTS = {
    "wrong": "**wrong**",
    "failed": "**failed**",
    "exact": "exact",
    "refused": "refused",
    "cannot": "vLLM cannot here",
    "no config": "no config",
}


@dataclass(frozen=True)
class Outcome:
    """`result`: a key of `RESULTS`. `tensors` of the checkpoint; vLLM's loader computes with `computed` of them."""

    architecture: str
    result: str
    why: str = ""
    tensors: int = 0
    computed: int = 0
    seconds: float = 0.0

    @property
    def bad(self) -> bool:
        return self.result in ("wrong", "failed")

    def line(self) -> str:
        text = f"{RESULTS[self.result]}{f': {self.why}' if self.why else ''}"
        counts = f", {self.tensors} tensors, {self.computed} computed" if self.tensors else ""
        return f"{self.architecture}: {text} ({self.seconds:.1f} s{counts})"


def told(outcomes: Sequence[Outcome]) -> str:
    """How many there are of each result, in words."""
    counts = {text: sum(outcome.result == result for outcome in outcomes) for result, text in RESULTS.items()}
    return ", ".join(f"{number} {text}" for text, number in counts.items() if number)


def table(outcomes: Sequence[Outcome]) -> str:
    """The outcomes as Markdown, those of one reason in one row."""
    rows: dict[tuple[str, str], list[str]] = {}
    for result in RESULTS:
        for outcome in outcomes:
            if outcome.result == result:
                note = "the loader computes some tensors" if result == "exact" and outcome.computed else outcome.why
                rows.setdefault((result, note), []).append(outcome.architecture)
    lines = [f"{len(outcomes)} architectures: {told(outcomes)}.", "", "| | why | architectures |", "|---|---|---|"]
    for (result, note), names in rows.items():
        lines.append(f"| {RESULTS[result]} | {note.replace('|', '/')} | {', '.join(names)} |")
    return "\n".join(lines) + "\n"

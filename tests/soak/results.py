"""What soaks tried: counts for a terminal, lines of JSON, and the table on docs/PROTOCOL.md."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from faults import machine
from support.faults.sampling import COMMIT

MARKS = ("<!-- soak -->\n", "<!-- end of soak -->\n")


@dataclass
class Soaked:
    """What one soak tried. `faults`: those that struck, by kind. `failure`: why its last round failed, if it did."""

    seed: int
    commit: str = COMMIT
    rounds: int = 0
    seconds: list[float] = field(default_factory=list)
    faults: dict[str, int] = field(default_factory=dict)
    versions: int = 0
    compared: int = 0
    restarts: int = 0
    failure: str = ""

    def played(self, seconds: float, faults: Sequence[str]) -> None:
        """A round has passed."""
        self.rounds += 1
        self.seconds.append(round(seconds, 2))
        for name in faults:
            self.faults[name] = self.faults.get(name, 0) + 1


def read_results(path: Path) -> list[Soaked]:
    return [Soaked(**json.loads(line)) for line in path.read_text().splitlines()]


def report(done: Sequence[Soaked]) -> str:
    """The counts, in the words that tests/faults.py reads."""
    faults, seconds = _struck(done), sorted(second for one in done for second in one.seconds)
    lines = [
        f"{_sum(done, 'rounds')} rounds, {sum(bool(one.failure) for one in done)} failed, "
        f"{sum(faults.values())} faults, {_sum(done, 'versions')} versions, {_sum(done, 'compared')} comparisons, "
        f"{_sum(done, 'restarts')} restarts",
        "struck: " + ", ".join(f"{name} {count}" for name, count in sorted(faults.items())),
    ]
    if seconds:
        lines.append(f"seconds of a round: median {seconds[len(seconds) // 2]:.1f}, most {seconds[-1]:.1f}")
    return "\n".join(lines)


def table(done: Sequence[Soaked]) -> str:
    """The counts, as Markdown."""
    commits = Counter[str]()
    for one in done:
        commits[one.commit] += one.rounds
    where = ", ".join(f"{commit} ({count:,})" for commit, count in commits.items())
    faults = sorted(_struck(done).items(), key=lambda item: -item[1])
    rows = "\n".join(f"| {name} | {count:,} |" for name, count in faults)
    failed = sum(bool(one.failure) for one in done)
    return (
        f"`tests/soak/run.py`: {_sum(done, 'rounds'):,} rounds passed, {failed} failed; "
        f"{_sum(done, 'versions'):,} versions sealed, {_sum(done, 'compared'):,} times a version was materialised and "
        f"compared, {_sum(done, 'restarts'):,} starts of a daemon that had ended. Rounds by commit: {where}; on "
        f"{machine()}.\n\n| fault | times |\n|---|---|\n{rows}\n"
    )


def _sum(done: Sequence[Soaked], name: str) -> int:
    return sum(getattr(one, name) for one in done)


def _struck(done: Sequence[Soaked]) -> Counter[str]:
    return sum((Counter(one.faults) for one in done), Counter[str]())

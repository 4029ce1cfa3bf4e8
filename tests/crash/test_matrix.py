"""kill -9 at every named instant of every daemon, once and twice: one more start, and nothing was lost.

A scene (tests/support/scenes.py) plays to its end whatever is killed; then every version is bit for bit the checkpoint
that was written, each checkpoint exactly one version, the replica at the newest, and `dcr verify` finds nothing. A
site that is never reached fails.
"""

from __future__ import annotations

import hashlib
import random
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
from forks import Nursery
from sites import IN_A_DIRECTORY, SITES, Site

pytestmark = pytest.mark.crash

EVERY_TIME = 12  #: cases of each `make test`; which ones is drawn by the commit
AT_MOST = 12  #: named instants that a second life may pass before it is killed too


@dataclass(frozen=True)
class Case:
    site: Site
    when: str
    kills: str

    @property
    def name(self) -> str:
        scene = self.site.scene.__name__.removesuffix("Scene").lower()
        return f"{self.site.role}-{scene}-{self.site.name}-{self.when}-{self.kills}"

    @property
    def failpoints(self) -> list[str]:
        """The second kill falls on whatever the next life passes, somewhere near its start."""
        first = self.site.failpoints(self.when)
        if self.kills == "single":
            return first
        return [*first, f"*:{random.Random(self.name).randint(1, AT_MOST)}"]


CASES = [Case(site, when, kills) for site in SITES for when in site.passes for kills in ("single", "double")]


def commit() -> str:
    """The commit that is tested; outside of a checkout always the same word."""
    here = Path(__file__).parent
    found = subprocess.run(["git", "rev-parse", "HEAD"], cwd=here, capture_output=True, text=True, check=False)
    return found.stdout.strip()[:12] or "released"


def drawn(cases: list[Case], word: str) -> set[str]:
    """The cases that every run tries: of all roles, no site twice."""
    order = sorted(cases, key=lambda case: hashlib.sha256(f"{word} {case.name}".encode()).digest())
    sites = {}
    for case in order:
        sites.setdefault((case.site.role, case.site.name), case)
    return {case.name for case in list(sites.values())[:EVERY_TIME]}


COMMIT = commit()
DRAWN = drawn(CASES, COMMIT)


def parameters() -> list[object]:
    return [
        pytest.param(case, id=f"{case.name}@{COMMIT}" if case.name in DRAWN else case.name, marks=_marks(case))
        for case in CASES
    ]


def _marks(case: Case) -> list[pytest.MarkDecorator]:
    return [] if case.name in DRAWN else [pytest.mark.faults]


@pytest.fixture
def url_for(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[[Site], str]:
    """A stream in a real bucket, unless only one in a directory passes the site."""

    def make(site: Site) -> str:
        if site.name in IN_A_DIRECTORY:
            return (tmp_path / "bucket").as_uri()
        return request.getfixturevalue("s3_stream")

    return make


@pytest.mark.parametrize("case", parameters())
async def test_whatever_is_killed_comes_back_by_itself(
    case: Case, nursery: Nursery, tmp_path: Path, url_for: Callable[[Site], str]
) -> None:
    scene = case.site.scene(nursery, tmp_path, url_for(case.site), case.failpoints)
    await scene.play()

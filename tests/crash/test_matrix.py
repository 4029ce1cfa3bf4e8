"""kill -9 at every named instant of every daemon, once and twice: one more start, and nothing was lost.

A scene (tests/support/faults/crash_scenes.py) plays to its end whatever is killed; then every version is bit for bit
the checkpoint that was written, each checkpoint exactly one version, the replica at the newest, and `dcr verify` finds
nothing. A site that is never reached fails.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
from support.faults.crash_sites import IN_A_DIRECTORY, SITES, Site
from support.faults.sampling import parameters
from support.processes.fork_server import ForkServer

pytestmark = pytest.mark.crash

EVERY_TIME = 12  #: cases of each `make test`


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
        return [*first, f"*:{random.Random(self.name).randint(1, self.site.second)}"]


CASES = [Case(site, when, kills) for site in SITES for when in site.passes for kills in site.kills]


@pytest.fixture
def url_for(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[[Site], str]:
    """A stream in a real bucket, unless only one in a directory passes the site."""

    def make(site: Site) -> str:
        if site.name in IN_A_DIRECTORY:
            return (tmp_path / "bucket").as_uri()
        return request.getfixturevalue("s3_stream")

    return make


@pytest.mark.parametrize(
    "case",
    parameters(CASES, EVERY_TIME, name=lambda case: case.name, group=lambda case: (case.site.role, case.site.name)),
)
async def test_whatever_is_killed_comes_back_by_itself(
    case: Case,
    fork_server: ForkServer,
    tmp_path: Path,
    url_for: Callable[[Site], str],
    record_property: Callable[[str, object], None],
) -> None:
    scene = case.site.scene(fork_server, tmp_path, url_for(case.site), case.failpoints)
    await scene.play()
    record_property("site", f"{case.site.role} {case.site.name}")
    record_property("kills", scene.kills)

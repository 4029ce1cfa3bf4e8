"""kill -9 at instants that nobody chose: the n-th named one that a life passes, whatever it is, for n after n.

`DCR_SWEEP` is the distance between two of them: 1 tries every instant of every scene.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from pathlib import Path

import pytest
from support.faults.crash_scenes import (
    CollectingScene,
    LoadingScene,
    PublisherScene,
    RestoringScene,
    Scene,
    SpoolingScene,
    SubscriberScene,
)
from support.faults.sampling import COMMIT
from support.processes.fork_server import ForkServer

pytestmark = [pytest.mark.crash, pytest.mark.faults, pytest.mark.timeout(7200)]

STRIDE = int(os.environ.get("DCR_SWEEP", "25"))
SURE = 0.8  #: of the instants that one life passed: another may take fewer turns
SECOND = 12  #: instants that the next life passes at most before it is killed too


@pytest.mark.parametrize(
    "kind", [PublisherScene, SpoolingScene, RestoringScene, CollectingScene, SubscriberScene, LoadingScene]
)
async def test_any_instant_will_do(
    kind: type[Scene], fork_server: ForkServer, tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    def scene(name: str, *failpoints: str) -> Scene:
        home = tmp_path / name
        home.mkdir()
        return kind(fork_server, home, (home / "bucket").as_uri(), failpoints)

    uncut, passed = scene("uncut"), tmp_path / "passed"
    uncut.environ["DCR_TEST_PASSED"] = str(passed)
    await uncut.play()
    count = int(len(passed.read_text().split()) * SURE)
    draw = random.Random(f"{COMMIT} {kind.__name__}")
    instants = range(draw.randint(1, min(STRIDE, count)), count + 1, STRIDE)
    for n in instants:
        await scene(f"at-{n}", f"*:{n}", f"*:{draw.randint(1, SECOND)}").play()
    record_property("kills", 2 * len(instants))

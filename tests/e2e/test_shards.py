"""Four training ranks → SeaweedFS → real vLLM on two: five real steps, each served; every bit that of the export.

The ranks run under torchrun (tests/support/ranks/programs/training.py), dense under FSDP2 over tensor parallelism, the
mixture under FSDP2; the servers cut the model otherwise. In the end the server loads the framework's own export of the
last step through vLLM's own loader, with another version in between, and every parameter must be what the deltas had
made.
"""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm")

from support.ranks.launch import quiet, torchrun
from support.ranks.stream_checks import check_stream, weights_of
from support.ranks.training_cases import BY_NAME
from support.stores.seaweed import Seaweed, set_environment
from support.vllm.server import ModelVersions, Rig, rig

from dcr_daemon.engine.port import Verdict
from dcr_daemon.engine.vllm_client import VllmEngine
from dcr_demo.models import write_tiny
from dcr_demo.proof import checksums
from dcr_demo.scene import Scene

pytestmark = [pytest.mark.vllm, pytest.mark.seaweed, pytest.mark.slow]

WORLD, STEPS = 4, 5


@pytest.fixture(scope="module")
def dense_on_two(short_tmp: Path) -> Iterator[Rig]:
    """A tiny Qwen3 on two workers."""
    model = write_tiny(short_tmp / "dense-two-model")
    with rig(model, short_tmp / "two", "dense-two", tensor_parallel=2) as made:
        yield made


@pytest.fixture
def scene(seaweed: Seaweed, monkeypatch: pytest.MonkeyPatch) -> Iterator[Scene]:
    set_environment(monkeypatch, seaweed)
    with tempfile.TemporaryDirectory(prefix="dcr-") as work, Scene(Path(work), Path(), stream=seaweed.stream()) as made:
        yield made


@pytest.mark.parametrize(("case", "server"), [("served_dense", "dense_on_two"), ("served_moe", "moe")])
def test_a_server_is_bit_for_bit_what_the_ranks_trained(
    case: str, server: str, scene: Scene, request: pytest.FixtureRequest
) -> None:
    served: Rig = request.getfixturevalue(server)
    asyncio.run(served.own_at(0))
    before = checksums(served.server.socket)
    place = scene.work / case
    refitted = trained_and_served(scene, served, case, place)
    assert len(refitted) == 2
    assert all(a.keys() == b.keys() and a != b for a, b in zip(before, refitted, strict=True))
    exports = {step: weights_of(place / f"step-{step}") for step in range(1, STEPS + 1)}
    told = asyncio.run(check_stream(scene.stream, scene.work / "materialised", exports))
    assert [len(one.parts) for one in told] == [WORLD] * STEPS
    assert asyncio.run(loaded(served, exports[STEPS], scene.work)) == [before, refitted]


def trained_and_served(scene: Scene, served: Rig, case: str, place: Path) -> list[dict[str, str]]:
    """Train, step by step, each served before the next begins; the server's checksums in the end."""
    place.mkdir()
    options = ["--base", str(served.server.model), "--stream", scene.stream, "--gated"]
    assert BY_NAME[case].world == WORLD
    trainers = scene.start(
        "trainers", torchrun(WORLD, "support.ranks.programs.training", str(scene.work), case, *options), quiet()
    )
    scene.wait(lambda: (place / "step-0").exists(), "the trainers")
    events = scene.subscriber(served.server.engine)
    for step in range(1, STEPS + 1):
        (place / f"go-{step}").touch()
        scene.wait(events.has("Committed", version=step), f"version {step} to be served")
    scene.processes.remove(trainers)
    assert trainers.wait(60) == 0, trainers.tail()
    refitted = checksums(served.server.socket)
    for process in list(scene.processes):
        scene.stop(process)
    return refitted


async def loaded(served: Rig, export: dict[str, Any], work: Path) -> list[list[dict[str, str]]]:
    """Checksums after vLLM's own loader has read version 0, and after it has read an export."""
    home = work / "exports"
    home.mkdir()
    versions = ModelVersions(home, served.server.model)
    versions.put(export)
    engine, found = VllmEngine(served.server.socket), []
    await engine.attach(versions.facts())
    for version in (0, 1):
        done = await engine.load(version, versions.anchor(version), versions.vector_file(version), f"v{version}")
        assert done.verdict is Verdict.COMMITTED, done
        found.append(await asyncio.to_thread(checksums, served.server.socket))
    await engine.close()
    return found

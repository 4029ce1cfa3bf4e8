"""A version is on its way while it is still being written, and fetched while it is still being sent."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("safetensors")

import torch

from dcr_daemon import runtime
from dcr_demo.models import write_sharded
from dcr_demo.scene import Scene

pytestmark = [pytest.mark.seaweed]

SHARDS = 16
SHARD_BYTES = 4 << 20


def checkpoint(seed: int) -> list[tuple[str, torch.Tensor]]:
    """Random bits: incompressible, and different everywhere from one seed to the next."""
    random = torch.Generator().manual_seed(seed)
    shape = (SHARD_BYTES // 2 // 1024, 1024)
    return [
        (f"layers.{n:02d}.weight", torch.randint(-30000, 30000, shape, generator=random, dtype=torch.int16))
        for n in range(SHARDS)
    ]


def as_bf16(tensors: list[tuple[str, torch.Tensor]]) -> list[tuple[str, torch.Tensor]]:
    return [(name, tensor.view(torch.bfloat16)) for name, tensor in tensors]


@pytest.fixture
def scene(tmp_path: Path, seaweed: Any) -> Any:
    base = tmp_path / "base"
    base.mkdir()
    write_sharded(base, as_bf16(checkpoint(0)), shard_bytes=SHARD_BYTES)
    env = {**seaweed.environ, "AWS_ENDPOINT_URL_S3": seaweed.endpoint_url}
    with Scene(tmp_path, base, stream=seaweed.stream(), env=env) as made:
        yield made


def test_chunks_are_put_before_the_last_shard_is_closed_and_fetched_before_the_seal(scene: Scene) -> None:
    """The last shard is written only when the first chunks are known to have arrived at the far end."""
    scene.publisher()
    scene.wait(scene.published.has("Claimed"), "the claim")
    fetched = scene.subscriber(f"dir://{scene.work / 'served'}")
    scene.wait(fetched.has("Serving", version=0), "version 0 to be served")

    ready = scene.work / "ready"
    ready.mkdir()
    *early, last = write_sharded(ready, as_bf16(checkpoint(1)), shard_bytes=SHARD_BYTES)
    target = scene.checkpoints / "step-1"
    target.mkdir()
    for file in early:
        file.rename(target / file.name)
    scene.wait(scene.published.has("ChunkPut"), "the first chunk, while the last shard is missing")
    scene.wait(lambda: len(fetched.of("ChunkFetched", sealed=False)) >= 3, "three chunks to be prefetched")
    assert not scene.published.has("Sealed")()
    closed = runtime.monotonic()
    last.rename(target / last.name)
    scene.wait(fetched.has("Committed", version=1), "version 1 to be served")

    puts, (sealed,) = scene.published.of("ChunkPut", version=1), scene.published.of("Sealed", version=1)
    assert len(puts) >= 8
    assert puts[0]["monotonic"] < closed
    before = [e for e in fetched.of("ChunkFetched", version=1) if e["monotonic"] < sealed["monotonic"]]
    assert len(before) >= 3


def test_the_served_directory_is_the_checkpoint_bit_for_bit(scene: Scene) -> None:
    from safetensors.torch import load_file

    scene.publisher()
    served = scene.work / "served"
    events = scene.subscriber(f"dir://{served}")
    write_sharded(_made(scene.checkpoints / "step-7"), as_bf16(checkpoint(7)), shard_bytes=SHARD_BYTES)
    scene.wait(events.has("Committed", version=1), "version 1 to be served")
    found: dict[str, torch.Tensor] = {}
    for file in served.glob("*.safetensors"):
        found |= load_file(file)
    expected = dict(checkpoint(7))
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[n].view(torch.int16), expected[n]) for n in expected)


def _made(path: Path) -> Path:
    path.mkdir(parents=True)
    return path

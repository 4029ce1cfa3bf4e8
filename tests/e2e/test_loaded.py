"""Real vLLMs whose loader computes with some tensors, kept up to date by a real subscriber.

It casts norms and routers of a wide checkpoint on two workers, and takes exponentials of decays in hybrids.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from support.streams.writer import StreamWriter
from support.vllm.model_families import write_served_family
from support.vllm.server import ModelVersions, Rig, rig
from support.vllm.wider_model import redrawn, written_wider

from dcr_daemon.checkpoint.directory import Checkpoint
from dcr_daemon.engine.messages import RankChecksums
from dcr_daemon.engine.port import TensorClass
from dcr_daemon.engine.vllm_client import VllmEngine
from dcr_daemon.events import discard
from dcr_daemon.store import open_store
from dcr_daemon.subscribe.daemon import SubscribeOptions, run_subscribe
from dcr_daemon.subscribe.materialize import materialize
from dcr_demo.models import copy_side_files, write_tiny

pytestmark = [pytest.mark.vllm, pytest.mark.slow]


def step(versions: ModelVersions) -> int:
    """A version in which every tensor changes, wide ones visibly so."""
    layout, last = versions.layout, versions.values[-1]
    fresh = redrawn(layout, [last[spec.name] for spec in layout], seed=versions.newest)
    return versions.put({spec.name: bits for spec, bits in zip(layout, fresh, strict=True)})


async def follow(made: Rig, model: Path, home: Path) -> list[RankChecksums]:
    """Three versions by a subscriber that loses what it kept once; what the server holds then."""
    url = f"file://{home}/stream"
    stream = StreamWriter(url, made.versions, await open_store(url))
    await stream.create()

    async def subscribe(base: Path | None = None) -> None:
        options = SubscribeOptions(replica="r1", state=home / "state", staging=home / "staging", once=True, base=base)
        await run_subscribe(options, stream.store, engine=VllmEngine(made.server.socket), emit=discard)

    await stream.publish(step(made.versions), step(made.versions))
    await subscribe(base=model)
    await stream.publish(step(made.versions))
    await subscribe()
    (kept,) = list(home.glob("state/**/loaded-*.safetensors"))  # noqa: ASYNC240 - nothing else runs in this loop
    assert kept.name == "loaded-3.safetensors"
    kept.unlink()
    await subscribe(base=model)  # built again, compared with what is live, and found there
    await materialize(stream.store, version=3, out=home / "built", base=model)
    engine = VllmEngine(made.server.socket)
    status = await engine.status()
    assert (status.version, status.serving) == (3, True)
    made.server.process.wait_ready(made.server.healthy)
    assert (await made.complete("Once upon a time", max_tokens=4))["logprobs"]["tokens"]
    return await engine.checksums()


def require_equal_to_fresh(model: Path, short_tmp: Path, tmp_path: Path, *, tensor_parallel: int) -> set[str]:
    """Follow three versions, and compare with a server that starts from the last; the tensors that are computed."""
    work, env = short_tmp / f"{model.name}-s", {"DCR_GATE": "health"}
    with rig(model, work, "live", tensor_parallel=tensor_parallel, env=env) as made:
        classes = zip(made.versions.layout, made.birth["attached"].classes, strict=True)
        computed = {spec.name for spec, kind in classes if kind is TensorClass.LOADER_COMPUTED}
        live = asyncio.run(follow(made, model, tmp_path))
    copy_side_files(model, tmp_path / "built")
    with rig(tmp_path / "built", work / "f", "fresh", tensor_parallel=tensor_parallel, env=env) as fresh:
        wanted = asyncio.run(VllmEngine(fresh.server.socket).checksums())
    assert len(live) == tensor_parallel
    assert [rank.parameters for rank in live] == [rank.parameters for rank in wanted]
    return computed


def test_after_several_versions_every_parameter_is_that_of_a_fresh_server(short_tmp: Path, tmp_path: Path) -> None:
    model = written_wider(write_tiny(tmp_path / "narrow", kind="moe"), short_tmp / "wide")
    computed = require_equal_to_fresh(model, short_tmp, tmp_path, tensor_parallel=2)
    with Checkpoint(model) as found:
        assert computed == {spec.name for spec in found.layout if spec.dtype == "F32"}


def test_a_hybrid_of_mamba_and_attention_is_refitted_while_it_serves(short_tmp: Path, tmp_path: Path) -> None:
    """The loader computes Mamba's decays. vLLM has CPU kernels for heads of 32."""
    model = write_served_family(short_tmp / "hybrid", "nemotron_h", head_dim=32)
    computed = require_equal_to_fresh(model, short_tmp, tmp_path, tensor_parallel=1)
    assert computed
    assert all(name.endswith("A_log") for name in computed)

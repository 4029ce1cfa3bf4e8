"""One rank of a Megatron run that trains and publishes: `python -m support.megatron.program OUT CASE...`

For each case and start of it: a model filled by Megatron-Bridge from the checkpoint before, real steps, and before each
update Bridge's own export as `OUT/CASE/step-N`, by rank 0.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from dcr_daemon import Publisher
from dcr_daemon.canonical.region import Region
from dcr_daemon.errors import DcrError
from dcr_daemon.events import Mapped
from dcr_daemon.projection.binding.bind import live
from dcr_daemon.projection.frameworks.megatron.live import Megatron, named_chunks
from dcr_daemon.projection.frameworks.megatron.model import VOCABULARY_MULTIPLE
from dcr_daemon.projection.frameworks.megatron.model import layout as layout_of_architecture
from dcr_daemon.projection.frameworks.megatron.shards import of_rank
from dcr_daemon.projection.frameworks.models.families import read_architecture
from dcr_daemon.projection.preview import preview
from dcr_daemon.projection.region_map import Map
from dcr_daemon.publish.publisher import Trainer
from support.megatron import bridge, cpu
from support.megatron.cases import CASES, LLAMA, OTHERS, WORLD, Case
from support.megatron.models import groups
from support.ranks.stream_checks import layout_of

NAME = "trainer"


def _start(case: Case, number: int, place: Path, first: int) -> int:
    """One start of the training run; `first` is its first version. Returns the next start's."""
    from megatron.core import parallel_state

    from support.megatron.training import Training

    degrees, rank = case.starts[number], dist.get_rank()
    groups(degrees)
    training = Training(
        case.fields, degrees, rank, _loaded(place / f"step-{first - 1}"),
        bf16=case.bf16, distributed=case.distributed, fp32_router=case.fp32_router,
        vocabulary_multiple=case.vocabulary_multiple,
    )  # fmt: skip
    _export(training.conversion, place / f"start-{number}", place)
    told: list[Mapped] = []
    megatron = Megatron.of_process(read_architecture(case.fields))
    handed = _handed(case, training)
    trainer, handed = _trainer(case, megatron, training, handed, place)
    publisher = Publisher(
        (place / "bucket").as_uri(), base=place / "step-0", create=True, trainer=trainer, name=NAME,
        state=place / "state", emit=lambda event: told.append(event) if isinstance(event, Mapped) else None,
    )  # fmt: skip
    with publisher:
        for rate in (None, *case.rates) if case.early else case.rates:
            if rate is not None:
                training.step(rate)
            _export(training.conversion, place / f"step-{first}", place)
            update = publisher.publish(handed, step=first)
            assert update.version == first
            first += 1
    if not case.residual:
        _check_plan(case, megatron, handed, place, told)
    if rank == 0:
        (place / f"mapped-{number}.json").write_text(json.dumps([event.report for event in told]))
    parallel_state.destroy_model_parallel()
    return first


def _handed(case: Case, training: Any) -> Any:
    chunks = training.chunks if case.handed == "bare" else training.wrapped
    return chunks[0] if case.handed == "module" else chunks


def _trainer(case: Case, megatron: Megatron, training: Any, handed: Any, place: Path) -> tuple[Trainer, Any]:
    """What the publisher is told, and what it is then handed."""
    if not case.residual:
        return Trainer(megatron=megatron), handed
    if case.residual == "marks":
        for chunk in training.chunks:
            for name, parameter in chunk.named_parameters():
                if name.endswith("linear_proj.weight"):
                    parameter.partition_dim = 0
        return Trainer(megatron=megatron, export=training.conversion.export_of), handed
    mapped = _mapped(megatron, handed, place)
    left_out = dict.fromkeys(_paper(mapped), "left out")
    trainer = Trainer(mapped=mapped.without(left_out), export=training.conversion.export_of)
    return trainer, named_chunks(handed, megatron.grid.vpp)


def _mapped(megatron: Megatron, handed: Any, place: Path) -> Map:
    base = layout_of(place / "step-0")
    return live(handed, base, rank=dist.get_rank(), world=WORLD, megatron=megatron).map


def _paper(mapped: Map) -> set[str]:
    names = {region.name for shard in mapped.shards for region in shard.regions}
    ends = ("embed_tokens.weight", "lm_head.weight", "q_proj.weight", "k_proj.weight", "v_proj.weight")
    return {name for name in names if name.endswith(ends)}


def _check_plan(case: Case, megatron: Megatron, handed: Any, place: Path, told: Sequence[Mapped]) -> None:
    """`dcr plan` predicts just what the live map has; but latent attention's projections down, which it takes for whole
    on every rank, as Transformer Engine has them, are cut in Megatron's own layers."""
    dtype = None if case.bf16 else "F32"
    predicted = preview(megatron.architecture, "megatron", grid=megatron.grid, dtype=dtype)
    multiple = case.vocabulary_multiple
    mapped = of_rank(
        megatron.architecture, megatron.grid, megatron.rank, dtype=dtype, vocabulary_multiple=multiple
    )  # fmt: skip
    assert dist.get_rank() == megatron.rank
    assert not predicted.gaps
    found = _regions(_mapped(megatron, handed, place))
    differ = {region.name for region in found ^ _regions(mapped)}
    assert all(name.endswith(("q_a_proj.weight", "kv_a_proj_with_mqa.weight")) for name in differ), differ
    assert bool(differ) <= (case.fields["model_type"] == "deepseek_v3")
    base = layout_of(place / "step-0")
    nbytes = sum(region.elements * base[base.index(region.name)].width for region in found)
    if not differ and multiple == VOCABULARY_MULTIPLE:
        assert (len(found), nbytes) == (predicted.regions[megatron.rank], predicted.baseline[megatron.rank])
    for event in told:
        assert event.residual_bytes == 0, event.report
        assert event.direct_bytes == predicted.direct, event
    assert bool(told) == (megatron.rank == 0)


def _regions(mapped: Map) -> set[Region]:
    return {region for shard in mapped.shards for region in shard.regions}


def _refusals(place: Path) -> list[str]:
    """What a user sees who gives another model's architecture: one of other shapes, and one of the very same."""
    from megatron.core import parallel_state

    from support.megatron.training import Training

    groups({"tp": 2, "dp": 2})
    training = Training(LLAMA, {"tp": 2, "dp": 2}, dist.get_rank(), _loaded(place / "step-0"), bf16=True,
                        distributed=False)  # fmt: skip
    said = []
    for number, other in enumerate(OTHERS):
        wrong = Trainer(megatron=Megatron.of_process(read_architecture(LLAMA | other)))
        try:
            with Publisher(
                (place / f"bucket-{number}").as_uri(), base=place / "step-0", create=True, trainer=wrong, name=NAME,
                state=place / f"state-{number}",
            ) as publisher:  # fmt: skip
                publisher.publish(training.wrapped)
        except DcrError as error:
            said.append(f"{type(error).__name__}: {error}")
        dist.barrier()
    parallel_state.destroy_model_parallel()
    return said


def _export(conversion: Any, out: Path, place: Path) -> None:
    """Bridge's export in the dtypes of the checkpoint, written by rank 0."""
    from safetensors.torch import save_file

    base = layout_of(place / "step-0")
    dtypes = {"BF16": torch.bfloat16, "F32": torch.float32}
    whole = {name: tensor.to(dtypes[base[base.index(name)].dtype]) for name, tensor in conversion.export()}
    if dist.get_rank() == 0:
        out.mkdir()
        save_file({name: tensor.clone().contiguous() for name, tensor in whole.items()}, out / "model.safetensors")
    dist.barrier()


def _loaded(path: Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    return load_file(path / "model.safetensors")


def _write_base(fields: Mapping[str, Any], out: Path) -> None:
    """Random weights, every one its own."""
    from safetensors.torch import save_file

    random, weights = torch.Generator().manual_seed(0), {}
    for spec in layout_of_architecture(read_architecture(fields)):
        drawn = (torch.randn(spec.shape, generator=random) * 0.08).bfloat16()
        weights[spec.name] = drawn.float() if spec.dtype == "F32" else drawn
    out.mkdir()
    save_file(weights, out / "model.safetensors")


def main(out: Path, names: Sequence[str]) -> None:
    torch.set_num_threads(1)
    bridge.prepare()
    cpu.pretend()
    rank = int(os.environ["RANK"])
    dist.init_process_group("gloo", init_method=f"file://{out}/meet", rank=rank, world_size=WORLD)
    for name in names:
        print(f"case {name} at {time.monotonic():.1f}", flush=True)
        place, case = out / name, CASES.get(name)
        if rank == 0:
            _write_base(case.fields if case else LLAMA, place / "step-0")
        dist.barrier()
        if case is None:
            (place / f"refusals-{rank}.json").write_text(json.dumps(_refusals(place)))
            continue
        first = 1
        for number in range(len(case.starts)):
            first = _start(case, number, place, first)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])

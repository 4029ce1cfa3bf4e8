"""One rank of a world of four: probes, declares, is judged, and constructs what is residual, as a trainer's rank would.

Run as a program, one process per rank, by tests/projection/binding/test_residual.py and probes/test_self_check.py; gloo
over a file, no ports. The name of the folder says which part is played. What a rank finds it checks itself; ranks meet
in files, as they do in a bucket.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from dcr_daemon.canonical.layout import Layout, TensorSpec
from dcr_daemon.canonical.region import Region
from dcr_daemon.errors import Incompatible
from dcr_daemon.projection.agreement.gate import (
    Verdict,
    declare,
    decode_declaration,
    decode_verdict,
    encode_declaration,
    encode_verdict,
    judge,
)
from dcr_daemon.projection.binding.bind import live
from dcr_daemon.projection.binding.residual import Exporter, Gather, Hook, Residual
from dcr_daemon.projection.frameworks.transformers_v5 import conversion, converter
from dcr_daemon.projection.probes import device_mesh
from dcr_daemon.projection.probes.device_mesh import probe_meshes
from dcr_daemon.projection.probes.export_check import asked, probe_export
from dcr_daemon.projection.probes.self_check import Probed, probe
from dcr_daemon.projection.region_map import Map
from dcr_daemon.projection.sharding.intervals import Cut
from dcr_daemon.projection.tracing import Conversion
from support.measure.torch_allocations import Allocations
from support.ranks.programs import binding, placements
from support.tensors.maps import map_of

WORLD = 4


class Meeting:
    """Files in place of a bucket: every rank puts a declaration, rank 0 a verdict."""

    def __init__(self, out: Path, rank: int) -> None:
        self._out, self._rank, self._call = out, rank, 0

    def verdict(self, made: Map, layout: Layout, exporter: Exporter | None, **fields: Any) -> Verdict:
        self._call += 1
        declaration = declare(
            made, layout, group="g", call=self._call, attempt=1, rank=self._rank, world=WORLD, nonce=str(self._rank),
            export=exporter.kind if exporter else "", buildable=exporter.can_build if exporter else None, **fields,
        )  # fmt: skip
        self._put(f"declaration.{self._rank}", encode_declaration(declaration))
        if self._rank == 0:
            ranks = [decode_declaration(self._get(f"declaration.{rank}")) for rank in range(WORLD)]
            self._put("verdict", encode_verdict(judge(ranks, layout)))
        verdict = decode_verdict(self._get("verdict"))
        assert verdict.admits(declaration)
        return verdict

    def _put(self, name: str, body: bytes) -> None:
        path = self._out / f"{self._call}.{name}"
        path.with_suffix(f".{self._rank}.new").write_bytes(body)
        path.with_suffix(f".{self._rank}.new").rename(path)

    def _get(self, name: str) -> bytes:
        deadline = time.monotonic() + 120
        while not (path := self._out / f"{self._call}.{name}").exists():
            assert time.monotonic() < deadline, path
            time.sleep(0.02)
        return path.read_bytes()


# ---- a model of experts under FSDP2


def tiny() -> Any:
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(7)
    fields = {
        "vocab_size": 72, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "head_dim": 8,
        "num_attention_heads": 4, "num_key_value_heads": 2, "num_experts": 6, "num_experts_per_tok": 2,
        "moe_intermediate_size": 24, "max_position_embeddings": 64,
    }  # fmt: skip
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("qwen3_moe", **fields), dtype=torch.float32)
    for parameter in model.parameters():
        parameter.data += 0.02 * torch.randn_like(parameter)
    return model


def exported(model: Any) -> dict[str, torch.Tensor]:
    """The checkpoint that the framework would write, in bf16."""
    made = converter(model)(dict(model.state_dict()))
    return {name: tensor.detach().to(torch.bfloat16).contiguous() for name, tensor in made.items()}


class Sharded:
    """The tiny model on this rank, under FSDP2 in fp32, with its layout and what its export really gives."""

    def __init__(self, rank: int) -> None:
        self.truth = exported(tiny())
        self.layout = Layout(TensorSpec(name, "BF16", tuple(t.shape)) for name, t in self.truth.items())
        self.model = tiny()
        fully_shard(self.model, mesh=init_device_mesh("cpu", (WORLD,)))
        self.tensors: dict[str, Any] = dict(self.model.state_dict())
        self.conversion: Conversion = conversion(self.model)
        self.convert = converter(self.model)
        self.map = map_of(self.tensors.items(), self.layout, conversion=self.conversion, plain_replica=(rank, WORLD))

    def probe(self, made: Map) -> Probed:
        return probe(self.tensors, made, self.layout, conversion=self.conversion, convert=self.convert)

    def check(self, built: Iterator[tuple[int, Any]], owned: Sequence[str]) -> None:
        got = {self.layout[index].name: tensor for index, tensor in built}
        assert got.keys() == set(owned)
        for name, tensor in got.items():
            assert torch.equal(tensor.view(torch.int16), self.truth[name].view(torch.int16)), name


def shifted_by_a_row(made: Map, parameter: str) -> Map:
    """One parameter's regions begin a row late and lose their last one: the mistake of a padded shard."""

    def late(region: Region) -> Region:
        run = region.shape[-1] - 8
        return replace(region, shape=(*region.shape[:-1], run), dst=region.dst + 8)

    return replace(
        made,
        shards=tuple(
            replace(one, regions=tuple(map(late, one.regions))) if one.parameter == parameter else one
            for one in made.shards
        ),
    )


def check_planted(sharded: Sharded, meeting: Meeting, rank: int) -> None:
    """A wrong map on one rank alone: found there, residual everywhere, constructed by its owner as the export does."""
    gather = Gather(lambda: sharded.tensors, sharded.layout, conversion=sharded.conversion, convert=sharded.convert)
    parameter = "model.layers.1.mlp.experts.gate_up_proj"
    names = {region.name for region in sharded.conversion.regions[parameter]}
    assert len(names) == 12
    made = shifted_by_a_row(sharded.map, parameter) if rank == 0 else sharded.map
    found = sharded.probe(made)
    assert found.residual.keys() == (names if rank == 0 else set())
    assert found.forms < found.checked
    verdict = meeting.verdict(made, sharded.layout, gather, probed=dict(found.residual))
    assert set(verdict.residual) == names
    assert set(verdict.residual.values()) == {"its map is not what its placement and the export say (rank 0)"}
    assert verdict.direct_bytes + verdict.residual_bytes == sharded.layout.nbytes
    assert sorted(name for r in range(WORLD) for name in verdict.owned(r)) == sorted(names)
    residual = Residual(verdict, sharded.layout, rank=rank, exporter=gather)
    sharded.check(residual.iterate(), verdict.owned(rank))
    some = sorted(names)[:3]
    sharded.check(residual.iterate(some), [name for name in some if name in residual.owned])
    with closing(residual.iterate()) as running:  # rank 3 gives up at once; the others get theirs
        if rank != 3:
            sharded.check(running, verdict.owned(rank))
        else:
            next(running)


def check_undetected(sharded: Sharded, meeting: Meeting, rank: int) -> None:
    """What no probe saw, the gate sees: elements that nobody declares are residual, or are refused."""
    parameter = "model.layers.0.self_attn.q_proj.weight"
    made = shifted_by_a_row(sharded.map, parameter) if rank == 1 else sharded.map
    gather = Gather(lambda: sharded.tensors, sharded.layout, conversion=sharded.conversion, convert=sharded.convert)
    verdict = meeting.verdict(made, sharded.layout, gather)
    assert verdict.residual == {parameter: "8 of 1,024 elements have no source (the others: ranks 0-3)"}
    without = [meeting_less(made, sharded.layout, r) for r in range(WORLD)]
    with pytest.raises(Incompatible, match="do not have exactly one source"):
        judge(without, sharded.layout)


def meeting_less(made: Map, layout: Layout, rank: int) -> Any:
    return declare(made, layout, group="g", call=0, attempt=0, rank=rank, world=WORLD, nonce="")


def check_hook(sharded: Sharded, meeting: Meeting, rank: int) -> None:
    """The user's own export: one collective per tensor, called alike; and a rank that it lies to brings nobody down."""

    def export(names: Sequence[str]) -> Iterator[tuple[str, Any]]:
        wanted = set(names)
        whole = {
            name: tensor.full_tensor() for name, tensor in sharded.tensors.items() if hasattr(tensor, "placements")
        }
        made = sharded.convert(whole)
        assert wanted <= made.keys()
        for name in names:
            dist.barrier()
            yield name, made[name].t() if name.endswith("lm_head.weight") and lie == rank else made[name]

    lie = -1
    why = {"model.embed_tokens.weight": "asked for", "lm_head.weight": "asked for", "model.norm.weight": "asked for"}
    hook = Hook(export, sharded.layout)
    verdict = meeting.verdict(sharded.map.without(why), sharded.layout, hook, probed=why)
    assert {residue.owner for residue in verdict.residues.values()} == {0, 1, 2}
    residual = Residual(verdict, sharded.layout, rank=rank, exporter=hook)
    sharded.check(residual.iterate(), verdict.owned(rank))
    names = asked(sharded.layout)
    found = probe_export(hook, read_of(sharded), mapped=sharded.map, layout=sharded.layout, names=names)
    assert (found.residual, found.forms) == ({}, len(sharded.layout))
    wrong = shifted_by_a_row(sharded.map, "model.embed_tokens.weight")
    found = probe_export(hook, read_of(sharded, wrong), mapped=wrong, layout=sharded.layout, names=names)
    assert found.residual.keys() == {"model.embed_tokens.weight"}
    lie = 2
    if rank == lie:
        with pytest.raises(Incompatible, match=r"lm_head\.weight as F32 \(32, 72\), and the checkpoint has BF16"):
            list(residual.iterate())
    else:
        sharded.check(residual.iterate(), verdict.owned(rank))


def read_of(sharded: Sharded, made: Map | None = None) -> Any:
    """A reader of this rank's own tensors through a map, element by element."""
    from dcr_daemon.canonical.region import box, indices, wire_pieces

    table = {}
    for one in (made or sharded.map).shards:
        tensor = sharded.tensors[one.parameter]
        local = (tensor.to_local() if hasattr(tensor, "placements") else tensor).detach().reshape(-1)
        for region in one.regions:
            for piece in wire_pieces(region):
                values = local[torch.from_numpy(indices(piece)[0])].to(torch.bfloat16)
                table[sharded.layout.index(region.name), box(piece)] = values.view(torch.int16).numpy().view("<u2")
    return lambda index, one: table[index, one]


def check_partial(meeting: Meeting, rank: int) -> None:
    """Partial sums cannot be projected; gathered, they are the finished tensor."""
    mesh = init_device_mesh("cpu", (WORLD,))
    tensors: dict[str, Any] = {
        "sum": DTensor.from_local(torch.full((3, 2), float(rank)), mesh, [Partial()], run_check=False),
        "rows": distribute_tensor(torch.arange(10.0).reshape(5, 2), mesh, [Shard(0)]),
    }
    layout = Layout(TensorSpec(name, "F32", tuple(tensor.shape)) for name, tensor in tensors.items())
    made = map_of([("rows", tensors["rows"])], layout)
    assert probe_meshes(tensors, made, layout=layout).residual == {}
    gather = Gather(lambda: tensors, layout)
    why = {"sum": "it is placed as Partial(sum)"}
    verdict = meeting.verdict(made, layout, gather, probed=why)
    got = list(Residual(verdict, layout, rank=rank, exporter=gather).iterate())
    assert [tensor.tolist() for _, tensor in got] == ([[[6.0, 6.0]] * 3] if rank == 0 else [])


def check_scenes(meeting: Meeting, rank: int, out: Path) -> None:
    """Models as training scripts shard them: nothing fails, all is direct, and all could be constructed as well."""
    (model := tiny()).save_pretrained(base := out / "base")  # the library writes on rank 0 alone
    dist.barrier()
    truth, layout = exported(model), binding.published(base)
    for scene in ("tp", "fsdp over experts"):
        weights, more = binding.SCENES[scene](base)
        found = live(weights, layout, rank=rank, world=WORLD, **more)
        exporter = Gather(
            lambda inputs=found.inputs: inputs, layout, conversion=found.conversion, convert=found.convert
        )
        own = probe(found.inputs, found.map, layout, conversion=found.conversion, convert=found.convert)
        common = probe_meshes(found.inputs, found.map, layout=layout)
        assert (own.residual, common.residual, own.checked > 0, common.checked > 0) == ({}, {}, True, True), scene
        verdict = meeting.verdict(found.map, layout, exporter, dropped=found.dropped)
        assert (verdict.residues, verdict.direct_bytes) == ({}, layout.nbytes)
        every = {spec.name: "for the test" for spec in layout}
        verdict = meeting.verdict(found.without(every).map, layout, exporter, probed=every)
        built = dict(Residual(verdict, layout, rank=rank, exporter=exporter).iterate())
        assert {layout[index].name for index in built} == set(verdict.owned(rank))
        for index, tensor in built.items():
            assert torch.equal(tensor.view(torch.int16), truth[layout[index].name].view(torch.int16)), scene


def residual(rank: int, out: Path) -> None:
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(WORLD), "LOCAL_RANK": str(rank)}
    sharded, meeting = Sharded(rank), Meeting(out, rank)
    check_scenes(meeting, rank, out)
    check_planted(sharded, meeting, rank)
    check_undetected(sharded, meeting, rank)
    check_hook(sharded, meeting, rank)
    check_partial(meeting, rank)


# ---- probes


def named(tensors: Mapping[str, Any]) -> tuple[dict[str, Any], Map, Layout]:
    layout = Layout(TensorSpec(name, "F32", tuple(tensor.shape)) for name, tensor in tensors.items())
    return dict(tensors), map_of(tensors.items(), layout), layout


def check_all_placements(rank: int) -> None:
    tensors, made, layout = named({**dict(placements.distributed()), **dict(placements.modules())})
    assert probe(tensors, made, layout).residual == {}
    found = probe_meshes(tensors, made, layout=layout)
    assert found.residual == {}
    assert found.checked > 50
    uneven, made, layout = named(dict(placements.uneven()))
    found = probe_meshes(uneven, made, layout=layout)
    assert found.residual == {}
    assert probe(uneven, made, layout).residual == {}


def check_a_wrong_rule(rank: int) -> None:
    """An interval rule that forgets the groups of a packed cut, and one that counts a mesh the other way round."""
    tensors, made, layout = named(dict(placements.distributed()))
    right = device_mesh.cuts_of

    def ungrouped(name: str, tensor: Any) -> list[Cut]:
        return [replace(cut, groups=1) for cut in right(name, tensor)]

    def backwards(name: str, tensor: Any) -> list[Cut]:
        return [replace(cut, at=cut.ways - 1 - cut.at) for cut in right(name, tensor)]

    try:
        device_mesh.cuts_of = ungrouped
        found = probe_meshes(tensors, made, layout=layout).residual
        assert {name.split(".")[0] for name in found} == {"packed"}
        assert set(found.values()) == {"torch puts its elements elsewhere than its placements say"}
        device_mesh.cuts_of = backwards
        found = probe_meshes(tensors, made, layout=layout).residual
        assert {"row.8", "column.8", "grid.(8, 6)"} <= found.keys()
        assert "replicated" not in found
    finally:
        device_mesh.cuts_of = right


def check_ranks_that_differ(rank: int) -> None:
    """A placement that one rank of its mesh does not know of is not asked about, and nobody waits for that rank."""
    mesh = init_device_mesh("cpu", (WORLD,))
    pairs = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "tp"))
    stage = rank // 2
    tensors: dict[str, Any] = {
        "all": distribute_tensor(torch.zeros(8, 2), mesh, [Shard(0)]),
        f"stage{stage}": distribute_tensor(torch.zeros(4 + stage, 2), pairs["tp"], [Shard(0)]),
    }
    if rank != 2:
        tensors["not on rank 2"] = DTensor.from_local(
            torch.zeros(3, 2), mesh, [Shard(0)], run_check=False, shape=torch.Size((12, 2)), stride=(2, 1)
        )
    tensors, made, layout = named(tensors)
    found = probe_meshes(tensors, made, layout=layout)
    assert (found.residual, found.checked, found.forms) == ({}, 2, 2)
    none = probe_meshes(tensors if rank else {}, made, layout=layout)
    assert none.checked == (0 if rank == 0 else 1 if stage else 0), none


def check_cost(rank: int) -> None:
    """Gigabytes of a grid, none of them real: what is gathered is small."""
    square = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    huge = {
        name: DTensor.from_local(
            torch.zeros(shape, device="meta"), square, placements, run_check=False, shape=torch.Size(whole),
            stride=(whole[1], 1),
        )
        for name, shape, whole, placements in [
            ("grid", (4096, 14336), (8192, 28672), [Shard(0), Shard(1)]),
            ("rows", (1 << 18, 128), (1 << 20, 128), [Shard(0), Shard(0)]),
            ("copies", (50257, 512), (50257, 512), [Replicate(), Replicate()]),
        ]
    }  # fmt: skip
    tensors, made, layout = named(huge)
    with Allocations() as largest:
        found = probe_meshes(tensors, made, layout=layout, cap=1 << 20)
        assert probe(tensors, made, layout, cap=1 << 20).residual == {}
    assert (found.residual, found.checked) == ({}, 3)
    assert 0 < largest.largest <= 1 << 20


def probes(rank: int, out: Path) -> None:
    sharded = Sharded(rank)
    assert sharded.probe(sharded.map).residual == {}
    assert probe_meshes(sharded.tensors, sharded.map, layout=sharded.layout).residual == {}
    check_all_placements(rank)
    check_a_wrong_rule(rank)
    check_ranks_that_differ(rank)
    check_cost(rank)


def main(rank: int, out: Path) -> None:
    dist.init_process_group("gloo", init_method=f"file://{out}/meet", rank=rank, world_size=WORLD)
    {"probes": probes, "residual": residual}[out.name](rank, out)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]))

"""What a projection costs: building and judging the map of a 30B mixture of experts, and reading through it.

    python benchmarks/projection.py [--json] [--config NAME]

One thread, its CPU time. A map is built once, when a trainer starts; a plan reads a configuration and adds up. At
every step a rank reads its shards by blocks and diffs them. The same is done here, in one run, with tensors of the
same sizes that nobody has cut or packed: the ratio is what projection costs. The shards are those of a rank in a layer
of the model and its embeddings, at full size; one element in a hundred changes by one unit in the last place.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from dcr_daemon.canonical.box import Box
from dcr_daemon.canonical.layout import Layout, TensorSpec
from dcr_daemon.checkpoint.blocks import block_bytes
from dcr_daemon.codec.chunk import ChunkId
from dcr_daemon.codec.encode import TARGET_BYTES, ChunkEncoder
from dcr_daemon.codec.warm import compile_kernels
from dcr_daemon.projection import values
from dcr_daemon.projection.binding.bind import Live
from dcr_daemon.projection.binding.reader import Reader, blocks
from dcr_daemon.projection.frameworks import modules
from dcr_daemon.projection.frameworks.megatron.grid import Grid
from dcr_daemon.projection.frameworks.megatron.model import layout
from dcr_daemon.projection.frameworks.megatron.shards import of_rank
from dcr_daemon.projection.frameworks.models.architecture import Architecture
from dcr_daemon.projection.frameworks.models.families import read_architecture, shipped
from dcr_daemon.projection.host import host_bits
from dcr_daemon.projection.preview import preview
from dcr_daemon.projection.region_map import Map, Shard, gaps

ID = ChunkId(stream="bench", attempt=1, base=0, version=1, group="bench", rank=0, nonce="bench", n=0)
RATE = 0.01  #: of the elements change
REPEATS = 40  #: passes; summed, since the clock of a thread may tick every few milliseconds only
GRIDS = (Grid(tp=4, ep=8, dp=2), Grid(tp=2, ep=32, dp=64), Grid(tp=8, pp=4, vpp=3, ep=8, etp=2, dp=4))


def seconds(work: Callable[[], Any]) -> tuple[float, Any]:
    begin = time.thread_time()
    answer = work()
    return time.thread_time() - begin, answer


def measure(name: str, grid: Grid) -> dict[str, Any]:
    architecture = read_architecture(name)
    one, _ = seconds(lambda: of_rank(architecture, grid, grid.world // 2))
    every, maps = seconds(lambda: [of_rank(architecture, grid, rank) for rank in range(grid.world)])
    judged, found = seconds(lambda: gaps(maps, layout(architecture)))
    planned, plan = seconds(lambda: preview(architecture, "megatron", grid=grid))
    assert not found
    assert not plan.gaps
    return {
        "grid": " · ".join(f"{k} {getattr(grid, k)}" for k in ("tp", "pp", "ep", "etp", "dp") if getattr(grid, k) > 1),
        "ranks": grid.world,
        "regions": sum(plan.regions),
        "map_of_one_rank_s": one,
        "maps_of_all_ranks_s": every,
        "exactly_once_s": judged,
        "plan_s": planned,
    }


Blocks = Sequence[tuple[int, Box]]
Read = Callable[[int, Box], Any]


def one_layer(architecture: Architecture) -> Architecture:
    return replace(architecture, layers=architecture.layers[-1:], prediction=None)


def megatron(architecture: Architecture) -> Map:
    """bf16 under tensor and expert parallelism: flat runs, columns, query groups."""
    return of_rank(architecture, GRIDS[0], 1)


def fsdp2(architecture: Architecture) -> Map:
    """fp32 masters of transformers' modules over eight ranks: fused experts, each cut into its canonical tensors."""
    shards = []
    for number, module in enumerate(modules.modules(architecture)):
        found = modules.regions(module.form, "fsdp2", 1, 1, 8)
        named = tuple(replace(region, name=module.targets[int(region.name)].name) for region in found)
        elements = sum(region.elements for region in named)
        value = values.between(module.kind, "F32", "BF16")
        shards.append(Shard(f"{number}.{module.kind}", (elements,), "F32", value, named))
    return Map(tuple(shards))


def bits(random: np.random.Generator, elements: int) -> tuple[Any, Any]:
    """bf16 values (as u16) before and after a step."""
    old = torch.from_numpy(random.standard_normal(elements, dtype=np.float32) * np.float32(0.04)).bfloat16()
    before = old.view(torch.uint16).numpy()
    moved = random.random(elements, dtype=np.float32) < RATE
    return before, before + moved.astype(np.uint16) - 2 * (moved & (before & 1 == 0)).astype(np.uint16)


def held(shape: tuple[int, ...], dtype: str, words: Any) -> Any:
    """A local tensor of a trainer with these canonical bits."""
    return torch.from_numpy(words).view(torch.bfloat16).to(values.torch_dtype(dtype)).reshape(shape)


def diff(table: Layout, taken: Blocks, read: Read, baselines: list[Any], olds: list[Any]) -> float:
    """Seconds of a pass over these blocks: read, compare, encode."""
    for baseline, old in zip(baselines, olds, strict=True):
        np.copyto(baseline, old)
    encoder = ChunkEncoder(table)
    begin = time.thread_time()
    for (tensor, box), baseline in zip(taken, baselines, strict=True):
        encoder.add(tensor, box, baseline, read(tensor, box))
        if encoder.full:
            encoder.finish(ID)
    if encoder.pending:
        encoder.finish(ID)
    return time.thread_time() - begin


def through_reader(
    mapped: Map, table: Layout, random: np.random.Generator
) -> tuple[float, Callable[[], float], Blocks]:
    """Seconds of planning, a pass over a rank's shards, and the blocks of that pass."""
    drawn = {shard.parameter: bits(random, math.prod(shard.shape)) for shard in mapped.shards}
    before, after = (
        {shard.parameter: held(shard.shape, shard.dtype, drawn[shard.parameter][n]) for shard in mapped.shards}
        for n in (0, 1)
    )
    live, began = Live(mapped, before), time.thread_time()
    reader, taken = Reader(live, table), blocks(mapped, table, block_bytes(TARGET_BYTES))
    reader.plan(taken)
    planned = time.thread_time() - began
    olds = [reader.read(tensor, box).copy() for tensor, box in taken]
    space = [old.copy() for old in olds]
    reader.bind(replace(live, tensors=after))
    return planned, lambda: diff(table, taken, reader.read, space, olds), taken


def uncut(mapped: Map, taken: Blocks, table: Layout, random: np.random.Generator) -> Callable[[], float]:
    """A pass over plain tensors, each with as many elements as the rank has of a canonical one."""
    value, most = mapped.shards[0].value, block_bytes(TARGET_BYTES) // 2
    sizes: dict[int, int] = {}
    for tensor, box in taken:
        sizes[tensor] = sizes.get(tensor, 0) + box.elements
    plain = Layout([TensorSpec(table[tensor].name, "BF16", (size,)) for tensor, size in sizes.items()])
    drawn = [bits(random, spec.elements) for spec in plain]
    tensors = [held(spec.shape, mapped.shards[0].dtype, drawn[n][1]) for n, spec in enumerate(plain)]
    flat = [
        (n, Box.flat(at, min(most, spec.elements - at)))
        for n, spec in enumerate(plain)
        for at in range(0, spec.elements, most)
    ]
    olds = [drawn[n][0][box.dst : box.dst + box.elements] for n, box in flat]
    space = [old.copy() for old in olds]

    def read(tensor: int, box: Box) -> Any:
        return host_bits(values.apply(value, tensors[tensor][box.dst : box.dst + box.elements]))

    return lambda: diff(plain, flat, read, space, olds)


def compared(name: str, mapped: Map, table: Layout) -> dict[str, Any]:
    """A rank's shards through the reader, and plain tensors of the same sizes, pass by pass in turn."""
    random = np.random.default_rng(0)
    planned, shards, taken = through_reader(mapped, table, random)
    plain = uncut(mapped, taken, table, random)
    passes = np.array([(shards(), plain()) for _ in range(REPEATS)])
    cut, whole = passes.mean(axis=0)
    return {
        "shards": name,
        "mebibytes": mapped.elements * 2 >> 20,
        "blocks": len(taken),
        "plan_s": planned,
        "shards_s": cut,
        "plain_s": whole,
        "ratio": cut / whole,
    }


def reading(name: str) -> list[dict[str, Any]]:
    compile_kernels([2])
    torch.set_num_threads(1)
    architecture = one_layer(read_architecture(name))
    table = layout(architecture)
    return [
        compared("bf16, megatron tp 4 ep 8", megatron(architecture), table),
        compared("fp32, fsdp2 over 8", fsdp2(architecture), table),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", default="qwen3-30b-a3b", choices=shipped())
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    rows, read = [measure(options.config, grid) for grid in GRIDS], reading(options.config)
    if options.json:
        print(json.dumps({"config": options.config, "rows": rows, "reading": read}))
        return
    print(options.config)
    for row in rows:
        print(f"  {row.pop('grid')}: {row.pop('ranks')} ranks, {row.pop('regions'):,} regions")
        print("    " + ", ".join(f"{what.removesuffix('_s').replace('_', ' ')} {n:.2f} s" for what, n in row.items()))
    print("a step, read and diffed")
    for row in read:
        print(f"  {row['shards']}: {row['mebibytes']:,} MiB of bf16 in {row['blocks']:,} blocks")
        print(
            f"    planned once in {row['plan_s']:.3f} s; shards {row['shards_s']:.3f} s, plain "
            f"{row['plain_s']:.3f} s: ratio {row['ratio']:.3f}"
        )


if __name__ == "__main__":
    main()

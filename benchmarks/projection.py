"""Building the map of a 30B mixture of experts, and judging it: seconds, for one rank and for all of them.

    python benchmarks/projection.py [--json] [--config NAME]

Thread CPU time. A map is built once, when a trainer starts; a plan reads a configuration and adds up.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from typing import Any

from dcr_daemon.projection.megatron.grid import Grid
from dcr_daemon.projection.megatron.model import layout
from dcr_daemon.projection.megatron.shards import of_rank
from dcr_daemon.projection.models.families import read_architecture, shipped
from dcr_daemon.projection.plan import gaps
from dcr_daemon.projection.preview import preview

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
    planned, plan = seconds(lambda: preview(architecture, "megatron", grid))
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", default="qwen3-30b-a3b", choices=shipped())
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    rows = [measure(options.config, grid) for grid in GRIDS]
    if options.json:
        print(json.dumps({"config": options.config, "rows": rows}))
        return
    print(options.config)
    for row in rows:
        print(f"  {row.pop('grid')}: {row.pop('ranks')} ranks, {row.pop('regions'):,} regions")
        print("    " + ", ".join(f"{what.removesuffix('_s').replace('_', ' ')} {n:.2f} s" for what, n in row.items()))


if __name__ == "__main__":
    main()

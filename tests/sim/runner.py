"""Runs one scenario from a seed: the entry for tests, `run.py` and `tests/faults.py`."""

from __future__ import annotations

import gc
import importlib
from functools import cache
from typing import Any

from sim import (  # noqa: F401  each registers its scenarios
    adversarial_scenarios,
    group_scenarios,
    ledger_scenarios,
    link_scenarios,
    scenarios,
    watched_scenarios,
)
from sim.engines import toy_workers
from sim.scenario_run import SCENARIOS as _SCENARIOS
from sim.scenario_run import ScenarioRun
from sim.world import Outcome, World, installed

#: names, in a fixed order
SCENARIOS: list[str] = list(_SCENARIOS)
_RANKS = [name for name in SCENARIOS if _SCENARIOS[name].__module__ == group_scenarios.__name__]
_ALONE = [name for name in SCENARIOS if name not in _RANKS]
#: whose turn it is: a group of ranks costs as much as three processes, and comes half as often
_TURNS = [*_ALONE, *_ALONE, *_RANKS]


def run_seed(seed: int, *, planted: str | None = None, tracing: bool = False) -> Outcome:
    """Play the scenario that the seed picks."""
    return run_scenario(_TURNS[seed % len(_TURNS)], seed, planted=planted, tracing=tracing)


def run_scenario(name: str, seed: int, *, planted: str | None = None, tracing: bool = False) -> Outcome:
    """Play one scenario from a seed. `planted` names a bug of `sim.planted.bugs` that is in force meanwhile."""
    if planted is None:
        return _run(name, seed, tracing)
    planting: Any = importlib.import_module("sim.planted.bugs")
    with planting.planted(planted):
        return _run(name, seed, tracing)


@cache
def _settle_memory() -> None:
    """What was imported stays: the collector need not look at it again and again."""
    gc.collect()
    gc.freeze()


def _run(name: str, seed: int, tracing: bool) -> Outcome:
    _settle_memory()
    world = World(seed, name, tracing=tracing)
    with installed(world), toy_workers():
        return world.run(_SCENARIOS[name](ScenarioRun(world)))

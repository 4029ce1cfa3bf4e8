"""`python tests/sim/run.py --seeds N`: play seeds, print what was covered, and how to replay what failed."""

from __future__ import annotations

import argparse
import logging
import multiprocessing
import sys
import time
from collections import Counter
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parents[1])]

from sim.runner import SCENARIOS, run_scenario, run_seed  # noqa: E402
from sim.world import Outcome  # noqa: E402


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=1000)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--seed", type=int, help="play just this one")
    parser.add_argument("--scenario", choices=SCENARIOS, help="instead of the one that the seed picks")
    parser.add_argument("--planted", help="with this bug of tests/sim/planted in force")
    parser.add_argument("--trace", action="store_true")
    parser.add_argument("--jobs", type=int, default=1)
    options = parser.parse_args()
    if options.seed is not None:
        # With the engine's own log: it is part of what happened.
        outcome = _one((options.seed, options.scenario, options.planted, options.trace))
        print(outcome)
        return not outcome.ok
    logging.disable()  # engines that are made to fail say so, and here nobody asked which
    began = time.monotonic()
    work = [
        (seed, options.scenario, options.planted, False) for seed in range(options.first, options.first + options.seeds)
    ]
    outcomes: list[Outcome] = []
    failed: list[Outcome] = []
    with multiprocessing.get_context("fork").Pool(options.jobs) if options.jobs > 1 else _Here() as pool:
        for outcome in pool.imap_unordered(_one, work):
            outcomes.append(outcome)
            if not outcome.ok:
                failed.append(outcome)
                again = f"--scenario {outcome.scenario} --seed {outcome.seed}"
                again += f" --planted {options.planted}" if options.planted else ""
                print(f"FAILED {outcome.violation}\n  replay: python tests/sim/run.py {again} --trace", flush=True)
    _report(outcomes, failed, time.monotonic() - began)
    return bool(failed)


class _Here:
    """One process."""

    imap_unordered = staticmethod(map)

    def __enter__(self) -> _Here:
        return self

    def __exit__(self, *_: object) -> None:
        pass


def _one(work: tuple[int, str | None, str | None, bool]) -> Outcome:
    seed, scenario, planted, tracing = work
    if scenario:
        return run_scenario(scenario, seed, planted=planted, tracing=tracing)
    return run_seed(seed, planted=planted, tracing=tracing)


def _report(outcomes: list[Outcome], failed: list[Outcome], seconds: float) -> None:
    total: dict[str, Counter[str]] = {
        "faults": Counter(),
        "crashes": Counter(),
        "passed": Counter(),
        "scenarios": Counter(),
    }
    for outcome in outcomes:
        total["faults"].update(outcome.faults)
        total["crashes"].update(outcome.crashes)
        total["passed"].update(outcome.passed)
        total["scenarios"][outcome.scenario] += 1
    print(
        f"{len(outcomes)} seeds in {seconds:.1f} s ({len(outcomes) / seconds:.1f}/s), {len(failed)} failed; "
        f"{sum(o.steps for o in outcomes)} steps, {sum(o.requests for o in outcomes)} store requests, "
        f"{sum(o.sealed for o in outcomes)} versions sealed, {sum(o.commits for o in outcomes)} commits, "
        f"{sum(o.seconds for o in outcomes) / 3600:.1f} virtual hours"
    )
    for name, counts in total.items():
        print(f"{name}: " + ", ".join(f"{key} {value}" for key, value in sorted(counts.items())))


if __name__ == "__main__":
    sys.exit(main())

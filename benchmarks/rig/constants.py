"""Writes the constants of `dcr plan --link` from a run of `benchmarks/refit.py`, and compares the two.

    python benchmarks/refit.py --json > refit.json
    python benchmarks/rig/constants.py refit.json [refit-vllm.json] [--write dcr_daemon/cli/plan/refit.json]

Of a second run only the engine's own constants are taken. Without --write, what the shipped constants predict is
compared with the runs; with it, what the new ones do. Exits with 1 if one of the rows is predicted with an error of
more than 20 %.
"""

from __future__ import annotations

import argparse
import functools
import json
import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parents[2])]

from dcr_daemon.cli.plan.prediction import compare, fit, join, shipped  # noqa: E402

LIMIT = 0.2


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("measured", type=Path, nargs="+")
    parser.add_argument("--write", type=Path)
    given = parser.parse_args()
    runs = [json.loads(path.read_text()) for path in given.measured]
    known = functools.reduce(join, map(fit, runs)) if given.write else shipped()
    if given.write:
        given.write.write_text(json.dumps(known.as_json(), indent=2) + "\n")
    print(f"{'Mbit/s':>7} {'changed':>8} {'measured':>9} {'predicted':>9} {'error':>7}")
    rows = [row for run in runs for row in compare(run, known)]
    for row in rows:
        seconds = f"{row['measured']:8.2f}s {row['predicted']:8.2f}s"
        print(f"{row['mbit']:7g} {row['changed']:8.2%} {seconds} {row['error']:+7.1%}")
    return int(any(abs(row["error"]) > LIMIT for row in rows))


if __name__ == "__main__":
    sys.exit(main())

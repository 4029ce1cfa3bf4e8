"""What a fleet of replicas asks of the store: requests a second, and what they cost a month on S3.

    python benchmarks/fleet.py [--replicas 10000] [--poll 1] [--poll-max 30] [--every 300] [--upload 60] [--json]

One real subscriber follows a bucket in memory, in virtual time, and its requests are counted: over an hour in which
nobody publishes, and over updates that come every `--every` seconds and upload for `--upload` of them. Both are then
multiplied by the number of replicas. Nothing is timed, so the figures are the same on every machine. The model is a
small one: a version of it has some dozen chunks, and a larger version has more GETs, one for every chunk of up to 4 MiB
or so. Bytes cost nothing within a region.

The prices (`PRICES`) are assumptions, typed in by hand: Amazon S3 Standard, us-east-1, in 2025, 0.005 $ for 1,000 PUT
or LIST requests, 0.0004 $ for 1,000 GET requests. See https://aws.amazon.com/s3/pricing/ for today's.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).parents[1] / "tests"), str(Path(__file__).parents[1])]

from support.measure.replica_requests import HOUR, UPDATES, idle_hour, measure, updates  # noqa: E402

PRICES = {"get": 0.0004, "list": 0.005, "overwrite": 0.005}  #: dollars for 1,000 requests
MONTH = 30 * 86400


def rates(counted: Counter[str], seconds: float, replicas: int) -> dict[str, float]:
    """Requests a second of the whole fleet by kind, and dollars a month."""
    found = {kind: counted[kind] * replicas / seconds for kind in PRICES}
    cost = sum(found[kind] * MONTH * PRICES[kind] / 1000 for kind in PRICES)
    return {**{kind: round(rate, 1) for kind, rate in found.items()}, "dollars_a_month": round(cost)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--replicas", type=int, default=10_000)
    parser.add_argument("--poll", type=float, default=1.0)
    parser.add_argument("--poll-max", type=float, default=30.0)
    parser.add_argument("--every", type=float, default=300.0)
    parser.add_argument("--upload", type=float, default=60.0)
    parser.add_argument("--json", action="store_true")
    asked = parser.parse_args()

    options = {"poll": asked.poll, "poll_max": asked.poll_max}
    found: dict[str, Any] = {
        "idle": rates(measure(idle_hour, **options), HOUR, asked.replicas),
        "updates": rates(measure(updates(asked.every, asked.upload), **options), UPDATES * asked.every, asked.replicas),
    }
    if asked.json:
        print(json.dumps(vars(asked) | found))
        return
    print(f"{asked.replicas} replicas, --poll {asked.poll:g} --poll-max {asked.poll_max:g}, requests a second:")
    for what, row in found.items():
        print(
            f"{what:8}  GET {row['get']:7.1f}  LIST {row['list']:6.1f}  PUT {row['overwrite']:6.1f}"
            f"  {row['dollars_a_month']:6} $ a month"
        )


if __name__ == "__main__":
    main()

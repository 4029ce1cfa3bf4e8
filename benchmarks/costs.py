"""Writes docs/COSTS.md: what fleets of 1 to 10,000 replicas cost, from counted requests and the store's list prices.

    python benchmarks/costs.py [--write docs/COSTS.md] [--every 300] [--upload 60] [--version-mb 80] [--json]

As in `fleet.py`, one real subscriber follows a bucket in memory, in virtual time, with all options at their defaults,
and its requests are counted: over an hour without an update, and over updates that come every `--every` seconds. A
version of `--version-mb` (10**6 bytes) has a GET for each chunk of a publisher with `--threads`. Nothing is timed: the
page is the same on every machine.

The prices are assumptions, typed in by hand: `PRICES` in `fleet.py`, `EGRESS` here.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).parents[1] / "tests"), str(Path(__file__).parents[1])]

from support.measure.replica_requests import UPDATES, idle_hour, measure, updates  # noqa: E402

from benchmarks.fleet import MONTH, PRICES  # noqa: E402
from dcr_daemon.codec.chunk import TARGET_BYTES  # noqa: E402
from dcr_daemon.codec.encode import FIRST_BYTES, GROWTH  # noqa: E402

FLEETS = (1, 100, 1_000, 10_000)
EGRESS = {"in the region": 0.0, "to another region": 0.02, "to the internet": 0.09}  #: dollars per 10**9 bytes


def dollars(requests: Counter[str]) -> float:
    return sum(requests[kind] * price / 1000 for kind, price in PRICES.items())


def chunks(version_bytes: float, threads: int) -> int:
    """Of a version that is divided evenly among the encoders of a publisher."""
    closed = number = 0
    while closed < version_bytes / threads:
        closed += min(TARGET_BYTES, max(FIRST_BYTES, closed // GROWTH))
        number += 1
    return number * threads


def count(every: float, upload: float, version_bytes: float, threads: int) -> dict[str, Any]:
    """Requests of one replica in an idle hour, and for one version until the next one."""
    idle = measure(idle_hour)
    version = measure(updates(every, upload))
    one = Counter({kind: number / UPDATES for kind, number in version.items()})
    number = chunks(version_bytes, threads)
    one["get"] += max(0.0, number - 12)  # the small model has a dozen chunks
    return {"idle": idle, "version": one, "chunks": number}


HEAD = """\
# What the bucket costs

Written by `python benchmarks/costs.py --write docs/COSTS.md`. The requests of one real subscriber were counted in
virtual time, all options at their defaults, and multiplied by the number of replicas. A version has {mb:g} MB (about
1 % of a model of 7 B parameters) in {chunks} chunks, as a publisher of {threads} threads makes them, and comes every
{every:g} seconds, {upload:g} of which are its upload. Storage is not counted, and neither is the publisher. What many
replicas cost one another, a store that refuses requests, is not in it.

The requests are counted; **the prices are assumptions**: list prices of Amazon S3 Standard in us-east-1, typed by hand
from memory of 2025, never fetched, compared with no bill, and without free amounts and discounts for quantity. They are
0.005 $ for 1,000 PUT or LIST requests, 0.0004 $ for 1,000 GET requests, 0.02 $ per GB to another region, 0.09 $ per GB
to the internet, nothing within the region. Put in your own: `PRICES` in `benchmarks/fleet.py` and `EGRESS` in
`benchmarks/costs.py`, then run the command above; `--every`, `--upload`, `--version-mb` and `--threads` describe a
version.
"""
TAIL = """
Bytes that leave the region cost far more than requests. Every replica downloads each version itself: keep the bucket
where most replicas are.
"""


def page(found: dict[str, Any], given: argparse.Namespace) -> str:
    idle, one = dollars(found["idle"]), dollars(found["version"])
    size, versions = given.version_mb / 1000, MONTH / given.every

    def kinds(requests: Counter[str]) -> str:
        return " | ".join(f"{requests[kind]:,.0f}" for kind in PRICES)

    def rows(*columns: tuple[float, str]) -> list[str]:
        """One for each fleet; a column is what one replica needs, and its format."""
        return [f"| {n:,} | {' | '.join(format(n * value, shown) for value, shown in columns)} |" for n in FLEETS]

    requests = (idle, ",.4f"), (one, ",.5f"), (one * versions, ",.2f")
    return "\n".join(
        [
            HEAD.format(
                mb=given.version_mb,
                every=given.every,
                upload=given.upload,
                threads=given.threads,
                chunks=found["chunks"],
            ),
            "| requests of one replica | GET | LIST | PUT | $ |",
            "|---|---|---|---|---|",
            f"| in an hour without an update | {kinds(found['idle'])} | {idle:.6f} |",
            f"| for one version, until the next one | {kinds(found['version'])} | {one:.6f} |",
            "",
            "| replicas | idle, $ an hour | requests, $ a version | requests, $ a month | GB a version | GB a month |",
            "|---|---|---|---|---|---|",
            *rows(*requests, (size, ",.2f"), (size * versions, ",.0f")),
            "",
            f"| replicas | {' | '.join(f'bytes {where}, $ a month' for where in EGRESS)} |",
            f"|---|{'---|' * len(EGRESS)}",
            *rows(*((size * versions * price, ",.2f") for price in EGRESS.values())),
            TAIL,
        ]
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--every", type=float, default=300.0, help="seconds from one update to the next")
    parser.add_argument("--upload", type=float, default=60.0, help="seconds")
    parser.add_argument("--version-mb", type=float, default=80.0, help="10**6 bytes")
    parser.add_argument("--threads", type=int, default=16, help="of the publisher, each with chunks of its own")
    parser.add_argument("--write", type=Path)
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    found = count(given.every, given.upload, given.version_mb * 1e6, given.threads)
    if given.json:
        print(json.dumps(found))
    elif given.write:
        given.write.write_text(page(found, given))
    else:
        print(page(found, given))


if __name__ == "__main__":
    main()

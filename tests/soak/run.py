"""Rounds of random faults against real processes: `python tests/soak/run.py [--rounds N] [--first SEED]`.

A seed is a soak of eight rounds on one stream. A round that fails prints how to play it again, and keeps its logs.
`--results FILE` appends what each soak tried, a line of JSON each; `--page FILE` puts all of it on a page.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parents[1])]

from faults import put_on_page  # noqa: E402
from soak.programs import shorten_pauses  # noqa: E402
from soak.results import MARKS, Soaked, read_results, report, table  # noqa: E402
from soak.rounds import FOR_ROOT, KINDS, ROUNDS, Round, draw_rounds, soak  # noqa: E402
from support.processes.fork_server import ForkServer  # noqa: E402
from support.stores.seaweed import SeaweedProcess  # noqa: E402

MODULES = ("torch", "dcr_daemon.publish.publisher", "soak.programs")  #: what a trainer needs beside the package


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=500, help="rounds in all, or of one --seed")
    parser.add_argument("--first", type=int, default=0, help="first seed")
    parser.add_argument("--seed", type=int, help="just this one")
    parser.add_argument("--only", action="append", default=[], help="kinds of faults whose name has this word")
    parser.add_argument("--keep", type=Path, help="where logs of failed rounds are kept; default: a new directory")
    parser.add_argument("--results", type=Path, metavar="FILE", help="append what each soak tried")
    parser.add_argument("--page", type=Path, metavar="FILE", help="put the table of all --results between its marks")
    parser.add_argument("--quiet", action="store_true", help="print failures and the counts alone")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit("terminated"))
    kinds = {kind: n for kind, n in KINDS.items() if all(word in kind.name for word in options.only)}
    if os.geteuid() != 0:
        print("not tried, for root only:", ", ".join(kind.name for kind in FOR_ROOT))
    place = options.keep or Path(tempfile.mkdtemp(prefix="dcr-soak-"))
    counts = [ROUNDS] * (options.rounds // ROUNDS) + [options.rounds % ROUNDS] * (options.rounds % ROUNDS > 0)
    work = list(enumerate(counts, options.first)) if options.seed is None else [(options.seed, options.rounds)]
    done: list[Soaked] = []
    with Soaks(place, quiet=options.quiet) as soaks:
        for seed, rounds in work:
            done.append(soaks.play(seed, draw_rounds(seed, rounds, kinds), again=_again(seed, options.only)))
            if options.results:
                with options.results.open("a") as results:
                    results.write(json.dumps(asdict(done[-1])) + "\n")
    print(report(done), flush=True)
    if options.page:
        put_on_page(options.page, table(read_results(options.results) if options.results else done), MARKS)
    return any(one.failure for one in done)


class Soaks:
    """One soak after the other, on one store and one fork server."""

    def __init__(self, place: Path, *, quiet: bool) -> None:
        self.place, self._quiet = place, quiet
        place.mkdir(parents=True, exist_ok=True)
        self._weed = SeaweedProcess(place / "seaweed")

    def __enter__(self) -> Soaks:
        shorten_pauses()
        self._weed.start()
        for name in [name for name in os.environ if name.startswith(("AWS_", "DCR_"))]:
            del os.environ[name]
        os.environ.update(self._weed.server.environ)
        self._fork_server = ForkServer(*MODULES)
        return self

    def __exit__(self, *_: object) -> None:
        self._fork_server.close()
        self._weed.stop()
        shutil.rmtree(self._weed.place, ignore_errors=True)

    def play(self, seed: int, rounds: Sequence[Round], *, again: str) -> Soaked:
        home, began = self.place / f"{seed}-{time.time_ns()}", time.monotonic()
        places = {"home": home, "weed": self._weed, "fork_server": self._fork_server}
        done = asyncio.run(soak(seed, rounds, tell=self._tell, **places))
        said = f"{done.rounds} rounds in {time.monotonic() - began:.0f} s, {done.versions} versions"
        print(f"seed {seed}: {said}", flush=True)
        if done.failure:
            print(f"FAILED {done.failure}\n  logs: {home}\n  again: {again} --rounds {done.rounds + 1}", flush=True)
        else:
            shutil.rmtree(home)
        return done

    def _tell(self, line: str) -> None:
        if not self._quiet:
            print(line, flush=True)


def _again(seed: int, only: Sequence[str]) -> str:
    return " ".join(["python tests/soak/run.py", f"--seed {seed}", *(f"--only {word!r}" for word in only)])


if __name__ == "__main__":
    sys.exit(main())

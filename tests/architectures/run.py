"""Which text architectures of vLLM are refitted exactly: `python tests/architectures/run.py [--only NAME]`.

Builds a small random model of every architecture, each in a process of its own, and prints a table. Exit code 1 if one
is wrong. `--json FILE` keeps the rows, and those of architectures that are not checked this time stay in it. `--page
docs/VLLM.md` puts the table of all these rows between the marks of the page.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parents[1])]

from faults import put_on_page  # noqa: E402

from architectures.outcome import MARKS, Outcome, table  # noqa: E402
from architectures.processes import open_checks  # noqa: E402


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", action="append", default=[], help="architectures with this word in their name")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows there")
    parser.add_argument("--page", type=Path, metavar="FILE", help="put the table between the marks of this page")
    options = parser.parse_args()
    rows: dict[str, Outcome] = {}
    if options.json and options.json.exists():
        rows = {row["architecture"]: Outcome(**row) for row in json.loads(options.json.read_text())}
    wrong = 0
    with open_checks() as checks:
        every, words = checks.names(), [word.lower() for word in options.only] or [""]
        names = [name for name in every if any(word in name.lower() for word in words)]
        for number, name in enumerate(names, start=1):
            rows[name] = checks.check(name)
            wrong += rows[name].bad
            print(f"{number}/{len(names)} {rows[name].line()}", file=sys.stderr, flush=True)
    outcomes = [rows[name] for name in every if name in rows]
    print(table(outcomes))
    if options.json:
        options.json.write_text(json.dumps([asdict(outcome) for outcome in outcomes], indent=2) + "\n")
    if options.page:
        put_on_page(options.page, table(outcomes), MARKS)
    return int(wrong > 0)


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit("interrupted: no table")

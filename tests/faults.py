"""Everything that can be broken on purpose, at a chosen length: `python tests/faults.py [--length short|full]`.

1. the simulation, seed after seed; 2. real processes killed and stopped at every named instant, on real files and a
real bucket, then real vLLM servers; 3. every text architecture of vLLM refitted; 4. fuzzing of every parser; 5. a
soak, rounds of random faults. Prints what each part prints, and at the end a table. Exit code 1 if any part failed.
`--json FILE` keeps the counts, `--page FILE` puts them between the marks of a page.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from xml.etree import ElementTree

TESTS = Path(__file__).parent
ROOT = TESTS.parent
sys.path.append(str(TESTS))
MARKS = ("<!-- counts -->\n", "<!-- end of counts -->\n")


@dataclass(frozen=True)
class Length:
    """`seeds` of the simulation; `sweep`: distance of the instants at which scenes are killed; `fuzz`: seconds for
    each parser; `rounds` of the soak."""

    seeds: int
    sweep: int
    fuzz: int
    rounds: int


LENGTHS = {"short": Length(300, 100, 5, 24), "full": Length(3000, 10, 60, 500)}


@dataclass
class Part:
    """What one part tried. `counts` in the order in which they are told."""

    name: str
    ok: bool = False
    seconds: float = 0.0
    counts: dict[str, float] = field(default_factory=dict)


def simulate(length: Length, jobs: int) -> Part:
    code, said = run([sys.executable, TESTS / "sim" / "run.py", "--seeds", length.seeds, "--jobs", jobs])
    return Part("simulation", code == 0, counts=simulated(said))


def simulated(said: str) -> dict[str, float]:
    """The counts in the words of tests/sim/run.py."""
    what = "seeds|failed|steps|store requests|versions sealed|commits|virtual hours"
    counts = {name: float(number) for number, name in re.findall(rf"([\d.]+) ({what})", said)}
    for name in ("faults", "crashes"):
        line = re.search(rf"^{name}: (.*)$", said, re.MULTILINE)
        counts[name] = sum(int(n) for n in re.findall(r" (\d+)(?:,|$)", line.group(1))) if line else 0
    return counts


def crash(length: Length, jobs: int) -> Part:
    parallel = ["-n", jobs, "--dist", "worksteal"] if jobs > 1 else []
    code, counts = pytest("not vllm and (crash or faults)", [*parallel], DCR_SWEEP=str(length.sweep))
    return Part("processes", code == 0, counts=counts)


def servers(length: Length, jobs: int) -> Part:
    """Servers need the machine for themselves: one at a time, whatever the length."""
    code, counts = pytest("vllm and (crash or faults)", ["-p", "no:randomly"])
    return Part("vLLM servers", code == 0, counts=counts)


def architectures(length: Length, jobs: int) -> Part:
    """A process for each model, one at a time, whatever the length."""
    code, said = run([sys.executable, TESTS / "architectures" / "run.py"])
    return Part("architectures", code == 0, counts=served(said))


def served(said: str) -> dict[str, float]:
    """The counts in the words of tests/architectures/run.py."""
    line = re.search(r"^(\d+ architectures): (.*)\.$", said, re.MULTILINE)
    words = [line.group(1), *line.group(2).replace("*", "").split(", ")] if line else []
    return {name: float(number) for number, name in (word.split(" ", 1) for word in words)}


def fuzz(length: Length, jobs: int) -> Part:
    code, said = run([sys.executable, TESTS / "fuzz" / "run.py", "--seconds", length.fuzz])
    targets = re.findall(r"^\S+ +\d+ executions", said, re.MULTILINE)
    counts = {"parsers": float(len(targets))}
    if total := re.search(r"^(\d+) executions, (\d+) found", said, re.MULTILINE):
        counts |= {"executions": float(total.group(1)), "found": float(total.group(2))}
    return Part("hostile bytes", code == 0, counts=counts)


def soak(length: Length, jobs: int) -> Part:
    """Five daemons and a store need the cores: one soak at a time, whatever the length."""
    code, said = run([sys.executable, TESTS / "soak" / "run.py", "--rounds", length.rounds])
    return Part("soak", code == 0, counts=soaked(said))


def soaked(said: str) -> dict[str, float]:
    """The counts in the words of tests/soak/run.py."""
    last = said.rstrip().rsplit("\n", 3)[-3:]
    what = "rounds|failed|versions|comparisons|restarts|faults"
    return {name: float(number) for number, name in re.findall(rf"(\d+) ({what})", last[0])} if last else {}


PARTS: dict[str, Callable[[Length, int], Part]] = {
    "simulation": simulate,
    "processes": crash,
    "servers": servers,
    "architectures": architectures,
    "bytes": fuzz,
    "soak": soak,
}
ABOUT = {
    "simulation": "seed after seed; silent unless one fails",
    "processes": "daemons killed at every named instant; about a minute of collecting, then a dot per test",
    "servers": "real vLLM servers killed, one at a time; minutes per dot",
    "architectures": "a small model of each text architecture of vLLM refitted, one line each",
    "bytes": "every parser fuzzed, one line each",
    "soak": "rounds of random faults against five daemons, one line each",
}


def pytest(marks: str, options: Sequence[object], **environ: str) -> tuple[int, dict[str, float]]:
    with tempfile.TemporaryDirectory() as temporary:
        report = Path(temporary) / "junit.xml"
        command = [sys.executable, "-P", "-m", "pytest", TESTS, "-q", "-m", marks, f"--junitxml={report}"]
        command += ["-o", "junit_family=xunit1", *options]  # the one that keeps what tests tell of themselves
        code, _ = run(command, **environ)
        return code, tested(report.read_text()) if report.exists() else {}


def tested(report: str) -> dict[str, float]:
    """What the tests of a JUnit report say that they did."""
    counts: Counter[str] = Counter(tests=0, failed=0, kills=0)
    sites = set()
    for case in ElementTree.fromstring(report).iter("testcase"):
        if case.find("skipped") is not None:  # it tried nothing
            counts["skipped"] += 1
            continue
        counts["tests"] += 1
        counts["failed"] += any(case.find(bad) is not None for bad in ("failure", "error"))
        for told in case.iter("property"):
            if told.get("name") == "site":
                sites.add(told.get("value"))
            else:
                counts[str(told.get("name"))] += int(str(told.get("value")))
    for role in sorted({str(site).split()[0] for site in sites}):
        counts[f"{role} sites"] = sum(str(site).startswith(f"{role} ") for site in sites)
    return dict(counts)


def run(command: Sequence[object], **environ: str) -> tuple[int, str]:
    """Run a command, show what it says as it says it, and keep it."""
    said = bytearray()
    process = subprocess.Popen(
        [str(word) for word in command], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        env={**os.environ, **environ},
    )  # fmt: skip
    assert process.stdout is not None
    while piece := os.read(process.stdout.fileno(), 1 << 16):
        said += piece
        sys.stdout.buffer.write(piece)
        sys.stdout.flush()
    return process.wait(), said.decode(errors="replace")


def machine() -> str:
    """Where it ran, in words."""
    cpu = re.search(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text())
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") >> 30
    name = cpu.group(1).strip() if cpu else platform.machine()
    return f"{len(os.sched_getaffinity(0))} cores of {name}, {memory} GiB, Python {platform.python_version()}"


def table(parts: Sequence[Part], length: str) -> str:
    """The counts, as Markdown."""
    from support.faults.sampling import COMMIT

    rows = ["| part | tried | minutes | |", "|---|---|---|---|"]
    for part in parts:
        tried = ", ".join(f"{_number(count)} {name}" for name, count in part.counts.items())
        rows.append(f"| {part.name} | {tried} | {part.seconds / 60:.1f} | {'passed' if part.ok else '**failed**'} |")
    return f"`make faults` ({length}) at commit {COMMIT}, on {machine()}:\n\n" + "\n".join(rows) + "\n"


def _number(count: float) -> str:
    return f"{count:,.0f}" if count == int(count) else f"{count:,.1f}"


def put_on_page(page: Path, text: str, marks: tuple[str, str] = MARKS) -> None:
    """Replace what stands between the marks."""
    before, rest = page.read_text().split(marks[0])
    page.write_text(before + marks[0] + text + marks[1] + rest.split(marks[1])[1])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--length", choices=LENGTHS, default="full")
    parser.add_argument("--only", action="append", choices=PARTS, help="just this part; repeatable")
    parser.add_argument("--jobs", type=int, default=min(4, len(os.sched_getaffinity(0))), help="processes at a time")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the counts there")
    parser.add_argument("--page", type=Path, metavar="FILE", help="put the table between the marks of this page")
    options = parser.parse_args()
    parts = []
    chosen = options.only or list(PARTS)
    for n, name in enumerate(chosen, start=1):
        print(f"== {name}: part {n} of {len(chosen)}, {ABOUT[name]}", flush=True)
        began = time.monotonic()
        part = PARTS[name](LENGTHS[options.length], options.jobs)
        part.seconds = time.monotonic() - began
        parts.append(part)
    text = table(parts, options.length)
    print(f"\n{text}")
    if options.json:
        facts = {"length": options.length, "machine": machine(), "parts": [asdict(part) for part in parts]}
        options.json.write_text(json.dumps(facts, indent=2) + "\n")
    if options.page:
        put_on_page(options.page, text)
    return 0 if all(part.ok for part in parts) else 1


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:  # told to the whole group: what it had started ends by itself
        sys.exit("interrupted: no table")

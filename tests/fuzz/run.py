"""Coverage-guided fuzzing of the targets: `python tests/fuzz/run.py --seconds 60 [--target NAME] [--corpus DIR]`.

Each target runs in a process of its own under libFuzzer (atheris), from the samples and the corpus kept here. Prints
executions, coverage and what was found; a finding's input lies in `--findings` and belongs into `corpus/<target>/` once
it is understood, where `test_corpus.py` replays it. Exit code 1 if anything was found.
"""

from __future__ import annotations

import argparse
import importlib.util
import re
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).parent
RSS_LIMIT = 3072  #: MiB
SLOWEST = 20  #: seconds for one input
LONGEST = 4096  #: bytes of an input
#: numba reads bytecode, so its kernels must stay as they are
COMPILED = [
    "dcr_daemon.codec.kernels",
    "dcr_daemon.codec.vector_kernels",
    "dcr_daemon.canonical.kernels",
    "dcr_daemon.canonical.jit",
    "dcr_daemon.checkpoint.kernels",
]


@dataclass
class Result:
    target: str
    executions: int
    features: int
    corpus: int
    found: list[Path]
    log: str


def one_target(name: str, arguments: list[str]) -> None:
    """In the child: instrument, import, fuzz. Never returns."""
    import atheris

    sys.path[:0] = [str(HERE.parent)]
    with atheris.instrument_imports(include=["dcr_daemon"], exclude=COMPILED):
        from fuzz import targets
        from fuzz.seeds import seeds
    for body in seeds(name):  # what is compiled at its first call is compiled before an input's time runs
        targets.TARGETS[name](body)
    atheris.Setup([sys.argv[0], *arguments], targets.TARGETS[name])
    atheris.Fuzz()


def fuzz(name: str, seconds: int, corpus: Path, findings: Path, seeds: Path) -> Result:
    """Run one target for a while; what is new goes to `corpus`."""
    corpus.mkdir(parents=True, exist_ok=True)
    before = set(findings.glob(f"{name}-*"))
    kept = HERE / "corpus" / name
    command = [
        sys.executable, __file__, "--child", name, str(corpus), str(seeds), *([str(kept)] if kept.is_dir() else []),
        f"-max_total_time={seconds}", f"-rss_limit_mb={RSS_LIMIT}", f"-timeout={SLOWEST}", f"-max_len={LONGEST}",
        f"-artifact_prefix={findings}/{name}-", "-print_final_stats=1", "-verbosity=1",
    ]  # fmt: skip
    log = subprocess.run(command, capture_output=True, text=True, errors="replace", check=False).stderr
    covered = re.findall(r"ft: (\d+) corp: (\d+)", log)
    runs = re.findall(r"number_of_executed_units: (\d+)", log) or re.findall(r"^#(\d+)", log, re.MULTILINE)
    features, size = map(int, covered[-1]) if covered else (0, 0)
    found = sorted(set(findings.glob(f"{name}-*")) - before)
    return Result(name, int(runs[-1]) if runs else 0, features, size, found, log)


def write_seeds(name: str, place: Path) -> Path:
    from fuzz.seeds import seeds

    place = place / name
    place.mkdir(parents=True)
    for n, body in enumerate(seeds(name)):
        (place / f"seed-{n:03d}").write_bytes(body)
    return place


def main() -> int:
    if sys.argv[1:2] == ["--child"]:
        one_target(sys.argv[2], sys.argv[3:])
    sys.path[:0] = [str(HERE.parent)]
    from fuzz import targets

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=int, default=20, help="for each target")
    parser.add_argument("--target", action="append", choices=sorted(targets.TARGETS), help="default: all")
    parser.add_argument("--corpus", type=Path, help="where what is new goes, kept between runs")
    parser.add_argument("--findings", type=Path, help="where inputs that broke something go")
    options = parser.parse_args()
    if importlib.util.find_spec("atheris") is None:
        print("atheris is not there for this Python or machine; test_corpus.py replays what is known")
        print("0 executions, 0 found")
        return 0
    found, executions = 0, 0
    with tempfile.TemporaryDirectory() as temporary:
        findings = (options.findings or Path(temporary, "findings")).absolute()
        findings.mkdir(parents=True, exist_ok=True)
        for name in options.target or sorted(targets.TARGETS):
            corpus = (options.corpus or Path(temporary, "corpus")) / name
            result = fuzz(name, options.seconds, corpus, findings, write_seeds(name, Path(temporary, "seeds")))
            executions, found = executions + result.executions, found + len(result.found)
            print(
                f"{name:20} {result.executions:>10} executions {result.features:>6} features {result.corpus:>5} inputs "
                f"{len(result.found)} found",
                flush=True,
            )
            if result.found or not result.executions:
                print(result.log[-4000:], flush=True)
                found += not result.executions
    print(f"{executions} executions, {found} found")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())

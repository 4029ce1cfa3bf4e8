"""Runs the check of each architecture in a process of its own, with limits of time and memory.

Importing vLLM takes longer than a check, so a server process imports it once and is forked for each architecture.
"""

from __future__ import annotations

import asyncio
import json
import os
import resource
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path

from support.processes.fork_server import ForkServer

from architectures.outcome import Outcome

SECONDS = 240.0  #: that a check may take
BYTES = 8 << 30  #: that its process may have allocated
#: vLLM reads them when it is imported.
QUIET = {
    "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_PLUGINS": "",
}  # fmt: skip
WARM = (
    "architectures.check", "transformers.models.auto.modeling_auto", "vllm.model_executor.model_loader",
    "vllm.model_executor.models.llama", "vllm.model_executor.models.mixtral",
)  # fmt: skip


class Checks:
    """The processes that check architectures."""

    def __init__(self, fork_server: ForkServer) -> None:
        self._fork_server = fork_server

    def names(self) -> list[str]:
        """Every architecture, as vLLM's registry has them."""
        found = self._ask("names")
        assert isinstance(found, list), found
        return found

    def check(self, architecture: str) -> Outcome:
        """What became of one architecture, also if its process did not live to say it."""
        began = time.monotonic()
        found = self._ask(architecture)
        outcome = Outcome(architecture, "failed", found) if isinstance(found, str) else Outcome(**found)
        return replace(outcome, seconds=round(time.monotonic() - began, 1))

    def _ask(self, what: str) -> object:
        """What `main` writes in a fork, or the end of its log if it writes nothing."""
        with tempfile.TemporaryDirectory(prefix="dcr-architecture-") as home:
            answer, log = Path(home, "answer"), Path(home, "log")
            process = self._fork_server.start([what, home], log, entry=f"{__name__}:main")
            try:
                status = asyncio.run(process.wait(SECONDS))
            except AssertionError as late:
                return str(late)[-300:]
            finally:
                self._fork_server.end()
            if not answer.exists():
                return f"its process ended with status {status}: {process.said()[-300:]}"
            return json.loads(answer.read_text())


@contextmanager
def open_checks() -> Iterator[Checks]:
    os.environ.update(QUIET)
    fork_server = ForkServer(*WARM)
    try:
        yield Checks(fork_server)
    finally:
        fork_server.close()


def main() -> None:
    """In a fork: check the architecture that the command line names, and write the outcome into the folder it names."""
    from architectures.check import check
    from architectures.configs import architectures

    what, home = sys.argv[1], Path(sys.argv[2])
    resource.setrlimit(resource.RLIMIT_DATA, (BYTES, BYTES))
    answer = architectures() if what == "names" else asdict(check(what, home))
    (home / "answer.new").write_text(json.dumps(answer))
    (home / "answer.new").rename(home / "answer")

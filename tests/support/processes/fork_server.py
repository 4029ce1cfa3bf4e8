"""Real `dcr` processes that start in milliseconds: forks of one that has imported everything, and nothing more.

    python -m support.processes.fork_server [MODULE...]     one JSON request per line on stdin, one answer on stdout

A crash matrix starts thousands of processes, and their imports would be most of what it does. A fork is a process
like any other (its own pid, descriptors, locks, death); the server has one thread, no event loop and no open file
when it forks, and each child makes its runtime anew, so that it reads its own `DCR_FAILPOINT`. A MODULE is what some
children need beside the package.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from support.processes.parent_death import set_parent_death_signal
from support.processes.python import import_path, module_command

WARM = (
    "dcr_daemon.cli.app",
    "dcr_daemon.observe.metrics",
    "dcr_daemon.observe.server",
    "dcr_daemon.publish.watch.watcher",
    "dcr_daemon.subscribe.daemon",
    "dcr_daemon.engine.directory.engine",
    "dcr_daemon.ledger.audit.verify",
    "dcr_daemon.store.file",
    "dcr_daemon.store.s3.store",
    "aioboto3",
    "uvloop",
)
DEADLINE = 120.0  #: seconds that anything waited for may take


class Process:
    """One child, named by its log. Its status is known only to the fork server, its parent."""

    def __init__(self, fork_server: ForkServer, pid: int, log: Path) -> None:
        self.pid, self.log = pid, log
        self._fork_server = fork_server
        self._status: int | None = None

    def poll(self) -> int | None:
        """As `Popen.poll`: None while it lives, stopped or not; else its exit code or minus its signal."""
        if self._status is None:
            self._status = self._fork_server.ask(poll=self.pid)
        return self._status

    @property
    def stopped(self) -> bool:
        """Whether SIGSTOP holds it."""
        if self.poll() is not None:
            return False
        return Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"

    def send(self, number: signal.Signals) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    async def wait(self, seconds: float = DEADLINE) -> int:
        """Its exit status. A process that does not end is a failure, told with what it said last."""
        try:
            async with asyncio.timeout(seconds):
                while (status := self.poll()) is None:  # noqa: ASYNC110 - another process has no event of ours
                    await asyncio.sleep(0.01)
        except TimeoutError:
            raise AssertionError(f"process {self.pid} did not end in {seconds} s:\n{self.said()}") from None
        return status

    def said(self) -> str:
        """The end of its log, which it opens itself."""
        if not self.log.exists():
            return ""
        return self.log.read_text(errors="replace")[-20_000:]


class ForkServer:
    """The process that forks. One per pytest worker: its start costs a second, more with `modules`."""

    def __init__(self, *modules: str) -> None:
        command, environment = module_command(__name__, *modules), os.environ | import_path()
        self._server = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        )
        self.pid = self._server.pid
        self._living: dict[int, Process] = {}
        assert self.ask(poll=0) is None

    def ask(self, **request: object) -> int | None:
        assert self._server.stdin is not None
        assert self._server.stdout is not None
        self._server.stdin.write(json.dumps(request) + "\n")
        self._server.stdin.flush()
        return json.loads(self._server.stdout.readline())

    def start(
        self,
        arguments: Sequence[str],
        log: Path,
        *,
        entry: str = "dcr_daemon.cli:main",
        **environ: str,
    ) -> Process:
        """Run `dcr ARGUMENTS`, as the console script would, in this process's environment and `environ`."""
        pid = self.ask(start=list(arguments), environ={**os.environ, **environ}, log=str(log), entry=entry)
        assert pid is not None
        self._living[pid] = Process(self, pid, log)
        return self._living[pid]

    def end(self) -> None:
        """No child outlives the test that started it."""
        for process in self._living.values():
            process.send(signal.SIGKILL)
            until = time.monotonic() + 10
            while process.poll() is None and time.monotonic() < until:
                time.sleep(0.005)
        self._living.clear()

    def close(self) -> None:
        self.end()
        assert self._server.stdin is not None
        self._server.stdin.close()
        self._server.wait(30)


@pytest.fixture(scope="session")
def shared_fork_server() -> Iterator[ForkServer]:
    fork_server = ForkServer()
    yield fork_server
    fork_server.close()


@pytest.fixture
def fork_server(shared_fork_server: ForkServer) -> Iterator[ForkServer]:
    yield shared_fork_server
    shared_fork_server.end()


def _poll(pid: int) -> int | None:
    if not pid:
        return None
    found, status = os.waitpid(pid, os.WNOHANG)
    return os.waitstatus_to_exitcode(status) if found else None


def _start(request: dict) -> int:
    assert threading.active_count() == 1
    if pid := os.fork():
        return pid
    code = 70
    try:
        code = _child(request)
    finally:
        with contextlib.suppress(OSError):
            sys.stdout.flush()
        os._exit(code)


def _child(request: dict) -> int:
    set_parent_death_signal()
    log = os.open(request["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    null = os.open(os.devnull, os.O_RDONLY)
    for source, target in ((null, 0), (log, 1), (log, 2)):
        os.dup2(source, target)
    os.environ.clear()
    os.environ.update(request["environ"])
    _install_runtime(request["environ"].get("DCR_TEST_PASSED"))
    sys.argv = ["dcr", *request["start"]]
    module, _, name = request["entry"].partition(":")
    try:
        getattr(importlib.import_module(module), name)()
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:  # noqa: BLE001 - what an interpreter does with it at its end
        sys.excepthook(*sys.exc_info())
        return 1
    return 0


def _install_runtime(passed: str | None) -> None:
    """Its own runtime; one that writes down every instant it passes, if a test asks which there are."""
    from dcr_daemon import runtime

    class Telling(runtime.SystemRuntime):
        def failpoint(self, name: str) -> None:
            os.write(told, f"{name}\n".encode())
            super().failpoint(name)

    if passed is None:
        runtime.install(runtime.SystemRuntime())
    else:
        told = os.open(passed, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        runtime.install(Telling())


def _compile() -> None:
    """Every kernel, here: a process that is killed while it compiles keeps nothing of it."""
    import numpy as np

    from dcr_daemon.canonical.fingerprint import sum_run
    from dcr_daemon.codec.warm import compile_kernels

    compile_kernels([1, 2, 4, 8])
    for width in (1, 2, 4, 8):
        sum_run(np.zeros(16, dtype=f"<u{width}"), 0)


def _serve() -> None:
    for name in (*WARM, *sys.argv[1:]):
        importlib.import_module(name)
    _compile()
    for line in sys.stdin:
        request = json.loads(line)
        answer = _poll(request["poll"]) if "poll" in request else _start(request)
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    _serve()

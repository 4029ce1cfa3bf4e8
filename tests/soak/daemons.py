"""The five daemons of a soak: how each starts, how it may end, and what was done to it.

Each has a home of its own, a small file system where the user may mount one, and a way of its own to the bucket, so
that a fault befalls exactly one of them.
"""

from __future__ import annotations

import contextlib
import json
import shutil
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from support.faults.full_disk import CannotMount, Tmpfs
from support.processes.fork_server import ForkServer, Process
from support.stores.faulty_proxy import BadNetwork

DISK = 24 << 20  #: bytes of a daemon's own file system
PAUSE = 0.3  #: seconds before a daemon that ended is started again, as a supervisor of processes waits
RESTARTED = {11, 14, 15, 16}  #: exit codes after which docs/OPERATIONS.md starts a daemon again
DOCUMENTED = {0, 10, 12, 13, *RESTARTED}


class Failed(AssertionError):
    """A round showed something that must not be."""


@dataclass
class Stream:
    """What all daemons of one soak have in common."""

    url: str
    base: Path
    watch: Path
    inbox: Path
    anchor_every: int
    keep_versions: int


@dataclass
class Daemon:
    """One daemon through all of its lives.

    `wanted`: it should be running. `claimed`: a publisher has claimed the stream since its start. `expected`: exit
    codes that the faults of this round may cause. `ousted`: another publisher took its stream; if it ends by itself,
    then fenced. `held`: it was ended and stays down until the round is over.
    """

    name: str
    home: Path
    stream: Stream
    network: BadNetwork
    fork_server: ForkServer
    wanted: bool = False
    claimed: bool = False
    ousted: bool = False
    held: bool = False
    expected: set[int] = field(default_factory=set)
    disk: Tmpfs | None = None
    process: Process | None = None
    lives: int = 0
    deaths: int = 0
    entry: ClassVar[str]

    def __post_init__(self) -> None:
        self._killed = self._armed = False
        self._ended = 0.0
        self._read = 0
        with contextlib.suppress(CannotMount):
            self.disk = Tmpfs(self.home, DISK)
        self.log = self.home.with_suffix(".log")
        self.events = self.home.with_suffix(".events")

    def arguments(self) -> list[str]:
        raise NotImplementedError

    @property
    def state(self) -> Path:
        return self.home / "state"

    @property
    def running(self) -> bool:
        return self.process is not None and self.process.poll() is None

    def start(self, failpoint: str = "") -> None:
        """Start it, or go on with the one that runs."""
        self.wanted, self.held = True, False
        if not self.running:
            self._killed, self._ended, self.claimed = False, 0.0, False
            self.lives += 1
            environ = {"DCR_FAILPOINT": failpoint}
            self.process = self.fork_server.start(self.arguments(), self.log, entry=self.entry, **environ)
            self._armed = bool(failpoint)

    def kill(self) -> None:
        """kill -9; it is started again unless it is `held`."""
        if self.running:
            self._killed = True
            self._send(signal.SIGKILL)

    def stop(self) -> None:
        self._send(signal.SIGSTOP)

    def resume(self) -> None:
        self._send(signal.SIGCONT)

    def terminate(self) -> None:
        """SIGTERM: it is not wanted any more."""
        self.wanted = False
        self._send(signal.SIGTERM)

    def _send(self, number: signal.Signals) -> None:
        if self.process is not None:
            self.process.send(number)

    def look(self) -> None:
        """Notice that it has ended, judge how, and start it again when its time has come."""
        if self.process is None or self.running:
            return
        if not self._ended:
            self._ended = time.monotonic()
            self._judge(self.process.poll())
        if self.wanted and not self.held and time.monotonic() > self._ended + PAUSE:
            self.start()

    def _judge(self, status: int | None) -> None:
        if status == -signal.SIGKILL and (self._killed or self._armed):
            self.deaths += 1
        elif status == 12 and self.ousted:
            self.wanted = False
        elif status in (0, -signal.SIGTERM) and not self.wanted:  # the latter before it had begun
            pass
        elif status in self.expected and status in DOCUMENTED:
            self.held = status not in RESTARTED
        else:
            said = self.log.read_text(errors="replace")[-3000:] if self.log.exists() else ""
            raise Failed(f"{self.name} ended with {status}, expected were {sorted(self.expected)}:\n{said}")
        if self.ousted:
            self.wanted = False

    def happened(self) -> Iterator[dict[str, Any]]:
        """Its events since the last call."""
        if self.events.exists():
            with self.events.open("rb") as file:
                file.seek(self._read)
                for line in file:
                    if not line.endswith(b"\n"):
                        return  # the rest of it comes
                    self._read += len(line)
                    yield json.loads(line)

    def close(self) -> None:
        if self.disk:
            self.disk.close()


class Watcher(Daemon):
    """`dcr publish --watch`, which also makes the stream."""

    entry = "soak.programs:watch"
    holds: bool = True

    def arguments(self) -> list[str]:
        stream = self.stream
        places = ["--to", stream.url, "--watch", str(stream.watch), "--state", str(self.state), "--create"]
        choices = ["--anchor-every", str(stream.anchor_every), "--keep-versions", str(stream.keep_versions)]
        named = ["--base", str(stream.base), "--name", self.name, *(["--take-over"] if self.holds else [])]
        return ["publish", *places, *named, *choices, *_observed(self)]


class Library(Daemon):
    """A training process with a `Publisher`."""

    entry = "soak.programs:publish"
    holds: bool = False

    def arguments(self) -> list[str]:
        stream = self.stream
        options = {
            "stream": stream.url, "inbox": str(stream.inbox), "events": str(self.events), "base": str(stream.base),
            "name": self.name, "take_over": self.holds, "state": str(self.state), "endpoint_url": self.network.url,
            "anchor_every": stream.anchor_every, "keep_versions": stream.keep_versions,
        }  # fmt: skip
        return [json.dumps(options)]


class Replica(Daemon):
    """`dcr subscribe` over a directory."""

    entry = "soak.programs:subscribe"

    @property
    def directory(self) -> Path:
        return self.home / "current"

    def arguments(self) -> list[str]:
        places = ["--state", str(self.state), "--staging", str(self.home / "staging")]
        engine = ["--engine", f"dir://{self.directory}", "--replica", self.name, "--patience", "2"]
        engine += ["--poll", "0.1", "--poll-max", "0.2"]
        return ["subscribe", "--from", self.stream.url, *engine, *places, *_observed(self)]


def _observed(daemon: Daemon) -> list[str]:
    return ["--endpoint-url", daemon.network.url, "--events", str(daemon.events)]


def forget(*places: Path) -> None:
    for place in places:
        shutil.rmtree(place, ignore_errors=True)

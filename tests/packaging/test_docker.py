"""The toy cluster and the images say what the code does; there is no docker engine in the tests, so they are read."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[2]
DOCKER = ROOT / "docker"
COMPOSE: dict[str, Any] = yaml.safe_load((DOCKER / "compose.yaml").read_text())
POLICIES = {
    name: json.loads((DOCKER / "policies" / f"{name}.json").read_text())
    for name in ("publisher", "subscriber", "observer")
}


def parameters(command: str) -> list[Any]:
    import typer.main

    from dcr_daemon.cli.app import app

    found: list[Any] = typer.main.get_command(app).commands[command].params  # type: ignore[attr-defined]
    return found


def instructions(file: Path) -> list[str]:
    text = re.sub(r"\\\n", " ", file.read_text())
    return [line for line in text.splitlines() if line and not line.startswith("#")]


@pytest.mark.parametrize(("service", "command"), [("publisher", "publish"), ("subscriber", "subscribe")])
def test_daemons_get_every_option_they_need_from_the_environment(service: str, command: str) -> None:
    given = COMPOSE["services"][service]["environment"]
    known = {p.envvar: p for p in parameters(command) if p.envvar}
    assert [name for name, p in known.items() if p.required and name not in given] == []
    assert [name for name in given if name.startswith("DCR_") and name not in known] == []


def test_named_volumes_targets_and_dependencies_exist() -> None:
    targets = set(re.findall(r"^FROM \S+ AS (\S+)", (DOCKER / "Dockerfile").read_text(), re.MULTILINE))
    for name, service in COMPOSE["services"].items():
        assert set(service.get("depends_on", {})) <= set(COMPOSE["services"]), name
        for volume in service.get("volumes", []):
            assert volume.split(":")[0] in COMPOSE["volumes"], name
        if "build" in service:
            assert service["build"]["target"] in targets
            assert (DOCKER / service["build"]["context"] / service["build"]["dockerfile"]).exists()


def test_the_engine_and_its_subscriber_share_socket_state_and_memory() -> None:
    vllm, subscriber = COMPOSE["services"]["vllm"], COMPOSE["services"]["subscriber"]
    assert subscriber["ipc"] == "service:vllm"
    assert set(subscriber["volumes"]) <= set(vllm["volumes"])
    assert "DCR_SOCKET=/run/dcr/private/vllm.sock" in (DOCKER / "Dockerfile").read_text()
    assert subscriber["environment"]["DCR_ENGINE"] == "vllm:///run/dcr/private/vllm.sock"


@pytest.mark.parametrize("target", ["publisher", "subscriber"])
def test_images_start_a_command_that_exists(target: str) -> None:
    lines = instructions(DOCKER / "Dockerfile")
    start = next(i for i, line in enumerate(lines) if line.endswith(f" AS {target}"))
    command, *flags = json.loads(lines[start + 1].removeprefix("CMD "))
    assert set(flags) <= {o for p in parameters(command) for o in p.opts}
    assert "--create" not in flags, "a misspelled prefix would be a new stream"


@pytest.mark.parametrize("file", ["Dockerfile", "vllm.Dockerfile"])
def test_images_copy_only_what_is_there_and_do_not_run_as_root(file: str) -> None:
    lines = instructions(DOCKER / file)
    for line in lines:
        if line.startswith("COPY") and "--from" not in line:
            assert [p for p in shlex.split(line)[1:-1] if not (ROOT / p).exists()] == []
    if file == "Dockerfile":
        assert lines.count("USER 10001:10001") == 2, "a name is refused under runAsNonRoot"


def test_the_serving_layer_installs_the_versions_of_the_lock() -> None:
    text = (DOCKER / "vllm.Dockerfile").read_text()
    lock = (ROOT / "requirements" / "lock.txt").read_text().splitlines()
    pins = re.findall(r"(?:xxhash|zstandard)==\S+", text)
    assert len(pins) == 2
    assert set(pins) <= set(lock)


def allowed(policy: dict[str, Any], action: str, key: str, *, conditional: bool = True) -> bool:
    """Judge one request as IAM does: an explicit deny wins, else any allow."""
    verdict = False
    for statement in policy["Statement"]:
        actions = statement["Action"] if isinstance(statement["Action"], list) else [statement["Action"]]
        resources = statement["Resource"] if isinstance(statement["Resource"], list) else [statement["Resource"]]
        patterns = [re.escape(r.removeprefix("arn:aws:s3:::BUCKET/")).replace(r"\*", ".*") for r in resources]
        if action not in actions or not any(re.fullmatch(p, key) for p in patterns):
            continue
        needs_null = "Null" in statement.get("Condition", {})
        if statement["Effect"] == "Deny" and (not needs_null or not conditional):
            return False
        verdict = verdict or statement["Effect"] == "Allow"
    return verdict


RECORD, CHUNK, STATUS = "PREFIX/ledger/0.json", "PREFIX/data/1/2/a-0-b-0.dcr", "PREFIX/replicas/a.json"


def test_nobody_can_delete_or_overwrite_the_ledger() -> None:
    for policy in POLICIES.values():
        assert not allowed(policy, "s3:DeleteObject", RECORD)
        assert not allowed(policy, "s3:PutObject", RECORD, conditional=False)


def test_a_publisher_creates_and_collects() -> None:
    policy = POLICIES["publisher"]
    for key in (RECORD, CHUNK, "PREFIX/anchors/0/0/model.safetensors", "PREFIX/layouts/a.json"):
        assert allowed(policy, "s3:PutObject", key)
        assert not allowed(policy, "s3:PutObject", key, conditional=False)
        assert allowed(policy, "s3:GetObject", key)
    assert allowed(policy, "s3:DeleteObject", CHUNK)
    assert not allowed(policy, "s3:PutObject", "OTHER/ledger/0.json")


def test_a_subscriber_reads_and_reports_only() -> None:
    policy = POLICIES["subscriber"]
    assert allowed(policy, "s3:GetObject", RECORD)
    assert allowed(policy, "s3:PutObject", STATUS, conditional=False)
    assert not allowed(policy, "s3:PutObject", CHUNK)
    assert not allowed(policy, "s3:DeleteObject", CHUNK)


def test_an_observer_only_reads() -> None:
    policy = POLICIES["observer"]
    assert allowed(policy, "s3:GetObject", CHUNK)
    assert not any(allowed(policy, "s3:PutObject", key) for key in (RECORD, CHUNK, STATUS))


def test_policies_cover_every_kind_of_key_that_the_code_makes() -> None:
    from dcr_daemon.ledger import names

    policy = POLICIES["publisher"]
    made = (names.record(3), names.layout("ab"), names.chunk(1, 2, "g", 0, "n", 3), names.part(1, 2, "g", 0, "n"))
    made += (names.sums(1, 2, "g", 0, "n"), names.vector(1, 2), names.anchor(1, 2) + "model.safetensors")
    assert [key for key in made if not allowed(policy, "s3:PutObject", f"PREFIX/{key}")] == []
    assert allowed(POLICIES["subscriber"], "s3:PutObject", f"PREFIX/{names.replica('a')}")

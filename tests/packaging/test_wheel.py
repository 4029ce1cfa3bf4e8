"""What is tested is what is installed, and the wheel holds the package and nothing else."""

from __future__ import annotations

import importlib.metadata
import os
import tomllib
import zipfile
from pathlib import Path

import pytest

import dcr_daemon

ROOT = Path(__file__).parents[2]


@pytest.mark.skipif(os.environ.get("DCR_TEST_INSTALLED") != "1", reason="not run by `make test`: the tree is installed")
def test_the_installed_wheel_is_under_test_and_not_the_source_tree() -> None:
    assert ROOT / "dcr_daemon" not in Path(dcr_daemon.__file__).parents
    assert "site-packages" in dcr_daemon.__file__


@pytest.mark.skipif(not list((ROOT / "dist").glob("*.whl")), reason="no wheel was built here: `make wheel`")
def test_the_wheel_holds_the_package_and_nothing_else() -> None:
    (wheel,) = (ROOT / "dist").glob("*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    assert {name.split("/")[0] for name in names} == {"dcr_daemon", f"dcr_daemon-{dcr_daemon.__version__}.dist-info"}
    assert "dcr_daemon/py.typed" in names
    assert any(name.endswith("licenses/LICENSE") for name in names)
    assert not [name for name in names if "__pycache__" in name or name.endswith((".nbi", ".nbc"))]


def test_only_the_command_imports_the_demo_which_the_wheel_does_not_hold() -> None:
    users = [path.name for path in (ROOT / "dcr_daemon").rglob("*.py") if "import dcr_demo" in path.read_text()]
    users += [path.name for path in (ROOT / "dcr_daemon").rglob("*.py") if "from dcr_demo" in path.read_text()]
    assert users == ["demo.py"]


def test_versions_agree() -> None:
    assert importlib.metadata.version("dcr-daemon") == dcr_daemon.__version__
    assert f"## {dcr_daemon.__version__}" in (ROOT / "CHANGELOG.md").read_text()


def test_the_public_package_is_small_and_complete() -> None:
    assert len(dcr_daemon.__all__) <= 10
    for name in dcr_daemon.__all__:
        assert getattr(dcr_daemon, name) is not None


@pytest.mark.parametrize(
    ("group", "name"),
    [("vllm.general_plugins", "dcr"), ("vllm.endpoint_plugins", "dcr_endpoint"), ("console_scripts", "dcr")],
)
def test_entry_points_load(group: str, name: str) -> None:
    """Whatever was imported before: a module of the same name as a factory would take its place."""
    (entry,) = (e for e in importlib.metadata.entry_points(group=group) if e.name == name)
    if group.startswith("vllm"):
        importlib.import_module("dcr_daemon.vllm_plugin.endpoint")
    assert callable(entry.load())


def test_every_pin_is_within_the_declared_range() -> None:
    """Requirement by requirement: what is installed and tested is what the metadata promises to work with."""
    from packaging.requirements import Requirement

    groups = tomllib.loads((ROOT / "pyproject.toml").read_text())["dependency-groups"]
    for text in [*(importlib.metadata.requires("dcr-daemon") or []), *groups["demo"]]:
        requirement = Requirement(text)
        if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
            assert requirement.specifier.contains(importlib.metadata.version(requirement.name)), text


@pytest.mark.parametrize(
    "folder", ["dcr_daemon", "demo", "docs", "systemd", "docker", "requirements", "examples", "benchmarks"]
)
def test_no_file_knows_the_machine_it_was_written_on(folder: str) -> None:
    wrong = []
    for path in sorted((ROOT / folder).rglob("*")):
        if path.is_file() and path.suffix in (".py", ".md", ".toml", ".txt", ".json", ".yaml", ".service"):
            text = path.read_text()
            wrong += [f"{path.name}: {word}" for word in ("/work/", "/home/", "/root/") if word in text]
    assert wrong == []

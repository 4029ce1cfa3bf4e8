"""The alert rules and the dashboard that are shipped: each asks for metrics and labels that the daemons have."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

import dcr_daemon.observe
from dcr_daemon import events as e
from dcr_daemon.observe.health import Health
from dcr_daemon.observe.metrics import Metrics

FILES = Path(dcr_daemon.observe.__file__).parent / "files"
OPERATIONS = Path(__file__).parents[2] / "docs" / "OPERATIONS.md"
RULES = yaml.safe_load((FILES / "alerts.yaml").read_text())["groups"][0]["rules"]
DASHBOARD = json.loads((FILES / "grafana.json").read_text())
EXPRESSIONS = [rule["expr"] for rule in RULES] + [
    target["expr"] for panel in DASHBOARD["panels"] for target in panel["targets"]
]


def series() -> dict[str, set[str]]:
    """The names of all samples that daemons can have, with their labels."""
    found: dict[str, set[str]] = {}
    for role in ("publisher", "subscriber"):
        metrics = Metrics(Health(role), disks={"state": Path("/")})
        for event in (
            e.Sealed(version=1, attempt=1, step=1, seq=1, changed=1, elements=2, bytes=1, dense_bytes=1, seconds=1.0),
            e.Committed(base=0, version=1, route="chain", pause_seconds=0.1, seconds=0.1),
            e.LedgerPolled(head=1),
            e.CheckpointSkipped(path="p", cause="misfit", reason="r"),
            e.ScrubEnded(version=1, tensors=1, bytes=1, seconds=0.1),
            e.StoreRequest(operation="get", outcome="ok", seconds=0.1),
        ):
            metrics(event)
        for family in metrics.registry.collect():
            for sample in family.samples:
                found.setdefault(sample.name, set()).update(sample.labels)
    return found


@pytest.mark.parametrize("expression", EXPRESSIONS)
def test_every_metric_and_label_exists(expression: str) -> None:
    known = series()
    names = re.findall(r"\bdcr_\w+", expression)
    assert names
    assert [name for name in names if name not in known] == []
    for name, labels in re.findall(r"(dcr_\w+)\{([^}]*)\}", expression):
        assert set(re.findall(r"(\w+)\s*=", labels)) <= known[name]
    assert expression.count("(") == expression.count(")")


def test_every_alert_says_how_bad_it_is_and_has_a_line_in_the_operations_guide() -> None:
    text = OPERATIONS.read_text()
    names = [rule["alert"] for rule in RULES]
    assert len(names) == len(set(names))
    for rule in RULES:
        assert rule["labels"]["severity"] in ("critical", "warning")
        assert rule["annotations"]["summary"]
        assert rule["annotations"]["runbook"].endswith(f"Alerts, {rule['alert']}")
        assert f"\n| `{rule['alert']}` |" in text
        assert re.fullmatch(r"\d+m", rule["for"])


def test_an_alert_on_an_increase_asks_for_series_that_exist_from_the_start() -> None:
    """`increase()` of a counter that begins with its first event is 0."""
    fresh = {
        (sample.name, *sorted(sample.labels.values()))
        for role in ("publisher", "subscriber")
        for family in Metrics(Health(role)).registry.collect()
        for sample in family.samples
    }
    for rule in RULES:
        for name, labels in re.findall(r"increase\((dcr_\w+)(?:\{([^}]*)\})?\[", rule["expr"]):
            values = sorted(re.findall(r'"(\w+)"', labels))
            assert (name, *values) in fresh or (not values and any(key[0] == name for key in fresh)), rule["alert"]


def test_panels_have_places_and_titles_of_their_own() -> None:
    panels = DASHBOARD["panels"]
    assert len({panel["id"] for panel in panels}) == len({panel["title"] for panel in panels}) == len(panels)
    assert len({(panel["gridPos"]["x"], panel["gridPos"]["y"]) for panel in panels}) == len(panels)


@pytest.mark.skipif(shutil.which("promtool") is None, reason="no promtool on this machine")
def test_promtool_accepts_the_rules() -> None:
    subprocess.run(["promtool", "check", "rules", str(FILES / "alerts.yaml")], check=True)

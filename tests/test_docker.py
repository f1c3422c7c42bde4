"""What stands in `docker/` agrees with the service: metrics that alerts and dashboard name, settings, the alert rules.

The image and the compose files themselves are tried in a real engine by `tests/containers/run`.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

from app.settings import Settings
from tests.service import ROOT, Service

DOCKER = ROOT / "docker"
PROMETHEUS_OWN = {"up"}


def expressions() -> list[str]:
    """Of every alert and every panel."""
    rules = yaml.safe_load((DOCKER / "alerts.yaml").read_text())["groups"]
    dashboard = json.loads((DOCKER / "grafana" / "phalanx.json").read_text())
    alerts = [rule["expr"] for group in rules for rule in group["rules"]]
    return alerts + [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]


def test_every_metric_that_alerts_and_dashboard_name_exists(digits: Service) -> None:
    assert (
        digits.infer([digits.group()["model"]["example"]]).status_code == 200
    )  # a rank is counted from its first step on
    exported = digits.client.get("/metrics").text
    names = {name for text in expressions() for name in re.findall(r"\bphalanx_\w+", text)}
    assert len(names) >= 12
    for name in names:
        assert re.search(rf"^(# TYPE )?{name}[ {{]", exported, re.MULTILINE), f"{name} is not exported"


def test_the_dashboard_shows_every_metric(digits: Service) -> None:
    exported = set(re.findall(r"^# TYPE (phalanx_\w+) (?!gauge$)", digits.client.get("/metrics").text, re.MULTILINE))
    shown = " ".join(expressions())
    unseen = {name for name in exported if not name.endswith("_created") and name not in shown}
    assert not unseen


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is missing (Debian: apt install prometheus)")
def test_the_alert_rules_fire_when_they_should_and_only_then(tmp_path: Path) -> None:
    shutil.copy(DOCKER / "alerts.yaml", tmp_path)
    shutil.copy(DOCKER / "prometheus.yaml", tmp_path)
    shutil.copy(Path(__file__).with_name("alerts_test.yaml"), tmp_path)
    for command in (["check", "rules", "alerts.yaml"], ["test", "rules", "alerts_test.yaml"]):
        done = subprocess.run(["promtool", *command], capture_output=True, text=True, cwd=tmp_path)
        assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is missing (Debian: apt install prometheus)")
def test_the_names_of_the_metrics_keep_the_rules(digits: Service) -> None:
    assert digits.infer([digits.group()["model"]["example"]]).status_code == 200
    exported = digits.client.get("/metrics").text
    done = subprocess.run(["promtool", "check", "metrics"], input=exported, capture_output=True, text=True)
    assert (done.returncode, done.stdout + done.stderr) == (0, "")


def test_compose_sets_only_settings_that_exist() -> None:
    text = "".join(path.read_text() for path in DOCKER.glob("compose*.yaml")) + (ROOT / "Dockerfile").read_text()
    for name in set(re.findall(r"PHALANX_\w+", text)):
        assert name.removeprefix("PHALANX_").lower() in Settings.model_fields, name

"""The dashboard, the alerts and the docs name metrics and labels that a run has, and the dashboard misses none."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

from raafl.core.types import Settled, Update
from raafl.monitoring.monitor import Health
from raafl.runfolder.record import RunRecord
from raafl.submodel import FlatTensors, Layout
from tests.habits.source import ROOT
from tests.runtime.server.sessions import task

pytest.importorskip("prometheus_client", reason="needs the extra monitoring")
from raafl.monitoring.monitor import RunMetrics

FOLDER = ROOT / "launch" / "monitoring"
DASHBOARD = json.loads((FOLDER / "grafana-dashboard.json").read_text())
ADDED = {"instance", "job"}
"""Labels that Prometheus adds."""


def labels_of_samples():
    """Each sample that a run has shown, with the names of its labels."""
    record = RunRecord(None)
    record.turned_away("x")
    info = dict.fromkeys(("run", "algorithm", "raafl", "runtime"), "x")
    metrics = RunMetrics(record, Health(60.0), info, num_clients=1)
    update = Update(1, 1, 0, FlatTensors.empty(Layout(())), 1, train_s=1.0, down_s=1.0, up_s=1.0)
    metrics.on_settled(Settled(task(1, client=1), 1, "merged", 1, 0, update), 1.0)
    metrics.on_merged(1, 1.0, 1.0)
    metrics.on_evaluate(1, 1.0, {"accuracy": 1.0})
    samples = [sample for family in metrics.registry.collect() for sample in family.samples]
    return {sample.name: set(sample.labels) for sample in samples if not sample.name.endswith("_created")}


KNOWN = labels_of_samples()
NAME = r"\b(?:raafl|process)_\w+"


def check(expression, legend=""):
    """Find the metrics of an expression; each name, and each label by which it selects, sums or is described, is one of its own."""
    names = re.findall(NAME, expression)
    assert names and KNOWN.keys() >= set(names), expression
    own = set.union(*(KNOWN[name] for name in names)) | ADDED
    for name, selected in re.findall(rf"({NAME}){{([^}}]*)}}", expression):
        assert set(re.findall(r"(\w+)\s*(?:=~|!=|=)", selected)) <= KNOWN[name] | ADDED, expression
    for by in re.findall(r"\b(?:by|on)\s*\(([^)]*)\)", expression):
        assert set(re.findall(r"\w+", by)) <= own, expression
    assert set(re.findall(r"{{\s*(\w+)\s*}}", legend)) <= own, legend
    assert expression.count("(") == expression.count(")")
    return set(names)


def test_the_dashboard_shows_every_metric_by_its_name_and_labels():
    shown = set[str]()
    for panel in DASHBOARD["panels"]:
        for target in panel["targets"]:
            shown |= check(target["expr"], target.get("legendFormat", ""))
    for variable in DASHBOARD["templating"]["list"][1:]:
        assert check(variable["query"]["query"]) == {"raafl_run_info"}

    def family(name):
        return re.sub(r"_(bucket|count|sum)$", "", name)

    not_shown = {"raafl_events_total", "raafl_evaluated_version", "raafl_run_clock_seconds"}
    assert {family(name) for name in KNOWN if name.startswith("raafl_")} - set(map(family, shown)) == not_shown


def test_panels_do_not_overlap():
    places = [
        (x, y)
        for panel in DASHBOARD["panels"]
        for x in range(panel["gridPos"]["x"], panel["gridPos"]["x"] + panel["gridPos"]["w"])
        for y in range(panel["gridPos"]["y"], panel["gridPos"]["y"] + panel["gridPos"]["h"])
    ]
    assert len(places) == len(set(places)) and max(x for x, _ in places) == 23
    ids = [panel["id"] for panel in DASHBOARD["panels"]]
    assert len(ids) == len(set(ids))


def test_the_alerts_are_of_metrics_and_scraped_from_the_documented_port():
    (group,) = yaml.safe_load((FOLDER / "alerts.yml").read_text())["groups"]
    for rule in group["rules"]:
        check(rule["expr"])
        assert rule["annotations"]["summary"].endswith(".")
    scrape = yaml.safe_load((FOLDER / "prometheus.yml").read_text())
    assert scrape["rule_files"] == ["alerts.yml"] and (FOLDER / "alerts.yml").is_file()
    (target,) = scrape["scrape_configs"][0]["static_configs"][0]["targets"]
    assert f"--monitor {target}" in (ROOT / "docs" / "monitoring.md").read_text()


def test_each_alert_fires_when_it_should(tmp_path):
    """By Prometheus' own tool, where it is installed."""
    if (promtool := shutil.which("promtool")) is None:
        pytest.skip("needs promtool, of Prometheus")
    for file in (*FOLDER.glob("*.yml"), Path(__file__).with_name("alerts_test.yml")):
        shutil.copy(file, tmp_path)
    for what in (["check", "config", "prometheus.yml"], ["test", "rules", "alerts_test.yml"]):
        done = subprocess.run([promtool, *what], cwd=tmp_path, capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stdout + done.stderr


def test_every_alert_has_a_case():
    rules = yaml.safe_load((FOLDER / "alerts.yml").read_text())["groups"][0]["rules"]
    (cases,) = yaml.safe_load(Path(__file__).with_name("alerts_test.yml").read_text())["tests"]
    assert {rule["alert"] for rule in rules} == {case["alertname"] for case in cases["alert_rule_test"]}


def test_the_docs_list_every_metric_and_no_other():
    text = (ROOT / "docs" / "monitoring.md").read_text()
    named = set(re.findall(r"^\| `(raafl_\w+)`", text, re.M))
    families = {re.sub(r"_(bucket|count|sum)$", "", name) for name in KNOWN if name.startswith("raafl_")}
    assert named == families


def test_names_are_as_prometheus_would_have_them():
    """Counters end in _total, and units are whole and in the plural: seconds, bytes, versions, ratio."""
    for name in KNOWN:
        assert not re.search(r"_(ms|s|sec|mb|kb|percent)(_|$)", name)

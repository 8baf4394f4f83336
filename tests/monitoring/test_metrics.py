"""Metrics count what happened, go on where a resumed run stopped, and have bounded labels whatever clients say."""

from __future__ import annotations

import math
import re
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raafl.core.types import Settled, Update
from raafl.monitoring.monitor import Health
from raafl.runfolder.record import RunRecord
from raafl.submodel import FlatTensors, Layout
from tests.runtime.server.sessions import task

pytest.importorskip("prometheus_client", reason="needs the extra monitoring")
from prometheus_client import CollectorRegistry, Gauge, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from raafl.monitoring.monitor import MAX_REASONS, LabelValues, RunMetrics


def metrics_of(record=None, **more):
    return RunMetrics(record or RunRecord(None), Health(60.0), {"run": "x"}, **more)


def value(metrics, name, **labels):
    return metrics.registry.get_sample_value(f"raafl_{name}", labels)


def settled(outcome, client=1, staleness=0, **update):
    assignment = task(1, client=client)
    answer = Update(1, client, 0, FlatTensors.empty(Layout(())), 1, **update) if update else None
    return Settled(assignment, client, outcome, 1, staleness, answer)


def test_ends_of_tasks_are_counted_by_outcome_and_reason():
    metrics = metrics_of(num_clients=2)
    ends = (
        settled("merged", staleness=3, train_s=0.25, down_s=0.1, up_s=0.02),
        settled("merged", 3, train_s=2.0),
        settled("refused:non-finite", 2, train_s=0.5),
        settled("lost:timeout"),
        settled("unused"),
    )
    for end in ends:
        metrics.on_settled(end, 5.0)
    assert value(metrics, "updates_total", outcome="merged", reason="") == 2
    assert value(metrics, "updates_total", outcome="refused", reason="non-finite") == 1
    assert value(metrics, "updates_total", outcome="lost", reason="timeout") == 1
    assert value(metrics, "updates_total", outcome="unused", reason="") == 1
    assert value(metrics, "client_updates_total", client="1", outcome="merged") == 1
    assert value(metrics, "client_updates_total", client="2", outcome="refused") == 1
    assert value(metrics, "client_updates_total", client="3", outcome="merged") is None  # beyond the configured two
    assert value(metrics, "staleness_versions_count") == 2 and value(metrics, "staleness_versions_sum") == 3
    assert value(metrics, "staleness_versions_bucket", le="2.0") == 1
    assert value(metrics, "task_seconds_count") == 3 and value(metrics, "task_seconds_sum") == 2.75
    assert value(metrics, "transfer_seconds_sum", direction="down") == 0.1
    assert value(metrics, "transfer_seconds_count", direction="up") == 1


def test_what_the_coordinator_and_the_record_have_is_shown():
    record, queued = RunRecord(None), [4]
    metrics = metrics_of(record, num_queued=lambda: queued[0])
    roster = SimpleNamespace(clients={1: 0, 2: 0, 3: 0}, busy={2: 9}, suspended={4: 0}, active={9: 0, 8: 0})
    state = SimpleNamespace(version=6, waiting=[1, 2])
    metrics.on_event(None, SimpleNamespace(roster=roster, state=state), 12.5)
    metrics.on_merged(6, 12.5, 0.02)
    record.moved(down=70, up=30)
    record.turned_away("bad-certificate")
    record.row = {"epsilon": 1.5, "utilisation": 0.75}
    assert math.isnan(value(metrics, "privacy_epsilon"))
    metrics.on_evaluate(6, 12.5, {"accuracy": 0.5})
    shown = [value(metrics, "sessions", state=name) for name in ("idle", "working", "suspended")]
    assert shown == [2, 1, 1]
    assert (value(metrics, "waiting_updates"), value(metrics, "tasks_in_flight")) == (2, 2)
    assert (value(metrics, "model_version"), value(metrics, "run_clock_seconds")) == (6, 12.5)
    assert value(metrics, "merge_seconds_sum") == 0.02
    assert value(metrics, "transferred_bytes_total", direction="down") == 70
    assert value(metrics, "transferred_bytes_total", direction="up") == 30
    assert value(metrics, "connections_refused_total", reason="bad-certificate") == 1
    assert (value(metrics, "queued_events"), value(metrics, "events_total")) == (4, 0)
    assert value(metrics, "evaluation", metric="accuracy") == 0.5 and value(metrics, "evaluated_version") == 6
    assert (value(metrics, "privacy_epsilon"), value(metrics, "utilisation_ratio")) == (1.5, 0.75)
    assert value(metrics, "run_info", run="x") == 1


def test_a_resumed_run_goes_on_counting():
    record = RunRecord(None)
    record.outcomes.update({"merged": 5, "refused:late": 2})
    metrics = metrics_of(record)
    metrics.on_settled(settled("merged"), 1.0)
    assert value(metrics, "updates_total", outcome="merged", reason="") == 6
    assert value(metrics, "updates_total", outcome="refused", reason="late") == 2


def test_nobody_can_make_labels_without_bound():
    record = RunRecord(None)
    metrics = metrics_of(record, num_clients=10)
    for number in range(500):
        metrics.on_settled(settled(f"refused:reason-{number}", number), 1.0)
        record.turned_away(f"other-{number}")
    found = list(metrics.registry.collect())
    samples = [sample for family in found for sample in family.samples]
    assert len(samples) < 300
    reasons = {sample.labels["reason"] for sample in samples if sample.labels.get("reason")}
    assert len(reasons) == MAX_REASONS + 1 and "other" in reasons
    assert value(metrics, "updates_total", outcome="refused", reason="other") == 500 - MAX_REASONS
    assert value(metrics, "connections_refused_total", reason="other") == 500


def test_a_label_is_plain_and_short():
    assert LabelValues(9).of('a"}\n\x1b[31m' + "b" * 99) == "a_____31m" + "b" * 51


def scraped(texts):
    """Render gauges whose label values are made from ``texts``; return the labels that Prometheus' own parser reads."""
    values, registry = LabelValues(64), CollectorRegistry()
    gauge = Gauge("raafl_test", "A test", ("name",), registry=registry)
    for number, text in enumerate(texts):
        gauge.labels(values.of(text)).set(number)
    (family,) = text_string_to_metric_families(generate_latest(registry).decode())
    return [sample.labels["name"] for sample in family.samples]


@given(st.lists(st.text(max_size=200), max_size=100))
def test_hostile_labels_are_plain_few_and_parsed_as_written(texts):
    found = scraped(texts)
    assert len(found) <= 65 and all(re.fullmatch(r"[A-Za-z0-9_./-]{0,60}", name) for name in found)


def test_labels_that_would_end_a_line_or_forge_a_metric_do_neither():
    hostile = [
        'a"} 1\nraafl_model_version 99',
        "\\",
        "\n",
        "# HELP x",
        "\u2028",
        "\0",
        "x" * 10_000,
        "__name__",
        '{le="+Inf"}',
        "é" * 61,
    ]
    assert len(scraped(hostile)) == len(set(map(LabelValues(64).of, hostile)))

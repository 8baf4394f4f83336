"""Spans of tasks, transfers and merges have the times at which these happened, and go where the environment says."""

from __future__ import annotations

import sys
import threading
import time
from importlib.metadata import EntryPoint

import pytest

from raafl.core.types import Settled, Update
from raafl.monitoring import spans as module
from raafl.submodel import FlatTensors, Layout
from tests.runtime.server.sessions import task

pytest.importorskip("opentelemetry.sdk.trace", reason="needs the extra monitoring")
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from raafl.monitoring.spans import EXPORTERS, Spans, find_sink


def recorded(act):
    provider, exporter = TracerProvider(shutdown_on_exit=False), InMemorySpanExporter()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    act(Spans(provider))
    return exporter.get_finished_spans()


def seconds(span):
    return (span.end_time - span.start_time) / 1e9


def test_a_task_has_its_transfers_and_a_merge_its_tasks():
    """The task was assigned at 2 s, sent in 0.5 s, answered at 8 s after an upload of a second, and merged at 10 s."""
    update = Update(
        3, 4, 0, FlatTensors.empty(Layout(())), 1, train_s=6.0, down_s=0.5, up_s=1.0, bytes_down=70, bytes_up=30
    )
    merged = Settled(task(3, assigned_s=2.0, version=1), 4, "merged", 9, 7, update)
    lost = Settled(task(5, assigned_s=4.0), 2, "lost:timeout", 9, 0)

    def act(spans):
        spans.on_merged(9, 10.0, 0.25)
        spans.on_settled(merged, 10.0)
        spans.on_settled(lost, 10.0)
        spans.on_settled(Settled(None, 1, "refused:unknown-assignment", 9, 0), 10.0)  # of no task
        spans.on_event(None, None, 10.0)
        spans.on_event(None, None, 11.0)  # of no merge

    now = time.time()
    down, up, whole, gone, merge = recorded(act)
    names = [span.name for span in (down, up, whole, gone, merge)]
    assert names == ["raafl.transfer.down", "raafl.transfer.up", "raafl.task", "raafl.task", "raafl.merge"]
    assert [seconds(span) for span in (down, up, whole)] == pytest.approx([0.5, 1.0, 6.0], abs=1e-6)
    assert whole.start_time / 1e9 == pytest.approx(now - 8.0, abs=2.0)
    assert down.start_time == whole.start_time and up.end_time == pytest.approx(whole.end_time, abs=1000)
    assert down.parent.span_id == up.parent.span_id == whole.context.span_id and whole.parent is None
    assert (down.attributes["raafl.bytes"], up.attributes["raafl.bytes"]) == (70, 30)
    assert whole.attributes["raafl.client"] == 4 and whole.attributes["raafl.staleness"] == 7
    assert seconds(gone) == pytest.approx(6.0, abs=2.0) and gone.status.description == "lost:timeout"
    assert seconds(merge) == pytest.approx(0.25, abs=1e-6) and merge.attributes["raafl.version"] == 9
    assert [link.context.span_id for link in merge.links] == [whole.context.span_id]


@pytest.fixture
def alone(monkeypatch):
    """No provider of the process's own, as if the SDK had not been imported."""
    monkeypatch.delitem(sys.modules, "opentelemetry.sdk.trace")
    monkeypatch.delenv("OTEL_SDK_DISABLED", raising=False)
    return []


@pytest.mark.parametrize("named", ["", "none", " , none"])
def test_without_an_exporter_there_are_no_spans(alone, monkeypatch, named):
    monkeypatch.setenv(EXPORTERS, named)
    assert find_sink(alone.append) is None and alone == [] and "opentelemetry.sdk.trace" not in sys.modules


def test_an_exporter_that_is_absent_or_cannot_be_made_is_said_once_and_hurts_nothing(alone, monkeypatch):
    def load(self):
        raise ImportError("no grpc")

    monkeypatch.setattr(EntryPoint, "load", load)
    monkeypatch.setenv(EXPORTERS, "console,carrier-pigeon")
    sink = find_sink(alone.append)
    assert sink is not None and sink.is_own
    sink.close()
    assert [line.partition(":")[0] for line in alone] == [
        EXPORTERS,
        f"{EXPORTERS} is 'carrier-pigeon', which no package here provides",
    ]


def test_a_collector_that_hangs_delays_the_end_by_seconds_at_most(monkeypatch):
    monkeypatch.setattr(module, "_CLOSE_S", 0.05)

    answered, ended = threading.Event(), threading.Event()

    class Hangs:
        def shutdown(self):
            answered.wait(30)
            ended.set()

    module.SpanSink(Hangs(), is_own=True).close()
    assert not ended.is_set()
    answered.set()
    assert ended.wait(30)


def test_the_named_exporter_gets_the_spans(alone, monkeypatch):
    made = []

    class Kept(InMemorySpanExporter):
        def __init__(self):
            super().__init__()
            made.append(self)

    monkeypatch.setattr(EntryPoint, "load", lambda self: Kept)
    monkeypatch.setenv(EXPORTERS, "console")
    sink = find_sink(alone.append)
    Spans(sink.provider).on_settled(Settled(task(5), 2, "unused", 9, 0), 10.0)
    sink.close()
    (span,) = made[0].get_finished_spans()
    assert span.name == "raafl.task" and span.resource.attributes["service.name"] == "raafl" and alone == []

"""Count and measure a run for Prometheus, in a registry of its own.

Every label has a bounded set of values, whatever clients say: outcomes and states are fixed, reasons and metrics are the first so
many that occur, ids of clients are those up to a configured number.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from raafl.core.coordinator import Coordinator
from raafl.core.hooks import RunHooks
from raafl.core.types import Event, Settled
from raafl.monitoring.endpoint import Health
from raafl.runfolder.record import RunRecord
from raafl.runfolder.schema import KINDS, MERGED, kind_of

MAX_REASONS: Final = 64
MAX_METRICS: Final = 100
OTHER: Final = "other"
_STALENESS: Final = (0, 1, 2, 4, 8, 16, 32, 64, 128, 256)
_SECONDS: Final = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 100, 300, 1000, 3000)
_STATES: Final = ("idle", "working", "suspended")


class LabelValues:
    """Values of a metric's label, limited in number: once the limit is reached, every new value becomes `OTHER`."""

    def __init__(self, most: int) -> None:
        """Allow ``most`` values beside `OTHER`."""
        self._most, self._values = most, dict[str, str]()

    def of(self, text: str) -> str:
        """Return the value to use as label for a text: at most 60 characters, with unusual characters replaced by ``_``."""
        if text not in self._values:
            if len(self._values) >= self._most:
                return OTHER
            self._values[text] = re.sub(r"[^A-Za-z0-9_./-]", "_", text[:60])
        return self._values[text]


class RunMetrics(RunHooks):
    """Observer that computes a run's metrics for Prometheus; docs/monitoring.md lists them.

    `registry`: Prometheus registry of the metrics; it can be read on any thread.
    """

    def __init__(
        self,
        record: RunRecord,
        health: Health,
        info: Mapping[str, str],
        num_clients: int = 0,
        num_queued: Callable[[], int] = lambda: 0,
    ) -> None:
        """Create the metrics, with the counts that the record of a resumed run has already."""
        self.registry = registry = CollectorRegistry()
        self._record, self._num_clients = record, num_clients
        self._reasons, self._names = LabelValues(MAX_REASONS), LabelValues(MAX_METRICS)
        ProcessCollector(registry=registry)
        registry.register(_AtScrape(record, health, num_queued, self._reasons))

        def gauge(name: str, text: str, *labels: str) -> Gauge:
            return Gauge(f"raafl_{name}", text, labels, registry=registry)

        def histogram(name: str, text: str, buckets: tuple[float, ...], *labels: str) -> Histogram:
            return Histogram(f"raafl_{name}", text, labels, registry=registry, buckets=buckets)

        gauge("run_info", "The run, as labels; always 1", *info).labels(*info.values()).set(1)
        self._updates = Counter(
            "raafl_updates", "Ends of tasks, by outcome and reason", ("outcome", "reason"), registry=registry
        )
        self._by_client = Counter(
            "raafl_client_updates",
            "Ends of tasks of single clients, by outcome",
            ("client", "outcome"),
            registry=registry if num_clients else None,
        )
        self._version = gauge("model_version", "Version of the global model: the number of merges")
        self._sessions = gauge("sessions", "Clients that are connected, by state", "state")
        self._waiting = gauge("waiting_updates", "Updates that have been received and not been merged yet")
        self._tasks = gauge("tasks_in_flight", "Tasks that are out at clients")
        self._evaluation = gauge("evaluation", "Metrics of the version measured last", "metric")
        self._evaluated = gauge("evaluated_version", "Version measured last")
        self._epsilon = gauge(
            "privacy_epsilon", "Differential privacy spent, in the run's unit of adjacency; NaN = off"
        )
        self._clock_s = gauge("run_clock_seconds", "The run's clock: seconds since it began, virtual in a simulation")
        self._utilisation = gauge("utilisation_ratio", "Share of the clients' time that is spent in tasks")
        self._staleness = histogram(
            "staleness_versions", "Versions between a merged update's task and merge", _STALENESS
        )
        self._task_s = histogram("task_seconds", "From a task's assignment to its answer, on the run's clock", _SECONDS)
        self._transfer_s = histogram(
            "transfer_seconds", "Seconds of a task in which its tensors travel", _SECONDS, "direction"
        )
        self._merge_s = histogram("merge_seconds", "Real seconds of handling an event with a merge in it", _SECONDS)
        self._begin()

    def _begin(self) -> None:
        for outcome in KINDS:
            self._updates.labels(outcome, "")
        for outcome, num in self._record.outcomes.items():
            self._updates.labels(*self._outcome(outcome)).inc(num)
        self._epsilon.set(float("nan"))
        for state in _STATES:
            self._sessions.labels(state)
        self._measured(self._record.evaluated_version, self._record.metrics)

    def _outcome(self, outcome: str) -> tuple[str, str]:
        kind, _, reason = outcome.partition(":")
        return kind, self._reasons.of(reason) if reason else ""

    def on_settled(self, settled: Settled, now: float) -> None:
        """Update the metrics when a task has ended; see `RunHooks.on_settled`."""
        self._updates.labels(*self._outcome(settled.outcome)).inc()
        if 0 < settled.client <= self._num_clients:
            self._by_client.labels(settled.client, kind_of(settled.outcome)).inc()
        if settled.outcome == MERGED:
            self._staleness.observe(settled.staleness)
        update = settled.update
        if update is None or settled.assignment is None:
            return
        self._task_s.observe(update.train_s)
        for direction, seconds in (("down", update.down_s), ("up", update.up_s)):
            if seconds > 0:
                self._transfer_s.labels(direction).observe(seconds)

    def on_merged(self, version: int, now: float, seconds: float) -> None:
        """Update the metrics of merges; see `RunHooks.on_merged`."""
        self._merge_s.observe(seconds)

    def on_event(self, event: Event, coordinator: Coordinator, now: float) -> None:
        """Update the metrics that an event may have changed; see `RunHooks.on_event`."""
        roster = coordinator.roster
        there, working = len(roster.clients), len(roster.busy)
        for state, num in zip(_STATES, (there - working, working, len(roster.suspended)), strict=True):
            self._sessions.labels(state).set(num)
        self._waiting.set(len(coordinator.state.waiting))
        self._tasks.set(len(roster.active))
        self._version.set(coordinator.state.version)
        self._clock_s.set(now)

    def on_evaluate(self, version: int, now: float, metrics: dict[str, float]) -> None:
        """Update the metrics of the global model after an evaluation; see `RunHooks.on_evaluate`."""
        self._measured(version, metrics)

    def _measured(self, version: int, metrics: Mapping[str, float]) -> None:
        row = self._record.row
        self._evaluated.set(version)
        for name, value in metrics.items():
            self._evaluation.labels(self._names.of(name)).set(value)
        for gauge, name in ((self._epsilon, "epsilon"), (self._utilisation, "utilisation")):
            if (figure := row.get(name)) is not None:
                gauge.set(figure)


class _AtScrape(Collector):
    """Collector of metrics that change without an event, and are read at each scrape; all are integers with one writer thread."""

    def __init__(self, record: RunRecord, health: Health, num_queued: Callable[[], int], reasons: LabelValues) -> None:
        self._record, self._health, self._num_queued, self._reasons = record, health, num_queued, reasons

    def collect(self) -> Iterator[Metric]:
        """Yield the metrics that are computed at each scrape, with their present values."""
        record = self._record
        moved = CounterMetricFamily(
            "raafl_transferred_bytes", "Bytes between server and clients", labels=("direction",)
        )
        moved.add_metric(("down",), record.bytes_down)
        moved.add_metric(("up",), record.bytes_up)
        refused = CounterMetricFamily(
            "raafl_connections_refused", "Callers that did not become clients, by reason", labels=("reason",)
        )
        numbers: dict[str, Any] = {}
        for reason, num in record.connections_refused().items():
            label = self._reasons.of(reason)
            numbers[label] = numbers.get(label, 0) + num
        for label, num in numbers.items():
            refused.add_metric((label,), num)
        yield from (moved, refused)
        yield CounterMetricFamily("raafl_events", "Events that the coordinator has handled", value=record.num_events)
        yield GaugeMetricFamily("raafl_queued_events", "Events that wait for the loop", value=self._num_queued())
        yield GaugeMetricFamily(
            "raafl_loop_idle_seconds", "Seconds since the loop turned last", value=self._health.idle_s
        )

    def describe(self) -> Iterator[Metric]:
        """Yield the metrics that are computed at each scrape, without values."""
        return self.collect()

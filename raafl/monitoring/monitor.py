"""Open a run's monitoring port, and create the observers that provide its data."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from http import HTTPStatus
from types import TracebackType
from typing import TYPE_CHECKING, Final, Self

from raafl.config.experiment import Experiment, seconds
from raafl.core.hooks import RunHooks
from raafl.monitoring.endpoint import Endpoint, Reply, listening_socket
from raafl.monitoring.health import Health
from raafl.runfolder.record import RunRecord

if TYPE_CHECKING:
    from raafl.monitoring.metrics import RunMetrics
    from raafl.monitoring.spans import SpanSink

REFRESH_S: Final = 0.5
"""Seconds for which a reply of /metrics is used again: many scrapers cost the run no more than one."""

EMPTY: Final = Reply(HTTPStatus.OK, b"")


class Monitor:
    """Monitoring of one run by Prometheus and OpenTelemetry; it does nothing unless the config or the environment asks for it."""

    address: str | None = None  # ``HOST:PORT`` that serves /metrics and /healthz; None = no port is open

    def __init__(self, experiment: Experiment, num_queued: Callable[[], int] = lambda: 0) -> None:
        """Prepare; the context opens the port."""
        self._experiment, self._num_queued = experiment, num_queued
        self._health = Health(seconds("monitor_stall_s", experiment.monitor_stall_s) or 0.0)
        self._endpoint: Endpoint | None = None
        self._metrics: RunMetrics | None = None
        self._sink: SpanSink | None = None
        self._rendered, self._rendered_at = EMPTY, float("-inf")

    def __enter__(self) -> Self:
        """Open the port; raises `BadInput` where it cannot be had."""
        if self._experiment.monitor is not None:
            routes = {"/metrics": self._scrape, "/healthz": self._health.report}
            self._endpoint = Endpoint(listening_socket("monitor", self._experiment.monitor), routes)
            self.address = self._endpoint.address
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Close the port, and export the last spans."""
        if self._endpoint is not None:
            self._endpoint.close()
        if self._sink is not None:
            self._sink.close()

    def observers(
        self, record: RunRecord, runtime: str, info: Mapping[str, str], warn: Callable[[str], None]
    ) -> list[RunHooks]:
        """Create the observers that compute metrics, health and trace spans of a run."""
        made: list[RunHooks] = []
        if self._endpoint is not None:
            from raafl.monitoring.metrics import RunMetrics

            num_clients = self._experiment.monitor_clients
            self._metrics = RunMetrics(
                record, self._health, {**info, "runtime": runtime}, num_clients, self._num_queued
            )
            made += [self._health, self._metrics]
        if runtime == "distributed":
            from raafl.monitoring.spans import Spans, find_sink

            self._sink = find_sink(warn)
            made += [] if self._sink is None else [Spans(self._sink.provider)]
        return made

    def _scrape(self) -> Reply:
        """Return the metrics as text; empty before the run has any."""
        if self._metrics is None:
            return EMPTY
        from prometheus_client import CONTENT_TYPE_LATEST, generate_latest

        if time.monotonic() - self._rendered_at > REFRESH_S:
            self._rendered = Reply(HTTPStatus.OK, generate_latest(self._metrics.registry), CONTENT_TYPE_LATEST)
            self._rendered_at = time.monotonic()
        return self._rendered

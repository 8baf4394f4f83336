"""Serve a run's metrics and health at a port, as its setting ``monitor`` asks."""

from __future__ import annotations

import time
from http import HTTPStatus
from typing import TYPE_CHECKING, Any, Final

from raafl._version import __version__
from raafl.config.experiment import seconds
from raafl.core.hooks import HookList
from raafl.monitoring.endpoint import Endpoint, Health, Reply, listening_socket

if TYPE_CHECKING:
    from raafl.monitoring.metrics import RunMetrics

REFRESH_S: Final = 0.5
"""Seconds for which a reply of /metrics is used again: many scrapers cost the run no more than one."""

EMPTY: Final = Reply(HTTPStatus.OK, b"")


class Monitor(HookList):
    """Observer that serves a run's metrics and health to Prometheus.

    `address`: ``HOST:PORT`` that serves /metrics and /healthz.
    """

    def __init__(self, run: Any) -> None:
        """Prepare to serve a `raafl.runtime.run.Run`; `begin` opens the port."""
        super().__init__()
        self._run, self.address = run, ""
        self._health = Health(seconds("monitor_stall_s", run.parts.experiment.monitor_stall_s) or 0.0)
        self._endpoint: Endpoint | None = None
        self._metrics: RunMetrics | None = None
        self._rendered, self._rendered_at = EMPTY, float("-inf")

    def begin(self, run: Any, saved: object = None) -> None:
        """Open the port; raises `BadInput` where it cannot be had."""
        routes = {"/metrics": self._scrape, "/healthz": self._health.report}
        self._endpoint = Endpoint(listening_socket("monitor", run.parts.experiment.monitor), routes)
        self.address = self._endpoint.address

    def opened(self) -> None:
        """Compute metrics and health from now on."""
        from raafl.monitoring.metrics import RunMetrics

        run, experiment = self._run, self._run.parts.experiment
        info = {
            "run": experiment.name,
            "algorithm": experiment.algorithm.name,
            "raafl": __version__,
            "runtime": run.runtime,
        }
        self._metrics = RunMetrics(run.record, self._health, info, experiment.monitor_clients, run.num_queued)
        self._hooks = (self._health, self._metrics)

    def start(self) -> None:
        """Say where it is."""
        self._run.progress.note(f"metrics at http://{self.address}/metrics, health at /healthz")

    def close(self) -> None:
        """Close the port."""
        if self._endpoint is not None:
            self._endpoint.close()

    def _scrape(self) -> Reply:
        """Return the reply to a scrape: the metrics in Prometheus' text format; empty before the run has started."""
        if self._metrics is None:
            return EMPTY
        from prometheus_client import CONTENT_TYPE_LATEST, generate_latest

        if time.monotonic() - self._rendered_at > REFRESH_S:
            self._rendered = Reply(HTTPStatus.OK, generate_latest(self._metrics.registry), CONTENT_TYPE_LATEST)
            self._rendered_at = time.monotonic()
        return self._rendered

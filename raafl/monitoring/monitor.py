"""Serve a run's metrics and health at a port, as its setting ``monitor`` asks."""

from __future__ import annotations

import asyncio
import json
import logging
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any, Final, Literal

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from raafl._version import __version__
from raafl.config.options import seconds
from raafl.core.coordinator import Coordinator
from raafl.core.hooks import HookList, RunHooks
from raafl.core.types import Event, Settled
from raafl.errors import BadInput, parse_address
from raafl.runfolder.record import RunRecord
from raafl.runfolder.schema import KINDS, MERGED, kind_of

# Answer short HTTP requests of monitoring tools, on a port and a thread of its own. The run never waits for a request,
# nor a request for the run: a request's size and a caller's time are limited, and with too many callers the oldest is
# disconnected, so that one who never finishes a request blocks nobody else.

MAX_REQUEST_BYTES = 8192
MAX_CALLERS = 32
CALLER_S = 5.0
"""Seconds that a caller has to send its request and to take the reply."""

_BACKLOG = 4 * MAX_CALLERS
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Reply:
    """A reply to an HTTP request: status, body and content type."""

    status: HTTPStatus
    body: bytes
    content_type: str = "text/plain; charset=utf-8"


def listening_socket(field: str, address: str) -> socket.socket:
    """Return a socket that listens at ``HOST:PORT``.

    Raises:
        BadInput: this machine cannot listen at the address.
    """
    try:
        host, port = parse_address(address)
        family, kind, _, _, where = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, kind)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(where)
            listener.listen(_BACKLOG)
        except OSError:
            listener.close()
            raise
    except (OSError, UnicodeError) as error:
        why = getattr(error, "strerror", None) or error
        raise BadInput(
            f"{field} is '{address}', on which this machine cannot listen ({why}): name another HOST:PORT"
        ) from None
    return listener


class Endpoint:
    """HTTP server for short requests: a listening socket, and the thread that answers.

    `address`: ``HOST:PORT`` at which the server listens.
    """

    def __init__(self, listener: socket.socket, routes: Mapping[str, Callable[[], Reply]]) -> None:
        """Start the thread that answers HTTP requests at ``listener``."""
        host, port = listener.getsockname()[:2]
        self.address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        self._listener, self._routes = listener, routes
        self._callers: dict[asyncio.Task[None], asyncio.StreamWriter] = {}  # open connections, oldest first
        self._loop, self._closing = asyncio.new_event_loop(), asyncio.Event()
        self._thread = threading.Thread(target=self._run, name="monitor", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Close the port and end the thread; a second call does nothing."""
        with suppress(RuntimeError):  # the event loop is closed
            self._loop.call_soon_threadsafe(self._closing.set)
        self._thread.join(timeout=CALLER_S)
        self._listener.close()

    def _run(self) -> None:
        loop = self._loop
        loop.set_exception_handler(lambda _, context: _log.debug("monitor: %s", context.get("message")))
        try:
            loop.run_until_complete(self._answer())
        finally:
            loop.close()

    async def _answer(self) -> None:
        """Answer HTTP requests until the endpoint is closed."""
        server = await asyncio.start_server(self._serve, sock=self._listener, limit=MAX_REQUEST_BYTES, backlog=_BACKLOG)
        await self._closing.wait()
        server.close()
        callers = [*self._callers]
        for caller in callers:
            caller.cancel()
        await asyncio.gather(*callers, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        if len(self._callers) >= MAX_CALLERS:
            next(iter(self._callers.values())).transport.abort()
            del self._callers[next(iter(self._callers))]
        self._callers[task] = writer
        try:
            async with asyncio.timeout(CALLER_S):
                head = await reader.readuntil(b"\r\n\r\n")
                writer.write(self._reply(head))
                await writer.drain()
                writer.close()
                await writer.wait_closed()
        except (TimeoutError, asyncio.LimitOverrunError, asyncio.IncompleteReadError, OSError):
            pass  # the caller was too slow, sent too much, or closed the connection
        finally:
            writer.transport.abort()
            self._callers.pop(task, None)

    def _reply(self, head: bytes) -> bytes:
        """Look up the path of an HTTP request and return the reply's bytes."""
        method, _, rest = head.partition(b"\r\n")[0].partition(b" ")
        path = rest.partition(b" ")[0].partition(b"?")[0].decode("latin-1")
        if method not in (b"GET", b"HEAD"):
            reply = _plain(HTTPStatus.METHOD_NOT_ALLOWED)
        elif path not in self._routes:
            reply = _plain(HTTPStatus.NOT_FOUND)
        else:
            try:
                reply = self._routes[path]()
            except Exception as error:  # an error in raafl's answer must not end this thread or the run
                _log.warning(f"{path} failed: {type(error).__name__}: {error}")
                reply = _plain(HTTPStatus.INTERNAL_SERVER_ERROR)
        lines = (
            f"HTTP/1.1 {reply.status.value} {reply.status.phrase}",
            f"Content-Type: {reply.content_type}",
            f"Content-Length: {len(reply.body)}",
            "Cache-Control: no-store",
            "Connection: close",
            "",
            "",
        )
        return "\r\n".join(lines).encode() + (b"" if method == b"HEAD" else reply.body)


def _plain(status: HTTPStatus) -> Reply:
    return Reply(status, f"{status.phrase}\n".encode())


class Health(RunHooks):
    """Observer that records each iteration of the run's main loop, for a health check.

    `state`: "starting" before the first iteration, then "running", and "ending" once the run has finished its work.
    """

    def __init__(self, stall_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        """Start in the state "starting"; a run whose main loop makes no turn for ``stall_s`` seconds counts as stalled."""
        self._stall_s, self._clock = stall_s, clock
        self._version, self._turned_at = 0, clock()
        self.state: Literal["starting", "running", "ending"] = "starting"

    def stop_asked(self) -> str | None:
        """Record an iteration of the run's main loop, which calls this method each time; return None, so that the loop goes on."""
        self._turned_at = self._clock()
        if self.state == "starting":
            self.state = "running"
        return None

    def on_event(self, event: Event, coordinator: Coordinator, now: float) -> None:
        """Record the run's state after an event; see `RunHooks.on_event`."""
        self.look(coordinator)

    def look(self, coordinator: Coordinator) -> None:
        """Record the model's version, and whether the run has finished its work."""
        self._version = coordinator.state.version
        if coordinator.finished is not None:
            self.state = "ending"

    @property
    def idle_s(self) -> float:
        """Seconds since the last iteration of the run's main loop."""
        return self._clock() - self._turned_at

    def report(self) -> Reply:
        """Return the reply to a health check: status 503 if the main loop has made no iteration for too long, else 200.

        It can be called on any thread.
        """
        idle_s = self.idle_s
        stalled = self.state == "running" and idle_s > self._stall_s
        body = {"status": "stalled" if stalled else self.state, "version": self._version, "idle_s": round(idle_s, 3)}
        status = HTTPStatus.SERVICE_UNAVAILABLE if stalled else HTTPStatus.OK
        return Reply(status, json.dumps(body).encode() + b"\n", "application/json")


REFRESH_S: Final = 0.5
"""Seconds for which a reply of /metrics is used again: many scrapers cost the run no more than one."""

EMPTY: Final = Reply(HTTPStatus.OK, b"")


class Monitor(HookList):
    """Observer that serves a run's metrics and health to Prometheus.

    `address`: ``HOST:PORT`` that serves /metrics and /healthz.
    """

    def __init__(self, run: Any) -> None:
        """Store the run, a `raafl.runtime.run.Run`; the port is opened only in `begin`."""
        super().__init__()
        self._run, self.address = run, ""
        self._health = Health(seconds("monitor_stall_s", run.parts.experiment.monitor_stall_s) or 0.0)
        self._endpoint: Endpoint | None = None
        self._metrics: RunMetrics | None = None
        self._rendered, self._rendered_at = EMPTY, float("-inf")
        self._begun_s = 0.0

    def begin(self, run: Any, saved: Any = None) -> None:
        """Open the port; raises `BadInput` where it cannot be had. ``saved``: the checkpoint of a resumed run, None = new."""
        self._begun_s = 0.0 if saved is None else saved.section["clock"]["now"]
        routes = {"/metrics": self._scrape, "/healthz": self._health.report}
        self._endpoint = Endpoint(listening_socket("monitor", run.parts.experiment.monitor), routes)
        self.address = self._endpoint.address

    def opened(self) -> None:
        """Compute metrics and health from now on."""
        run, experiment = self._run, self._run.parts.experiment
        info = {
            "run": experiment.name,
            "algorithm": experiment.algorithm.name,
            "raafl": __version__,
            "runtime": run.runtime,
        }
        self._metrics = RunMetrics(run.record, self._health, info, experiment.monitor_clients, run.num_queued)
        self._hooks = (self._health, self._metrics)
        # a resumed run may have no event for hours, until its clients are back
        self._health.look(run.parts.coordinator)
        self._metrics.look(run.parts.coordinator, self._begun_s)

    def start(self) -> None:
        """Say where it is."""
        self._run.progress.note(f"metrics at http://{self.address}/metrics, health at /healthz")

    def close(self) -> None:
        """Close the port."""
        if self._endpoint is not None:
            self._endpoint.close()

    def _scrape(self) -> Reply:
        """Render the metrics for Prometheus; the reply is empty before the run begins, and rendered anew after `REFRESH_S`."""
        if self._metrics is None:
            return EMPTY
        from prometheus_client import CONTENT_TYPE_LATEST, generate_latest

        if time.monotonic() - self._rendered_at > REFRESH_S:
            self._rendered = Reply(HTTPStatus.OK, generate_latest(self._metrics.registry), CONTENT_TYPE_LATEST)
            self._rendered_at = time.monotonic()
        return self._rendered


# Count and measure a run for Prometheus, in a registry of its own. Each label has a bounded number of values, whatever
# clients send: outcomes and states are fixed, only the first `MAX_REASONS` reasons and `MAX_METRICS` metrics get values
# of their own, and client ids end at a limit in the config.

MAX_REASONS: Final = 64
MAX_METRICS: Final = 100
OTHER: Final = "other"
_STALENESS: Final = (0, 1, 2, 4, 8, 16, 32, 64, 128, 256)
_SECONDS: Final = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 100, 300, 1000, 3000)
_STATES: Final = ("idle", "working", "suspended")


class LabelValues:
    """Values of a metric's label, limited in number: once the limit is reached, every new value becomes `OTHER`."""

    def __init__(self, most: int) -> None:
        """Give the first ``most`` values a label of their own; all later ones share the label `OTHER`."""
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
        """Create the metrics, which start from the counts in ``record``: those of a resumed run are not 0."""
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
        for direction, spent_s in (("down", update.down_s), ("up", update.up_s)):
            if spent_s > 0:
                self._transfer_s.labels(direction).observe(spent_s)

    def on_merged(self, version: int, now: float, seconds: float) -> None:
        """Update the metrics of merges; see `RunHooks.on_merged`."""
        self._merge_s.observe(seconds)

    def on_event(self, event: Event, coordinator: Coordinator, now: float) -> None:
        """Update the metrics that an event may have changed; see `RunHooks.on_event`."""
        self.look(coordinator, now)

    def look(self, coordinator: Coordinator, now: float) -> None:
        """Update the metrics of the coordinator's state at the time ``now`` of the run's clock."""
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
    """Prometheus collector of figures that change without an event, and so are read when Prometheus asks for them.

    Reading them needs no lock: all are integers, which a single thread writes.
    """

    def __init__(self, record: RunRecord, health: Health, num_queued: Callable[[], int], reasons: LabelValues) -> None:
        self._record, self._health, self._num_queued, self._reasons = record, health, num_queued, reasons

    def collect(self) -> Iterator[Metric]:
        """Yield the metrics with their present values."""
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
        """Yield the metrics' names and labels; the registry checks them for duplicates."""
        return self.collect()

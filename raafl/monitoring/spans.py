"""Describe a wall-clock run to OpenTelemetry: a span for each task, its transfers, and each merge.

Spans are made by the server once their times are known, with the SDK's own environment variables, and leave the process on the
SDK's own thread: no call here waits for a collector.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import entry_points
from typing import TYPE_CHECKING, Any, Final

from raafl._version import __version__
from raafl.core.coordinator import Coordinator
from raafl.core.hooks import RunHooks
from raafl.core.types import Assignment, Event, Settled, Update
from raafl.errors import format_error, installing
from raafl.runfolder.schema import MERGED

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.trace import SpanContext

EXPORTERS: Final = "OTEL_TRACES_EXPORTER"
"""OpenTelemetry's variable that names exporters of spans, such as otlp or console; without it raafl makes no spans."""

MAX_LINKS: Final = 100
"""Tasks that the span of one merge links to."""

_CLOSE_S = 5.0


@dataclass(frozen=True, slots=True)
class SpanSink:
    """Destination to which OpenTelemetry's trace spans are sent."""

    provider: TracerProvider  # OpenTelemetry's source of tracers
    is_own: bool  # whether raafl created the provider, and so must shut it down

    def close(self) -> None:
        """Export the remaining spans; give up after a few seconds."""
        if self.is_own:
            thread = threading.Thread(target=self.provider.shutdown, name="spans", daemon=True)
            thread.start()
            thread.join(timeout=_CLOSE_S)


def find_sink(warn: Callable[[str], None]) -> SpanSink | None:
    """Find where to send trace spans; return None if no destination is set.

    They go to the OpenTelemetry tracer provider that the program has set, or else to the exporters that the environment
    variable OTEL_TRACES_EXPORTER names.
    """
    if "opentelemetry.sdk.trace" in sys.modules:
        from opentelemetry import trace
        from opentelemetry.sdk.trace import TracerProvider

        if isinstance(found := trace.get_tracer_provider(), TracerProvider):
            return SpanSink(found, is_own=False)
    names = [name.strip() for name in os.environ.get(EXPORTERS, "").split(",")]
    names = [name for name in names if name not in ("", "none")]
    if not names or os.environ.get("OTEL_SDK_DISABLED", "").lower() == "true":
        return None
    try:
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError:
        warn(f"{EXPORTERS} is '{','.join(names)}', which needs opentelemetry-sdk: {installing('monitoring')}")
        return None
    named = "OTEL_SERVICE_NAME" in os.environ or "service.name" in os.environ.get("OTEL_RESOURCE_ATTRIBUTES", "")
    provider = TracerProvider(
        resource=Resource.create({} if named else {"service.name": "raafl"}), shutdown_on_exit=False
    )
    for exporter in filter(None, (_exporter(name, warn) for name in names)):
        provider.add_span_processor(BatchSpanProcessor(exporter))
    return SpanSink(provider, is_own=True)


def _exporter(name: str, warn: Callable[[str], None]) -> Any:
    """Load the span exporter called ``name``; warn and return None if that fails."""
    known = {"otlp": "otlp_proto_http"}.get(name, name)
    for entry in entry_points(group="opentelemetry_traces_exporter"):
        if entry.name in (name, known):
            try:
                return entry.load()()
            except Exception as error:  # exporters and their environment variables may raise any error
                warn(f"{EXPORTERS}: the exporter {name} cannot be made: {format_error(error)}; there are no spans")
                return None
    warn(
        f"{EXPORTERS} is '{name}', which no package here provides: install its exporter, such as opentelemetry-exporter-otlp"
    )
    return None


def exported(run: Any) -> RunHooks:
    """Return the observer that makes spans of a `raafl.runtime.run.Run`; none without a destination, nor in simulations."""
    sink = find_sink(run.progress.warn) if run.runtime == "distributed" else None
    return RunHooks() if sink is None else Spans(sink.provider, sink.close)


class Spans(RunHooks):
    """Observer that creates OpenTelemetry's trace spans for a distributed run."""

    def __init__(self, provider: TracerProvider, close: Callable[[], None] = lambda: None) -> None:
        """Create a tracer from ``provider``; ``close`` is called when the run ends."""
        self.close = close  # type: ignore[method-assign]
        self._tracer = provider.get_tracer("raafl", __version__)
        # latest merge: version, end in nanoseconds, duration in seconds
        self._merge: tuple[int, int, float] | None = None
        self._merged: list[SpanContext] = []

    def on_settled(self, settled: Settled, now: float) -> None:
        """Create the spans of a task that has ended and of its transfers; see `RunHooks.on_settled`."""
        assignment, update = settled.assignment, settled.update
        if assignment is None:
            return
        from opentelemetry import trace
        from opentelemetry.context import Context

        began = time.time_ns() - _ns(now - assignment.assigned_s)
        ended = time.time_ns() if update is None else began + _ns(update.train_s)
        attributes = _described(settled, assignment)
        span = self._tracer.start_span("raafl.task", Context(), attributes=attributes, start_time=began)
        if update is not None:
            self._transfers(trace.set_span_in_context(span), update, began, ended)
        if settled.outcome == MERGED and len(self._merged) < MAX_LINKS:
            self._merged.append(span.get_span_context())
        if settled.outcome.startswith(("refused", "lost")):
            span.set_status(trace.Status(trace.StatusCode.ERROR, settled.outcome))
        span.end(ended)

    def _transfers(self, task: Any, update: Update, began: int, ended: int) -> None:
        """Create the spans of a task's download and upload, where their durations are known."""
        for name, start, seconds, num_bytes in (
            ("raafl.transfer.down", began, update.down_s, update.bytes_down),
            ("raafl.transfer.up", ended - _ns(update.up_s), update.up_s, update.bytes_up),
        ):
            if seconds > 0:
                span = self._tracer.start_span(name, task, attributes={"raafl.bytes": num_bytes}, start_time=start)
                span.end(start + _ns(seconds))

    def on_merged(self, version: int, now: float, seconds: float) -> None:
        """Record a merge, whose span is created by `on_event`; see `RunHooks.on_merged`."""
        self._merge = (version, time.time_ns(), seconds)

    def on_event(self, event: Event, coordinator: Coordinator, now: float) -> None:
        """Create the span of the last merge, with links to the tasks it merged; see `RunHooks.on_event`."""
        if self._merge is None:
            return
        from opentelemetry import trace
        from opentelemetry.context import Context

        (version, ended, seconds), self._merge = self._merge, None
        links, self._merged = [trace.Link(context) for context in self._merged], []
        span = self._tracer.start_span(
            "raafl.merge",
            Context(),
            attributes={"raafl.version": version},
            links=links,
            start_time=ended - _ns(seconds),
        )
        span.end(ended)


def _described(settled: Settled, assignment: Assignment) -> dict[str, str | int]:
    return {
        "raafl.client": settled.client,
        "raafl.assignment": assignment.id,
        "raafl.task": assignment.task,
        "raafl.version": assignment.version,
        "raafl.submodel": str(assignment.spec)[:100],
        "raafl.outcome": settled.outcome,
        "raafl.staleness": settled.staleness,
    }


def _ns(seconds: float) -> int:
    return int(seconds * 1e9)

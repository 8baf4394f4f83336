"""Run Lightning loggers (W&B, TensorBoard, CSV, MLflow, custom) without letting them delay or end the run.

Each logger has a thread of its own, which builds, calls and closes it. The run's thread only puts items into a bounded queue. A
logger that raises, hangs or falls behind is reported once and counted in the summary.
"""

from __future__ import annotations

import queue
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any, cast

import yaml

from raafl.config.loggers import FOLDER, LoggerSpec, in_words, maker, specs
from raafl.core.hooks import RunHooks
from raafl.core.types import Settled
from raafl.loggers.tracking import Measurements, RecentUpdates, RunIds, Tables, finish, log, prepare
from raafl.runfolder.record import RunRecord
from raafl.runfolder.schema import CLIENT, LOST, MERGED, REFUSED, TRAIN, Summary, kind_of
from raafl.runfolder.statistics import Coverage

CALL_S = 30.0
"""Seconds after which a call of a logger counts as hung."""
FINISH_S = 60.0
"""Seconds that a run waits at its end for its loggers to write what is queued."""
MAX_QUEUED = 1000
"""Calls that wait for one logger; what comes while so many wait is dropped, and counted as failed."""


class Loggers(RunHooks):
    """The Lightning loggers of a run. Each works in a thread of its own; only `finish` waits for them."""

    def __init__(self, run: Any) -> None:
        """Store the `raafl.runtime.run.Run` whose setting ``logger`` names the loggers."""
        self._run = run
        self._workers: list[_Worker] = []

    def opened(self) -> None:
        """Create the workers; `start` builds the loggers."""
        run, warn = self._run, self._run.progress.warn
        self._since = RecentUpdates(Coverage(run.parts.submodels).share)
        ids = RunIds(run.folder / FOLDER)
        for spec in specs(run.parts.experiment.logger):
            same = sum(worker.spec.name == spec.name for worker in self._workers)
            name = f"{spec.name} {same + 1}" if same else spec.name
            make = maker(spec, run.folder, warn, run.progress.note, ids.of(name), run.record.evaluated_version)
            self._workers.append(_Worker(spec, name, make, warn, ids))

    def start(self) -> None:
        """Build the loggers and make them log the run's config, and the metrics of a new run's initial model."""
        config_yaml = self._run.config_yaml
        for worker in self._workers:
            worker.start()
            worker.put(prepare)
            worker.put(lambda logger: logger.log_hyperparams(_hyper_parameters(config_yaml)))
        if not self._run.resumed:
            self.on_evaluate(0, 0.0, self._run.record.metrics)

    def on_settled(self, settled: Settled, now: float) -> None:
        """Record the end of a task, for the histograms that are logged at the next evaluation."""
        self._since.settled(settled)

    def on_evaluate(self, version: int, now: float, metrics: dict[str, float]) -> None:
        """Log an evaluation, with the run's totals at that time, such as bytes; see `RunHooks.on_evaluate`."""
        record: RunRecord = self._run.record
        row = {name: value for name, value in record.row.items() if value is not None}
        own = {name: value for name, value in row.items() if name.startswith((CLIENT, TRAIN.rstrip("/")))}
        ends = Counter[str]()
        for outcome, num in record.outcomes.items():
            ends[kind_of(outcome)] += num
        figures = {
            **{name: value for name, value in row.items() if name not in own},
            "time_s": now,
            "wall_s": record.wall_s,
            "num_updates": ends[MERGED],
            "num_refused": ends[REFUSED],
            "num_lost": ends[LOST],
            "bytes_up": record.bytes_up,
            "bytes_down": record.bytes_down,
        }
        measured = Measurements(version, {**metrics, **own}, figures, *self._since.take())
        for worker in self._workers:
            worker.put(lambda logger: log(logger, measured), counted=True)

    def publish(self, summary: dict[str, Any]) -> None:
        """Log summary, tables and final model; wait, for a limited time, until all is written, and add what came of it."""
        folder, reason = self._run.folder, summary["finished"]
        tables, typed = Tables(folder), cast(Summary, summary)
        status = next((word for word in ("interrupted", "failed") if reason.startswith(word)), "success")
        for worker in self._workers:
            with_model = worker.spec.init_args.get("log_model") is not False
            worker.put(partial(finish, folder=folder, summary=typed, tables=tables, with_model=with_model))
            worker.end(lambda logger: _close(logger, status))
        until = time.monotonic() + FINISH_S
        for worker in self._workers:
            while worker.at_work and time.monotonic() < until:
                worker.join(timeout=0.05)
        summary["loggers"] = {worker.name: worker.give_up() for worker in self._workers}

    def close(self) -> None:
        """Tell the loggers' threads to stop, without waiting for them."""
        for worker in self._workers:
            worker.give_up()


class _Worker(threading.Thread):
    """One logger and the only thread that uses it."""

    def __init__(
        self, spec: LoggerSpec, name: str, make: Callable[[], Any], warn: Callable[[str], None], ids: RunIds
    ) -> None:
        super().__init__(name=name, daemon=True)
        self.spec, self._make, self._warn, self._ids = spec, make, warn, ids
        self._queue: queue.Queue[tuple[Callable[[Any], None], bool] | None] = queue.Queue(MAX_QUEUED)
        self._changed = threading.Lock()
        self._logged = self._failed = 0
        self._error: str | None = None
        self._since: float | None = None  # start of the call in progress

    @property
    def at_work(self) -> bool:
        """Check whether the logger's thread is alive, and none of its calls has taken too long."""
        return self.is_alive() and not self._look()

    def put(self, call: Callable[[Any], None], *, counted: bool = False) -> None:
        """Add a call to the logger's queue and return at once; ``counted`` marks a call that logs metrics."""
        self._look()
        try:
            self._queue.put_nowait((call, counted))
        except queue.Full:
            self._fail(f"{self._queue.maxsize} calls are waiting for it, and further calls are dropped")

    def end(self, call: Callable[[Any], None]) -> None:
        """Add a last call to the logger's queue; the logger's thread ends after it."""
        self.put(call)
        with suppress(queue.Full):
            self._queue.put_nowait(None)

    def give_up(self) -> dict[str, Any]:
        """Stop calling the logger; return the number of rows logged and of failed calls, and the first error."""
        self._look()
        left = 0
        with suppress(queue.Empty):
            while True:
                left += self._queue.get_nowait() is not None
        if self.is_alive() and (left or self._since is not None):
            self._fail("it has not ended in time", num=left + (self._since is not None))
        with suppress(queue.Full):
            self._queue.put_nowait(None)
        with self._changed:
            return {"logged": self._logged, "failed": self._failed, "error": self._error}

    def run(self) -> None:
        """Create the logger and make the queued calls; this is the main function of the logger's thread."""
        try:
            # starting in the future doubles the time limit, for import and connection
            self._since = time.monotonic() + CALL_S
            logger = self._make()
            self._ids.keep(self.name, logger)
        except BaseException as error:  # BaseException: a library may raise SystemExit
            logger = None
            self._fail(in_words(error))
        while True:
            self._since = None
            item = self._queue.get()
            if item is None:
                return
            call, counted = item
            if logger is None:
                self._fail("", num=int(counted))
                continue
            try:
                self._since = time.monotonic()
                call(logger)
                with self._changed:
                    self._logged += counted
            except BaseException as error:
                self._fail(in_words(error))

    def _look(self) -> bool:
        """Check whether the thread is stuck in a call; report it the first time."""
        since = self._since
        stuck = since is not None and time.monotonic() - since > CALL_S
        if stuck and self._error is None:
            self._fail(f"a call has not returned within {CALL_S:g} s", num=0)
        return stuck

    def _fail(self, error: str, num: int = 1) -> None:
        with self._changed:
            self._failed += num
            first = self._error is None and bool(error)
            if first:
                self._error = error
        if first:
            self._warn(f"logger {self.name}: {error}; the run goes on, and the summary counts what is not logged")


def _hyper_parameters(config_yaml: str) -> dict[str, Any]:
    """Return a run's config as a logger's hyper-parameters; empty if there is none."""
    found = yaml.safe_load(config_yaml)
    return found if isinstance(found, dict) else {}


def _close(logger: Any, status: str) -> None:
    """Close a logger so that its data is on disk or sent."""
    logger.finalize("success" if status == "interrupted" else status)
    if type(logger).__name__ == "WandbLogger":  # Lightning would close the run only when the process ends
        logger.experiment.finish(exit_code=int(status == "failed"))

"""Run Lightning loggers (W&B, TensorBoard, CSV, MLflow, custom) without letting them delay or end the run.

Each logger has a thread of its own, which builds, calls and closes it. The run's thread only puts items into a bounded queue. A
logger that raises, hangs or falls behind is reported once and counted in the summary.
"""

from __future__ import annotations

import csv
import importlib.util
import io
import json
import math
import queue
import re
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import yaml

from raafl.atomic_file import atomic_file
from raafl.config.loggers import FOLDER, LoggerSpec, in_words, maker, specs
from raafl.core.hooks import RunHooks
from raafl.core.types import Settled
from raafl.runfolder.reading import sample_images, sample_rows
from raafl.runfolder.record import RunRecord
from raafl.runfolder.schema import (
    BREAKS,
    CLIENT,
    KINDS,
    LOST,
    MERGED,
    REFUSED,
    SAMPLE_COLUMNS,
    SAMPLE_IMAGES,
    TRAIN,
    Summary,
    kind_of,
)
from raafl.runfolder.statistics import Coverage
from raafl.submodel import Spec

if TYPE_CHECKING:
    import numpy.typing as npt

    from raafl.runfolder.reading import RecordedRun

CALL_S = 30.0
"""Seconds after which a call of a logger counts as hung."""
FINISH_S, SAID_S = 60.0, 1.0
"""Seconds that a run waits at its end for its loggers to write what is queued, and after which it says that it does."""
MAX_QUEUED = 1000
"""Calls that wait for one logger; what comes while so many wait is dropped, and counted as failed."""


class Loggers(RunHooks):
    """The Lightning loggers of a run. Each works in a thread of its own; only `finish` waits for them."""

    def __init__(self, run: Any) -> None:
        """Store the run, a `raafl.runtime.run.Run`; its setting ``logger`` names the loggers."""
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
            "time_s": now,
            "wall_s": record.wall_s,
            "num_updates": ends[MERGED],
            "num_refused": ends[REFUSED],
            "num_lost": ends[LOST],
            "bytes_up": record.bytes_up,
            "bytes_down": record.bytes_down,
            # last: on the wall clock more bytes have travelled since the version was made, while it was measured
            **{name: value for name, value in row.items() if name not in own},
        }
        measured = Measurements(version, {**metrics, **own}, figures, *self._since.take())
        for worker in self._workers:
            worker.put(lambda logger: log(logger, measured), counted=True)

    def publish(self, summary: dict[str, Any]) -> None:
        """Log summary, tables and final model; wait a limited time for the loggers, and add their outcome to the summary."""
        folder, reason = self._run.folder, summary["finished"]
        tables, typed = Tables(folder), cast(Summary, summary)
        status = next((word for word in BREAKS if reason.startswith(word)), "success")
        for worker in self._workers:
            with_model = worker.spec.init_args.get("log_model") is not False
            worker.put(partial(finish, folder=folder, summary=typed, tables=tables, with_model=with_model))
            worker.end(lambda logger: close(logger, status))
        until, said_at = time.monotonic() + FINISH_S, time.monotonic() + SAID_S
        for worker in self._workers:
            while worker.at_work and (now := time.monotonic()) < until:
                if now > said_at:
                    names, said_at = ", ".join(one.name for one in self._workers if one.at_work), math.inf
                    self._run.progress.note(f"waiting up to {FINISH_S:g} s for logger {names} to write what is queued")
                worker.join(timeout=0.05)
        summary["loggers"] = {worker.name: worker.give_up() for worker in self._workers}

    def close(self) -> None:
        """Tell the loggers' threads to stop, without waiting for them."""
        for worker in self._workers:
            worker.give_up()


class _Worker(threading.Thread):
    """Thread that owns one Lightning logger and makes all calls to it."""

    def __init__(
        self, spec: LoggerSpec, name: str, make: Callable[[], Any], warn: Callable[[str], None], ids: RunIds
    ) -> None:
        super().__init__(name=name, daemon=True)
        self.spec, self._make, self._warn, self._ids = spec, make, warn, ids
        self._queue: queue.Queue[tuple[Callable[[Any], None], bool] | None] = queue.Queue(MAX_QUEUED)
        self._changed = threading.Lock()
        self._logged = self._failed = 0
        self._error: str | None = None
        self._since: float | None = None  # monotonic time at which the present call began

    @property
    def at_work(self) -> bool:
        """Check whether the logger's thread is alive and not stuck in a call."""
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
        """Create the logger and make the queued calls, until the queue has None; this is the thread's main function."""
        try:
            # a later start doubles the time limit of the first call, which imports a library and connects
            self._since = time.monotonic() + CALL_S
            logger = self._make()
            self._ids.keep(self.name, logger)
        except BaseException as error:  # BaseException: some libraries raise SystemExit
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
        """Check whether the thread hangs in a call of the logger; the first time, count that as a failure."""
        since = self._since
        stuck = since is not None and time.monotonic() - since > CALL_S
        if stuck and self._error is None:
            self._fail(f"a call has not returned within {CALL_S:g} s", num=0)
        return stuck

    def _fail(self, error: str, num: int = 1) -> None:
        with self._changed:
            self._failed += num
            first = self._error is None and bool(error)
            self._error = error if first else self._error
        if first:
            self._warn(f"logger {self.name}: {error}; the run goes on, and the summary counts what is not logged")


def _hyper_parameters(config_yaml: str) -> dict[str, Any]:
    """Parse a run's config as hyper-parameters for a logger; empty if there is no config."""
    found = yaml.safe_load(config_yaml)
    return found if isinstance(found, dict) else {}


def close(logger: Any, status: str) -> None:
    """Close a logger, so that its data is on disk or sent."""
    logger.finalize("success" if status == "interrupted" else status)
    if _is_a(logger, "WandbLogger"):  # otherwise W&B's run would end only with the process
        logger.experiment.finish(exit_code=int(status == "failed"))


OVER_TIME, OVER_BYTES = "over_time/", "over_bytes/"
"""Prefixes of the names under which W&B draws each metric against the run's clock, and against the bytes sent."""
MAX_TASKS = 10_000
"""Largest number of rows of the timeline: the last tasks of a run."""
BINS = 20
"""Number of bins in a histogram of shares."""
_MAX_BINS = 500
_MAX_BARS = 2_000  # most tasks in a chart
_SHOWN_ROWS = 200  # most rows of a table that is shown as text
_RUN_IDS = "runs.json"
_COLOURS = dict(zip(KINDS, ("#4269d0", "#b9b9c2", "#ff725c", "#efb118"), strict=True))


@dataclass(frozen=True, slots=True)
class Measurements:
    """Data of one evaluation, to be passed to a logger.

    Attributes:
        version: version of the evaluated model.
        metrics: metrics of the model, and averages over clients.
        figures: numbers about the run at that time, by name, such as ``time_s``, ``bytes_up`` and ``bytes_down``.
        staleness: staleness of each update merged since the last evaluation.
        coverage: share of the model's parameters, 0 to 1, that a version's updates had trained; for each version since
            the last evaluation.
    """

    version: int
    metrics: Mapping[str, float]
    figures: Mapping[str, float]
    staleness: Sequence[int] = ()
    coverage: Sequence[float] = ()

    def scalars(self) -> dict[str, float]:
        """Return all numbers of the evaluation, by name."""
        found = {**self.metrics, **self.figures}
        if self.staleness:
            found["recent_staleness"] = sum(self.staleness) / len(self.staleness)
            found["recent_staleness_max"] = max(self.staleness)
        if self.coverage:
            found["recent_coverage"] = sum(self.coverage) / len(self.coverage)
        return found


class RecentUpdates:
    """Collector of data about the updates merged since the last evaluation: staleness, and the share of the model trained."""

    def __init__(self, share: Callable[[Iterable[Spec]], float | None] | None = None) -> None:
        """Store ``share``, which computes the share of the model that some submodels cover together; None = unknown."""
        self._share = share
        self._staleness: list[int] = []
        self._specs: dict[int, set[Spec]] = {}

    def settled(self, settled: Settled) -> None:
        """Record the end of a task, and its update's staleness if the update was merged."""
        if settled.outcome == MERGED and settled.assignment is not None:
            self._staleness.append(settled.staleness)
            self._specs.setdefault(settled.version, set()).add(settled.assignment.spec)

    def take(self) -> tuple[list[int], list[float]]:
        """Empty the collector; return the staleness of each update, and the share of the model that each version trained."""
        shares = [self._share(specs) for specs in self._specs.values()] if self._share is not None else []
        staleness, self._staleness = self._staleness, []
        self._specs = {}
        return staleness, [share for share in shares if share is not None]


# ---- calls that differ between kinds of loggers ----


def _is_a(logger: object, name: str) -> bool:
    """Check whether a logger is of the Lightning class ``name``, without importing that class."""
    return any(cls.__name__ == name for cls in type(logger).__mro__)


def prepare(logger: Any) -> None:
    """Tell W&B which quantity is the x axis of each metric."""
    if not _is_a(logger, "WandbLogger"):
        return
    begin = _prefix(logger)
    for glob, step in ((OVER_TIME, "time_s"), (OVER_BYTES, "bytes")):
        logger.experiment.define_metric(f"{begin}{step}")
        logger.experiment.define_metric(f"{begin}{glob}*", step_metric=f"{begin}{step}")


def log(logger: Any, measured: Measurements) -> None:
    """Log an evaluation to a Lightning logger; the step is the model's version."""
    row: dict[str, Any] = measured.scalars()
    histograms = {"staleness": measured.staleness, "coverage": measured.coverage}
    if _is_a(logger, "WandbLogger"):
        import wandb

        row |= {"version": measured.version, "bytes": row["bytes_up"] + row["bytes_down"]}
        for begin in (OVER_TIME, OVER_BYTES):
            row |= {begin + name: value for name, value in measured.metrics.items()}
        for name, values in histograms.items():
            if values:
                row[f"histograms/{name}"] = wandb.Histogram(np_histogram=histogram(values, whole=name == "staleness"))
    elif _is_a(logger, "MLFlowLogger"):  # MLflow would drop ">=" from the names of targets, and warn each time
        row = {re.sub("[<>=]+", "_", name): value for name, value in row.items()}
    logger.log_metrics(row, step=measured.version)
    if _is_a(logger, "TensorBoardLogger"):
        import numpy as np

        for name, values in histograms.items():
            if values:
                logger.experiment.add_histogram(f"histograms/{name}", np.array(values, float), measured.version)
    logger.save()


def histogram(values: Sequence[float], *, whole: bool) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
    """Compute a histogram, as counts and bin edges."""
    import numpy as np

    most = int(max(values)) + 1 if whole else 1
    return np.histogram(values, bins=most if whole and most <= _MAX_BINS else BINS, range=(0, most))


def finish(logger: Any, folder: Path, summary: Summary, tables: Tables, *, with_model: bool = True) -> None:
    """Log the tables, the summary and the final model at the end of a run."""
    model = folder / summary["model"] if summary.get("model") and with_model else None
    if _is_a(logger, "WandbLogger"):
        _finish_wandb(logger, folder, summary, tables, model)
    elif _is_a(logger, "TensorBoardLogger"):
        for name, (columns, rows) in tables.all().items():
            logger.experiment.add_text(name, markdown(columns, rows), summary.get("versions", 0))
        for number, (content, _) in sample_images(folder).items():
            import numpy as np
            from PIL import Image  # TensorBoard itself needs PIL for images

            pixels = np.asarray(Image.open(io.BytesIO(content)).convert("RGB"))
            logger.experiment.add_image(f"samples/{number}", pixels, summary.get("versions", 0), dataformats="HWC")
    elif _is_a(logger, "MLFlowLogger"):
        client, run = logger.experiment, logger.run_id
        for name, (columns, rows) in tables.all().items():
            client.log_text(run, _csv(columns, rows), f"{name}.csv")
        if (folder / SAMPLE_IMAGES).is_dir():
            client.log_artifacts(run, str(folder / SAMPLE_IMAGES), SAMPLE_IMAGES)
        client.log_text(run, json.dumps(dict(summary), indent=2, default=str), "summary.json")
        if model is not None:
            (client.log_artifacts if model.is_dir() else client.log_artifact)(run, str(model), "model")


def _finish_wandb(logger: Any, folder: Path, summary: Summary, tables: Tables, model: Path | None) -> None:
    import wandb

    run, begin = logger.experiment, _prefix(logger)
    found: dict[str, Any] = {
        begin + name: wandb.Table(columns=[*columns], data=rows) for name, (columns, rows) in tables.all().items()
    }
    figure = tables.figure()
    if figure is not None:
        found[f"{begin}timeline_chart"] = wandb.Plotly(figure)
    for number, (_, caption) in sample_images(folder).items():
        found[f"{begin}samples/{number}"] = wandb.Image(str(folder / SAMPLE_IMAGES / f"{number}.png"), caption=caption)
    run.log(found)
    said = ("finished", "versions", "updates_merged", "updates_lost", "utilisation", "model_digest", "time_to")
    run.summary.update({name: value for name, value in summary.items() if name in said})
    if model is not None:
        told = [
            (name, value)
            for name, value in summary.items()
            if name in ("algorithm", "versions", "model_digest", "final")
        ]
        artifact = wandb.Artifact(f"model-{run.id}", type="model", metadata=dict(told))
        (artifact.add_dir if model.is_dir() else artifact.add_file)(str(model))
        run.log_artifact(artifact, aliases=["latest", "final"])


def _prefix(logger: object) -> str:
    prefix = getattr(logger, "_prefix", "")
    return f"{prefix}-" if prefix else ""


# ---- tables that a logger shows ----

Table = tuple[list[str], list[list[Any]]]
"""Names of columns, and rows; what is not known is None."""


class Tables:
    """Tables of a run for its loggers; the run's folder is read only once, when a table is first needed."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._lock = folder, threading.Lock()
        self._found: tuple[dict[str, Table], Any] | None = None

    def all(self) -> dict[str, Table]:
        """Return the tables by name: clients, timeline and regions (pieces of the model that are merged separately)."""
        return self._read()[0]

    def figure(self) -> object:
        """Return the timeline as a plotly figure; None if plotly is not installed or the run has too many tasks."""
        return self._read()[1]

    def _read(self) -> tuple[dict[str, Table], Any]:
        with self._lock:
            if self._found is None:
                from raafl.runfolder.reading import read

                run = read(self._folder)
                found = {"clients": clients_table(run), "timeline": timeline_table(run), "regions": regions_table(run)}
                if (rows := sample_rows(self._folder)) is not None:
                    found["samples"] = [*SAMPLE_COLUMNS], rows
                self._found = found, _figure(found["timeline"])
            return self._found


def clients_table(run: RecordedRun) -> Table:
    """Return a table with a row for each client: device, outcomes of its tasks, working time, bytes."""
    import numpy as np

    from raafl.runfolder.intervals import worked_s

    tasks, at_work_s = run.tasks, worked_s(run)
    columns = ["client", "device", "samples", "tasks", "merged", "refused", "lost", "unused", "staleness_mean"]
    columns += ["staleness_max", "median_task_s", "at_work_share", "bytes_down", "bytes_up"]
    rows = []
    tasks_of = tasks.by_client()
    ended = {kind: tasks.are(kind) for kind in ("merged", "refused", "lost", "unused")}
    took_s = tasks["arrived_s"] - tasks["assigned_s"]
    for number in run.client_ids():
        mine, known = tasks_of.get(number, np.empty(0, np.intp)), run.clients.get(number)
        lasted_s = took_s[mine]
        lasted_s = lasted_s[np.isfinite(lasted_s)]
        staleness = tasks["staleness"][mine[ended[MERGED][mine]]]
        row: list[Any] = [number, known.device if known else "", known.num_samples if known else None, len(mine)]
        row += [int(kind[mine].sum()) for kind in ended.values()]
        row += [float(staleness.mean()), int(staleness.max())] if len(staleness) else [None, None]
        row.append(float(np.median(lasted_s)) if len(lasted_s) else None)
        row.append(min(at_work_s[number] / run.end_s, 1.0) if run.end_s > 0 else None)
        row += [int(np.nansum(tasks[name][mine])) for name in ("bytes_down", "bytes_up")]
        rows.append(row)
    return columns, rows


def timeline_table(run: RecordedRun) -> Table:
    """Return a table with a row for each of the last `MAX_TASKS` tasks, in the order in which they ended."""
    tasks = run.tasks
    numbers = ("assigned_s", "arrived_s", "version", "merged_version", "staleness", "bytes_down", "bytes_up")
    rows = []
    for place in range(max(len(tasks) - MAX_TASKS, 0), len(tasks)):
        cells = [_plain(tasks[name][place]) for name in numbers]
        rows.append([int(tasks.client[place]), tasks.spec[place], tasks.outcome[place], *cells])
    return ["client", "spec", "outcome", "begins_s", "ends_s", *numbers[2:]], rows


def regions_table(run: RecordedRun) -> Table:
    """Return a table with the number of merged updates of each region (a piece of the model that is merged separately)."""
    regions = run.tasks["region"][run.tasks.are(MERGED)]
    counts = Counter(int(region) for region in regions if math.isfinite(region))
    return ["region", "merged"], [[*pair] for pair in sorted(counts.items())]


def _plain(value: float) -> float | None:
    if not math.isfinite(value):
        return None
    return int(value) if float(value).is_integer() else float(value)


def _figure(timeline: Table) -> object:
    rows = [row for row in timeline[1] if row[3] is not None and row[4] is not None]
    if not rows or len(rows) > _MAX_BARS or importlib.util.find_spec("plotly") is None:
        return None
    from plotly import graph_objects

    figure = graph_objects.Figure()
    for kind, colour in _COLOURS.items():
        mine = [row for row in rows if kind_of(row[2]) == kind]
        if mine:
            figure.add_bar(
                orientation="h",
                name=kind,
                marker_color=colour,
                y=[row[0] for row in mine],
                base=[row[3] for row in mine],
                x=[row[4] - row[3] for row in mine],
                text=[row[1] for row in mine],
            )
    figure.update_layout(barmode="overlay", xaxis_title="seconds on the run's clock", yaxis_title="client")
    return figure


def markdown(columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """Return the first rows of a table as Markdown, for TensorBoard."""
    lines = [columns, ["---"] * len(columns), *rows[:_SHOWN_ROWS]]
    text = [f"| {' | '.join(map(_in_cell, line))} |" for line in lines]
    if len(rows) > _SHOWN_ROWS:
        text += ["", f"and {len(rows) - _SHOWN_ROWS} more"]
    return "\n".join(text)


def _in_cell(value: object) -> str:
    """Format a value, such as a text that a model wrote, so that it stays within its cell of a Markdown table."""
    text = "" if value is None else f"{value:.6g}" if isinstance(value, float) else str(value)
    return " ".join(text.split()).replace("\\", "\\\\").replace("|", "\\|")


def _csv(columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    file = io.StringIO()
    csv.writer(file, lineterminator="\n").writerows([columns, *rows])
    return file.getvalue()


# ---- ids by which a resumed run continues its run at a tracker ----


_NAMES = {
    "id": re.compile(r"[\w-]{1,128}"),
    "run_id": re.compile(r"[\w-]{1,128}"),
    "version": re.compile(r"version_\d{1,9}"),
}
"""Patterns of the names that trackers give a run, by attribute; no path matches, since loggers write where a version leads."""


def _names_in(ids: Mapping[str, Any]) -> dict[str, Any]:
    """Select those stored ids that are well-formed arguments for naming a run at a tracker."""
    return {
        name: value
        for name, words in _NAMES.items()
        if type(value := ids.get(name)) is int or (isinstance(value, str) and words.fullmatch(value))
    }


class RunIds:
    """Ids that trackers such as W&B gave a run; they are stored in its folder, so that a resumed run continues the same entry."""

    def __init__(self, folder: Path) -> None:
        """Read the trackers' run ids that an earlier attempt has stored in ``folder``."""
        self._path, self._lock = folder / _RUN_IDS, threading.Lock()
        self._found: dict[str, dict[str, Any]] = {}
        with suppress(OSError, ValueError, TypeError, AttributeError):  # missing or invalid file
            found = json.loads(self._path.read_text(encoding="utf-8"))
            self._found = {str(name): _names_in(ids) for name, ids in found.items()}

    def of(self, name: str) -> dict[str, Any]:
        """Return the arguments with which the logger ``name`` continues an earlier run; an empty mapping for a new run."""
        return dict(self._found.get(name, {}))

    def keep(self, name: str, logger: Any) -> None:
        """Store the id that a logger gave the run; do nothing if the file cannot be written."""
        ids: dict[str, Any] = {}
        if _is_a(logger, "WandbLogger"):
            ids = {"id": logger.experiment.id}
        elif _is_a(logger, "MLFlowLogger"):
            ids = {"run_id": logger.run_id}
        elif _is_a(logger, "TensorBoardLogger"):
            ids = {"version": logger.version}
        with self._lock, suppress(OSError):
            if ids and self._found.get(name) != ids:
                self._found[name] = ids
                self._path.parent.mkdir(parents=True, exist_ok=True)
                with atomic_file(self._path) as file:
                    file.write((json.dumps(self._found, indent=2) + "\n").encode())

"""Define all names in a run folder: its files, the columns of its tables, the rows of its journal, its summary.

Writers and readers use these types, so that an unknown name is a type error. Values are what JSON or a CSV file can hold. Needs
neither torch nor numpy.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from types import UnionType
from typing import Any, Final, Literal, TypedDict, get_args, get_origin, get_type_hints

CONFIG: Final = "config.yaml"
JOURNAL: Final = "events.jsonl"
METRICS: Final = "metrics.csv"
CLIENTS: Final = "clients.csv"
SUMMARY: Final = "summary.json"
SEALS: Final = "seals.jsonl"
CLIENT_LOGS: Final = "client-logs.jsonl"
MODEL: Final = "model"
CHECKPOINTS: Final = "checkpoints"
GROWING: Final = (JOURNAL, METRICS, CLIENTS)
"""The files that grow by rows."""

# ---- the journal ----

Kind = Literal["run", "assigned", "gap", "resumed", "away", "back", "joined", "arrived", "lost", "timer", "stop"]
EVENTS: Final[tuple[Kind, ...]] = ("joined", "arrived", "lost", "timer", "stop")
"""What the coordinator is told of. The other rows say what it decided, or how the run began and went on."""

EXCHANGES: Final = ("split", "batches")
"""Where the `extra` of a task with an exchange says how many round trips it has in its middle."""


class JournalRow(TypedDict, total=False):
    """A row of events.jsonl.

    Its fields by `event`, beside `time_s`, on the run's clock:

    - run, the first: runtime, conditions, start, title, goals, guard (what it refuses by default), and where raafl has chosen
      the method chosen: the method, its settings, reasons, and the figures behind them;
    - joined: client, incarnation, num_samples, own_data, profile; lost: client, incarnation, reason, counts (true
      where it left a task unanswered until the timeout);
    - assigned: the fields of an `Assignment`; arrived: assignment, client, incarnation, num_samples, refusal, fingerprint;
      of a sum that is read as a whole also group (ids of its assignments), scale, masked;
    - timer: id; stop: reason;
    - away, where the connection of a client with a task broke: client, incarnation, assignment, reason; back: the same without
      reason, and chunks (of its update, that had arrived), away_s;
    - gap, where rows could not be written: rows, last_id (of the assignments until then);
    - resumed: kept (how many events count of those before), last_id, version, goals, restarted, start.

    In the file each row ends with ``chain`` (`raafl.runfolder.chain`), which readers leave out.
    """

    time_s: float
    event: Kind
    runtime: str
    conditions: dict[str, Any]
    start: dict[str, Any]
    title: str
    goals: Any
    guard: dict[str, Any]
    chosen: dict[str, Any]
    client: int
    incarnation: Any
    num_samples: int
    own_data: bool
    profile: Any
    reason: str
    counts: bool
    id: int
    task: int
    version: int
    spec: object
    region: int
    num_epochs: int | None
    num_steps: int | None
    seed: int
    assigned_s: float
    pace_s: float
    extra: object
    assignment: int
    refusal: str | None
    fingerprint: str | None
    group: list[int]
    scale: float
    masked: bool
    rows: int
    last_id: int
    kept: int
    restarted: bool
    chain: str


# ---- clients.csv ----


class ClientRow(TypedDict, total=False):
    """A row of clients.csv, a finished task, in the order of its columns."""

    client: int
    task: int
    assignment: int
    incarnation: int
    spec: object
    region: int
    version: int
    merged_version: int
    staleness: int
    assigned_s: float
    arrived_s: float
    train_s: float
    bytes_down: int
    bytes_up: int
    num_samples: int
    num_steps: int
    loss: float | None
    outcome: str


class LoggedCells(TypedDict, total=False):
    """Column that clients.csv gets once a row has it: values logged by a task's `training_step`, as JSON by name."""

    logged: Mapping[str, float]


class MemoryCells(TypedDict, total=False):
    """Columns that clients.csv gets once a row has them: a task's predicted and measured memory."""

    peak_bytes: int
    measured_bytes: int


CLIENT_COLUMNS: Final = tuple(ClientRow.__annotations__)
MEMORY_COLUMNS: Final = tuple(MemoryCells.__annotations__)
LOGGED_COLUMNS: Final = tuple(LoggedCells.__annotations__)
TESTED: Final = "test/"
"""Begins the names of further columns: what clients measure on their own test parts."""

MERGED, UNUSED, REFUSED, LOST = KINDS = ("merged", "unused", "refused", "lost")
"""How a task ends; behind ``refused:`` and ``lost:`` stands the reason."""
LOST_AT_RESTART: Final = "lost:restart"


def kind_of(outcome: str) -> str:
    """Return the kind of an outcome, such as "refused" of "refused:REASON"."""
    return outcome.partition(":")[0]


# ---- metrics.csv ----


class Measurement(TypedDict):
    """First columns of metrics.csv, before metrics, averages over clients, `RunFigures` and times to targets."""

    version: int
    time_s: float
    wall_s: float


class RunFigures(TypedDict, total=False):
    """Columns of metrics.csv about the run itself."""

    utilisation: float
    participation: float
    staleness: float
    coverage: float | None
    round_s: float | None
    bytes_up: int
    bytes_down: int
    peak_bytes: int | None
    measured_bytes: int
    epsilon: float | None


METRIC_COLUMNS: Final = tuple(Measurement.__annotations__)
RUN_COLUMNS: Final = tuple(RunFigures.__annotations__)
CLIENT: Final = "client_"
"""Begins the names of averages over clients, in metrics.csv and in the summary."""
TRAIN: Final = "train/"
"""Begins the names of means, in metrics.csv, of what `training_step` logs; names that begin with "train" stay as they are."""
TIME_TO: Final = "time_to/"
"""Begins the names of the columns of metrics.csv that say when a target was first met."""


def is_metric(column: str) -> bool:
    """Check whether a column of metrics.csv is a metric of the model or of clients, not a figure of the run."""
    return column not in METRIC_COLUMNS and column not in RUN_COLUMNS and not column.startswith(TIME_TO)


# ---- summary.json ----


class Summary(TypedDict, total=False):
    """Content of summary.json, also returned by the Python API; a merge may report further entries.

    `finished` is the reason why the run ended; `updates_lost_by_reason` splits `updates_lost`; `batched` describes
    which clients were trained as one batch. `model` and `traceback` are files in the folder; `model_copy` is the place
    of a model that could not be saved there. `best` has version, metric and value of `checkpoints/best.ckpt`;
    `mirror` describes the copy in an object store, `hub` the upload; `unwritten` counts the rows that each file lacks.
    """

    algorithm: str
    runtime: str
    seed: int
    finished: str
    versions: int
    updates_merged: int
    updates_refused: dict[str, int]
    updates_lost: int
    updates_lost_by_reason: dict[str, int]
    updates_unused: int
    clients_kept_out: dict[str, int]
    connections_refused: dict[str, int]
    time_s: float
    wall_s: float
    bytes_up: int
    bytes_down: int
    utilisation: float
    participation: dict[str, int]
    staleness: Any
    participation_rate: dict[str, float]
    coverage: Any
    peak_memory: Any
    round_s: float | None
    final: dict[str, float]
    time_to: dict[str, float | None]
    model_digest: str
    batched: dict[str, Any]
    weights_clipped: dict[str, int]
    axes: list[dict[str, Any]]
    rates_leave: Any
    kept_whole: Any
    model: Any
    model_copy: str | None
    best: dict[str, Any] | None
    loggers: dict[str, dict[str, Any]]
    traceback: str | None
    mirror: dict[str, Any] | None
    hub: dict[str, Any] | None
    unwritten: dict[str, int]
    warnings: list[str]


def misfits(row: Mapping[str, Any], kind: type) -> list[str]:
    """Return the fields of a row whose values do not match ``kind``, one of the records in this module.

    Unknown fields are ignored.
    """
    hints = _hints(kind)
    return [name for name, value in row.items() if name in hints and not _fits(value, hints[name])]


@cache
def _hints(kind: type) -> Mapping[str, Any]:
    return get_type_hints(kind)


def _fits(value: object, hint: Any) -> bool:
    """Check whether a value from JSON matches a type, without looking inside containers."""
    if hint is Any or get_origin(hint) is Literal:
        return True
    if get_origin(hint) is UnionType:
        return any(_fits(value, one) for one in get_args(hint))
    if hint is int:
        return isinstance(value, int) and abs(value) < 2**64  # a seed has 64 bits
    return isinstance(value, int | float if hint is float else get_origin(hint) or hint)

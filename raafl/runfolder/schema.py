"""Define the names in a run folder: files, columns of tables, rows of the journal, fields of the summary.

Writers and readers use these types, so that an unknown name is a type error. Values are what JSON or a CSV file can hold. Needs
neither torch nor numpy.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal, TypedDict

CONFIG: Final = "config.yaml"
JOURNAL: Final = "events.jsonl"
METRICS: Final = "metrics.csv"
CLIENTS: Final = "clients.csv"
SUMMARY: Final = "summary.json"
SEALS: Final = "seals.jsonl"
CLIENT_LOGS: Final = "client-logs.jsonl"
MODEL: Final = "model"
CHECKPOINTS: Final = "checkpoints"
RECEIVED: Final = "received"
SUBFEDERATIONS: Final = "subfederations"
"""Folder of the run folders of simulated subfederations: 1, 2 and so on."""
SAMPLES: Final = "samples.csv"
SAMPLE_IMAGES: Final = "samples"
"""Folder of small pictures of the test samples in samples.csv: 0.png, 1.png and so on."""
SAMPLE_COLUMNS: Final = ("version", "kind", "input", "output", "expected", "probability")
BREAKS: Final = ("interrupted", "failed")
"""How a summary's `finished` begins where a run was broken off; `raafl.core.types.ENDS` are those that cannot be resumed."""
GROWING: Final = (JOURNAL, METRICS, CLIENTS)
"""The files that grow by rows."""

# ---- rows of the journal, events.jsonl ----

Kind = Literal[
    "run",
    "assigned",
    "adjusted",
    "batch",
    "gap",
    "resumed",
    "away",
    "back",
    "joined",
    "arrived",
    "sending",
    "lost",
    "timer",
    "stop",
    "received",
]
EVENTS: Final[tuple[Kind, ...]] = ("joined", "arrived", "sending", "lost", "timer", "stop", "received")
"""Types of rows that are events for the coordinator; the other rows have its decisions, or how the run began and went on."""

EXCHANGES: Final = ("split", "batches")
"""Key in the `extra` of a task: its number of round trips in the middle of the task."""


class JournalRow(TypedDict, total=False):
    """A row of events.jsonl, the journal of a run, from which the run can be replayed.

    Every row has ``time_s``, seconds on the run's clock, and ``event``, which says what happened:

    - run: the run began; the row has its package versions, hardware and limits;
    - joined: a client connected; lost: it disconnected, or did not answer a task in time (``counts`` is then True);
    - assigned: a client got a task, with the fields of `Assignment`;
    - arrived: the update of a task arrived, or a sum of several tasks' updates (``group`` has the tasks' ids); that of a
      subfederation has ``contributions`` of its clients, and the head of its own ``journal``;
    - received: the server above has sent a subfederation a task; its values are in the run folder;
    - sending: a client sends an update, and may start its next task meanwhile;
    - adjusted: the method changed one of its settings;
    - batch: ``assignments`` were trained together with ``batch_clients: fast``, so that their bits are this batch's;
    - timer: a timer of the method went off; stop: the run was asked to end;
    - away: the connection of a working client broke; back: it was restored;
    - gap: ``rows`` rows are missing here, since they could not be written;
    - resumed: the run was resumed, and only the first ``kept`` events still count; ``undone`` has client id and model
      version of each update whose merge that has undone.

    ``incarnation`` is the number of times that the client had joined before, ``fingerprint`` a digest of an update's
    tensors, and ``refusal`` the reason why an update was refused.

    In the file each row ends with its hash, ``chain`` (`raafl.runfolder.append_file`), which readers leave out.
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
    batches: str
    assignments: list[int]
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
    undone: list[tuple[int, int]]
    extra: object
    assignment: int
    refusal: str | None
    fingerprint: str | None
    group: list[int]
    scale: float
    masked: bool
    below: int
    contributions: list[Any]
    journal: str
    setting: str
    before: float
    after: float
    quantity: str
    measured: float
    predicted: float
    rows: int
    last_id: int
    kept: int
    restarted: bool
    chain: str


# ---- rows of clients.csv ----


class ClientRow(TypedDict, total=False):
    """A row of clients.csv, for a finished task; fields are in the order of the columns."""

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
    """Column of clients.csv for the values that a task's `training_step` logged, as JSON; added when a row first has it."""

    logged: Mapping[str, float]


class MemoryCells(TypedDict, total=False):
    """Columns of clients.csv for the predicted and measured memory of a task; added when a row first has them."""

    peak_bytes: int
    measured_bytes: int


CLIENT_COLUMNS: Final = tuple(ClientRow.__annotations__)
MEMORY_COLUMNS: Final = tuple(MemoryCells.__annotations__)
LOGGED_COLUMNS: Final = tuple(LoggedCells.__annotations__)
TESTED: Final = "test/"
"""Prefix of the names of what clients measure on their own test parts."""

MERGED, UNUSED, REFUSED, LOST = KINDS = ("merged", "unused", "refused", "lost")
"""How a task ends; behind ``refused:`` and ``lost:`` stands the reason."""
LOST_AT_RESTART: Final = "lost:restart"


def kind_of(outcome: str) -> str:
    """Return the kind of an outcome, for example "refused" for "refused:REASON"."""
    return outcome.partition(":")[0]


# ---- rows of metrics.csv ----


class Measurement(TypedDict):
    """The columns of metrics.csv that come first in each row: version and time of an evaluation; metrics come after them."""

    version: int
    time_s: float
    wall_s: float


class RunFigures(TypedDict, total=False):
    """Columns of metrics.csv that describe the run, not the model."""

    utilisation: float
    participation: float
    staleness: float
    coverage: float | None
    round_s: float | None
    bytes_up: int
    bytes_down: int
    peak_bytes: int | None
    measured_bytes: int
    tokens_per_s: float | None
    epsilon: float | None


METRIC_COLUMNS: Final = tuple(Measurement.__annotations__)
RUN_COLUMNS: Final = tuple(RunFigures.__annotations__)
CLIENT: Final = "client_"
"""Prefix of the names of averages over clients, in metrics.csv and in the summary."""
TRAIN: Final = "train/"
"""Prefix, in metrics.csv, of means of what `training_step` logs; names that begin with "train" get none."""
TIME_TO: Final = "time_to/"
"""Prefix of the columns of metrics.csv with the time at which a target was first met."""


def is_metric(column: str) -> bool:
    """Check whether a column of metrics.csv is a metric of the model or the clients, and not a number about the run."""
    return column not in METRIC_COLUMNS and column not in RUN_COLUMNS and not column.startswith(TIME_TO)


# ---- fields of summary.json ----


class Summary(TypedDict, total=False):
    """Content of summary.json, which the Python API returns, too; an algorithm's merge rule may add entries.

    `finished` is the reason why the run ended. `updates_lost_by_reason` has the numbers whose sum is `updates_lost`.
    `batched` tells which clients were trained together in one operation, `captured` how many tasks had steps that are
    CUDA graphs, and why others had none; `data_on_device` of how many tasks the data lay on the GPU, and why others' were
    sent. `trials` has the metric, virtual seconds, updates, share of the run's work and real seconds of trials of methods
    before the run, the untrained model's metric, and whether the trials were decisive. `subfederations` has the number of
    simulated ones, and the updates and bytes below them. `model` and `traceback` are files in the folder; `model_copy` is
    the path of a model that could not be saved there. `best` has version, metric and value of `checkpoints/best.ckpt`,
    and `rolled_back` if a restart has undone that version. `mirror` describes the copy in an object store, `hub` the upload
    to the Hugging Face hub. `unwritten` has the number of rows that each file lacks.
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
    tokens: int
    tokens_per_s: float | None
    final: dict[str, float]
    time_to: dict[str, float | None]
    model_digest: str
    batched: dict[str, Any]
    captured: dict[str, Any]
    data_on_device: dict[str, Any]
    trials: dict[str, Any]
    subfederations: dict[str, int]
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


@dataclass(frozen=True, slots=True)
class TableSeal:
    """Digest of the rows of a table, with their number and the columns."""

    lines: int  # number of lines after the header
    columns: Sequence[str]  # columns of the header at that time; more may have been added since
    sha256: str  # digest of the rows without empty last cells, so that a new column does not change it


@dataclass(frozen=True, slots=True)
class Sealed:
    """State of journal and tables at one moment, for a seal (a signed entry with their hashes)."""

    rows: int  # number of rows in the journal
    head: str  # hash of the journal's last row
    tables: Mapping[str, TableSeal]  # digest of each table, by file name

"""Hold the state of a run at one moment for display."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from raafl.watch.eta import Eta


@dataclass(frozen=True, slots=True)
class ClientProgress:
    """Progress of one client of a run."""

    client: int
    doing: str = ""  # description of the submodel that it is training; empty if it is idle
    num_tasks: int = 0  # number of its merged tasks
    device: str = ""
    there: bool = True  # whether the client is connected
    version: int | None = None  # version of the global model from which it trains
    behind: int = 0  # number of versions of the global model made since then
    since_s: float | None = None  # seconds since its task began
    due_in_s: float | None = None  # predicted seconds until its task ends, negative if it is late


@dataclass(frozen=True, slots=True)
class ProgressState:
    """A snapshot of a run's progress."""

    version: int  # version of the global model
    num_updates: int  # number of updates merged so far
    time_s: float  # seconds on the run's clock: wall time, or the virtual clock of a simulation
    # metrics of the newest evaluation; ``evaluated`` has its time and version
    metrics: Mapping[str, float] = field(default_factory=dict)
    clients: tuple[ClientProgress, ...] = ()  # clients to show, one entry each
    num_updates_goal: int | None = None  # number of updates after which the run ends; None = another limit ends it
    title: str = ""
    simulated: bool = False
    finished: str | None = None  # reason for which the run has ended; None = it goes on
    # number of clients that have ever joined, which may be more than are shown; ``num_there`` are connected, and
    # ``num_working`` are training
    num_clients: int | None = None
    num_there: int | None = None
    num_working: int | None = None
    bytes_down: int = 0
    bytes_up: int = 0
    # recent rate of updates on the run's clock; ``bytes_per_s``: recent rate of bytes, up and down together
    updates_per_s: float | None = None
    bytes_per_s: float | None = None
    staleness_mean: float = 0.0  # mean staleness of the updates merged so far
    staleness_max: int = 0
    # number of ended tasks by outcome: merged, refused, lost and unused
    outcomes: Mapping[str, int] = field(default_factory=dict)
    # estimated seconds until each goal of the run is met; ``ends_in_s``: seconds until the run ends. Both are in
    # seconds of the run's clock
    etas: tuple[Eta, ...] = ()
    ends_in_s: float | None = None
    speed: float | None = None  # seconds of the run's clock per second of real time
    # trainings of a simulation per second of real time; ``num_processes``: number of processes that train, if
    # known
    trainings_per_s: float | None = None
    num_processes: int | None = None
    # share of the training tasks that ran together with others as one batch; ``mean_cohort``: mean number of
    # clients in such a batch
    share_batched: float | None = None
    mean_cohort: float | None = None
    evaluated: tuple[float, int] | None = None

"""Hold the state of a run at one moment for display."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from raafl.watch.eta import Eta


@dataclass(frozen=True, slots=True)
class ClientProgress:
    """Progress of one client of a run.

    Attributes:
        doing: description of the submodel that it is training; empty if it is idle.
        num_tasks: number of its merged tasks.
        there: whether the client is connected.
        version: version of the global model from which it trains.
        behind: number of versions of the global model made since then.
        since_s: seconds since its task began.
        due_in_s: predicted seconds until its task ends, negative if it is late.
    """

    client: int
    doing: str = ""
    num_tasks: int = 0
    device: str = ""
    there: bool = True
    version: int | None = None
    behind: int = 0
    since_s: float | None = None
    due_in_s: float | None = None


@dataclass(frozen=True, slots=True)
class ProgressState:
    """A snapshot of a run's progress.

    Attributes:
        version: version of the global model.
        num_updates: number of updates merged so far.
        time_s: seconds on the run's clock: wall time, or the virtual clock of a simulation.
        metrics: metrics of the newest evaluation; ``evaluated`` has its time and version.
        clients: clients to show, one entry each.
        num_clients: number of clients that have ever joined, which may be more than are shown; ``num_there`` are
            connected, and ``num_working`` are training.
        num_updates_goal: number of updates after which the run ends; None = another limit ends it.
        finished: reason for which the run has ended; None = it goes on.
        updates_per_s: recent rate of updates on the run's clock; ``bytes_per_s``: recent rate of bytes, up and down
            together.
        staleness_mean: mean staleness of the updates merged so far.
        outcomes: number of ended tasks by outcome: merged, refused, lost and unused.
        etas: estimated seconds until each goal of the run is met; ``ends_in_s``: seconds until the run ends. Both are
            in seconds of the run's clock.
        speed: seconds of the run's clock per second of real time.
        trainings_per_s: trainings of a simulation per second of real time; ``num_processes``: number of processes that
            train, if known.
        share_batched: share of the training tasks that ran together with others as one batch; ``mean_cohort``: mean
            number of clients in such a batch.
    """

    version: int
    num_updates: int
    time_s: float
    metrics: Mapping[str, float] = field(default_factory=dict)
    clients: tuple[ClientProgress, ...] = ()
    num_updates_goal: int | None = None
    title: str = ""
    simulated: bool = False
    finished: str | None = None
    num_clients: int | None = None
    num_there: int | None = None
    num_working: int | None = None
    bytes_down: int = 0
    bytes_up: int = 0
    updates_per_s: float | None = None
    bytes_per_s: float | None = None
    staleness_mean: float = 0.0
    staleness_max: int = 0
    outcomes: Mapping[str, int] = field(default_factory=dict)
    etas: tuple[Eta, ...] = ()
    ends_in_s: float | None = None
    speed: float | None = None
    trainings_per_s: float | None = None
    num_processes: int | None = None
    share_batched: float | None = None
    mean_cohort: float | None = None
    evaluated: tuple[float, int] | None = None

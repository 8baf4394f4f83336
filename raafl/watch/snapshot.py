"""Hold the state of a run at one moment for display."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from raafl.watch.eta import Eta


@dataclass(frozen=True, slots=True)
class ClientProgress:
    """Progress of one client.

    Attributes:
        doing: what it trains now; empty when idle.
        num_tasks: number of its merged tasks.
        there: whether it is connected.
        version: that it trains from; ``behind``: versions made since.
        since_s: for how long it has been at it; ``due_in_s``: when it should be back, negative when late.
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
    """A snapshot of a run.

    Attributes:
        version: Of the global model.
        num_updates: Updates merged so far.
        time_s: The run's own time: wall time, or the virtual clock of a simulation.
        metrics: The newest evaluation, which was of the time and version of ``evaluated``.
        clients: One entry a client that is to be shown.
        num_clients: That have ever joined, if more than are shown; ``num_there`` in the fleet, ``num_working`` at work now.
        num_updates_goal: How many updates the run is for, where that is what ends it.
        finished: Why the run has ended, if it has.
        updates_per_s: Of late, on the run's clock; ``bytes_per_s`` up and down together.
        staleness_mean: Of the updates merged so far.
        outcomes: How many tasks ended as merged, refused, lost, unused.
        etas: When each goal is met, and ``ends_in_s`` the run; seconds of the run's clock from now.
        speed: Seconds of the run's clock in a second here.
        trainings_per_s: Of a simulation, by the clock on the wall; ``num_processes`` that train, where it is known.
        share_batched: Of the trainings, those of clients trained as one batch, of ``mean_cohort`` clients on average.
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

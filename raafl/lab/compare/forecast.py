"""Predict how long a comparison will take on this machine, by running each row without training."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from statistics import fmean
from typing import Any

from raafl.config.experiment import Experiment, distance, seconds
from raafl.core.select import time_on
from raafl.core.types import Work
from raafl.devices.measure import measure_machine
from raafl.devices.profiles import Profile
from raafl.lab.compare.comparison import Comparison
from raafl.lab.compare.runs import parsed
from raafl.lab.compare.search import rungs
from raafl.lab.compare.tables import Cells
from raafl.lab.plan.dry import Prediction, World, predict
from raafl.submodel import FULL
from raafl.units import duration, size


@dataclass(frozen=True, slots=True)
class Forecast:
    """Predicted cost of one row of a comparison."""

    row: str  # label of the row
    runs: int  # number of reported runs of the row, one for each seed
    trials: float  # number of runs for the search; a trial that ends early counts as a part of a run
    updates: int = 0  # number of merged updates of a run
    time_s: float = 0.0  # virtual seconds of a run
    num_bytes: float = 0.0  # number of bytes sent and received by all clients in a run
    here_s: float = 0.0  # seconds that one process on this machine needs for a run, including evaluations
    problem: str | None = None  # reason why the row cannot be predicted; all numbers are then 0

    @property
    def total_s(self) -> float:
        """Seconds that one process on this machine needs for all runs of the row."""
        return self.here_s * (self.runs + self.trials)


def forecast(comparison: Comparison) -> list[Forecast]:
    """Predict the cost of each row of a comparison without training.

    A run for the search is assumed to take as long as a reported run.

    Raises:
        BadInput: an option of a row is wrong; the message names the row.
    """
    machine = measure_machine()
    return [_row(comparison, label, machine) for label in comparison.rows]


def as_table(rows: Sequence[Forecast]) -> Cells:
    """Format the predictions as a table of texts: a header, a row for each row of the comparison, and the sum."""
    table = [["row", "runs", "trials", "updates", "virtual time", "sent", "a run here", "all here"]]
    for row in rows:
        counts = [row.row, str(row.runs), f"{row.trials:g}"]
        if row.problem:
            table.append([*counts, f"unknown: {row.problem}", "", "", "", ""])
            continue
        table.append(
            [
                *counts,
                f"{row.updates:,}",
                duration(row.time_s),
                size(row.num_bytes),
                duration(row.here_s),
                duration(row.total_s),
            ]
        )
    return [*table, ["all rows", "", "", "", "", "", "", duration(sum(row.total_s for row in rows))]]


def as_json(rows: Sequence[Forecast]) -> list[dict[str, Any]]:
    """Convert the predictions to plain data."""
    return [asdict(row) | {"total_s": row.total_s} for row in rows]


def _row(comparison: Comparison, label: str, machine: Profile) -> Forecast:
    experiment = parsed(comparison.config, label, comparison.options_of(label), comparison.seeds[0]).experiment
    search = comparison.search
    trials = 0.0 if search is None else len(search.settings(label)) * len(search.seeds) * _share(comparison)
    row = Forecast(label, len(comparison.seeds), trials)
    world = World(experiment)
    found = predict(world, experiment.algorithm, machine=machine)
    if found.problem or not found.updates:
        return replace(row, problem=found.problem or "no update in time")
    updates = _updates(experiment, found)
    factor = updates / found.updates
    evaluation_s = time_on(
        machine, world.submodels(experiment.algorithm).cost(FULL, world.batch_size), 0.0, _tested(world)
    )
    evaluations = _evaluations(experiment, world, found, factor)
    return replace(
        row,
        updates=updates,
        time_s=found.time_s * factor,
        num_bytes=(found.bytes_per_update or 0.0) * updates,
        here_s=(found.here_s or 0.0) * factor + evaluations * evaluation_s.compute_s,
    )


def _evaluations(experiment: Experiment, world: World, found: Prediction, factor: float) -> float:
    """Return about how many times a run evaluates its model; by seconds or samples, at most once a version."""
    versions, every = found.versions * factor, distance("eval_every", experiment.eval_every)
    if every is None:
        return versions / len(world.clients)
    if every.unit == "versions":
        return versions / every.size
    sizes = [client.num_samples for client in world.clients]
    each = experiment.train.trained_samples(Work(), round(fmean(sizes)), world.batch_size, world.data.drop_last)
    samples = each * found.updates * factor
    return min(versions, (found.time_s * factor if every.unit == "seconds" else samples) / every.size)


def _updates(experiment: Experiment, found: Prediction) -> int:
    """Return after how many merged updates a run ends, by its own limits; targets are not expected to be reached."""
    limit_s, updates = seconds("max_time", experiment.max_time), experiment.max_updates
    in_time = None if limit_s is None or not found.update_s else int(limit_s / found.update_s)
    return min((limit for limit in (in_time, updates) if limit is not None), default=found.updates)


def _tested(world: World) -> int:
    return sum(count for _, count in world.data.test_batches(world.batch_size))


def _share(comparison: Comparison) -> float:
    """Return the budget that halving spends on a trial, on average, as a share of running each to its end."""
    halving = comparison.search.halving if comparison.search else None
    spent, left = 0.0, 1.0
    for fraction in rungs(halving):
        spent += left * fraction  # each part begins anew
        left *= halving.keep if halving else 1.0
    return spent

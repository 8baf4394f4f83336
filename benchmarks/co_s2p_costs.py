"""Predict what Co-S2P and FedRolex send, hold and take: the paper's figures 7 and 8 (E1) and Table XI (1.1 billion parameters).

Nothing is trained: the coordinator hands out tasks over virtual time, each predicted as every selector predicts it. A row is one
kind of client with one method: bytes of a task both ways, peak memory and seconds of its dearest task, and the means over its
tasks. `share` is the mean over that of FedRolex with the residual width whole, for the same kind.

    python -m benchmarks.co_s2p_costs [--json] [--out FILE]
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence

from benchmarks.common import Row, main
from raafl.commands.reproduce import papers_folder
from raafl.config.experiment import Experiment
from raafl.core.types import Assignment, Work
from raafl.lab.compare.comparison import read
from raafl.lab.compare.runs import parsed
from raafl.lab.plan.dry import DryRun, Untrained, World
from raafl.runfolder.record import RunRecord
from raafl.submodel import FlatTensors

TASKS = 96
RATES = "--algorithm.rates={type-1: 0.0625, type-3: 0.5625, type-4: 0.5625}"
# square roots of the rates, since both sides of a weight are cut
CUT = "--algorithm.rates={type-1: 0.25, type-3: 0.75, type-4: 0.75}"
METHODS = {
    "FedRolex": ["--algorithm", "fed_rolex", RATES],
    "FedRolex, residual width cut": ["--algorithm", "fed_rolex", CUT, "--submodels.residual_width", "true"],
    "Co-S2P": ["--algorithm.server_lr", "1"],
    "FedAvg": ["--algorithm", "fed_avg"],
}


class Recording(Untrained):
    """Executor of a dry run that records each task in place of training it."""

    tasks: list[Assignment]

    def submit(self, assignment: Assignment, snapshot: FlatTensors, needed_at: float) -> None:
        """Record the task; see `Untrained.submit`."""
        self.tasks.append(assignment)
        super().submit(assignment, snapshot, needed_at)


def tasks_of(world: World, experiment: Experiment) -> Iterator[tuple[str, float, int, int]]:
    """Yield device, seconds, peak bytes and bytes both ways of each task that the coordinator hands out."""
    coordinator = world.coordinator(experiment.algorithm, TASKS)
    sizes = {client.id: client.num_samples for client in world.clients}
    executor = Recording(coordinator.payload, sizes, lambda task: 0.0)
    executor.tasks = []
    DryRun(coordinator, world.clients, executor, RunRecord(None), None).run()
    clients, fleet = {client.id: client for client in world.clients}, coordinator.fleet
    for task in executor.tasks:
        client = clients[task.client]
        work = Work(task.spec, task.region, task.num_epochs, task.num_steps, task.extra)
        cost, time = fleet.cost(task.spec, task.extra), fleet.task_time(client, work)
        yield client.profile.name, time.total_s, cost.peak_bytes, cost.down_bytes + cost.up_bytes


def setting(name: str) -> tuple[str, Sequence[str]]:
    """Return config and options of a setting: E1, or Table XI at the paper's size."""
    if name == "E1":
        return "co-s2p-paper", ()
    comparison = read(papers_folder() / "co-s2p-table-11-fpb.yaml", "full")
    return comparison.config, (*comparison.options, *comparison.rows["Co-S2P"])


def measure() -> list[Row]:
    """Return a row for each setting, kind of client and method."""
    rows: list[Row] = []
    for name in ("E1", "Table XI"):
        config, options = setting(name)
        whole: dict[str, Row] = {}
        for method, more in METHODS.items():
            experiment = parsed(config, method, (*options, *more), 0).experiment
            kinds: dict[str, list[tuple[float, int, int]]] = {}
            for kind, *figures in tasks_of(World(experiment), experiment):
                kinds.setdefault(kind, []).append(tuple(figures))
            for kind, figures in kinds.items():
                seconds, peaks, sent = zip(*figures, strict=True)
                row = {
                    "setting": name,
                    "method": method,
                    "device": kind,
                    "tasks": len(figures),
                    "task_s": statistics.fmean(seconds),
                    "megabytes": statistics.fmean(sent) / 1e6,
                    "peak_mb": max(peaks) / 1e6,
                }
                first = whole.setdefault(kind, row)
                shares = {f"{key}_share": row[key] / first[key] for key in ("task_s", "megabytes", "peak_mb")}
                rows.append(row | shares)
    return rows


if __name__ == "__main__":
    main("co_s2p_costs", measure)

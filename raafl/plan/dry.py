"""Run a federation over virtual time without training: coordinator, parts and devices are the real ones."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from raafl.config.experiment import Experiment
from raafl.core.algorithm import Algorithm, Merge, SelectContext, Trigger
from raafl.core.coordinator import Coordinator
from raafl.core.payload import Payload
from raafl.core.state import GlobalState
from raafl.core.types import Assignment, ClientInfo, Update, Work
from raafl.data.federated import FederatedData
from raafl.devices.profiles import Profile
from raafl.errors import BadInput
from raafl.local.context import ALONE, TaskContext
from raafl.parts.select.rate_select import RateSelect
from raafl.parts.select.submodels import Full
from raafl.runfolder.record import RunRecord
from raafl.runtime.executors import Executor
from raafl.runtime.setup import batch_size_of, client_infos, coordinator_of, limits_of, load_data, make_model, proven
from raafl.runtime.simulation import Simulation
from raafl.submodel import FlatTensors, Layout, Spec, Submodels, skeleton
from raafl.submodel.find.trace import MOST_VALUES
from raafl.submodel.prove.narrow import num_values

MOST_UPDATES = 2000


@dataclass(frozen=True, slots=True)
class Prediction:
    """Predicted figures of a run with one algorithm; figures are None if no update would be merged.

    Attributes:
        name: name of the algorithm.
        updates: number of updates merged in the dry run.
        time_s: virtual seconds of the dry run.
        version_s: seconds per version.
        update_s: seconds per merged update, all clients together.
        utilisation: share of the clients' time spent on tasks.
        staleness: mean staleness of the merged updates.
        bytes_per_update: bytes of an update, down and up.
        run_s: virtual seconds until the config's ``max_updates`` are merged.
        least, most: number of merged updates of the client with the fewest, and of the one with the most.
        problem: reason why the algorithm cannot be run; the figures are then None or 0.
        note: reason why it will not learn at this staleness.
        bases: precision of the frozen base that each client had in its last task, by client id, if there are several.
        here_s: seconds in which one process of the given machine trains the tasks of these updates; None = no machine
            was given.
    """

    name: str
    updates: int = 0
    versions: int = 0
    time_s: float = 0.0
    version_s: float | None = None
    update_s: float | None = None
    utilisation: float | None = None
    staleness: float | None = None
    bytes_per_update: float | None = None
    run_s: float | None = None
    least: int = 0
    most: int = 0
    problem: str | None = None
    note: str | None = None
    bases: Mapping[int, str] = field(default_factory=dict)
    here_s: float | None = None


class World:
    """Data, clients and costs shared by all predictions for one experiment."""

    def __init__(self, experiment: Experiment) -> None:
        """Load and partition the data. Raises `BadInput` as `raafl.runtime.setup` does."""
        torch.set_num_threads(experiment.threads)
        self.experiment = experiment
        self.data: FederatedData = load_data(experiment)
        self.clients: list[ClientInfo] = client_infos(experiment, self.data)
        self.batch_size = batch_size_of(experiment, self.data)
        self._submodels: dict[str, Submodels] = {}

    def submodels(self, algorithm: Algorithm) -> Submodels:
        """Return the submodels of the model as this algorithm trains it, without values."""
        prepared = type(algorithm.local).prepare
        key = "plain" if prepared.__qualname__ == "Local.prepare" else repr(algorithm.local)
        key += " whole" if type(algorithm.select) is Full else ""
        if key not in self._submodels:
            experiment = replace(self.experiment, algorithm=algorithm)
            with skeleton():
                module = make_model(experiment)
            self._submodels[key] = proven(experiment, module, self.data)
            self._submodels[key].attach_base(module)  # what is frozen travels in no run, nor here
        return self._submodels[key]

    def cut_submodels(self) -> Submodels:
        """Return the submodels of the config's algorithm with proven axes; also for an algorithm of whole models."""
        own = self.experiment.algorithm
        return self.submodels(replace(own, select=RateSelect()) if type(own.select) is Full else own)

    def fleet(self, algorithm: Algorithm) -> SelectContext:
        """Return a select part's context with all clients, even if the algorithm does not suit them."""
        fleet = self._coordinator(algorithm, None, real=False).fleet
        return fleet.of(self.clients)

    def coordinator(self, algorithm: Algorithm, max_updates: int | None, *, real: bool = False) -> Coordinator:
        """Return the coordinator of a run with this world's model and clients.

        Args:
            algorithm: algorithm of the run.
            max_updates: number of merged updates after which it ends; None = never.
            real: whether the model has values; else it is on the meta device.

        Raises:
            BadInput: the clients and the submodels do not fit each other.
        """
        coordinator = self._coordinator(algorithm, max_updates, real=real)
        problems = algorithm.merge.check(coordinator.state)
        problems += algorithm.select.check(coordinator.fleet.of(self.clients))
        if problems:
            raise BadInput(problems[0] + (f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""))
        return coordinator

    def _coordinator(self, algorithm: Algorithm, max_updates: int | None, *, real: bool) -> Coordinator:
        experiment = replace(self.experiment, algorithm=algorithm)
        submodels = self.submodels(algorithm)
        if real:
            module = make_model(experiment)
            submodels = proven(experiment, module, self.data)
            state = GlobalState(submodels, submodels.state(module))
            submodels.attach_base(state.values)
        else:
            state = GlobalState(submodels, FlatTensors.empty(submodels.layout(), "meta"))
        there = max(sum(client.profile.available(0.0) for client in self.clients), 1)
        limits = replace(limits_of(experiment, there), max_updates=max_updates, checkpoint_every=None)
        # a trigger that merges some of the waiting updates reads from the merge's memory which they are
        reads_memory = type(algorithm.trigger).merged_now is not Trigger.merged_now
        unmerged = algorithm if reads_memory else replace(algorithm, merge=Unmerged(algorithm.merge))
        return coordinator_of(experiment, self.data, unmerged, state, limits)


class Unmerged(Merge):
    """Merge that discards updates: the model stays unchanged, but versions are counted."""

    def __init__(self, inner: Merge) -> None:
        """Stand in for the merge ``inner``."""
        self.sends = inner.sends

    def receive(self, state: GlobalState, update: Update, spec: Spec, staleness: int) -> None:
        """Discard the update; see `Merge.receive`."""

    def apply(self, state: GlobalState) -> None:
        """Leave the model unchanged; see `Merge.apply`."""


class Untrained(Executor):
    """Executor for dry runs: answers every task at once with uninitialised tensors."""

    def __init__(self, payload: Payload, sizes: Mapping[int, int], seconds_of: Callable[[Assignment], float]) -> None:
        """Answer for clients with ``sizes`` samples, by id; ``here_s`` adds up ``seconds_of`` each task."""
        self._payload, self._sizes, self._seconds_of = payload, sizes, seconds_of
        self.here_s = 0.0
        self._tasks: dict[int, tuple[Assignment, torch.device]] = {}
        self.bases: dict[int, str] = {}

    def submit(self, assignment: Assignment, snapshot: FlatTensors, needed_at: float) -> None:
        """Store the task; see `Executor.submit`."""
        self._tasks[assignment.id] = assignment, snapshot.device
        if assignment.spec.base is not None:
            self.bases[assignment.client] = assignment.spec.base

    def result(self, assignment_id: int, context: TaskContext = ALONE) -> Update:
        """Return an update with the expected layout and uninitialised values."""
        task, device = self._tasks.pop(assignment_id)
        self.here_s += self._seconds_of(task)
        tensors = FlatTensors.zeros(self._payload.layout(task.spec, "trained"), device)
        return Update(task.id, task.client, task.incarnation, tensors, self._sizes[task.client])

    def cancel(self, assignment_id: int) -> None:
        """Remove the task; see `Executor.cancel`."""
        self._tasks.pop(assignment_id, None)


class DryRun(Simulation):
    """Simulation for dry runs, which writes no checkpoints."""

    def save(self) -> dict[str, Any]:
        """Return an empty state, since dry runs are not saved."""
        return {}

    def _take_raised(self, error: Exception, client: int | None) -> None:
        raise error  # a part that reads values may need those of trained updates, which there are none of: `predict` says so


def predict(
    world: World, algorithm: Algorithm, name: str = "", max_updates: int | None = None, machine: Profile | None = None
) -> Prediction:
    """Run one algorithm without training and return its figures; `Prediction.problem` says why it cannot run.

    Args:
        world: shared data, clients and costs.
        algorithm: algorithm to predict.
        name: name of the algorithm, for the result.
        max_updates: number of updates that ends the run; None = the config's, at most `MOST_UPDATES` or 20 per client.
        machine: machine for which `Prediction.here_s` tells how long training takes; None = none.
    """
    name, wanted = name or algorithm.name, world.experiment.max_updates
    if max_updates is None:
        max_updates = min(wanted or MOST_UPDATES, max(MOST_UPDATES, 20 * len(world.clients)))
    problem, is_large = "", num_values(world.submodels(algorithm)) > MOST_VALUES
    for real in (False,) if is_large else (False, True):  # most need no values
        try:
            return _gone_through(world, algorithm, name, max_updates, wanted, real, machine)
        except BadInput as error:
            return Prediction(name, problem=" ".join(str(error).split()))
        except (NotImplementedError, RuntimeError, KeyError, TypeError, ValueError) as error:
            problem = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
    return Prediction(name, problem=f"its parts need trained updates to decide ({problem})")


def _gone_through(
    world: World, algorithm: Algorithm, name: str, max_updates: int, wanted: int | None, real: bool,
    machine: Profile | None,
) -> Prediction:  # fmt: skip
    coordinator = world.coordinator(algorithm, max_updates, real=real)
    record = RunRecord(None)
    sizes = {client.id: client.num_samples for client in world.clients}
    seconds = functools.cache(lambda client, work: coordinator.fleet.task_time(client, work).compute_s)

    def on_machine(task: Assignment) -> float:
        if machine is None:
            return 0.0
        client = ClientInfo(task.client, sizes[task.client], machine)
        return float(seconds(client, Work(task.spec, task.region, task.num_epochs, task.num_steps, task.extra)))

    executor = Untrained(coordinator.payload, sizes, on_machine)
    simulation = DryRun(coordinator, world.clients, executor, record, None)
    reason = simulation.run()
    summary = record.summary(
        algorithm=name, runtime="plan", seed=world.experiment.seed, version=coordinator.state.version,
        values=FlatTensors.empty(Layout.pack([])), time_s=simulation.now, reason=reason,
    )  # fmt: skip
    updates, versions, time_s = summary["updates_merged"], summary["versions"], simulation.now
    if reason.startswith("failed") or not versions:
        return Prediction(name, time_s=time_s, problem=reason if reason.startswith("failed") else "no update in time")
    tasks, staleness = summary["participation"].values(), float(summary["staleness"]["mean"])
    return Prediction(
        name, updates, versions, time_s, time_s / versions, time_s / updates, summary["utilisation"],
        staleness, (summary["bytes_up"] + summary["bytes_down"]) / updates,
        None if wanted is None else time_s / updates * wanted, min(tasks), max(tasks),
        note=algorithm.merge.too_stale(staleness), bases=executor.bases,
        here_s=None if machine is None else executor.here_s,
    )  # fmt: skip

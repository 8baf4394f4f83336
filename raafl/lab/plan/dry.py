"""Simulate a run without training it (a dry run): coordinator, algorithm and devices are the real ones."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from raafl.config.experiment import Experiment
from raafl.core.algorithm import Algorithm, Local, Merge, SelectContext, Trigger
from raafl.core.coordinator import Coordinator
from raafl.core.payload import Payload
from raafl.core.state import GlobalState
from raafl.core.subfederation import SIMULATED, below, config_problems
from raafl.core.types import Assignment, ClientInfo, Update, Work
from raafl.data.federated import FederatedData
from raafl.devices.profiles import Profile
from raafl.errors import USER_ERRORS, BadInput, format_error, one_line
from raafl.exact_key import exact_key
from raafl.local.context import ALONE, TaskContext
from raafl.parts.select.rate_select import RateSelect
from raafl.parts.select.submodels import Full
from raafl.runfolder.record import RunRecord
from raafl.runtime.executors import Executor
from raafl.runtime.setup import batch_size_of, client_infos, coordinator_of, limits_of, load_data, make_model, proven
from raafl.runtime.simulation import Simulation
from raafl.runtime.subfederations import Below, Shared, Subfederations
from raafl.submodel import FlatTensors, Layout, Spec, Submodels, skeleton
from raafl.submodel.find.trace import MOST_VALUES
from raafl.submodel.prove.narrow import num_values

MOST_UPDATES = 2000


@dataclass(frozen=True, slots=True)
class Prediction:
    """Predicted figures of a run with one algorithm; None where no update would be merged."""

    name: str  # name of the algorithm
    updates: int = 0  # number of updates merged in the dry run
    versions: int = 0
    time_s: float = 0.0  # duration of the dry run in virtual seconds
    version_s: float | None = None  # seconds per version of the global model
    update_s: float | None = None  # seconds per merged update of the whole fleet
    utilisation: float | None = None  # share of the clients' time in which they work
    staleness: float | None = None  # mean staleness of the merged updates
    bytes_per_update: float | None = None  # bytes sent and received for one update
    # virtual seconds until ``max_updates`` of the config have been merged
    run_s: float | None = None
    least: int = 0  # smallest and largest number of a client's merged updates
    most: int = 0
    problem: str | None = None  # why the algorithm cannot be run; the figures are then None or 0
    note: str | None = None  # why the algorithm will not learn with this staleness
    # precision of the frozen parameters that each client received last, by client id, if there are several precisions
    bases: Mapping[int, str] = field(default_factory=dict)
    # seconds in which one process on a given machine would train these tasks; None = no machine was given
    here_s: float | None = None
    at_work: float = 0.0  # mean number of clients that work at the same time


class World:
    """Data, clients and costs of an experiment, shared by the predictions for several algorithms."""

    def __init__(self, experiment: Experiment) -> None:
        torch.set_num_threads(experiment.threads)
        self.experiment = experiment
        self.data: FederatedData = load_data(experiment)
        self.clients: list[ClientInfo] = client_infos(experiment, self.data)
        self.batch_size = batch_size_of(experiment, self.data)
        self._submodels: dict[Hashable, Submodels] = {}

    def submodels(self, algorithm: Algorithm) -> Submodels:
        """Return the submodels of the model, without parameter values, after ``algorithm`` has prepared it for training."""
        is_plain = type(algorithm.local).prepare is Local.prepare
        key = None if is_plain else exact_key(algorithm.local), type(algorithm.select) is Full
        if key not in self._submodels:
            experiment = replace(self.experiment, algorithm=algorithm)
            with skeleton():
                module = make_model(experiment)
            self._submodels[key] = proven(experiment, module, self.data)
            self._submodels[key].attach_base(module)  # as in a real run, frozen values are not sent
        return self._submodels[key]

    def cut_submodels(self) -> Submodels:
        """Return the submodels that the model can be cut to, even if the config's algorithm only trains whole models."""
        own = self.experiment.algorithm
        return self.submodels(replace(own, select=RateSelect()) if type(own.select) is Full else own)

    def fleet(self, algorithm: Algorithm) -> SelectContext:
        """Return the context in which the algorithm selects submodels for the experiment's clients.

        It is not checked that every client has enough memory for a submodel.
        """
        fleet = self._coordinator(algorithm, None, real=False).fleet
        return fleet.of(self.clients)

    def below(self, experiment: Experiment, number: int) -> World:
        """Return the world of a subfederation's own run, on the same data and submodels."""
        own = copy.copy(self)
        own.experiment = below(experiment, number)
        own.clients = client_infos(own.experiment, self.data)
        return own

    def coordinator(self, algorithm: Algorithm, max_updates: int | None, *, real: bool = False) -> Coordinator:
        """Build the coordinator of a run with the experiment's clients and model.

        `max_updates`: number of merged updates after which the run ends; None = no limit.

        Raises:
            BadInput: a client has too little memory for every submodel.
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
        # a trigger with its own `merged_now` may read the merge's memory, so it needs the real merge
        reads_memory = type(algorithm.trigger).merged_now is not Trigger.merged_now
        unmerged = algorithm if reads_memory else replace(algorithm, merge=_Unmerged(algorithm.merge))
        return coordinator_of(experiment, self.data, unmerged, state, limits)


class _Unmerged(Merge):
    """Merge of a dry run: discard each update, so that only versions are counted."""

    def __init__(self, inner: Merge) -> None:
        """Let clients send the same as for ``inner``, the merge that this one replaces."""
        self.sends = inner.sends

    def receive(self, state: GlobalState, update: Update, spec: Spec, staleness: int) -> None:
        """Discard the update; see `Merge.receive`."""

    def apply(self, state: GlobalState) -> None:
        """Leave the model unchanged; see `Merge.apply`."""


class Untrained(Executor):
    """Executor of a dry run: it trains nothing, and returns uninitialised tensors at once."""

    def __init__(self, payload: Payload, sizes: Mapping[int, int], seconds_of: Callable[[Assignment], float]) -> None:
        """Store each client's number of samples, by id, and a function from a task to its seconds."""
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
        """Return an update with the right tensor shapes and uninitialised values."""
        task, device = self._tasks.pop(assignment_id)
        self.here_s += self._seconds_of(task)
        tensors = FlatTensors.zeros(self._payload.layout(task.spec, "trained"), device)
        return Update(task.id, task.client, task.incarnation, tensors, self._sizes[task.client])

    def cancel(self, assignment_id: int) -> None:
        """Remove the task; see `Executor.cancel`."""
        self._tasks.pop(assignment_id, None)


class DryRun(Simulation):
    """Simulation that trains nothing and writes no checkpoints."""

    def save(self) -> dict[str, Any]:
        """Return an empty state, since dry runs are not resumed."""
        return {}

    def _take_raised(self, error: BaseException, client: int | None) -> None:
        # raise: some methods read values of updates, which a dry run lacks, and `predict` reports such an error
        raise error


class _DryBelow(Below, DryRun):
    """Subfederation of a dry run, whose tasks are timed but not trained."""

    def _fingerprint(self, received: FlatTensors) -> str:
        return ""

    def _answer(self, assignment: Assignment, received: FlatTensors, num_merges: int) -> Update:
        tensors = FlatTensors.zeros(self.coordinator.payload.layout(assignment.spec, "trained"), received.device)
        return Update(assignment.id, assignment.client, assignment.incarnation, tensors, self._num_samples)


def _of_subfederations(world: World, experiment: Experiment, executor: Untrained, *, real: bool) -> Executor:
    """Make the executor of a dry run with subfederations: each client is one, and ``executor`` times the tasks of its clients."""
    takes = {SIMULATED: experiment.subfederations.size}
    if problems := config_problems(experiment.algorithm, experiment.algorithm.merge, takes, False, ()):
        raise BadInput(problems[0])
    found = []
    for number in range(1, experiment.num_members + 1):
        own = world.below(experiment, number)
        coordinator = own.coordinator(own.experiment.algorithm, None, real=real)
        shared = Shared(executor, number, experiment.num_members)
        found.append(_DryBelow(number, coordinator, own.clients, shared, RunRecord(None), "values"))
    return Subfederations(executor, found)


def predict(
    world: World, algorithm: Algorithm, name: str = "", max_updates: int | None = None, machine: Profile | None = None
) -> Prediction:
    """Simulate a run with one algorithm without training, and return its predicted figures.

    `max_updates`: number of merged updates after which the run ends; None = as in the config, at most `MOST_UPDATES`
    or 20 per client.
    `machine`: device profile for predicting the time that the run would take on this machine; None = do not predict
    it.
    """
    name, wanted = name or algorithm.name, world.experiment.max_updates
    if max_updates is None:
        max_updates = min(wanted or MOST_UPDATES, max(MOST_UPDATES, 20 * len(world.clients)))
    problem = ""
    try:
        is_large = num_values(world.submodels(algorithm)) > MOST_VALUES
        # first without tensor values, which is cheaper and enough for most methods
        for real in (False,) if is_large else (False, True):
            try:
                return _gone_through(world, algorithm, name, max_updates, wanted, real, machine)
            except (NotImplementedError, RuntimeError, KeyError, TypeError) as error:
                problem = one_line(format_error(error))
    except BadInput as error:
        return Prediction(name, problem=one_line(str(error)))
    except USER_ERRORS as error:  # must not hide the predictions of the other methods
        return Prediction(name, problem=f"it cannot be planned ({one_line(format_error(error))})")
    return Prediction(name, problem=f"it cannot be planned, since its parts need trained updates ({problem})")


def _gone_through(
    world: World,
    algorithm: Algorithm,
    name: str,
    max_updates: int,
    wanted: int | None,
    real: bool,
    machine: Profile | None,
) -> Prediction:
    coordinator = world.coordinator(algorithm, max_updates, real=real)
    record = RunRecord(None)
    sizes = dict(enumerate(world.data.sizes, start=1))
    seconds = functools.cache(lambda client, work: coordinator.fleet.task_time(client, work).compute_s)

    def on_machine(task: Assignment) -> float:
        if machine is None:
            return 0.0
        client = ClientInfo(task.client, sizes[task.client], machine)
        return float(seconds(client, Work(task.spec, task.region, task.num_epochs, task.num_steps, task.extra)))

    executor = Untrained(coordinator.payload, sizes, on_machine)
    trains: Executor = executor
    if world.experiment.subfederations.size is not None:
        own = replace(world.experiment, algorithm=algorithm)
        trains = _of_subfederations(world, own, executor, real=real)
    simulation = DryRun(coordinator, world.clients, trains, record, None)
    reason = simulation.run()
    summary = record.summary(
        algorithm=name,
        runtime="plan",
        seed=world.experiment.seed,
        version=coordinator.state.version,
        values=FlatTensors.empty(Layout.pack([])),
        time_s=simulation.now,
        reason=reason,
    )
    updates, versions, time_s = summary["updates_merged"], summary["versions"], simulation.now
    if reason.startswith("failed") or not versions:
        return Prediction(name, time_s=time_s, problem=reason if reason.startswith("failed") else "no update in time")
    tasks, staleness = summary["participation"].values(), float(summary["staleness"]["mean"])
    return Prediction(
        name,
        updates,
        versions,
        time_s,
        time_s / versions,
        time_s / updates,
        summary["utilisation"],
        staleness,
        (summary["bytes_up"] + summary["bytes_down"]) / updates,
        None if wanted is None else time_s / updates * wanted,
        min(tasks),
        max(tasks),
        note=algorithm.merge.innermost.too_stale(staleness),
        bases=executor.bases,
        here_s=None if machine is None else executor.here_s,
        at_work=summary["utilisation"] * len(tasks),
    )

"""The five parts of a federated algorithm, and the record that joins them.

A toy algorithm, whole: clients train the full model one at a time, and the newest result replaces the model.

>>> from raafl.parts.merge.mean import Mean
>>> from raafl.core.sample import Sample
>>> from raafl.parts.select.submodels import Full
>>> from raafl.parts.trigger import EachArrival
>>> def relay() -> Algorithm:
...     return Algorithm(name="relay", paper="none", sample=Sample(concurrency=1), select=Full(),
...                      local=Local(), trigger=EachArrival(), merge=Mean(alpha=1.0))
>>> relay().describe()["trigger"]
'each arrival'
"""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, ClassVar, Literal

from raafl.core.local import Hook, Local, Task
from raafl.core.part import Part
from raafl.core.payload import Bundles, TransferCost
from raafl.core.state import GlobalState
from raafl.core.training import Training
from raafl.core.types import Assignment, ClientInfo, Update, Warn, Work, derive_seed
from raafl.devices.profiles import TaskTime
from raafl.devices.times import time_on
from raafl.devices.variation import real_time
from raafl.errors import BadInput
from raafl.submodel.cost import Cost
from raafl.submodel.flat import FlatTensors
from raafl.submodel.spec import Spec

__all__ = [
    "Algorithm",
    "Hook",
    "Local",
    "Merge",
    "OwnTests",
    "Restart",
    "Select",
    "SelectContext",
    "Task",
    "Training",
    "Trigger",
    "TriggerContext",
]  # fmt: skip

Restart = Literal["arrival", "merge"]


@dataclass(frozen=True, slots=True)
class OwnTests:
    """Number of samples on which each client evaluates its trained submodel.

    Attributes:
        sizes: client -> samples in the test part of its share of the run's data; a client that is not named has none.
        share: fraction of a client's own data that is its test part, for clients whose data the server does not know.
    """

    sizes: Mapping[int, int] = field(default_factory=dict)
    share: float = 0.0

    def of(self, client: ClientInfo) -> float:
        """Return the number of test samples of ``client``; for own data, estimated from its number of training samples."""
        if client.own_data:
            return client.num_samples * self.share / (1.0 - self.share)
        return float(self.sizes.get(client.id, 0))

    def most(self, client: ClientInfo) -> int:
        """Return the largest number of test samples that ``client`` can have; for own data, allowing for rounding."""
        own = 1.0 / (1.0 - self.share) if client.own_data and self.share else 0.0
        return int(self.of(client) + own)


@dataclass(frozen=True, slots=True)
class SelectContext:
    """Everything that a `select` part may read when it chooses a client's work.

    Attributes:
        state: global values, version t and merge counts q(j); read only.
        clients: id -> every client that has joined and is not lost.
        rng: the run's random generator; draws from it are replayed.
        training: the run's setting of local work.
        batch_size: local batch size, for predictions of memory.
        cache: what the part has computed; `Select.on_join` and `Select.on_loss` clear it unless the part keeps it up to date.
        seed: the run's seed, for draws that must not depend on earlier draws.
        local: what clients do with their submodels, for predictions of cost.
        plan: how updates are compressed, for predictions of transfer times; None = they are not.
        own_tests: number of samples on which clients evaluate their own submodels.
        drop_last: whether an epoch drops its last batch when that is smaller than the others.
    """

    state: GlobalState
    clients: Mapping[int, ClientInfo]
    rng: random.Random
    training: Training
    batch_size: int
    cache: MutableMapping[Any, Any] = field(default_factory=dict)
    seed: int = 0
    local: Local = field(default_factory=Local)
    plan: TransferCost | None = None
    own_tests: OwnTests = field(default_factory=OwnTests)
    drop_last: bool = False

    def of(self, clients: Iterable[ClientInfo]) -> SelectContext:
        """Return a context in which exactly ``clients`` have joined, with an empty cache."""
        return replace(self, clients={client.id: client for client in clients}, cache={})

    def cost(self, spec: Spec, extra: Mapping[str, Any] | None = None) -> Cost:
        """Predict the cost of a task.

        Where the frozen base exists in several precisions and ``spec`` names none, the least precise one counts: what fits with
        it can be assigned, and `choose_base` then picks the precision.

        Args:
            spec: the submodel.
            extra: `Work.extra` of the task.
        """
        if spec.base is None and (bases := self.state.submodels.bases.names):
            spec = replace(spec, base=bases[-1])
        cost = self.local.cost(self.state.submodels, spec, self.batch_size, extra or {})
        return cost if self.plan is None else self.plan.cost(cost, spec)

    def choose_base(self, client: ClientInfo, spec: Spec, extra: Mapping[str, Any] | None = None) -> Spec:
        """Return ``spec`` with the frozen base's precision for ``client``: the highest that fits its memory, else the lowest.

        Args:
            client: whose memory counts.
            spec: the submodel; returned unchanged if it already names a precision.
            extra: `Work.extra` of the task; None = empty.
        """
        bases = self.state.submodels.bases.names
        if not bases or spec.base is not None:
            return spec
        budget, forms = client.profile.memory_bytes, [replace(spec, base=base) for base in bases]
        return next((one for one in forms if self.cost(one, extra).peak_bytes <= budget), forms[-1])

    def task_time(self, client: ClientInfo, work: Work) -> TaskTime:
        """Predict the seconds of download, computation (evaluation on the client's test part included) and upload of ``work``."""
        samples = self.training.samples(work, client.num_samples, self.batch_size)
        spec = self.choose_base(client, work.spec, work.extra)
        return time_on(client.profile, self.cost(spec, work.extra), samples, self.tested(client, work.extra))

    def real_time(self, client: ClientInfo, predicted: TaskTime, now: float, task: int) -> TaskTime:
        """Return the real duration of a task, on a device that may vary; see `raafl.devices.variation`.

        Args:
            client: whose device it is.
            predicted: see `task_time`.
            now: when the task is assigned, in seconds of the run's clock.
            task: the client's number of it, see `Assignment.task`.
        """
        return real_time(client.profile, predicted, now, task, partial(derive_seed, self.seed, "device", client.id))

    def task_options(self, client: ClientInfo) -> dict[str, Any]:
        """Return the entries of `Work.extra` that all tasks of ``client`` share; see `Local.task_options`."""
        return self.local.task_options(client, self.state.submodels, self.training, self.batch_size, self.drop_last)

    def tested(self, client: ClientInfo, extra: Mapping[str, Any] | None = None) -> float:
        """Return the number of samples on which ``client`` evaluates its trained submodel after a task with this `Work.extra`."""
        return self.own_tests.of(client) if self.local.evaluates_on_client(extra or {}) else 0.0

    def cost_s(self, client: ClientInfo, work: Work) -> float:
        """Predict the seconds of ``work`` on ``client`` in total, the papers' c(n, j)."""
        return self.task_time(client, work).total_s

    def problems(self, ask: Callable[[ClientInfo], object]) -> list[str]:
        """Call ``ask`` for every client and collect the messages of the `BadInput` that it raises."""
        found = []
        for client in self.clients.values():
            try:
                ask(client)
            except BadInput as error:
                found.append(str(error))
        return found

    def fits(self, client: ClientInfo, spec: Spec) -> bool:
        """Check whether the predicted peak memory of a task (`Cost.peak_bytes`) is within the client's memory."""
        budget = client.profile.memory_bytes
        return budget == float("inf") or self.cost(spec).peak_bytes <= budget


class Select(Part, ABC):
    """Base of the part that answers: which submodel, and how much work, does this client get?"""

    @abstractmethod
    def __call__(self, client: ClientInfo, fleet: SelectContext) -> Work:
        """Return the work for an idle ``client``; raises `BadInput` where none is possible."""

    def on_join(self, client: ClientInfo, fleet: SelectContext) -> None:
        """Update the cache when ``client`` joins: for the first time, again, or with another device profile."""
        self.forget(client, fleet)

    def on_loss(self, client: ClientInfo, fleet: SelectContext) -> None:
        """Update the cache when ``client`` is lost."""
        self.forget(client, fleet)

    def forget(self, client: ClientInfo, fleet: SelectContext) -> None:
        """Remove from the cache what depends on the set of clients; by default everything."""
        fleet.cache.clear()

    def on_round_start(self, out: Sequence[ClientInfo], fleet: SelectContext) -> None:
        """Prepare for a round whose clients were just drawn; each of them is asked for its work afterwards.

        Args:
            out: clients of the round: those drawn, and those of earlier rounds that are still at work.
            fleet: what the part may read.
        """
        return

    def on_update(self, client: ClientInfo, assignment: Assignment, seconds: float, fleet: SelectContext) -> None:
        """Record that an update has arrived.

        Args:
            client: that sent it.
            assignment: the task.
            seconds: from assignment to arrival.
            fleet: the run as the part may see it.
        """
        return

    def check(self, fleet: SelectContext) -> list[str]:
        """Return every problem that can be found before training starts, one line each."""
        return []

    def notes(self, fleet: SelectContext) -> list[str]:
        """Return notes for the user at the start of a run, one line each; a `Warn` where the setting is probably a mistake."""
        return []


@dataclass(frozen=True, slots=True)
class TriggerContext:
    """Everything that a `trigger` part may read.

    Attributes:
        arrived_s: arrival times of the waiting updates, ascending.
        num_active: tasks that may still report, including clients drawn and not yet started; where late updates are refused,
            without the tasks of earlier rounds.
        num_clients: clients present.
        opened_s: when work for this merge last started.
        now_s: the current time.
        memory: `GlobalState.memory`, where other parts record state; read only.
    """

    arrived_s: Sequence[float]
    num_active: int
    num_clients: int
    opened_s: float
    now_s: float
    memory: Mapping[str, Any] = field(default_factory=dict)


class Trigger(Part, ABC):
    """Base of the part that answers: when are waiting updates merged?

    Attributes:
        restart: when a client that reported may work again: at its own "arrival", or after the "merge".
        folds_rest: whether updates that still wait when the run ends are merged.
    """

    restart: ClassVar[Restart] = "arrival"
    folds_rest: ClassVar[bool] = False

    @property
    def refuses_late(self) -> bool:
        """Whether a round closes without the tasks that are still out, whose updates are then refused."""
        return False

    @abstractmethod
    def due(self, waiting: TriggerContext) -> bool:
        """Check whether to merge now; called after every event while at least one update waits."""

    def wake_at(self, waiting: TriggerContext) -> float | None:
        """Return the time at which to check again even if nothing happens, or None."""
        return None

    def needed(self, num_more: int, num_waiting: int) -> int | None:
        """Return the number of arrivals until ``num_more`` more updates are merged, given ``num_waiting``; None = unknown."""
        return None

    def staleness(self, num_at_work: int) -> float:
        """Return the mean staleness of updates when ``num_at_work`` clients always work; 0 where staleness is bounded."""
        return 0.0


class Merge(Part, ABC):
    """Base of the part that answers: how are waiting updates merged?

    Its state lies in `GlobalState.memory` and `GlobalState.clients`, so that checkpoints and replays have it.

    Attributes:
        sends: whether an update holds trained "values", or their "delta" from the received ones.
        by_client: whether the merge depends on which client an update is from; then no joint update may replace several.
    """

    sends: Literal["values", "delta"] = "values"
    by_client: ClassVar[bool] = False

    def check(self, state: GlobalState) -> list[str]:
        """Return every problem that can be found before training starts, one line each."""
        return []

    def notes(self, state: GlobalState, num_clients: int) -> list[str]:
        """Return notes for the user at the start of a run, one line each; a `Warn` where the setting is probably a mistake."""
        return []

    @property
    def personalizes(self) -> bool:
        """Whether a client receives values of its own: a subclass overrides `personalize`."""
        return type(self).personalize is not Merge.personalize

    def personalize(self, state: GlobalState, client: int, spec: Spec, values: FlatTensors, bundles: Bundles) -> None:
        """Overwrite what one client receives for a task, in place.

        Args:
            state: the global model; values stored for the client are in ``state.clients``.
            client: its id.
            spec: the submodel it receives.
            values: the global model's values of that submodel.
            bundles: the tensors named by `Local.down`, uninitialised.
        """
        return

    def too_stale(self, staleness: float) -> str | None:
        """Explain why the merge cannot learn from updates of this mean staleness, or return None."""
        return None

    def reject_reason(self, state: GlobalState, update: Update, spec: Spec, staleness: int) -> str | None:
        """Return the REASON of refused:REASON for an update that is well-formed but unusable, or None; called before `receive`.

        Args:
            state: the global model; read only.
            update: the client's.
            spec: of its submodel.
            staleness: merges since its assignment.
        """
        return None

    def numbers(self, update: Update) -> Sequence[float]:
        """Return the numbers in `Update.extra` that change the model in place of tensors, for guards that bound their size."""
        return ()

    def overflows(self, state: GlobalState, update: Update, spec: Spec, staleness: int) -> bool:
        """Check whether merging this update would leave numbers that are not finite; called right before `receive`.

        Args:
            state: the global model; read only.
            update: the client's.
            spec: of its submodel.
            staleness: merges since its assignment.
        """
        return False

    @abstractmethod
    def receive(self, state: GlobalState, update: Update, spec: Spec, staleness: int) -> None:
        """Take in one update.

        Its tensors may be overwritten once this returns, unless `detach` was called. `reject_reason` has checked the client's
        plain data. If this raises all the same, the update is refused and its client dismissed: so read first, and change the
        memory last.

        Args:
            state: the global model.
            update: the client's.
            spec: of its submodel.
            staleness: merges since its assignment.
        """

    def detach(self, state: GlobalState) -> None:
        """Copy what still refers to an update's own tensors; called when no merge follows at once."""
        return

    @abstractmethod
    def apply(self, state: GlobalState) -> None:
        """Merge everything received since the last call into ``state.values``, in place."""

    def on_rollback(self, state: GlobalState, merged: Sequence[tuple[int, int]]) -> None:
        """Account for merges that a crash has undone although clients saw their results.

        Args:
            state: the global model as restored.
            merged: (client, version) of each update of those merges.
        """
        return

    def report(self, state: GlobalState) -> dict[str, Any]:
        """Return entries for the run's summary: plain data by name."""
        return {}


@dataclass(frozen=True)
class Algorithm:
    """A federated algorithm: a frozen record of five parts, made by a factory in `raafl.algorithms`."""

    name: str
    paper: str
    sample: Any
    select: Select
    local: Local
    trigger: Trigger
    merge: Merge

    def describe(self) -> dict[str, str]:
        """Return name, paper and the five parts in words."""
        parts = {part: str(getattr(self, part)) for part in ("sample", "select", "local", "trigger", "merge")}
        return {"name": self.name, "paper": self.paper, **parts}

    def notes(self, fleet: SelectContext, num_clients: int) -> list[str]:
        """Collect the notes of all parts for the start of a run."""
        stale = self.merge.too_stale(self.trigger.staleness(self.sample.most_at_work(num_clients)))
        return (
            self.select.notes(fleet)
            + self.local.notes(fleet.state.submodels)
            + self.merge.notes(fleet.state, num_clients)
            + (fleet.plan.notes(num_clients) if fleet.plan is not None else [])
            + ([] if stale is None else [Warn(stale)])
        )

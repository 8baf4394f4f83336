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
from typing import Any, ClassVar, Literal

from raafl.core.local import Hook, Local, Task
from raafl.core.part import Part
from raafl.core.payload import Bundles, Wire
from raafl.core.state import GlobalState
from raafl.core.training import Training
from raafl.core.types import Assignment, ClientInfo, Update, Warn, Work
from raafl.devices.profiles import TaskTime
from raafl.devices.times import time_on
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
    """On how many samples clients measure what they have trained.

    Attributes:
        sizes: of the test part of client i's share of the run's data; none where it is not named.
        share: of the test part of data that only a client has, whose size it does not say.
    """

    sizes: Mapping[int, int] = field(default_factory=dict)
    share: float = 0.0

    def of(self, client: ClientInfo) -> float:
        """Return the number of samples, of a client's own data as many as go with those that it trains on."""
        if client.own_data:
            return client.num_samples * self.share / (1.0 - self.share)
        return float(self.sizes.get(client.id, 0))

    def most(self, client: ClientInfo) -> int:
        """Return the largest number of samples that a client can have measured on; of its own data after rounding."""
        own = 1.0 / (1.0 - self.share) if client.own_data and self.share else 0.0
        return int(self.of(client) + own)


@dataclass(frozen=True, slots=True)
class SelectContext:
    """What a `select` part may know when it chooses.

    Attributes:
        state: global values, version t and merge counts q(j); to be read, not written.
        clients: all that have joined and are not lost.
        rng: the run's own generator.
        training: the run's own setting of local work.
        batch_size: local batch size, for memory.
        cache: the part's notes; `Select.on_join` and `Select.on_loss` empty it unless the part keeps it up to date.
        seed: the run's, for draws that must not depend on those before them.
        local: what clients do with their submodels, for what it costs.
        plan: how what travels does so; None = as it is.
        own_tests: what clients measure by themselves.
        drop_last: whether an epoch leaves out its last batch where that is smaller than the others.
    """

    state: GlobalState
    clients: Mapping[int, ClientInfo]
    rng: random.Random
    training: Training
    batch_size: int
    cache: MutableMapping[Any, Any] = field(default_factory=dict)
    seed: int = 0
    local: Local = field(default_factory=Local)
    plan: Wire | None = None
    own_tests: OwnTests = field(default_factory=OwnTests)
    drop_last: bool = False

    def of(self, clients: Iterable[ClientInfo]) -> SelectContext:
        """Return the fleet as it is when ``clients`` have joined, with nothing computed yet."""
        return replace(self, clients={client.id: client for client in clients}, cache={})

    def cost(self, spec: Spec, extra: Mapping[str, Any] | None = None) -> Cost:
        """Predict the cost of a task of ``spec`` for a client; ``extra`` is the work's.

        Where the model has several forms of its frozen base and ``spec`` names none, it is that with the least precise: what
        fits so can be handed out, and `held` says in which form.
        """
        if spec.base is None and (bases := self.state.submodels.bases.names):
            spec = replace(spec, base=bases[-1])
        cost = self.local.cost(self.state.submodels, spec, self.batch_size, extra or {})
        return cost if self.plan is None else self.plan.cost(cost, spec)

    def held(self, client: ClientInfo, spec: Spec, extra: Mapping[str, Any] | None = None) -> Spec:
        """Return ``spec`` with the form in which ``client`` is to hold the frozen base, where there are several.

        That is the most precise with which the task is predicted to fit the client's memory, or else the least precise.
        """
        bases = self.state.submodels.bases.names
        if not bases or spec.base is not None:
            return spec
        budget, forms = client.profile.memory_bytes, [replace(spec, base=base) for base in bases]
        return next((one for one in forms if self.cost(one, extra).peak_bytes <= budget), forms[-1])

    def task_time(self, client: ClientInfo, work: Work) -> TaskTime:
        """Return the predicted seconds of ``work`` on ``client``: download, compute (its own test part included) and upload."""
        samples = self.training.samples(work, client.num_samples, self.batch_size)
        spec = self.held(client, work.spec, work.extra)
        return time_on(client.profile, self.cost(spec, work.extra), samples, self.tested(client, work.extra))

    def task_options(self, client: ClientInfo) -> dict[str, Any]:
        """Return the part of `Work.extra` that all tasks of ``client`` share: see `Local.task_options`."""
        return self.local.task_options(client, self.state.submodels, self.training, self.batch_size, self.drop_last)

    def tested(self, client: ClientInfo, extra: Mapping[str, Any] | None = None) -> float:
        """Return on how many samples ``client`` measures what it has trained in a task; ``extra`` is the work's."""
        return self.own_tests.of(client) if self.local.evaluates_on_client(extra or {}) else 0.0

    def cost_s(self, client: ClientInfo, work: Work) -> float:
        """Return the sum of `task_time`, the papers' c(n, j)."""
        return self.task_time(client, work).total_s

    def problems(self, ask: Callable[[ClientInfo], object]) -> list[str]:
        """Collect the `BadInput` that ``ask`` raises, client by client."""
        found = []
        for client in self.clients.values():
            try:
                ask(client)
            except BadInput as error:
                found.append(str(error))
        return found

    def fits(self, client: ClientInfo, spec: Spec) -> bool:
        """Check whether the memory that a task of ``spec`` is predicted to need, `Cost.peak_bytes`, is within the client's."""
        budget = client.profile.memory_bytes
        return budget == float("inf") or self.cost(spec).peak_bytes <= budget


class Select(Part, ABC):
    """Which submodel, and how much work, does this client get?"""

    @abstractmethod
    def __call__(self, client: ClientInfo, fleet: SelectContext) -> Work:
        """Return the work for an idle ``client``; raises `BadInput` where none is possible."""

    def on_join(self, client: ClientInfo, fleet: SelectContext) -> None:
        """Note that ``client`` is in the fleet now, for the first time, again, or as another device."""
        self.forget(client, fleet)

    def on_loss(self, client: ClientInfo, fleet: SelectContext) -> None:
        """Note that ``client`` is no longer in the fleet."""
        self.forget(client, fleet)

    def forget(self, client: ClientInfo, fleet: SelectContext) -> None:
        """Take out of the cache what depends on who is in the fleet: all of it, unless a part knows better."""
        fleet.cache.clear()

    def on_round_start(self, out: Sequence[ClientInfo], fleet: SelectContext) -> None:
        """Note that clients have been drawn; they are asked for their work after this.

        Args:
            out: the round's clients: those drawn, and those of earlier rounds that are still at work.
            fleet: what may be known.
        """
        return

    def on_update(self, client: ClientInfo, assignment: Assignment, seconds: float, fleet: SelectContext) -> None:
        """Note that a task's update came in ``seconds`` after it was handed out."""
        return

    def check(self, fleet: SelectContext) -> list[str]:
        """Return every problem found before training starts, one line each."""
        return []

    def notes(self, fleet: SelectContext) -> list[str]:
        """List the notes for the user at the start, one line each; a `Warn` where it is likely not what was meant."""
        return []


@dataclass(frozen=True, slots=True)
class TriggerContext:
    """What a `trigger` part may know.

    Attributes:
        arrived_s: arrival times of the updates waiting, in order.
        num_active: tasks still out (or drawn and not yet started) that may still report; where late ones are refused, without
            those of earlier rounds.
        num_clients: clients present.
        opened_s: when work last started for this merge.
        now_s: the time.
        memory: `GlobalState.memory`, for what the other parts have noted there; to be read.
    """

    arrived_s: Sequence[float]
    num_active: int
    num_clients: int
    opened_s: float
    now_s: float
    memory: Mapping[str, Any] = field(default_factory=dict)


class Trigger(Part, ABC):
    """When are waiting updates folded in?

    Attributes:
        restart: when a client that has reported may work again: at its own arrival, or after the merge.
        folds_rest: whether what still waits when the run ends is folded in.
    """

    restart: ClassVar[Restart] = "arrival"
    folds_rest: ClassVar[bool] = False

    @property
    def refuses_late(self) -> bool:
        """Whether a round closes without the tasks that are still out; their updates are refused, and nobody waits for them."""
        return False

    @abstractmethod
    def due(self, waiting: TriggerContext) -> bool:
        """Check whether to merge now; asked after every event while at least one update waits."""

    def wake_at(self, waiting: TriggerContext) -> float | None:
        """Return when to ask again even if nothing happens, or None."""
        return None

    def needed(self, num_more: int, num_waiting: int) -> int | None:
        """Count the updates that have to arrive until ``num_more`` more are merged, where some wait; None = not known."""
        return None

    def staleness(self, num_at_work: int) -> float:
        """Return the mean staleness of updates where so many clients are always at work; 0 where it is bounded."""
        return 0.0


class Merge(Part, ABC):
    """How are waiting updates folded in? Its memory lives in `GlobalState.memory`, so that it can be saved.

    Attributes:
        sends: what a client sends: its trained values, or their difference from what it received.
        by_client: whether it goes by whose update it receives; no joint update of several may take their place then.
    """

    sends: Literal["values", "delta"] = "values"
    by_client: ClassVar[bool] = False

    def check(self, state: GlobalState) -> list[str]:
        """Return every problem found before training starts, one line each."""
        return []

    def notes(self, state: GlobalState, num_clients: int) -> list[str]:
        """List the notes for the user at the start, one line each; a `Warn` where it is likely not what was meant."""
        return []

    @property
    def personalizes(self) -> bool:
        """Whether each client is sent something of its own: a subclass overrides `personalize`."""
        return type(self).personalize is not Merge.personalize

    def personalize(self, state: GlobalState, client: int, spec: Spec, values: FlatTensors, bundles: Bundles) -> None:
        """Fill what a client is sent for a task, in place.

        ``values`` are the global model's, as they would be sent; ``bundles`` those of `Local.down`, with anything in
        them. What is kept for the client is in ``state.clients``.
        """
        return

    def too_stale(self, staleness: float) -> str | None:
        """Explain why it will not learn from updates that come so many merges late on average, or None."""
        return None

    def reject_reason(self, state: GlobalState, update: Update, spec: Spec, staleness: int) -> str | None:
        """Refuse a sound update by a reason, the REASON in refused:REASON, or None; asked before `receive`."""
        return None

    def numbers(self, update: Update) -> Sequence[float]:
        """List the numbers in `Update.extra` that move the model in the place of tensors, for whoever judges their size."""
        return ()

    def overflows(self, state: GlobalState, update: Update, spec: Spec, staleness: int) -> bool:
        """Check whether a merge with this update would leave numbers that are not finite; asked right before `receive`."""
        return False

    @abstractmethod
    def receive(self, state: GlobalState, update: Update, spec: Spec, staleness: int) -> None:
        """Take in one update; its tensors may be gone once this returns.

        What a client says beside them is looked at in `problem`. Where this raises all the same, the update is refused and its
        client turned away: so look first, and change the memory last.
        """

    def detach(self, state: GlobalState) -> None:
        """Make what was received independent of the updates' own tensors; called when no merge follows at once."""
        return

    @abstractmethod
    def apply(self, state: GlobalState) -> None:
        """Fold all that was received since the last call into ``state.values``, in place."""

    def on_rollback(self, state: GlobalState, merged: Sequence[tuple[int, int]]) -> None:
        """Note that a crash has undone merges whose results clients have seen: (client, version) of each update."""
        return

    def report(self, state: GlobalState) -> dict[str, Any]:
        """Report the merge for the run's summary: plain data by name."""
        return {}


@dataclass(frozen=True)
class Algorithm:
    """A federated algorithm: five answers. Made by a factory in `raafl.algorithms`, one file for each method."""

    name: str
    paper: str
    sample: Any
    select: Select
    local: Local
    trigger: Trigger
    merge: Merge

    def describe(self) -> dict[str, str]:
        """Return name, paper and the five answers in words, read from the parts."""
        parts = {part: str(getattr(self, part)) for part in ("sample", "select", "local", "trigger", "merge")}
        return {"name": self.name, "paper": self.paper, **parts}

    def notes(self, fleet: SelectContext, num_clients: int) -> list[str]:
        """Collect the notes of its parts at the start."""
        stale = self.merge.too_stale(self.trigger.staleness(self.sample.most_at_work(num_clients)))
        return (
            self.select.notes(fleet)
            + self.local.notes(fleet.state.submodels)
            + self.merge.notes(fleet.state, num_clients)
            + (fleet.plan.notes(num_clients) if fleet.plan is not None else [])
            + ([] if stale is None else [Warn(stale)])
        )

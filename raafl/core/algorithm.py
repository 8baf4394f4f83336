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

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

from raafl.core.local import Hook, Local, Task
from raafl.core.options import Training
from raafl.core.payload import Bundles
from raafl.core.sample import Sample
from raafl.core.select import OwnTests, Select, SelectContext
from raafl.core.state import GlobalState, Memory, PendingUpdate
from raafl.core.types import Adjusted, Assignment, Part, Update, Warn
from raafl.errors import BadInput
from raafl.submodel.flat import FlatTensors, Layout
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
]

Restart = Literal["arrival", "merge"]


@dataclass(frozen=True, slots=True)
class TriggerContext:
    """Everything that the decision when to merge updates (an algorithm's `trigger` part) may depend on.

    Attributes:
        arrived_s: arrival times of the updates that wait for a merge, ascending, in seconds.
        num_active: number of tasks whose updates may still arrive and be accepted, including those of clients that are
            chosen but have not started.
        num_clients: number of clients present in the run.
        opened_s: time at which clients last started to work for this merge, in seconds.
        now_s: current time, in seconds of the run's clock.
        memory: state that the parts of the algorithm keep between updates, `GlobalState.memory`; read only.
    """

    arrived_s: Sequence[float]
    num_active: int
    num_clients: int
    opened_s: float
    now_s: float
    memory: Memory = field(default_factory=Memory)


class Trigger(Part, ABC):
    """Base class of the part of an algorithm that decides when the server merges the updates that have arrived.

    Attributes:
        restart: moment at which a client may work again: at the "arrival" of its update, or after the "merge" of it.
        folds_rest: whether the updates that still wait for a merge are merged when the run ends.
    """

    restart: ClassVar[Restart] = "arrival"
    folds_rest: ClassVar[bool] = False

    @property
    def allows_overlap(self) -> bool:
        """Whether a client may work on its next task before its last update has arrived."""
        return self.restart == "arrival"

    @property
    def refuses_late(self) -> bool:
        """Whether a merge closes its round, so that updates of the round's unfinished tasks are refused when they arrive later."""
        return False

    @property
    def waits_for_all(self) -> bool:
        """Whether a single client that takes a task and never answers holds up the merge until its task times out."""
        return False

    def below(self, num_updates: int) -> Trigger:
        """Return the trigger that ends a merge of the clients of a simulated subfederation.

        Args:
            num_updates: number of updates in such a merge: its clients, unless the config says less.
        """
        return self

    @abstractmethod
    def due(self, waiting: TriggerContext) -> bool:
        """Decide whether to merge now; called after each event while at least one update waits."""

    def merged_now(self, waiting: TriggerContext) -> Collection[int] | None:
        """Return the assignment ids of the updates to merge now; None = all that wait. It needs a merge that `merges_some`."""
        return None

    def client_waits(self, assignment: Assignment, memory: Memory) -> bool:
        """Check whether a client that has just sent an update must wait for its update to be merged before it may work again.

        Args:
            assignment: the task whose update has just arrived.
            memory: `GlobalState.memory`; read only.
        """
        return self.restart == "merge"

    def on_update(self, assignment: Assignment, num_active: int, state: GlobalState) -> Adjusted | None:
        """Take note of an accepted update, for triggers that adapt their settings to measured times.

        Args:
            assignment: task of the update.
            num_active: number of clients at work until now, including this one.
            state: the global model; its memory holds what this trigger has measured.

        Returns:
            The setting that this trigger has changed, with its values before and after; None if it has changed none.
        """
        return None

    def wake_at(self, waiting: TriggerContext) -> float | None:
        """Return the time at which to call `due` again even if nothing happens before then; None = not needed."""
        return None

    def needed(self, num_more: int, num_waiting: int) -> int | None:
        """Return the number of updates that must still arrive so that ``num_more`` further ones are merged.

        Args:
            num_more: number of updates that must still be merged, for example until the end of the run.
            num_waiting: number of updates that have arrived and wait for a merge.

        Returns:
            The number; None if it is unknown.
        """
        return None

    def staleness(self, num_at_work: int) -> float:
        """Predict the mean staleness of updates if ``num_at_work`` clients always train; 0 where updates cannot become stale."""
        return 0.0


class Merge(Part, ABC):
    """Base class of the part of an algorithm that decides how updates are merged into the global model.

    A merge keeps its state in `GlobalState.memory` and `GlobalState.clients`, which checkpoints and replays include.
    Which updates wait is listed in `GlobalState.waiting`, so a merge keeps no list of its own.

    Attributes:
        sends: content of an update: trained "values", or their "delta", the difference from the received values.
        by_client: whether the merge must see each client's update by itself, so that updates may not be summed
            beforehand.
        merges_some: whether `apply` merges the updates of `GlobalState.waiting` alone, so that a trigger may choose some
            of those that have been received (`Trigger.merged_now`); False = it merges all.
        merges_means: whether an update may be the mean of several clients' (`Update.contributions`), each element of which
            weighs as much as those that have trained it.
        counts_updates: whether the step of a merge depends on the number of its updates beside their mean.
        extension: name of the extension of the runtime (`raafl.runtime.extensions`) that this merge needs; None = none.
    """

    sends: Literal["values", "delta"] = "values"
    by_client: ClassVar[bool] = False
    merges_some: ClassVar[bool] = False
    merges_means: ClassVar[bool] = False
    counts_updates: ClassVar[bool] = False
    extension: ClassVar[str | None] = None

    def check(self, state: GlobalState) -> list[str]:
        """Return every problem of this merge that can be found before training starts, one line each."""
        return []

    def notes(self, state: GlobalState, num_clients: int) -> list[str]:
        """Return remarks on this merge, for the user at the start of a run, one line each.

        A remark is a `Warn` if a setting is probably a mistake.
        """
        return []

    @property
    def personalizes(self) -> bool:
        """Whether clients receive values of their own instead of the same global values.

        True if a subclass overrides `personalize`.
        """
        return type(self).personalize is not Merge.personalize

    def personalize(self, state: GlobalState, client: int, spec: Spec, values: FlatTensors, bundles: Bundles) -> None:
        """Overwrite, in place, the values and bundles that one client is about to receive.

        Args:
            state: the global model; values stored for the client are in ``state.clients``.
            client: id of the client.
            spec: submodel that the client receives.
            values: the global model's values of that submodel.
            bundles: extra tensors that travel beside the values, named by `Local.down`; uninitialised, to be filled
                here.
        """
        return

    @property
    def innermost(self) -> Merge:
        """This merge itself; for a wrapper of merges, the method's own merge, which all wrappers enclose."""
        return self

    def too_stale(self, staleness: float) -> str | None:
        """Explain why training is expected to fail at this mean staleness; None = no reason is known."""
        return None

    def reject_reason(self, state: GlobalState, update: Update, spec: Spec, staleness: int) -> str | None:
        """Return a reason to refuse an update, or None; the journal then shows refused:REASON. Called before `receive`.

        Args:
            state: the global model; read only.
            update: the client's update.
            spec: submodel of the update.
            staleness: number of merges since the update's assignment.
        """
        return None

    def received_layout(self, state: GlobalState, spec: Spec, layout: Layout) -> Layout:
        """Return names, shapes and dtypes of the tensors that the merge gets for an update; asked of the outermost merge.

        They are those that the client trained, unless a merge that converts updates beforehand overrides this method.

        Args:
            state: the global model; read only.
            spec: submodel of the update.
            layout: names, shapes and dtypes of the tensors that a client sends for a task of ``spec``.
        """
        return layout

    def numbers(self, update: Update) -> Sequence[float]:
        """Return those numbers in `Update.extra` that change the model, so that outliers among them can be refused.

        Outliers among the tensors of updates are refused in the same way (the options `guard`).
        """
        return ()

    def overflows(self, state: GlobalState, update: Update, spec: Spec, staleness: int) -> bool:
        """Check whether merging this update would overflow to infinite or undefined numbers; called right before `receive`.

        Args:
            state: the global model; read only.
            update: the client's update.
            spec: submodel of the update.
            staleness: number of merges since the update's assignment.
        """
        return False

    def take(self, state: GlobalState, waiting: PendingUpdate) -> None:
        """Receive one update and list it among those that wait; called on the outermost merge of a state."""
        self.receive(state, waiting.update, waiting.spec, waiting.staleness)
        state.waiting.append(waiting)

    @abstractmethod
    def receive(self, state: GlobalState, update: Update, spec: Spec, staleness: int) -> None:
        """Add one update to the next merge, which `apply` carries out.

        It is not in ``state.waiting`` yet. A merge that needs the update's tensors after the current event must copy
        them in `detach`. `reject_reason` has already checked the client's plain data. If this method raises an
        exception, the update is refused and its client dismissed. Read the update completely before changing the
        merge's state, so that an exception leaves the state unchanged.

        Args:
            state: the global model.
            update: the client's update.
            spec: submodel of the update.
            staleness: number of merges since the update's assignment.
        """

    def detach(self, state: GlobalState) -> None:
        """Copy the tensors of updates that still wait, since their storage is about to be reused.

        Called if no merge follows at once.
        """
        return

    @abstractmethod
    def apply(self, state: GlobalState) -> None:
        """Merge the updates in ``state.waiting``, which were received since the last call, into ``state.values``, in place."""

    def on_rollback(self, state: GlobalState, merged: Sequence[tuple[int, int]]) -> None:
        """Tell this merge, after a crash of the server, which merges since the last checkpoint were undone.

        Clients may already have received the models that those merges made. So what this merge remembers in
        ``state.memory`` may have to count them anyway, such as a privacy budget.

        Args:
            state: the global model, restored from the last checkpoint.
            merged: (client, version) of each update in the undone merges.
        """
        return

    def ends_run(self, state: GlobalState) -> str | None:
        """Return a reason to end the run instead of merging the updates that wait, or None; called just before `apply`."""
        return None

    def figures(self, state: GlobalState) -> dict[str, float | None]:
        """Return additional numbers about the new version; each becomes a column of metrics.csv."""
        return {}

    def report(self, state: GlobalState) -> dict[str, Any]:
        """Return the entries that this merge adds to the run's summary, as plain data by name."""
        return {}


@dataclass(frozen=True)
class Algorithm:
    """A federated algorithm, composed of five parts.

    The parts answer: which clients work now (sample), on which submodel (select), how do they train it (local), when are
    their updates merged (trigger), and how (merge)? A function in `raafl.algorithms` creates the record of a method.

    Attributes:
        name: name of the method, as in configs and summaries.
        paper: reference of its paper, such as "McMahan et al. 2017".
        sample: part that chooses the idle clients that work now.
        select: part that chooses each client's submodel and amount of work.
        local: part that changes the client's training steps, and says what travels.
        trigger: part that decides when waiting updates are merged.
        merge: part that folds updates into the global model.
        chosen: plain data on the reasons for which `raafl.lab.plan.choose` selected this method, for the journal. The run
            prints its ``reasons`` at the start. None = the user selected the method.
    """

    name: str
    paper: str
    sample: Sample
    select: Select
    local: Local
    trigger: Trigger
    merge: Merge
    chosen: Mapping[str, Any] | None = field(default=None, repr=False, compare=False)

    def __post_init__(self) -> None:
        if type(self.trigger).merged_now is not Trigger.merged_now and not self.merge.innermost.merges_some:
            raise BadInput(
                f"algorithm is {self.name}, whose trigger {type(self.trigger).__name__} merges some of the waiting updates, but "
                f"its merge {type(self.merge.innermost).__name__} all of them: give a merge that has merges_some"
            )

    def describe(self) -> dict[str, str]:
        """Return the algorithm's name, its paper, and its five parts in words."""
        parts = {part: str(getattr(self, part)) for part in ("sample", "select", "local", "trigger", "merge")}
        return {"name": self.name, "paper": self.paper, **parts}

    def notes(self, fleet: SelectContext, num_clients: int) -> list[str]:
        """Collect the remarks of the algorithm's five parts, for the user at the start of a run."""
        stale = self.merge.innermost.too_stale(self.trigger.staleness(self.sample.most_at_work(num_clients)))
        return (
            list((self.chosen or {}).get("reasons", ()))
            + self.select.notes(fleet)
            + self.local.notes(fleet.state.submodels)
            + self.merge.notes(fleet.state, num_clients)
            + (fleet.plan.notes(num_clients) if fleet.plan is not None else [])
            + ([] if stale is None else [Warn(stale)])
        )

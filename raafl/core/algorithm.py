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
from raafl.core.memory import Memory
from raafl.core.part import Part
from raafl.core.payload import Bundles
from raafl.core.sample import Sample
from raafl.core.select import OwnTests, Select, SelectContext
from raafl.core.state import GlobalState
from raafl.core.training import Training
from raafl.core.types import Assignment, Update, Warn
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
]  # fmt: skip

Restart = Literal["arrival", "merge"]


@dataclass(frozen=True, slots=True)
class TriggerContext:
    """Everything that a `trigger` part may read to decide on a merge.

    Attributes:
        arrived_s: arrival times of the waiting updates, ascending.
        num_active: tasks that may still report, including clients drawn and not yet started; where late updates are refused,
            without the tasks of earlier rounds.
        num_clients: number of clients present.
        opened_s: time at which work for this merge last started.
        now_s: current time, in seconds of the run's clock.
        memory: `GlobalState.memory`, in which other parts record state; read only.
    """

    arrived_s: Sequence[float]
    num_active: int
    num_clients: int
    opened_s: float
    now_s: float
    memory: Memory = field(default_factory=Memory)


class Trigger(Part, ABC):
    """Base of the part that decides when waiting updates are merged.

    Attributes:
        restart: time at which a client may work again: at the "arrival" of its update, or after the "merge".
        folds_rest: whether updates that still wait when the run ends are merged.
    """

    restart: ClassVar[Restart] = "arrival"
    folds_rest: ClassVar[bool] = False

    @property
    def refuses_late(self) -> bool:
        """Whether a merge ends the round: updates that arrive from its unfinished tasks later are refused."""
        return False

    @abstractmethod
    def due(self, waiting: TriggerContext) -> bool:
        """Check whether to merge now; called after every event during which at least one update waits."""

    def merged_now(self, waiting: TriggerContext) -> Collection[int] | None:
        """Return ids of the assignments whose updates a due merge takes; None = all. `Merge.apply` must take the same ones."""
        return None

    def client_waits(self, assignment: Assignment, memory: Memory) -> bool:
        """Check whether a client that has just reported waits for the merge of its update before it may work again.

        Args:
            assignment: the task whose update has just arrived.
            memory: `GlobalState.memory`; read only.
        """
        return self.restart == "merge"

    def wake_at(self, waiting: TriggerContext) -> float | None:
        """Return the time at which to call `due` again even if no event happens; None = no such time."""
        return None

    def needed(self, num_more: int, num_waiting: int) -> int | None:
        """Return the number of updates that must still arrive until ``num_more`` more are merged; None = unknown."""
        return None

    def staleness(self, num_at_work: int) -> float:
        """Predict the mean staleness of updates if ``num_at_work`` clients always train; 0 if the trigger bounds it."""
        return 0.0


class Merge(Part, ABC):
    """Base of the part that decides how waiting updates are merged.

    A merge keeps its state in `GlobalState.memory` and `GlobalState.clients`, so that checkpoints and replays include
    it.

    Attributes:
        sends: whether an update holds trained "values", or their "delta" from the received ones.
        by_client: whether the merge treats updates by the client that sent them; if so, they may not be summed before
            it.
    """

    sends: Literal["values", "delta"] = "values"
    by_client: ClassVar[bool] = False

    def check(self, state: GlobalState) -> list[str]:
        """Return every problem of this merge that can be found before training starts, one line each."""
        return []

    def notes(self, state: GlobalState, num_clients: int) -> list[str]:
        """Return notes on this merge for the start of a run, one line each; a `Warn` where a setting is probably a mistake."""
        return []

    @property
    def personalizes(self) -> bool:
        """Whether clients receive values of their own; true if a subclass overrides `personalize`."""
        return type(self).personalize is not Merge.personalize

    def personalize(self, state: GlobalState, client: int, spec: Spec, values: FlatTensors, bundles: Bundles) -> None:
        """Overwrite, in place, the values and bundles that one client is about to receive.

        Args:
            state: the global model; values stored for the client are in ``state.clients``.
            client: id of the client.
            spec: submodel that the client receives.
            values: the global model's values of that submodel.
            bundles: tensors named by `Local.down`, uninitialised.
        """
        return

    def too_stale(self, staleness: float) -> str | None:
        """Explain in words why training fails at this mean staleness; None = it works."""
        return None

    def reject_reason(self, state: GlobalState, update: Update, spec: Spec, staleness: int) -> str | None:
        """Return the reason to refuse a well-formed update (REASON in refused:REASON), or None; called before `receive`.

        Args:
            state: the global model; read only.
            update: the client's update.
            spec: submodel of the update.
            staleness: number of merges since the update's assignment.
        """
        return None

    def received_layout(self, state: GlobalState, spec: Spec, layout: Layout) -> Layout:
        """Return the layout in which an update's tensors reach the merge; by default as the client trained them.

        Args:
            state: the global model; read only.
            spec: submodel of the update.
            layout: layout of everything that a client sends for a task of ``spec``.
        """
        return layout

    def numbers(self, update: Update) -> Sequence[float]:
        """Return the numbers in `Update.extra` that change the model as tensors do; guards bound their size."""
        return ()

    def overflows(self, state: GlobalState, update: Update, spec: Spec, staleness: int) -> bool:
        """Check whether merging this update would leave numbers that are not finite; called right before `receive`.

        Args:
            state: the global model; read only.
            update: the client's update.
            spec: submodel of the update.
            staleness: number of merges since the update's assignment.
        """
        return False

    @abstractmethod
    def receive(self, state: GlobalState, update: Update, spec: Spec, staleness: int) -> None:
        """Accept one update into the next merge, which `apply` makes.

        Its tensors may be overwritten once this returns, unless `detach` was called. `reject_reason` has checked the client's
        plain data. If this raises all the same, the update is refused and its client dismissed: so read first, and change the
        memory last.

        Args:
            state: the global model.
            update: the client's update.
            spec: submodel of the update.
            staleness: number of merges since the update's assignment.
        """

    def detach(self, state: GlobalState) -> None:
        """Copy stored references to updates' tensors, whose storage is about to be reused; called if no merge follows at once."""
        return

    @abstractmethod
    def apply(self, state: GlobalState) -> None:
        """Merge all updates received since the last call into ``state.values``, in place."""

    def on_rollback(self, state: GlobalState, merged: Sequence[tuple[int, int]]) -> None:
        """Correct the merge's memory after a crash of the server, which loses merges whose results clients have received.

        Args:
            state: the global model, restored from the last checkpoint.
            merged: (client, version) of each update in the lost merges.
        """
        return

    def ends_run(self, state: GlobalState) -> str | None:
        """Return a reason to end the run instead of merging the waiting updates, or None; called just before `apply`."""
        return None

    def figures(self, state: GlobalState) -> dict[str, float | None]:
        """Return further figures of the new version, as columns of its row in metrics.csv."""
        return {}

    def report(self, state: GlobalState) -> dict[str, Any]:
        """Return this merge's entries of the run's summary: plain data by name."""
        return {}


@dataclass(frozen=True)
class Algorithm:
    """A federated algorithm: a frozen record of five parts, made by a factory in `raafl.algorithms`.

    Attributes:
        chosen: plain data on why raafl has chosen it (`raafl.plan.choose`), for the journal; its ``reasons`` are notes of the
            run. None = the user has chosen.
    """

    name: str
    paper: str
    sample: Sample
    select: Select
    local: Local
    trigger: Trigger
    merge: Merge
    chosen: Mapping[str, Any] | None = field(default=None, repr=False, compare=False)

    def describe(self) -> dict[str, str]:
        """Return the algorithm's name, its paper, and its five parts in words."""
        parts = {part: str(getattr(self, part)) for part in ("sample", "select", "local", "trigger", "merge")}
        return {"name": self.name, "paper": self.paper, **parts}

    def notes(self, fleet: SelectContext, num_clients: int) -> list[str]:
        """Collect the notes of all five parts for the start of a run."""
        stale = self.merge.too_stale(self.trigger.staleness(self.sample.most_at_work(num_clients)))
        return (
            list((self.chosen or {}).get("reasons", ()))
            + self.select.notes(fleet)
            + self.local.notes(fleet.state.submodels)
            + self.merge.notes(fleet.state, num_clients)
            + (fleet.plan.notes(num_clients) if fleet.plan is not None else [])
            + ([] if stale is None else [Warn(stale)])
        )

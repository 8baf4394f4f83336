"""FedCompass (Li et al., "FedCompass: Efficient Cross-Silo Federated Learning on Heterogeneous Client Devices ...").

The title ends "... Using a Computing Power-Aware Scheduler" (ICLR 2024).

The server measures each client's seconds per local step and gives it so many steps, between Q_min and Q_max, that clients of a
group report at about the same time. A client's first update, of Q_max steps, is merged alone. Then it

- joins the group in which it makes the most steps, floor((T_expected - now) / speed), within [Q_min, Q_max];
- or founds one, with so many steps that it arrives with the fastest client of another group's next round, between Q_min and Q_max.

A group is merged once all of its clients have reported, or at the latest after lambda times its expected time, together with
updates that came too late for an earlier group::

    theta <- theta + sum_i alpha s(staleness_i) p_i Delta_i,   p_i = 1/N,   Delta_i = theta_i - what the client was sent

Clients of the group wait for that merge; a client that is late, or new, does not wait.

The grouping is that of the authors' scheduler (APPFL, `compass_scheduler.py`), as are the merge's weights; the test holds it
against what that scheduler gives for the same arrivals. The paper's text could not be read here.

Choices that are left open, and differences:
- Staleness is counted when the group is merged, as in APPFL.
- The authors' aggregator mixes models in or adds gradients; here deltas are added, so that what others merged in the meantime
  stays.
- The authors' buffers hold one update for each client: a late one is lost where its client's next is in the same merge. Here both
  are merged.
- A client that is lost leaves its group, which is complete without it. One that joins again is measured anew.
- With `concurrency` a client chooses its group when it starts.
- Updates that still wait when the run ends are unused.
- Submodels (no paper has them): the mean over those of the group that cover an element stands for all of the group.
- Running statistics of norms get the plain mean of the group, each times s(staleness).
"""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass, field, fields, replace
from typing import Any, ClassVar, Self

from raafl.algorithm import (
    Algorithm,
    Assignment,
    BadInput,
    ClientInfo,
    Deltas,
    FlatTensors,
    Full,
    GlobalState,
    Kind,
    Local,
    MergeMemory,
    Sample,
    Select,
    SelectContext,
    Spec,
    Staleness,
    Trigger,
    TriggerContext,
    Update,
    Work,
    fraction,
    positive,
)
from raafl.core.state import Memory
from raafl.parts.select.submodels import WrappedSelect

_FASTEST = 1e-9
"""Smallest time of a step in seconds, since a task takes no time on a virtual clock without costs."""


@dataclass(frozen=True, slots=True)
class Pace:
    """Settings for grouping clients, so that those of a group finish at the same time.

    Attributes:
        min_steps: smallest number of local steps of a task (Q_min).
        max_steps: largest number of local steps of a task (Q_max).
        momentum: weight of the newest measurement in the estimate of a client's speed.
        late: latest arrival of a group's clients, as a multiple of their expected time (lambda).
    """

    min_steps: int = 20
    max_steps: int = 100
    momentum: float = 0.9
    late: float = 1.2

    def __post_init__(self) -> None:
        positive("min_steps", self.min_steps)
        if self.max_steps < self.min_steps:
            raise BadInput(f"max_steps is {self.max_steps}: give {self.min_steps} (min_steps) or more")
        fraction("momentum", self.momentum)
        if not 1 <= self.late < math.inf:
            raise BadInput(f"late is {self.late}: give a multiple of the expected time, 1 or more")


@dataclass
class Group:
    """Clients that are expected to report at the same time.

    Attributes:
        out: ids of the clients still at work.
        reported: ids of the clients that have reported and wait for the merge.
        tasks: ids of the assignments whose updates wait for the merge.
        expected_s: time at which the clients are expected to report, in seconds of the run's clock.
        latest_s: time at which the group is merged without the clients still at work, in seconds of the run's clock.
    """

    out: list[int]
    reported: list[int]
    tasks: list[int]
    expected_s: float
    latest_s: float


@dataclass
class CompassMemory(MergeMemory):
    """Server state of FedCompass: the groups of clients, and each client's measured speed, group and number of steps.

    Attributes:
        speed: measured seconds of one step, by client.
        steps: number of local steps in a client's current task, by client.
        group: number of a client's group, by client; absent during its first task.
        planned_s: time at which a client's group and steps were chosen, by client.
        groups: open groups by number, oldest first.
        num_groups: number of groups that have been created so far.
        alone: ids of the tasks whose updates are their clients' first, and are each merged alone.
        late: ids of the assignments whose updates came after their group was merged; they join the next group's merge.
        copies: start version and a copy of the tensors of each update that waits, by assignment.
    """

    key = "fed_compass"
    speed: dict[int, float] = field(default_factory=dict)
    steps: dict[int, int] = field(default_factory=dict)
    group: dict[int, int] = field(default_factory=dict)
    planned_s: dict[int, float] = field(default_factory=dict)
    groups: dict[int, Group] = field(default_factory=dict)
    num_groups: int = 0
    alone: list[int] = field(default_factory=list)
    late: list[int] = field(default_factory=list)
    copies: dict[int, tuple[int, FlatTensors]] = field(default_factory=dict)

    def to_plain(self) -> dict[str, Any]:
        """Convert this state to plain data for a checkpoint: its fields by name, each group of clients as a dict."""
        groups = {
            number: {one.name: getattr(group, one.name) for one in fields(group)}
            for number, group in self.groups.items()
        }
        return {**super().to_plain(), "groups": groups}

    @classmethod
    def from_plain(cls, data: Any) -> Self:
        """Restore the state of FedCompass from the result of `to_plain`."""
        groups = {number: Group(**group) for number, group in data["groups"].items()}
        # checkpoints of earlier versions of raafl have a list "waiting" of (assignment, submodel, start version,
        # tensors)
        copies = {task: (version, tensors) for task, _, version, tensors in data.get("waiting", ())}
        return super().from_plain({"copies": copies, **data, "groups": groups})

    # ---- when a client starts a task ----

    def plan_task(self, client: int, now: float, pace: Pace) -> int:
        """Return the number of local steps for the task that a client starts now; also put the client into a group.

        In its first task a client makes the largest number of steps and belongs to no group. If the last merge has put
        it into a group at this same instant, it stays there.

        Args:
            client: id of the client.
            now: time in seconds of the run's clock.
            pace: settings of the grouping.
        """
        if self.planned_s.get(client) != now or client not in self.steps:
            self.leave(client)
            if client in self.speed:
                self._choose(client, now, pace)
            else:
                self.steps[client], self.planned_s[client] = pace.max_steps, now
        return self.steps[client]

    def _choose(self, client: int, now: float, pace: Pace) -> None:
        """Put an idle client into the existing group in which it makes the most steps, or into a new group."""
        number, steps = self._best_group(client, now, pace)
        if number is None:
            number, steps = self.num_groups, self._steps_of_new_group(client, now, pace)
            seconds = steps * self.speed[client]
            self.groups[number] = Group([], [], [], now + seconds, now + seconds * pace.late)
            self.num_groups += 1
        self.groups[number].out.append(client)
        self.group[client], self.steps[client], self.planned_s[client] = number, steps, now

    def _best_group(self, client: int, now: float, pace: Pace) -> tuple[int | None, int]:
        """Find the existing group that an idle client should join; return it and the client's steps, or (None, -1) if none fits.

        It is the group in which the client makes the most steps until the group's expected arrival, among those in
        which its number of steps lies between `min_steps` and `max_steps`.
        """
        best, most = None, -1
        for number, group in self.groups.items():
            steps = math.floor((group.expected_s - now) / self.speed[client])
            if pace.min_steps <= steps <= pace.max_steps and steps >= most:
                best, most = number, steps
        return best, most

    def _steps_of_new_group(self, client: int, now: float, pace: Pace) -> int:
        """Compute the number of steps for a client that starts a new group.

        The client should arrive together with the fastest client of another group, after that one's next task.
        """
        most = -1
        for group in self.groups.values():
            clients = (*group.out, *group.reported)
            if now < group.latest_s and clients:  # all may be lost whose updates still wait
                fastest = min(self.speed[other] for other in clients)
                steps = math.floor((group.latest_s + fastest * pace.max_steps - now) / self.speed[client])
                most = max(most, steps) if steps <= pace.max_steps else most
        return pace.max_steps if most < 0 else max(most, pace.min_steps)

    # ---- when a client reports, or leaves ----

    def report(self, client: int, task: int, now: float, pace: Pace) -> None:
        """Record that the update of a client has arrived.

        Args:
            client: id of the client.
            task: id of the assignment that the update answers.
            now: time in seconds of the run's clock.
            pace: settings of the grouping.
        """
        measured = max((now - self.planned_s[client]) / self.steps[client], _FASTEST)
        before = self.speed.get(client, measured)
        self.speed[client] = (1 - pace.momentum) * before + pace.momentum * measured
        group = self.groups.get(self.group.get(client, -1))
        if group is None:
            self.alone.append(task)
        elif now > group.latest_s:
            self.late.append(task)
            self.leave(client)
        else:
            group.out.remove(client)
            group.reported.append(client)
            group.tasks.append(task)

    def leave(self, client: int) -> None:
        """Remove a lost client from its group; if its update already waits there, the update stays."""
        number = self.group.pop(client, None)
        group = None if number is None else self.groups.get(number)
        if number is None or group is None:
            return
        for clients in (group.out, group.reported):
            if client in clients:
                clients.remove(client)
        if not group.out and not group.tasks:
            del self.groups[number]

    def forget(self, client: int) -> None:
        """Delete everything recorded about a client."""
        self.leave(client)
        for known in (self.speed, self.steps, self.planned_s):
            known.pop(client, None)

    # ---- when updates are merged ----

    def due(self, now: float) -> Collection[int]:
        """Return the ids of the tasks whose updates are to be merged now; empty if there are none.

        They are either a single task, the first of its client, or the tasks of one group together with all late ones.
        """
        if self.alone:
            return self.alone[:1]
        number = self._due_group(now)
        return () if number is None else (*self.late, *self.groups[number].tasks)

    def _due_group(self, now: float) -> int | None:
        ripe = (n for n, group in self.groups.items() if group.tasks and (not group.out or now >= group.latest_s))
        return next(ripe, None)

    def next_s(self) -> float | None:
        """Return the next time at which a group must be merged, in seconds of the run's clock; None if no update waits."""
        return min((group.latest_s for group in self.groups.values() if group.tasks), default=None)

    def finish_merge(self, now: float, pace: Pace) -> None:
        """Delete the updates just merged, and put the clients of the merged group into new groups, the fastest client first."""
        if self.alone:
            del self.alone[0]
            return
        number = self._due_group(now)
        if number is None:
            return
        group = self.groups[number]
        self.late.clear()
        # the group stays until its missing clients have reported late, but its time of 0 keeps others from joining it
        group.expected_s = group.latest_s = 0.0
        for client in sorted(group.reported, key=self.speed.__getitem__):
            del self.group[client]
            self._choose(client, now, pace)
        group.reported, group.tasks = [], []
        if not group.out:
            del self.groups[number]


@dataclass(frozen=True)
class StepsByGroup(WrappedSelect):
    """Rule that sets each client's number of local steps, so that all clients of its group finish at about the same time.

    Attributes:
        pace: settings of the grouping.
    """

    pace: Pace = field(default_factory=Pace)

    def __call__(self, client: ClientInfo, fleet: SelectContext) -> Work:
        """Assign the work that the wrapped select part chooses, but with as many local steps as the client's group has time for."""
        work = super().__call__(client, fleet)
        memory = fleet.state.memory.of(CompassMemory)
        return replace(work, num_epochs=None, num_steps=memory.plan_task(client.id, fleet.state.now_s, self.pace))

    def on_join(self, client: ClientInfo, fleet: SelectContext) -> None:
        """Delete the client's measured speed, since it may have joined from another device."""
        super().on_join(client, fleet)
        fleet.state.memory.of(CompassMemory).forget(client.id)

    def on_loss(self, client: ClientInfo, fleet: SelectContext) -> None:
        """Remove the lost client from its group; the rest of the group may now be complete."""
        super().on_loss(client, fleet)
        fleet.state.memory.of(CompassMemory).forget(client.id)

    def notes(self, fleet: SelectContext) -> list[str]:
        """Return the wrapped part's notes, and one for each setting of the length of a task, which this part replaces."""
        train, inner = fleet.training, getattr(self.inner, "steps_within_s", None)
        given = {"train.num_steps": train.num_steps, "algorithm.submodel.steps_within_s": inner}
        if train.num_steps is None and train.num_epochs != 1:  # 1 is what a config has that gives neither
            given["train.num_epochs"] = train.num_epochs
        steps = f"{self.pace.min_steps} to {self.pace.max_steps} steps (algorithm.min_steps, algorithm.max_steps)"
        unused = [
            f"{name} is {value}, and has no effect: each task has {steps}" for name, value in given.items() if value
        ]
        return super().notes(fleet) + unused

    def __str__(self) -> str:
        return f"{self.inner}, {self.pace.min_steps} to {self.pace.max_steps} steps by speed"


@dataclass(frozen=True)
class GroupReported(Trigger):
    """Rule for the time of a merge: once all clients of a group have reported, or the group's deadline has passed.

    A client's first update is merged at once, by itself.
    """

    @property
    def allows_overlap(self) -> bool:
        """Whether a client may start its next task while its update is still on its way: no, it waits for its group's merge."""
        return False

    def due(self, waiting: TriggerContext) -> bool:
        """Check whether to merge now: a client's first update has arrived, or a group is complete or past its deadline."""
        return bool(waiting.memory.of(CompassMemory).due(waiting.now_s))

    def wake_at(self, waiting: TriggerContext) -> float | None:
        """Return the earliest deadline of a group with waiting updates, in seconds of the run's clock; None = no update waits."""
        return waiting.memory.of(CompassMemory).next_s()

    def merged_now(self, waiting: TriggerContext) -> Collection[int]:
        """Return the ids of the tasks whose updates are merged now.

        They are either a single task, the first of its client, or the tasks of one group together with all late ones.
        """
        return set(waiting.memory.of(CompassMemory).due(waiting.now_s))

    def client_waits(self, assignment: Assignment, memory: Memory) -> bool:
        """Check whether the client's group is still open, so that the client waits for the others."""
        record = memory.of(CompassMemory)
        return assignment.id not in record.alone and assignment.id not in record.late

    def __str__(self) -> str:
        return "its group reported"


@dataclass(frozen=True)
class GroupDeltas(Deltas):
    """FedCompass's merge: add the weighted changes of a group's clients, and of clients that missed their own group's merge.

    The model theta becomes ``theta + sum_i alpha s_i Delta_i / N``. Delta_i is a client's change, N the number of clients
    in the run, and s_i falls with the number of merges since the client started. Updates are copied until they are merged.

    Attributes:
        server_lr: server learning rate (alpha).
        pace: settings of the grouping.
    """

    merges_means: ClassVar[bool] = False

    by_client: ClassVar[bool] = True
    merges_some: ClassVar[bool] = True

    pace: Pace = field(default_factory=Pace)

    def receive(self, state: GlobalState, update: Update, spec: Spec, staleness: int) -> None:
        """Measure the client's speed, add its update to its group, and keep a copy until the group is merged."""
        memory, tensors = state.memory.of(CompassMemory), update.tensors.clone()
        _add_statistics_(state, spec, tensors, 1.0)
        memory.copies[update.assignment] = (state.version - staleness, tensors)
        memory.report(update.client, update.assignment, state.now_s, self.pace)

    def apply(self, state: GlobalState) -> None:
        """Merge the updates of the group that is due, and put the group's clients into new groups."""
        memory = state.memory.of(CompassMemory)
        due = set(memory.due(state.now_s))
        chosen = [item for item in state.waiting if item.update.assignment in due]
        if chosen:
            # Deltas averages over the K clients that trained an element, so its rate is K alpha / N to step by alpha /
            # N times the sum
            step = Deltas(self.server_lr * len(chosen) / state.num_clients, self.staleness)
            for item in chosen:
                version, tensors = memory.copies.pop(item.update.assignment)
                _add_statistics_(state, item.spec, tensors, -1.0)
                step.receive(state, Update(0, 0, 0, tensors, 1), item.spec, state.version - version)
            step.apply(state)
        memory.finish_merge(state.now_s, self.pace)

    def __str__(self) -> str:
        stale = f" x {self.staleness}" if str(self.staleness) else ""
        return f"sum of a group's deltas x {self.server_lr:g}/N{stale}"


def _add_statistics_(state: GlobalState, spec: Spec, tensors: FlatTensors, alpha: float) -> None:
    """Add ``alpha`` times the server's running statistics of batch norm to those of an update, in place.

    `Pooled` has made differences from the server's statistics of them, but other groups may be merged before this update
    is. So they wait as values, and become differences again at their own merge.
    """
    if not state.submodels.rules.moves_waiting_statistics:
        return
    pooling = state.submodels.cached("pooling", "", state.submodels.pooling)
    if pooling is None:
        return
    current = pooling.statistics_in(state.submodels.plan(spec).gather(state.values))
    for own, others in zip(pooling.statistics_in(tensors), current, strict=True):
        for tensor, other in zip(own, others, strict=True):
            tensor.add_(other, alpha=alpha)


def fed_compass(
    min_steps: int = 20,
    max_steps: int = 100,
    late: float = 1.2,
    momentum: float = 0.9,
    alpha: float = 0.9,
    staleness: Kind = "polynomial",
    staleness_a: float = 0.5,
    staleness_b: float = 4.0,
    cohort: int | None = None,
    concurrency: int | None = None,
    submodel: Select | None = None,
) -> Algorithm:
    """Return FedCompass, which groups clients and gives each so many steps that its group finishes at the same time.

    Args:
        min_steps: smallest number of local steps of a task (Q_min).
        max_steps: largest number of local steps of a task, used for a client's first task (Q_max).
        late: time at which a group is merged without the clients still at work, as a multiple of the expected time
            (lambda).
        momentum: weight of the newest measurement in the estimate of a client's seconds per step.
        alpha: server learning rate (alpha).
        staleness: form of the function s(.) by which late updates count less: constant, polynomial or hinge.
        staleness_a: parameter a of the polynomial and hinge functions.
        staleness_b: parameter b of the hinge function.
        cohort: number of clients that the server keeps at work, drawn uniformly; None = all.
        concurrency: upper limit on the clients at work, in case the cohort is larger; None = no limit.
        submodel: rule that chooses each client's submodel, such as `raafl.parts.RateSelect`; None = the whole model for
            every client.
    """
    pace = Pace(min_steps, max_steps, momentum, late)
    return Algorithm(
        name="fed_compass",
        paper="Li et al. 2024, FedCompass",
        sample=Sample(cohort, concurrency),
        select=StepsByGroup(submodel or Full(), pace),
        local=Local(),
        trigger=GroupReported(),
        merge=GroupDeltas(alpha, Staleness(staleness, staleness_a, staleness_b), pace=pace),
    )

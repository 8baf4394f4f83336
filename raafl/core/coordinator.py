"""Drive a federated run: take an event in, return actions. It has no socket, thread, file, sleep or clock; two runtimes drive it.

The same events at the same times give the same actions and the same model, bit for bit.
"""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from typing import overload

from raafl.core.admission import ERROR, Admission
from raafl.core.algorithm import Algorithm, OwnTests, SelectContext, Training, TriggerContext
from raafl.core.payload import TransferCost
from raafl.core.roster import RefusalBackoff, Roster
from raafl.core.state import GlobalState, PendingUpdate
from raafl.core.types import (
    ENDS,
    OVERFLOW,
    Action,
    Arrived,
    Assignment,
    Checkpoint,
    Dismiss,
    Evaluate,
    Event,
    Finish,
    Joined,
    Limits,
    Lost,
    Sending,
    SetTimer,
    Stop,
    Timer,
    Update,
    derive_seed,
)
from raafl.errors import BadInput
from raafl.rules import Rules

TIME_UP = 0  # id of the timer that ends the run; minus a client's id: of the one that lets it take part again


class Coordinator(Admission):
    """State machine of a run. It decides who trains what and when updates are merged, and owns the global state."""

    def __init__(
        self,
        algorithm: Algorithm,
        state: GlobalState,
        limits: Limits,
        *,
        training: Training,
        batch_size: int,
        seed: int = 0,
        pace: bool = False,
        plan: TransferCost | None = None,
        own_tests: OwnTests | None = None,
        drop_last: bool = False,
        overlap: bool = False,
        rules: Rules | None = None,
    ) -> None:
        """Start without clients.

        Args:
            algorithm: the five parts, merge and trigger wrapped as the run's options ask.
            state: the global model; changed in place by merges.
            limits: when the run starts, evaluates, saves and ends.
            training: epochs or steps of a task, and the learning rate over the run.
            batch_size: of local steps.
            seed: of the run; every task's seed follows from it.
            pace: make wall-clock clients take their emulated device's time for each task.
            plan: how updates are compressed, for predicted transfer times; None = not at all.
            own_tests: how many samples clients measure their own submodels on; None = none.
            drop_last: whether clients drop their last, smaller batch.
            overlap: whether a client may work on its next task while its update travels: where it does not need that task
                for its first steps (`Traits.steps_ahead`), before it is assigned; else as soon as it is.
            rules: rules by which times are predicted; None = those of a new run.
        """
        self.works_ahead = overlap and algorithm.local.traits.steps_ahead > 0
        self.overlap = overlap and not self.works_ahead
        self.algorithm, self.state, self.limits, self.seed, self.pace = algorithm, state, limits, seed, pace
        self.roster = Roster()
        self.merged = self.evaluated = 0
        self.samples_merged = 0  # samples that merged updates were trained on, by the lengths of their tasks
        self.spacings = 0  # multiples of `limits.eval_every` that had passed at the last merge
        self.backoff = RefusalBackoff(limits.max_refused)
        self.refused: Counter[str] = Counter()
        self.clipped: Counter[int] = Counter()  # by client: updates that say more samples than may weigh
        self.opened_s, self.started, self.wake = 0.0, False, (0, -1.0)
        self.is_merging = False
        self.finished: str | None = None
        self.payload = algorithm.local.payload(state.submodels)
        state.num_clients = limits.num_clients
        self.rng = random.Random(derive_seed(seed, "coordinator"))
        self.fleet = SelectContext(
            state,
            self.roster.clients,
            self.rng,
            training,
            batch_size,
            seed=seed,
            local=algorithm.local,
            plan=plan,
            own_tests=own_tests or OwnTests(),
            drop_last=drop_last,
            overlap=overlap,
            rules=rules or Rules(),
        )
        self.absent: set[int] = set()  # lost before the start, and not waited for
        self._actions: list[Action] = []
        self._handlers: dict[type, Callable[..., None]] = {
            Joined: self._joined,
            Arrived: self._arrived,
            Sending: self._sending,
            Lost: self._lost,
            Timer: self._timer,
            Stop: lambda event, now: self._finish(event.reason),
        }

    def handle(self, event: Event, now: float) -> list[Action]:
        """Process one event and return the actions that the runtime must carry out, in order.

        Args:
            event: event to handle.
            now: time of the event in seconds of the run's clock; it never decreases.
        """
        self._actions, self.state.now_s = [], now
        if self.finished is None:
            self._handlers[type(event)](event, now)
        while self.finished is None and self._go_on(now):
            pass
        return self._actions

    # ---- events ----

    def _arrived(self, event: Arrived, now: float) -> None:
        update = event.update
        assignment = self.roster.active.get(update.assignment)
        try:
            problem = self._reject_reason(update, assignment)
            if problem is None and assignment is not None:
                problem = self._take(update, assignment, now)
        except Exception as error:
            if assignment is None:
                raise
            self._refuse(update, assignment, ERROR, now, error)
            return
        if problem is not None or assignment is None:
            self._refuse(update, assignment, problem or "", now)
            return
        waits, num_active = self.algorithm.trigger.client_waits(assignment, self.state.memory), len(self.roster.active)
        self.roster.release(assignment, back=not waits)
        self.backoff.accept(assignment.client)
        adjusted = self.algorithm.trigger.on_update(assignment, num_active, self.state)
        if adjusted is not None:
            self._actions.append(adjusted)

    def _take(self, update: Update, assignment: Assignment, now: float) -> str | None:
        """Pass a well-formed update to the parts, before it is recorded as answered; return why a part refuses it, or None."""
        client, cut = self.roster.clients[assignment.client], assignment.spec.without_base
        staleness = self.state.version - assignment.version
        update.tensors, update.bundles = self.payload.split(update.tensors, assignment.spec, "trained")
        update.work = assignment.extra
        problem = self.algorithm.merge.reject_reason(self.state, update, cut, staleness)
        if problem is not None:
            return problem
        self.algorithm.select.on_update(client, assignment, now - assignment.assigned_s, self.fleet)
        self._clip(client, assignment, update)
        if self.algorithm.merge.overflows(self.state, update, cut, staleness):
            return OVERFLOW
        self.algorithm.merge.take(self.state, PendingUpdate(update, cut, staleness, assignment, now))
        return None

    def _sending(self, event: Sending, now: float) -> None:
        """Let a client that has trained have its next task; at most one update of a client travels beside a task."""
        assignment = self.roster.active.get(event.assignment)
        if assignment is None or (assignment.client, assignment.incarnation) != (event.client, event.incarnation):
            return
        if self.roster.busy.get(event.client) == event.assignment and event.client not in self.roster.sending:
            self.roster.send(assignment)

    def _timer(self, event: Timer, now: float) -> None:
        if event.id == TIME_UP:
            self._finish("max_time")
        elif -event.id in self.roster.suspended and not self.backoff.keeps_out(-event.id, now):
            self._admit(self.roster.suspended.pop(-event.id), now)

    # ---- what follows from an event ----

    def _go_on(self, now: float) -> bool:
        """Merge if the trigger is due, then assign work; return whether to repeat, since all who might work were dismissed."""
        if not self.started:
            there = len(self.roster.clients)
            if not there or there + len(self.absent) < self.limits.min_clients:
                return False
            self.started, self.opened_s = True, now
            if self.limits.max_time_s is not None:
                self._actions.append(SetTimer(TIME_UP, self.limits.max_time_s))
        self._merge_if_due(now)
        return self.finished is None and self._hand_out(now) and not self.roster.num_out

    def _merge_if_due(self, now: float) -> None:
        """Merge as often as the trigger is due; where it takes some of the waiting updates, it may be due again."""
        trigger, memory = self.algorithm.trigger, self.state.memory
        while self.state.waiting and self.finished is None:
            there, arrived_s = len(self.roster.clients), _ArrivalTimes(self.state.waiting)
            waiting = TriggerContext(arrived_s, self.roster.num_out, there, self.opened_s, now, memory)
            if not trigger.due(waiting):
                self.algorithm.merge.detach(self.state)
                self._set_timer(trigger.wake_at(waiting))
                return
            if (why := self.algorithm.merge.ends_run(self.state)) is not None:
                self._finish(why)
                return
            self._merge(trigger.merged_now(waiting))
            self.opened_s = now
            self._after_merge(now)

    def _set_timer(self, at: float | None) -> None:
        if at is not None and at != self.wake[1]:
            self.wake = (self.wake[0] + 1, at)
            self._actions.append(SetTimer(*self.wake))

    def _merge(self, ids: Collection[int] | None = None) -> None:
        """Merge the waiting updates into the next version; where ``ids`` of assignments are given, only theirs."""
        state = self.state
        due = [item for item in state.waiting if ids is None or item.update.assignment in ids]
        left = [item for item in state.waiting if not (ids is None or item.update.assignment in ids)]
        state.waiting[:] = due
        self.is_merging = True  # and stays so where the method raises: half of the model may be merged
        self.algorithm.merge.apply(state)
        self.is_merging = False
        state.waiting[:] = left
        before = state.version
        state.version += 1
        for item in due:
            assignment = item.assignment
            assert assignment is not None
            state.counts[assignment.region] = state.counts.get(assignment.region, 0) + 1
            # counted anew: others may have been merged since this one arrived
            self._settle(assignment, assignment.client, "merged", before - assignment.version, item.update)
            self.samples_merged += self.fleet.samples(item.update.num_samples, assignment)
            self.roster.readmit(assignment.client)
        self.merged += len(due)
        if self.algorithm.trigger.refuses_late:
            self.roster.late = set(self.roster.active)

    def _after_merge(self, now: float) -> None:
        limits, version = self.limits, self.state.version
        if limits.max_updates is not None and self.merged >= limits.max_updates:
            self._finish("max_updates")
            return
        if self._is_evaluation_due(now):
            self._evaluate()
        if limits.checkpoint_every is not None and version % limits.checkpoint_every == 0:
            self._actions.append(Checkpoint(version))

    def _is_evaluation_due(self, now: float) -> bool:
        """Check whether the version that was just merged is the first at or after a multiple of the evaluations' distance."""
        every, unit = self.limits.eval_every, self.limits.eval_unit
        if unit == "versions":
            return self.state.version % every == 0
        # 0.6 / 0.2 is below 3 in floating point, though three distances of 0.2 s have passed at 0.6 s
        passed = math.floor((now if unit == "seconds" else self.samples_merged) / every * (1 + 1e-12))
        due, self.spacings = passed > self.spacings, passed
        return due

    def _hand_out(self, now: float) -> bool:
        """Sample clients where work may start, and assign to as many as may work at once; return whether one was dismissed."""
        sample, rolling = self.algorithm.sample, self.algorithm.trigger.restart == "arrival"
        if len(self.roster.idle) and (rolling or not self.state.waiting):
            if not (self.roster.num_out or self.state.waiting):
                self.opened_s = now
            if self.roster.draw(sample, self.rng, rolling=rolling) and not rolling:
                self._open_round(now)
        dismissed = False
        while (client := self.roster.next_to_start(sample.concurrency)) is not None:
            try:
                work = self._work_for(client)
                pace_s = self._pace_s(client, work, now)
            except BadInput as error:  # nobody else is to suffer for it
                self._drop(client.id, "unfit")
                self._actions.append(Dismiss(client.id, client.incarnation, str(error)))
                dismissed = True
            except Exception as error:
                self._turn_away(client, error, now)
                dismissed = True
            else:
                self._assign(client, work, now, pace_s)
        return dismissed

    def _evaluate(self) -> None:
        if self.evaluated != self.state.version:
            self.evaluated = self.state.version
            self._actions.append(Evaluate(self.state.version))

    def _finish(self, reason: str) -> None:
        """End the run: merge the waiting updates if it is complete, settle the rest as unused, evaluate and save once more."""
        folds = self.algorithm.trigger.folds_rest and reason in ENDS
        if self.state.waiting and folds and self.algorithm.merge.ends_run(self.state) is None:
            self._merge()
        for item in self.state.waiting:
            self._settle(item.assignment, item.update.client, "unused", item.staleness, item.update)
        for assignment in self.roster.active.values():
            self._settle(assignment, assignment.client, "unused", 0, None)
        self.state.waiting.clear()
        self.roster.active.clear()
        self.roster.late.clear()
        self.roster.sending.clear()
        self._evaluate()
        self.finished = reason
        self._actions += [Checkpoint(self.state.version), Finish(reason)]


class _ArrivalTimes(Sequence[float]):
    """Arrival times of the updates that wait, read from the state's list without a copy."""

    def __init__(self, waiting: Sequence[PendingUpdate]) -> None:
        self._waiting = waiting

    def __len__(self) -> int:
        return len(self._waiting)

    @overload
    def __getitem__(self, index: int) -> float: ...
    @overload
    def __getitem__(self, index: slice) -> list[float]: ...
    def __getitem__(self, index: int | slice) -> float | list[float]:
        if isinstance(index, slice):
            return [item.arrived_s for item in self._waiting[index]]
        return self._waiting[index].arrived_s

"""Drive a federated run: take an event in, return actions. It has no socket, thread, file, sleep or clock; two runtimes drive it.

The same events at the same times give the same actions and the same model, bit for bit.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Collection
from dataclasses import replace
from typing import TYPE_CHECKING

from raafl.core.admission import Admission
from raafl.core.algorithm import Algorithm, OwnTests, SelectContext, Training, TriggerContext
from raafl.core.payload import TransferCost
from raafl.core.roster import Roster
from raafl.core.state import ArrivalTimes, GlobalState, PendingUpdate
from raafl.core.types import (
    ENDS,
    ERROR,
    OVERFLOW,
    RESTART,
    Action,
    Arrived,
    Assign,
    Assignment,
    Checkpoint,
    ClientInfo,
    Dismiss,
    Evaluate,
    Event,
    Finish,
    Joined,
    Limits,
    Lost,
    Received,
    Sending,
    SetTimer,
    Stop,
    Timer,
    Update,
    Work,
    derive_seed,
)
from raafl.errors import BadInput, WrongReturn
from raafl.rules import Rules

if TYPE_CHECKING:
    from raafl.core.subfederation import TasksAbove

TIME_UP = 0  # id of the timer that ends the run; the timer that readmits a suspended client has minus the client's id


class Coordinator:
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
        """Create the coordinator of a run that no client has joined yet.

        Args:
            algorithm: parts of the method, with merge and trigger wrapped in the run's options.
            state: global model, which merges change in place.
            limits: numbers that decide when the run starts, evaluates, saves and ends.
            training: epochs or steps of a task, and the schedule of the learning rate.
            batch_size: number of samples in a local step.
            seed: seed of the run, from which the seed of every task is derived.
            pace: whether wall-clock clients wait until their emulated device would have finished a task.
            plan: compression of transfers, for predicting their times; None = no compression.
            own_tests: numbers of test samples on which clients evaluate their submodels; None = no such tests.
            drop_last: whether clients drop their last, smaller batch.
            overlap: whether a client may train its next task while its update is being sent; with `Traits.steps_ahead`
                it starts even before that task is assigned.
            rules: rules by which times are predicted; None = those of a new run.
        """
        self.works_ahead = overlap and algorithm.local.traits.steps_ahead > 0
        self.overlap = overlap and not self.works_ahead
        self.algorithm, self.state, self.limits, self.seed, self.pace = algorithm, state, limits, seed, pace
        self.roster = Roster()
        self.merged = self.evaluated = 0
        self.samples_merged = 0  # sum of the training samples of all merged updates
        self.spacings = 0  # number of multiples of `limits.eval_every` that were passed by the last merge
        self.opened_s, self.started, self.wake = 0.0, False, (0, -1.0)
        self.is_merging = False
        self.finished: str | None = None
        self.above: TasksAbove | None = None
        if limits.subfederation is not None:
            from raafl.core.subfederation import TasksAbove

            self.above = TasksAbove(limits.subfederation, algorithm, state, self.roster, self.drop_waiting)
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
        self._actions: list[Action] = []  # actions that result from the event being handled
        self.admission = Admission(algorithm, self.fleet, self.roster, limits, self.payload, self._actions, self.above)
        self._handlers: dict[type, Callable[..., None]] = {
            Joined: self.admission.joined,
            Arrived: self._arrived,
            Sending: self._sending,
            Lost: self._lost,
            Timer: self._timer,
            Stop: lambda event, now: self._finish(event.reason),
            **({} if self.above is None else {Received: self.above.begin}),
        }

    def handle(self, event: Event, now: float) -> list[Action]:
        """Process one event and return the actions that the runtime must carry out, in order.

        Args:
            event: event to handle.
            now: time of the event in seconds of the run's clock; it never decreases.
        """
        self._actions.clear()
        self.state.now_s = now
        if self.finished is None:
            self._handlers[type(event)](event, now)
        while self.finished is None and self._go_on(now):
            pass
        return list(self._actions)

    def change(self, **parts: SelectContext | Limits | TasksAbove | None) -> None:
        """Replace what selects see (`fleet`), the `limits` or the tasks from `above`, here and where clients are admitted."""
        for owner in (self, self.admission):
            for name, part in parts.items():
                setattr(owner, name, part)

    def restart(self) -> None:
        """Restart after a server restart, or after an end that is undone: wait for ``limits.min_clients`` clients again."""
        self.started, self.finished = False, None
        roster = self.roster
        # an end settles all tasks, but leaves their clients busy
        roster.busy = {client: number for client, number in roster.busy.items() if number in roster.active}
        roster.gone = set(roster.clients) if self.fleet.rules.counts_returned else set()
        self.admission.restart()
        if self.above is not None:
            self.above.waits = True

    # ---- events ----

    def _arrived(self, event: Arrived, now: float) -> None:
        update = event.update
        assignment = self.roster.active.get(update.assignment)
        try:
            problem = self.admission.reject_reason(update, assignment)
            if problem is None and assignment is not None:
                problem = self._take(update, assignment, now)
        except Exception as error:
            if assignment is None:
                raise
            self.admission.refuse(update, assignment, ERROR, now, error)
            return
        if problem is not None or assignment is None:
            self.admission.refuse(update, assignment, problem or "", now)
            return
        waits, num_active = self.algorithm.trigger.client_waits(assignment, self.state.memory), len(self.roster.active)
        self.roster.release(assignment, back=not waits)
        self.admission.backoff.accept(assignment.client)
        adjusted = self.algorithm.trigger.on_update(assignment, num_active, self.state)
        if adjusted is not None:
            self._actions.append(adjusted)

    def _take(self, update: Update, assignment: Assignment, now: float) -> str | None:
        """Pass a valid update to the method's select and merge; return the reason for which one refuses it, else None."""
        client, cut = self.roster.clients[assignment.client], assignment.spec.without_base
        staleness = self.state.version - assignment.version
        update.tensors, update.bundles = self.payload.split(update.tensors, assignment.spec, "trained")
        update.work = assignment.extra
        problem = self.algorithm.merge.reject_reason(self.state, update, cut, staleness)
        if problem is not None:
            return problem
        self.algorithm.select.on_update(client, assignment, now - assignment.assigned_s, self.fleet)
        self.admission.clip(client, assignment, update)
        if self.algorithm.merge.overflows(self.state, update, cut, staleness):
            return OVERFLOW
        self.algorithm.merge.take(self.state, PendingUpdate(update, cut, staleness, assignment, now))
        return None

    def _sending(self, event: Sending, now: float) -> None:
        """Free a client for its next task while its update is being sent; a client sends one update at a time."""
        assignment = self.roster.active.get(event.assignment)
        if assignment is None or (assignment.client, assignment.incarnation) != (event.client, event.incarnation):
            return
        if self.roster.busy.get(event.client) == event.assignment and event.client not in self.roster.sending:
            self.roster.send(assignment)

    def _lost(self, event: Lost, now: float) -> None:
        was_there = self.admission.lost(event, now)
        if was_there and not self.started and self.limits.count_lost and event.reason != RESTART:
            self.admission.absent.add(event.client)

    def _timer(self, event: Timer, now: float) -> None:
        if event.id == TIME_UP:
            self._finish("max_time")
        elif -event.id in self.roster.suspended and not self.admission.backoff.keeps_out(-event.id, now):
            self.admission.admit(self.roster.suspended.pop(-event.id), now)

    # ---- merging and assigning ----

    def _go_on(self, now: float) -> bool:
        """Start the run, merge and assign work if due; return whether to repeat this, since all clients asked were dismissed."""
        if not self.started:
            there = len(self.roster.clients)
            if self.roster.gone or not there or there + len(self.admission.absent) < self.limits.min_clients:
                return False
            self.started, self.opened_s = True, now
            if self.limits.max_time_s is not None:
                self._actions.append(SetTimer(TIME_UP, self.limits.max_time_s))
        self._merge_if_due(now)
        return self.finished is None and self._hand_out(now) and not self.roster.num_out

    def _merge_if_due(self, now: float) -> None:
        """Merge as often as the trigger is due, since one merge may use only some of the waiting updates."""
        trigger, memory = self.algorithm.trigger, self.state.memory
        while self.state.waiting and self.finished is None:
            there, arrived_s = len(self.roster.clients), ArrivalTimes(self.state.waiting)
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
        """Merge the waiting updates of the assignments ``ids`` (None = all) into the next version of the model."""
        state = self.state
        due = [item for item in state.waiting if ids is None or item.update.assignment in ids]
        if not due:  # the trigger would be due again at once, without end
            name = type(self.algorithm.trigger).__name__
            raise WrongReturn(f"{name}.merged_now returned no update that waits: let it name some")
        left = [item for item in state.waiting if not (ids is None or item.update.assignment in ids)]
        state.waiting[:] = due
        self.is_merging = True  # not reset if the method raises: the global model may then contain half a merge
        self.algorithm.merge.apply(state)
        self.is_merging = False
        state.waiting[:] = left
        before = state.version
        state.version += 1
        for item in due:
            assignment = item.assignment
            assert assignment is not None
            state.counts[assignment.region] = state.counts.get(assignment.region, 0) + 1
            # staleness is counted up to this merge, since other merges may have come after the update's arrival
            self.admission.settle(assignment, assignment.client, "merged", before - assignment.version, item.update)
            self.samples_merged += self.fleet.samples(item.update.num_samples, assignment)
            self.roster.readmit(assignment.client)
        self.merged += len(due)
        if self.algorithm.trigger.refuses_late:
            self.roster.late = set(self.roster.active)

    def _after_merge(self, now: float) -> None:
        limits, version = self.limits, self.state.version
        if self.above is not None:
            self.above.merged(now)
        if limits.max_updates is not None and self.merged >= limits.max_updates:
            self._finish("max_updates")
            return
        if self._is_evaluation_due(now):
            self._evaluate()
        if limits.checkpoint_every is not None and version % limits.checkpoint_every == 0:
            self._actions.append(Checkpoint(version))

    def _is_evaluation_due(self, now: float) -> bool:
        """Check whether the last merge has reached or passed the next multiple of `limits.eval_every`."""
        every, unit = self.limits.eval_every, self.limits.eval_unit
        if unit == "versions":
            return self.state.version % every == 0
        # rounding may put a quotient just below a whole number (0.6 / 0.2 < 3), hence the small tolerance
        passed = math.floor((now if unit == "seconds" else self.samples_merged) / every * (1 + 1e-12))
        due, self.spacings = passed > self.spacings, passed
        return due

    def _hand_out(self, now: float) -> bool:
        """Assign work to sampled idle clients, as many as may work at once; return whether a client was dismissed."""
        sample, rolling = self.algorithm.sample, self.algorithm.trigger.restart == "arrival"
        waits_above = self.above is not None and self.above.waits
        if len(self.roster.idle) and not waits_above and (rolling or not self.state.waiting):
            if not (self.roster.num_out or self.state.waiting):
                self.opened_s = now
            if self.roster.draw(sample, self.rng, rolling=rolling) and not rolling:
                self.admission.open_round(now)
        dismissed = False
        starts = self.roster.next_to_start if self.above is None else self.above.next_to_start
        while (client := starts(sample.concurrency)) is not None:
            try:
                work = self.admission.work_for(client)
                pace_s = self._pace_s(client, work, now)
            except BadInput as error:  # no work fits this client, so it is dismissed; the other clients go on
                self.admission.drop(client.id, "unfit")
                self._actions.append(Dismiss(client.id, client.incarnation, str(error)))
                dismissed = True
            except Exception as error:
                self.admission.turn_away(client, error, now)
                dismissed = True
            else:
                self._assign(client, work, now, pace_s)
        return dismissed

    def _evaluate(self) -> None:
        if self.evaluated != self.state.version:
            self.evaluated = self.state.version
            self._actions.append(Evaluate(self.state.version))

    def _finish(self, reason: str) -> None:
        """End the run: merge or discard the waiting updates, evaluate the model and write a last checkpoint."""
        folds = self.algorithm.trigger.folds_rest and reason in ENDS
        if self.state.waiting and folds and self.algorithm.merge.ends_run(self.state) is None:
            self._merge()
        self.drop_waiting()
        for assignment in self.roster.active.values():
            self.admission.settle(assignment, assignment.client, "unused", 0, None)
        for book in (self.roster.active, self.roster.late, self.roster.sending):
            book.clear()
        self._evaluate()
        self.finished = reason
        self._actions += [Checkpoint(self.state.version), Finish(reason)]

    def drop_waiting(self) -> None:
        """Settle the updates that wait for a merge as unused."""
        for item in self.state.waiting:
            self.admission.settle(item.assignment, item.update.client, "unused", item.staleness, item.update)
        self.state.waiting.clear()

    def _assign(self, client: ClientInfo, work: Work, now: float, pace_s: float) -> None:
        number, task = self.roster.number(client.id)
        assignment = Assignment(
            id=number,
            client=client.id,
            incarnation=client.incarnation,
            task=task,
            version=self.state.version,
            spec=work.spec,
            region=work.region,
            num_epochs=work.num_epochs,
            num_steps=work.num_steps,
            seed=derive_seed(self.seed, client.id, task),
            assigned_s=now,
            pace_s=pace_s,
            extra=work.extra,
            lr_scale=self.fleet.training.lr_scale(self.state.version, now),
        )
        if self.works_ahead:
            next_lr_scale = self.fleet.training.lr_scale(self.state.version + 1, now)
            next_seed = derive_seed(self.seed, client.id, task + 1)
            assignment = replace(assignment, next_seed=next_seed, next_lr_scale=next_lr_scale)
        self.roster.start(assignment)
        self._actions.append(Assign(assignment))

    def _pace_s(self, client: ClientInfo, work: Work, now: float) -> float:
        """Return the seconds that a client's emulated device takes for a task, until which the client waits; 0 = none."""
        if not self.pace:
            return 0.0
        predicted, task = self.fleet.task_time(client, work), self.roster.tasks[client.id]
        return self.fleet.real_time(client, predicted, now, task).total_s

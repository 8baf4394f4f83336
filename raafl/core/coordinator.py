"""THE LOOP: events in, actions out. It has no socket, thread, file, sleep or clock; two runtimes drive it.

Given the same events at the same times it asks for the same actions and leaves the same model, bit for bit.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import partial

from raafl.core.admission import ERROR, LATE, Admission
from raafl.core.algorithm import Algorithm, OwnTests, SelectContext, Training, TriggerContext
from raafl.core.payload import Wire
from raafl.core.quarantine import RefusalBackoff
from raafl.core.roster import Roster
from raafl.core.state import GlobalState
from raafl.core.types import (
    ENDS,
    NUM_TESTED,
    OVERFLOW,
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
    SetTimer,
    Stop,
    Timer,
    Update,
    Work,
    derive_seed,
)  # fmt: skip
from raafl.errors import BadInput

TIME_UP = 0  # id of the timer that ends the run; minus a client's id: of the one that lets it take part again


class Coordinator(Admission):
    """Decides who trains what and when it is merged; owns the global state."""

    def __init__(
        self, algorithm: Algorithm, state: GlobalState, limits: Limits, *, training: Training, batch_size: int,
        seed: int = 0, pace: bool = False, plan: Wire | None = None, own_tests: OwnTests | None = None,
        drop_last: bool = False,
    ) -> None:  # fmt: skip
        """Start with nobody there; what decides the cost of tasks is told to the parts as `SelectContext` says.

        ``pace`` makes a wall-clock client take its profile's time for each task.
        """
        self.algorithm, self.state, self.limits, self.seed, self.pace = algorithm, state, limits, seed, pace
        self.roster = Roster()
        self.waiting: list[tuple[Assignment, Update, int]] = []  # received, not yet merged; with staleness
        self.arrived_s: list[float] = []
        self.merged = self.evaluated = 0
        self.standing = RefusalBackoff(limits.max_refused)
        self.refused: Counter[str] = Counter()
        self.clipped: Counter[int] = Counter()  # by client: updates that say more samples than may weigh
        self.opened_s, self.started, self.wake = 0.0, False, (0, -1.0)
        self.is_merging = False
        self.finished: str | None = None
        self.payload = algorithm.local.payload(state.submodels)
        state.num_clients = limits.num_clients
        self.rng = random.Random(derive_seed(seed, "coordinator"))
        self.fleet = SelectContext(
            state, self.roster.clients, self.rng, training, batch_size, seed=seed, local=algorithm.local, plan=plan,
            own_tests=own_tests or OwnTests(), drop_last=drop_last,
        )  # fmt: skip
        self.absent: set[int] = set()  # lost before the start, and not waited for
        self._actions: list[Action] = []
        self._handlers: dict[type, Callable[..., None]] = {
            Joined: self._joined, Arrived: self._arrived, Lost: self._lost, Timer: self._timer, Stop: self._stop,
        }  # fmt: skip

    def handle(self, event: Event, now: float) -> list[Action]:
        """Take in one event that happened at ``now`` (seconds) and return what is to be done, in order."""
        self._actions = []
        if self.finished is None:
            self._handlers[type(event)](event, now)
        while self.finished is None and self._go_on(now):
            pass
        return self._actions

    # ---- events ----

    def restart(self) -> None:
        """Begin again with whoever joins, as many as the run needs to start; for a server that was started anew."""
        self.started = False
        self.standing.forgive()
        self.absent.clear()

    def _arrived(self, event: Arrived, now: float) -> None:
        update = event.update
        assignment = self.roster.active.get(update.assignment)
        try:
            problem = self._problem(update, assignment)
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
        self.roster.release(assignment, back=self.algorithm.trigger.restart == "arrival")
        self.standing.accept(assignment.client)
        self.waiting.append((assignment, update, self.state.version - assignment.version))
        self.arrived_s.append(now)

    def _take(self, update: Update, assignment: Assignment, now: float) -> str | None:
        """Hand a sound update to the parts, before the books know of it; return why it is refused all the same, or None."""
        client = self.roster.clients[assignment.client]
        self.algorithm.select.answered(client, assignment, now - assignment.assigned_s, self.fleet)
        self._clip(client, update)
        staleness = self.state.version - assignment.version
        if self.algorithm.merge.overflows(self.state, update, assignment.spec.cut, staleness):
            return OVERFLOW
        self.algorithm.merge.receive(self.state, update, assignment.spec.cut, staleness)
        return None

    def _problem(self, update: Update, assignment: Assignment | None) -> str | None:
        """Explain why ``update`` may not be merged, or None."""
        if assignment is None:
            return "repeated" if 0 < update.assignment <= self.roster.last_id else "unknown-assignment"
        if (assignment.client, assignment.incarnation) != (update.client, update.incarnation):
            return "wrong-client"
        if update.refusal is not None:
            return update.refusal
        if assignment.id in self.roster.late:
            return LATE
        if update.num_samples < 1:  # weighs nothing, whatever the merge goes by
            return "no-samples"
        expected = self.payload.layout(assignment.spec, "trained")
        if update.tensors.layout is not expected and update.tensors.layout != expected:
            return "wrong-layout"
        update.tensors, update.bundles = self.payload.split(update.tensors, assignment.spec, "trained")
        staleness = self.state.version - assignment.version
        return self.algorithm.merge.problem(self.state, update, assignment.spec.cut, staleness)

    def _most(self, client: ClientInfo) -> int | None:
        """Return the most samples that a client with data of its own may count as beside the others; None = as it says."""
        if not client.own_data or self.limits.max_weight is None:
            return None
        return max(int(self.limits.max_weight * self.roster.middle), 1)

    def _clip(self, client: ClientInfo, update: Update) -> None:
        """Cut what a client says of its number of samples to what it may count as, for training and for its own tests."""
        most = self._most(client)
        if most is not None and update.num_samples > most:
            self.clipped[client.id] += 1
            update.num_samples = most
        tested = self.fleet.own_tests.most(
            client if most is None else replace(client, num_samples=min(client.num_samples, most))
        )
        if update.metrics.get(NUM_TESTED, 0) > tested:
            update.metrics = {**update.metrics, NUM_TESTED: float(tested)}

    def _timer(self, event: Timer, now: float) -> None:
        if event.id == TIME_UP:
            self._finish("max_time")
        elif -event.id in self.roster.kept_out and not self.standing.keeps_out(-event.id, now):
            self._admit(self.roster.kept_out.pop(-event.id), now)

    def _stop(self, event: Stop, now: float) -> None:
        self._finish(event.reason)

    # ---- what follows from an event ----

    def _go_on(self, now: float) -> bool:
        """Merge if it is time, then hand out work; return whether to look again, since all who might work were let go."""
        if not self.started:
            there = len(self.roster.clients)
            if not there or there + len(self.absent) < self.limits.min_clients:
                return False
            self.started, self.opened_s = True, now
            if self.limits.max_time_s is not None:
                self._actions.append(SetTimer(TIME_UP, self.limits.max_time_s))
        if self.waiting:
            trigger = self.algorithm.trigger
            there, memory = len(self.roster.clients), self.state.memory
            waiting = TriggerContext(self.arrived_s, self.roster.num_out, there, self.opened_s, now, memory)
            if trigger.due(waiting):
                self._merge()
                self.opened_s = now
                self._after_merge()
            else:
                self.algorithm.merge.keep(self.state)
                self._set_timer(trigger.wake_at(waiting))
        return self.finished is None and self._hand_out(now) and not self.roster.num_out

    def _set_timer(self, at: float | None) -> None:
        if at is not None and at != self.wake[1]:
            self.wake = (self.wake[0] + 1, at)
            self._actions.append(SetTimer(*self.wake))

    def _merge(self) -> None:
        """Fold in what waits, as the next version."""
        self.is_merging = True  # and stays so where the method raises: half of the model may be merged
        self.algorithm.merge.apply(self.state)
        self.is_merging = False
        self.state.version += 1
        for assignment, update, staleness in self.waiting:
            self.state.counts[assignment.region] = self.state.counts.get(assignment.region, 0) + 1
            self._settle(assignment, assignment.client, "merged", staleness, update)
            self.roster.readmit(assignment.client)
        self.merged += len(self.waiting)
        self.waiting.clear()
        self.arrived_s.clear()
        if self.algorithm.trigger.refuses_late:
            self.roster.late = set(self.roster.active)

    def _after_merge(self) -> None:
        limits, version = self.limits, self.state.version
        if limits.max_updates is not None and self.merged >= limits.max_updates:
            self._finish("max_updates")
            return
        if version % limits.eval_every == 0:
            self._evaluate()
        if limits.checkpoint_every is not None and version % limits.checkpoint_every == 0:
            self._actions.append(Checkpoint(version))

    def _hand_out(self, now: float) -> bool:
        """Draw clients where work may start, and start as many as may work at a time; return whether one was let go."""
        sample, rolling = self.algorithm.sample, self.algorithm.trigger.restart == "arrival"
        if len(self.roster.idle) and (rolling or not self.waiting):
            if not (self.roster.num_out or self.waiting):
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

    def _open_round(self, now: float) -> None:
        """Tell the selector who is in the round; turn away those whose words alone make it raise.

        Raises:
            Exception: what it raises for no client alone, or for each of several, is the method's own fault.
        """
        select = self.algorithm.select
        while out := self.roster.out:
            try:
                select.drawn(out, self.fleet)
                return
            except Exception as error:
                guilty = [client for client in out if _raises(partial(select.drawn, [client], self.fleet))]
                if not guilty or (len(guilty) == len(out) > 1):
                    raise
                for client in guilty:
                    self._turn_away(client, error, now)

    def _work_for(self, client: ClientInfo) -> Work:
        """Choose a client's work; where nothing smaller suits one whose memory was too small, that which suited it before."""
        try:
            return self._selected(client)
        except BadInput:
            if client.id not in self.roster.said_bytes:
                raise
            return self._selected(self._with_memory(client, self.roster.said_bytes.pop(client.id)))

    def _selected(self, client: ClientInfo) -> Work:
        """Choose a client's work, and in which form it holds the frozen base."""
        work = self.algorithm.select(client, self.fleet)
        spec = self.fleet.held(client, work.spec, work.extra)
        return work if spec is work.spec else replace(work, spec=spec)

    def _assign(self, client: ClientInfo, work: Work, now: float, pace_s: float) -> None:
        number, task = self.roster.number(client.id)
        assignment = Assignment(
            id=number, client=client.id, incarnation=client.incarnation, task=task, version=self.state.version,
            spec=work.spec, region=work.region, num_epochs=work.num_epochs, num_steps=work.num_steps,
            seed=derive_seed(self.seed, client.id, task), assigned_s=now,
            pace_s=pace_s, extra=work.extra, lr_scale=self.fleet.training.lr_scale(self.state.version, now),
        )  # fmt: skip
        self.roster.start(assignment)
        self._actions.append(Assign(assignment))

    def _pace_s(self, client: ClientInfo, work: Work, now: float) -> float:
        """Return the least time of a wall-clock task: what it takes the emulated device from now on."""
        return client.profile.as_it_goes(self.fleet.task_time(client, work), now).total_s if self.pace else 0.0

    def _evaluate(self) -> None:
        if self.evaluated != self.state.version:
            self.evaluated = self.state.version
            self._actions.append(Evaluate(self.state.version))

    def _finish(self, reason: str) -> None:
        """End the run: fold in what waits if it is done, give up the rest and what is out, measure and save once more."""
        if self.waiting and self.algorithm.trigger.folds_rest and reason in ENDS:
            self._merge()
        for assignment, update, staleness in self.waiting:
            self._settle(assignment, assignment.client, "unused", staleness, update)
        for assignment in self.roster.active.values():
            self._settle(assignment, assignment.client, "unused", 0, None)
        self.waiting.clear()
        self.roster.active.clear()
        self.roster.late.clear()
        self._evaluate()
        self.finished = reason
        self._actions += [Checkpoint(self.state.version), Finish(reason)]


def _raises(call: Callable[[], None]) -> bool:
    try:
        call()
    except Exception:
        return True
    return False

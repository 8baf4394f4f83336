"""Decide for the coordinator which clients take part, which updates count and for how much, and who is suspended."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import partial

from raafl.core.algorithm import Algorithm, SelectContext
from raafl.core.payload import Payload
from raafl.core.roster import DAMAGED, RefusalBackoff, Roster
from raafl.core.state import GlobalState, is_ruined
from raafl.core.types import (
    DIVERGED,
    NUM_TESTED,
    OUT_OF_MEMORY,
    RESTART,
    Action,
    Assign,
    Assignment,
    ClientInfo,
    Dismiss,
    Fail,
    Joined,
    Limits,
    Lost,
    SetTimer,
    Settled,
    Suspend,
    Update,
    Work,
    derive_seed,
)
from raafl.errors import BadInput, format_error

ERROR = "error"
"""Reason for which a client is lost, and its update refused, whose words raised an exception."""

LATE = "late"
"""Reason for which an update is refused that comes after its round was closed."""

NO_SPACE = "no-space"
"""Reason for which a client is lost whose task or update finds no room on the server's disk."""

LOSSES = frozenset(
    {
        "disconnected",
        ERROR,
        "failed",
        "gpu",
        "kept-out",
        NO_SPACE,
        "other",
        "replaced",
        RESTART,
        "stopped",
        "timeout",
        "unavailable",
        "unfit",
    }
)
"""Every REASON of lost:REASON. Whatever else a client or its session says goes to the journal and the log alone."""


class Admission:
    """Base class of `Coordinator`, with the rules for clients and updates: who may take part, and which updates count."""

    algorithm: Algorithm
    pace: bool
    works_ahead: bool
    seed: int
    absent: set[int]
    fleet: SelectContext
    limits: Limits
    payload: Payload
    clipped: Counter[int]
    refused: Counter[str]
    roster: Roster
    backoff: RefusalBackoff
    started: bool
    state: GlobalState
    _actions: list[Action]

    @property
    def num_good(self) -> int:
        """Number of clients present, except those whose recent updates were all refused."""
        return len(self.roster.clients) - sum(
            map(self.backoff.is_bad, self.backoff.refused.keys() & self.roster.clients)
        )

    def restart(self) -> None:
        """Restart admission after a server restart: wait for ``limits.min_clients`` clients again before assigning work."""
        self.started = False
        self.backoff.forgive()
        self.absent.clear()

    def _joined(self, event: Joined, now: float) -> None:
        if self.roster.find(event.client.id) is not None:
            self._count_unanswered(event.client.id, now)
            self._drop(event.client.id, "replaced")
        self.absent.discard(event.client.id)
        if self.backoff.keeps_out(event.client.id, now):
            self.roster.suspend(event.client)
        else:
            self._admit(event.client, now)

    def _admit(self, client: ClientInfo, now: float) -> None:
        self.roster.join(client)
        try:
            self.algorithm.select.on_join(client, self.fleet)
        except Exception as error:
            self._turn_away(client, error, now)

    def _turn_away(self, client: ClientInfo, error: Exception, now: float) -> None:
        """Dismiss a client whose words raised ``error``, and suspend it as if its last updates had all been refused.

        What calls this has left the books as they were before, or settled. A fault of the method's own meets every client, and so
        ends the run.
        """
        until = self.backoff.condemn(client.id, now)
        self._drop(client.id, ERROR)
        reason = f"its message caused an error ({type(error).__name__})"
        self._actions += [SetTimer(-client.id, until), Dismiss(client.id, client.incarnation, reason, error)]
        self._fail_if_hopeless(f"every client was turned away, client {client.id} for {format_error(error)}")

    def _refuse(
        self, update: Update, assignment: Assignment | None, problem: str, now: float, error: Exception | None = None
    ) -> None:
        """Settle an update that is not merged; a client refused too often is kept out, and alone can end no run.

        One whose words raised ``error`` is turned away.
        """
        self.refused[problem] += 1
        if assignment is not None and problem == "wrong-client":
            assignment = None  # the one that was asked may still answer
        if assignment is not None:
            self.roster.release(assignment, back=True)
        self._settle(assignment, update.client, f"refused:{problem}", 0, update)
        if assignment is None or problem in DAMAGED:
            return
        client = self.roster.clients[assignment.client]
        if error is not None:
            self._turn_away(client, error, now)
            return
        if problem == OUT_OF_MEMORY:
            self._narrow(assignment)
        excused = problem in DIVERGED and is_ruined(self.state)  # a model on which honest clients fail, too
        until = self.backoff.refuse(client.id, now, excused=excused)
        client = self.roster.clients[client.id]
        if until is not None:
            said_bytes = self.roster.said_bytes.get(client.id)
            self._drop(client.id, "kept-out")
            self.roster.suspend(client, said_bytes)
            self._actions += [SetTimer(-client.id, until), Suspend(client.id, until, problem)]
        if self.backoff.is_bad(client.id):
            most = self.limits.max_refused
            self._fail_if_hopeless(
                f"the last {most} updates of every client were refused, those of client {client.id} as {problem}"
            )

    def _reject_reason(self, update: Update, assignment: Assignment | None) -> str | None:
        """Return why an update is refused whatever its values are, or None: unknown, another client's, late, empty, misshapen."""
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
        sent = self.payload.returned(assignment.spec)
        expected = self.algorithm.merge.received_layout(self.state, assignment.spec, sent)
        if update.tensors.layout is not expected and update.tensors.layout != expected:
            return "wrong-layout"
        return None

    def _max_samples(self, client: ClientInfo) -> int | None:
        """Return the most samples that a client with data of its own may count as beside the others; None = as it says."""
        if not client.own_data or self.limits.max_weight is None:
            return None
        return max(int(self.limits.max_weight * self.roster.middle), 1)

    def counted_samples(self, client: ClientInfo, num_samples: int) -> int:
        """Return the weight of an update, in samples: the ``num_samples`` that its client reports, up to a limit.

        Only clients with their own data have a limit: ``limits.max_weight`` times the median client's samples.
        """
        most = self._max_samples(client)
        return num_samples if most is None else min(num_samples, most)

    def _clip(self, client: ClientInfo, assignment: Assignment, update: Update) -> None:
        """Cut the steps and samples that a client says to what it may count as, for training and for its own tests."""
        # an epoch has at most a step for each sample
        steps = self.fleet.training.nominal_samples(assignment, client.num_samples, 1)
        update.num_steps = min(update.num_steps, max(steps, 1))
        most = self._max_samples(client)
        if most is not None and update.num_samples > most:
            self.clipped[client.id] += 1
            update.num_samples = most
        tested = self.fleet.own_tests.most(
            client if most is None else replace(client, num_samples=min(client.num_samples, most))
        )
        if update.metrics.get(NUM_TESTED, 0) > tested:
            update.metrics = {**update.metrics, NUM_TESTED: float(tested)}

    def _count_unanswered(self, client: int, now: float, *, always: bool = False) -> None:
        """Count a task that its client leaves without an answer as a refusal: ``always``, or if its round was closed without it.

        So who takes tasks and never answers, whether it waits for the timeout or joins again before, is soon asked for nothing.
        """
        number = self.roster.busy.get(client, self.roster.sending.get(client))
        if number is None or not (always or number in self.roster.late):
            return
        taken_s = now - self.roster.active[number].assigned_s if self.limits.suspends_by_time else None
        until = self.backoff.refuse(client, now, unanswered_s=taken_s)
        if until is not None:
            self._actions += [SetTimer(-client, until), Suspend(client, until, "not answered")]

    def _fail_if_hopeless(self, why: str) -> None:
        if self._is_hopeless():
            self._actions.append(Fail(f"failed: {why}"))

    def _is_hopeless(self) -> bool:
        """Check whether no client's update can be hoped to be merged any more."""
        known = [client for client, num in self.roster.joins.items() if num]
        if len({*known, *self.absent}) >= self.limits.num_clients and all(map(self.backoff.is_bad, known)):
            return True
        there = (*self.roster.clients, *self.roster.suspended)
        return bool(there) and all(map(self.backoff.is_hopeless, there))

    def _lost(self, event: Lost, now: float) -> None:
        client = self.roster.find(event.client)
        if client is not None and event.incarnation not in (None, client.incarnation):
            return
        if client is not None:
            if event.reason != RESTART:
                self._count_unanswered(event.client, now, always=event.counts)
            kind = event.reason.partition(":")[
                0
            ]  # the rest may be the client's own words: each would be an outcome of its own
            self._drop(event.client, kind if kind in LOSSES else "other")
        if not self.started and self.limits.count_lost and event.reason != RESTART:
            self.absent.add(event.client)

    def _narrow(self, assignment: Assignment) -> None:
        """Take it that a client's memory is less than a task was predicted to need, which it did not have."""
        client = self.roster.clients[assignment.client]
        needed = self.fleet.cost(assignment.spec, assignment.extra).peak_bytes
        self.roster.said_bytes.setdefault(client.id, client.profile.memory_bytes)
        self._with_memory(client, min(client.profile.memory_bytes, max(needed - 1, 1)))

    def _open_round(self, now: float) -> None:
        """Tell the selector who is in the round; turn away those whose words alone make it raise.

        Raises:
            Exception: what it raises for no client alone, or for each of several, is the method's own fault.
        """
        select = self.algorithm.select
        while out := self.roster.out:
            try:
                select.on_round_start(out, self.fleet)
                return
            except Exception as error:
                guilty = [client for client in out if _raises(partial(select.on_round_start, [client], self.fleet))]
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
        spec = self.fleet.choose_base(client, work.spec, work.extra)
        return work if spec is work.spec else replace(work, spec=spec)

    def _with_memory(self, client: ClientInfo, memory_bytes: float) -> ClientInfo:
        changed = replace(client, profile=replace(client.profile, memory_bytes=memory_bytes))
        self.algorithm.select.on_loss(client, self.fleet)
        self.roster.clients[client.id] = changed
        self.algorithm.select.on_join(changed, self.fleet)
        return changed

    def _drop(self, client: int, reason: str) -> None:
        """Forget a client; what it was working on is lost, what it has sent stays."""
        if self.roster.suspended.pop(client, None) is not None:
            self.roster.said_bytes.pop(client, None)
            return
        gone = self.roster.clients[client]
        unanswered = self.roster.drop(client)
        try:
            self.algorithm.select.on_loss(gone, self.fleet)
        except Exception:
            if reason != ERROR:  # else it has never seen the client, or the same words raise again
                raise
        for assignment in unanswered:
            self._settle(assignment, client, f"lost:{reason}", 0, None)

    def _settle(
        self, assignment: Assignment | None, client: int, outcome: str, staleness: int, update: Update | None
    ) -> None:
        self._actions.append(Settled(assignment, client, outcome, self.state.version, staleness, update))

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
        """Return the least duration of a wall-clock task in seconds: what the emulated device would take; 0 = as fast as it can."""
        if not self.pace:
            return 0.0
        predicted, task = self.fleet.task_time(client, work), self.roster.tasks[client.id]
        return self.fleet.real_time(client, predicted, now, task).total_s


def _raises(call: Callable[[], None]) -> bool:
    try:
        call()
    except Exception:
        return True
    return False

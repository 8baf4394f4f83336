"""Decide which clients may take part and which updates count: joins, losses, refusals, suspensions, limits on what clients say."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from raafl.core.algorithm import Algorithm, SelectContext
from raafl.core.payload import Payload
from raafl.core.roster import DAMAGED, RefusalBackoff, Roster
from raafl.core.state import is_ruined
from raafl.core.types import (
    DIVERGED,
    ERROR,
    LATE,
    LOSSES,
    NUM_TESTED,
    OUT_OF_MEMORY,
    RESTART,
    Action,
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
)
from raafl.errors import BadInput, format_error, raises

if TYPE_CHECKING:
    from raafl.core.subfederation import TasksAbove


class Admission:
    """The clients of a run as the coordinator lets them take part; it appends its actions to the coordinator's.

    `backoff`: refusals in a row and suspensions, by client.
    `refused`: number of refused updates, by reason.
    `clipped`: number of updates that reported more samples than allowed, by client.
    `absent`: clients lost before the start, for which the run does not wait any more.
    """

    def __init__(
        self,
        algorithm: Algorithm,
        fleet: SelectContext,
        roster: Roster,
        limits: Limits,
        payload: Payload,
        actions: list[Action],
        above: TasksAbove | None,
    ) -> None:
        self.algorithm, self.fleet, self.roster, self.limits, self.payload = algorithm, fleet, roster, limits, payload
        self.state, self._actions, self.above = fleet.state, actions, above
        self.backoff = RefusalBackoff(limits.max_refused)
        self.refused: Counter[str] = Counter()
        self.clipped: Counter[int] = Counter()
        self.absent: set[int] = set()

    def restart(self) -> None:
        """Forget refusals, suspensions and absent clients, since the server was restarted."""
        self.backoff.forgive()
        self.absent.clear()

    def settle(
        self, assignment: Assignment | None, client: int, outcome: str, staleness: int, update: Update | None
    ) -> None:
        """Report what became of a task or an update."""
        self._actions.append(Settled(assignment, client, outcome, self.state.version, staleness, update))

    def joined(self, event: Joined, now: float) -> None:
        """Admit a client that joins; suspend it while its last updates are not forgotten."""
        if self.roster.find(event.client.id) is not None:
            self.count_unanswered(event.client.id, now)
            self.drop(event.client.id, "replaced")
        self.absent.discard(event.client.id)
        if self.backoff.keeps_out(event.client.id, now):
            self.roster.suspend(event.client)
        else:
            self.admit(event.client, now)

    def admit(self, client: ClientInfo, now: float) -> None:
        """Let a client take part, and tell the selector."""
        self.roster.join(client)
        try:
            self.algorithm.select.on_join(client, self.fleet)
        except Exception as error:
            self.turn_away(client, error, now)

    def turn_away(self, client: ClientInfo, error: Exception, now: float) -> None:
        """Dismiss a client whose message raised ``error``, and suspend it as if its last updates had all been refused.

        The caller leaves the coordinator's tables consistent first. An error in the method itself occurs for every
        client, and so ends the run.
        """
        until = self.backoff.condemn(client.id, now)
        self.drop(client.id, ERROR)
        reason = f"its message caused an error ({type(error).__name__})"
        self._actions += [SetTimer(-client.id, until), Dismiss(client.id, client.incarnation, reason, error)]
        self._fail_if_hopeless(f"every client was turned away, client {client.id} for {format_error(error)}")

    def refuse(
        self, update: Update, assignment: Assignment | None, problem: str, now: float, error: Exception | None = None
    ) -> None:
        """Record an update as refused; suspend a client that is refused too often, and dismiss it if its message raised ``error``.

        The run fails only if the last updates of every client were refused.
        """
        self.refused[problem] += 1
        if assignment is not None and problem == "wrong-client":
            assignment = None  # the task stays open: the client to which it was assigned may still send its update
        if assignment is not None:
            self.roster.release(assignment, back=True)
        self.settle(assignment, update.client, f"refused:{problem}", 0, update)
        if assignment is None or problem in DAMAGED or (problem == LATE and self.above is not None):
            return  # damage and tasks ended by the server above are not the client's fault
        client = self.roster.clients[assignment.client]
        if error is not None:
            self.turn_away(client, error, now)
            return
        if problem == OUT_OF_MEMORY:
            self._narrow(assignment)
        excused = problem in DIVERGED and is_ruined(self.state)  # a non-finite model makes honest updates non-finite
        until = self.backoff.refuse(client.id, now, excused=excused)
        client = self.roster.clients[client.id]
        if until is not None:
            said_bytes = self.roster.said_bytes.get(client.id)
            self.drop(client.id, "kept-out")
            self.roster.suspend(client, said_bytes)
            self._actions += [SetTimer(-client.id, until), Suspend(client.id, until, problem)]
        if self.backoff.is_bad(client.id):
            most = self.limits.max_refused
            self._fail_if_hopeless(
                f"the last {most} updates of every client were refused, those of client {client.id} as {problem}"
            )

    def reject_reason(self, update: Update, assignment: Assignment | None) -> str | None:
        """Return the reason to refuse an update whatever its values (unknown assignment, late, wrong layout, ...); else None."""
        if assignment is None:
            return "repeated" if 0 < update.assignment <= self.roster.last_id else "unknown-assignment"
        if (assignment.client, assignment.incarnation) != (update.client, update.incarnation):
            return "wrong-client"
        if update.refusal is not None:
            return update.refusal
        if assignment.id in self.roster.late:
            return LATE
        if update.num_samples < 1:  # an update without samples would have no weight in any merge
            return "no-samples"
        sent = self.payload.returned(assignment.spec)
        expected = self.algorithm.merge.received_layout(self.state, assignment.spec, sent)
        if update.tensors.layout is not expected and update.tensors.layout != expected:
            return "wrong-layout"
        return None

    def counted_samples(self, client: ClientInfo, num_samples: int) -> int:
        """Return the number of a client's reported samples that count; `limits.max_weight` limits data of its own."""
        if not client.own_data or self.limits.max_weight is None:
            return num_samples
        return min(num_samples, max(int(self.limits.max_weight * self.roster.middle * client.stands_for), 1))

    def clip(self, client: ClientInfo, assignment: Assignment, update: Update) -> None:
        """Limit the steps and samples that a client reports, for training and for its own test, to plausible numbers."""
        # a task without a number of steps cannot have more than samples times epochs, as batches of one sample
        steps = (
            self.fleet.training.trained_samples(assignment, max(client.num_samples, 1), 1, False) * client.stands_for
        )
        update.num_steps = min(update.num_steps, max(steps, 1))
        if (counted := self.counted_samples(client, update.num_samples)) < update.num_samples:
            self.clipped[client.id] += 1
            update.limit_samples(counted)
        tested = self.fleet.own_tests.most(
            replace(client, num_samples=self.counted_samples(client, client.num_samples))
        )
        if update.metrics.get(NUM_TESTED, 0) > tested:
            update.metrics = {**update.metrics, NUM_TESTED: float(tested)}

    def count_unanswered(self, client: int, now: float, *, always: bool = False) -> None:
        """Count a task that its client never answered as a refusal if ``always`` is set, or if its round was closed without it."""
        number = self.roster.busy.get(client, self.roster.sending.get(client))
        if number is None or not (always or number in self.roster.late):
            return
        taken_s = now - self.roster.active[number].assigned_s if self.limits.suspends_by_time else None
        until = self.backoff.refuse(client, now, unanswered_s=taken_s)
        if until is not None:
            self._actions += [SetTimer(-client, until), Suspend(client, until, "not answered")]

    def _fail_if_hopeless(self, why: str) -> None:
        """End the run if it cannot go on because every client has been refused too often."""
        known = [client for client, num in self.roster.joins.items() if num]
        are_bad = len({*known, *self.absent}) >= self.limits.num_clients and all(map(self.backoff.is_bad, known))
        there = (*self.roster.clients, *self.roster.suspended)
        if are_bad or (there and all(map(self.backoff.is_hopeless, there))):
            self._actions.append(Fail(f"failed: {why}"))

    def lost(self, event: Lost, now: float) -> bool:
        """Remove a lost client; return False if the event is about an earlier connection of it."""
        client = self.roster.find(event.client)
        if client is not None and event.incarnation not in (None, client.incarnation):
            return False
        if client is not None:
            if event.reason != RESTART:
                self.count_unanswered(event.client, now, always=event.counts)
            # keep only the code before the colon: the free text after it would make each loss an outcome of its own
            kind = event.reason.partition(":")[0]
            self.drop(event.client, kind if kind in LOSSES else "other")
        return True

    def _narrow(self, assignment: Assignment) -> None:
        """Lower a client's assumed memory below the predicted need of a task that ran out of memory there."""
        client = self.roster.clients[assignment.client]
        needed = self.fleet.cost(assignment.spec, assignment.extra).peak_bytes
        self.roster.said_bytes.setdefault(client.id, client.profile.memory_bytes)
        self._with_memory(client, min(client.profile.memory_bytes, max(needed - 1, 1)))

    def open_round(self, now: float) -> None:
        """Tell the selector which clients are in the round; turn away clients that make the selector raise.

        An error that no client causes alone, or that each of several causes, is the method's own and is raised.
        """
        select = self.algorithm.select
        while out := self.roster.out:
            try:
                select.on_round_start(out, self.fleet)
                return
            except Exception as error:
                guilty = [client for client in out if raises(partial(select.on_round_start, [client], self.fleet))]
                if not guilty or (len(guilty) == len(out) > 1):
                    raise
                for client in guilty:
                    self.turn_away(client, error, now)

    def work_for(self, client: ClientInfo) -> Work:
        """Choose work for a client; if its lowered memory fits no work, restore the memory that it reported and choose again."""
        try:
            return self._selected(client)
        except BadInput:
            if client.id not in self.roster.said_bytes:
                raise
            return self._selected(self._with_memory(client, self.roster.said_bytes.pop(client.id)))

    def _selected(self, client: ClientInfo) -> Work:
        """Select a client's submodel, number of steps, and precision of the frozen base parameters."""
        work = self.algorithm.select(client, self.fleet)
        if self.above is not None:
            work = self.above.within(work)
        spec = self.fleet.choose_base(client, work.spec, work.extra)
        return work if spec is work.spec else replace(work, spec=spec)

    def _with_memory(self, client: ClientInfo, memory_bytes: float) -> ClientInfo:
        """Change a client's assumed memory; another task of it may go on, so it has neither left nor joined."""
        changed = replace(client, profile=replace(client.profile, memory_bytes=memory_bytes))
        select, is_alone = self.algorithm.select, self.fleet.rules.changes_memory_alone
        if not is_alone:
            select.on_loss(client, self.fleet)
        self.roster.clients[client.id] = changed
        (select.forget if is_alone else select.on_join)(changed, self.fleet)
        return changed

    def drop(self, client: int, reason: str) -> None:
        """Remove a client: its unanswered tasks are lost, the updates that it has sent stay."""
        if self.roster.suspended.pop(client, None) is not None:
            self.roster.said_bytes.pop(client, None)
            return
        gone = self.roster.clients[client]
        unanswered = self.roster.drop(client)
        try:
            self.algorithm.select.on_loss(gone, self.fleet)
        except Exception:
            if reason != ERROR:  # after ERROR the selector may lack the client, or fail again
                raise
        for assignment in unanswered:
            self.settle(assignment, client, f"lost:{reason}", 0, None)

    @property
    def num_good(self) -> int:
        """Number of clients present, except those whose recent updates were all refused."""
        return len(self.roster.clients) - sum(
            # the keys of both, so that the smaller one is iterated: with a dict it would be all clients
            map(self.backoff.is_bad, self.backoff.refused.keys() & self.roster.clients.keys())
        )

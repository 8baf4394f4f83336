"""Track which clients are present, what each works on, who may work next, and who is suspended for refused updates."""

from __future__ import annotations

import random
import statistics
from collections import Counter, OrderedDict
from dataclasses import replace

from raafl.core.sample import IdlePool, Sample
from raafl.core.types import Assignment, ClientInfo

FIRST_S = 10.0
"""Shortest duration of a client's first suspension, in seconds of the run's clock; each further one is twice as long."""

LONGEST_S = 3600.0
_REMEMBERED = 9
HOPELESS = 7
"""Number of suspensions in a row (21 minutes in all) after which no valid update is expected of a client."""

DAMAGED = frozenset({"bad-magic", "bad-version", "bad-checksum", "bad-record", "slow"})
"""Reasons of refusals that damage on the way may cause; they count against a connection, not against a client."""


class RefusalBackoff:
    """Record of each client's refused updates in a row, which suspends clients that have too many.

    After ``most`` refusals in a row a client is suspended for 10 s, next time for 20 s, and so on up to an hour. For a
    client that leaves tasks unanswered the first time is the median time of these tasks, if that is longer: what waits
    for such a client waits as long. An accepted update resets the count. A client that returns from a suspension is
    suspended again at its next refusal.

    `most`: number of refusals in a row that suspends a client.
    `refused`: number of refusals in a row, by client.
    `times`: number of suspensions in a row, by client.
    `until`: end of the current suspension in seconds of the run's clock, by client.
    `unanswered_s`: seconds that the latest tasks took which a client left unanswered in a row, by client.
    """

    def __init__(self, most: int) -> None:
        self.most = most
        self.refused: Counter[int] = Counter()
        self.times: Counter[int] = Counter()
        self.until: dict[int, float] = {}
        self.unanswered_s: dict[int, list[float]] = {}

    def refuse(
        self, client: int, now: float, *, excused: bool = False, unanswered_s: float | None = None
    ) -> float | None:
        """Count a refused update of ``client``; return the end of the suspension that follows, or None.

        `unanswered_s`: seconds from the assignment of a task that the client has left unanswered; None = it has
        answered.
        """
        self.refused[client] += 1
        if unanswered_s is not None:
            self.unanswered_s[client] = [*self.unanswered_s.get(client, ()), unanswered_s][-_REMEMBERED:]
        if excused or self.refused[client] < self.most:
            return None
        first_s = max(FIRST_S, statistics.median(self.unanswered_s.get(client, (0.0,))))
        self.until[client] = now + min(first_s * 2 ** min(self.times[client], 20), LONGEST_S)
        self.times[client] += 1
        return self.until[client]

    def condemn(self, client: int, now: float) -> float:
        """Suspend ``client`` at once, however few refusals it has; return the end of the suspension."""
        self.refused[client] = max(self.refused[client], self.most)
        until = self.refuse(client, now)
        assert until is not None
        return until

    def accept(self, client: int) -> None:
        """Forget the refusals and suspensions of ``client``, since an update of it was accepted."""
        for book in (self.refused, self.times, self.until, self.unanswered_s):
            book.pop(client, None)

    def keeps_out(self, client: int, now: float) -> bool:
        """Check whether ``client`` is still suspended at ``now``."""
        return now < self.until.get(client, now)

    def is_bad(self, client: int) -> bool:
        """Check whether at least the last ``most`` updates of ``client`` were refused."""
        return self.refused[client] >= self.most

    def is_hopeless(self, client: int) -> bool:
        """Check whether ``client`` was suspended so often, without an accepted update in between, that it is given up."""
        return self.times[client] >= HOPELESS

    def forgive(self) -> None:
        """Forget the refusals and suspensions of all clients."""
        for book in (self.refused, self.times, self.until, self.unanswered_s):
            book.clear()


class Roster:
    """Record of all clients and their assignments. Each client is idle, drawn (about to start), at work, or has reported.

    If clients may train while they send (`Coordinator.overlap`), the update of a client's previous task may still be on
    its way.

    `clients`: every client that joined and is neither lost nor suspended, by id.
    `gone`: ids of clients from before a restart of the server, until each is lost or has joined again.
    `suspended`: suspended clients that are still connected, by id.
    `said_bytes`: memory in bytes that clients declared, by id, for those that turned out to have less.
    `active`: assignments whose updates may still arrive, by assignment id.
    `away`: clients at work whose connection broke and that may still finish their task; no decision depends on this
    set.
    `late`: ids of unfinished assignments whose round has closed; their updates will be refused.
    `idle`: clients without work, from which the next ones are drawn.
    `drawn`: clients that were drawn to work and wait until concurrency allows them to start, in order.
    `busy`: id of the assignment on which a client works, by client id.
    `sending`: id of the assignment whose update travels while its client may work on the next, by client id.
    `tasks`: number of tasks that a client has had so far, by id.
    `joins`: number of times that a client has joined so far, by id.
    `last_id`: id of the newest assignment; ids count from 1.
    """

    def __init__(self) -> None:
        self.clients: dict[int, ClientInfo] = {}
        self.gone: set[int] = set()
        self.suspended: dict[int, ClientInfo] = {}
        self.said_bytes: dict[int, float] = {}
        self.active: dict[int, Assignment] = {}
        self.away: set[int] = set()
        self.late: set[int] = set()
        self.last_id = 0
        self.idle = IdlePool()
        self.drawn: OrderedDict[int, None] = OrderedDict()  # sampled clients in order; a dict, so that one can leave
        self.busy: dict[int, int] = {}  # by client: id of the assignment on which it works
        self.sending: dict[int, int] = {}
        self.tasks: Counter[int] = Counter()
        self.joins: Counter[int] = Counter()
        self._middle: int | None = None

    @property
    def num_out(self) -> int:
        """Number of updates that may still arrive: active tasks, and clients drawn to start."""
        return self.num_at_work + len(self.sending) + len(self.drawn)

    @property
    def num_at_work(self) -> int:
        """Number of tasks that count towards the limit of clients at work.

        These are the active tasks, but not those whose round has closed (`late`), since their clients may never answer,
        nor those that are trained and whose update is being sent (`sending`).
        """
        return len(self.active) - len(self.late) - len(self.sending)

    @property
    def middle(self) -> int:
        """Number of training samples of the median client; of two clients in the middle, the smaller number.

        A subfederation counts as its clients, each with an equal share of its samples.
        """
        if self._middle is None:
            counts = [(client.num_samples // client.stands_for, client.stands_for) for client in self.clients.values()]
            self._middle = statistics.median_low(num for num, times in counts for _ in range(times))
        return self._middle

    def find(self, client: int) -> ClientInfo | None:
        """Return the description of ``client``, suspended or not; None if it is not present."""
        return self.clients.get(client) or self.suspended.get(client)

    def declared(self, client: int) -> ClientInfo | None:
        """Return the description of ``client`` with the memory that it declared; None if it is not present."""
        found = self.find(client)
        if found is None or client not in self.said_bytes:
            return found
        return replace(found, profile=replace(found.profile, memory_bytes=self.said_bytes[client]))

    @property
    def out(self) -> list[ClientInfo]:
        """Clients whose updates may still be accepted: those at work, followed by those drawn to start."""
        at_work = [client for client, number in self.busy.items() if number not in self.late]
        return [self.clients[client] for client in (*at_work, *self.drawn)]

    def join(self, client: ClientInfo) -> None:
        """Register ``client`` as present and idle."""
        self.clients[client.id] = client
        self._middle = None
        self.joins[client.id] = max(self.joins[client.id], client.incarnation + 1)
        self.idle.add(client.id)

    def suspend(self, client: ClientInfo, said_bytes: float | None = None) -> None:
        """Register ``client`` as present but suspended.

        `said_bytes`: memory in bytes that the client declared, which counts again after the suspension; None = the
        memory in ``client``.
        """
        self.suspended[client.id] = client
        if said_bytes is not None:
            self.said_bytes[client.id] = said_bytes
        self.joins[client.id] = max(self.joins[client.id], client.incarnation + 1)

    def drop(self, client: int) -> list[Assignment]:
        """Remove ``client``; return its unfinished assignments, oldest first, which are no longer active."""
        del self.clients[client]
        self.gone.discard(client)
        self.away.discard(client)
        self.said_bytes.pop(client, None)
        self._middle = None
        self.idle.discard(client)
        self.drawn.pop(client, None)
        lost = [self.active[having[client]] for having in (self.sending, self.busy) if client in having]
        for assignment in lost:
            self.release(assignment, back=False)
        return lost

    def draw(self, sample: Sample, rng: random.Random, *, rolling: bool) -> bool:
        """Draw clients from the idle ones by the rule of ``sample``; return whether any were drawn."""
        chosen = sample.draw(self.idle, self.num_at_work + len(self.drawn), rng, rolling=rolling)
        self.drawn.update(dict.fromkeys(chosen))
        return bool(chosen)

    def next_to_start(self, concurrency: int | None) -> ClientInfo | None:
        """Remove and return the next drawn client; None if there is none or ``concurrency`` clients are already at work."""
        if not self.drawn or (concurrency is not None and self.num_at_work >= concurrency):
            return None
        return self.clients[self.drawn.popitem(last=False)[0]]

    def number(self, client: int) -> tuple[int, int]:
        """Return the id of the next assignment for ``client``, and the number of tasks that the client had before."""
        self.last_id += 1
        task = self.tasks[client]
        self.tasks[client] += 1
        return self.last_id, task

    def start(self, assignment: Assignment) -> None:
        """Record ``assignment`` as active and its client as busy."""
        self.active[assignment.id] = assignment
        self.busy[assignment.client] = assignment.id

    def send(self, assignment: Assignment) -> None:
        """Record that a client has begun to send its update for ``assignment``; the client becomes idle at once."""
        self.sending[assignment.client] = self.busy.pop(assignment.client)
        self.idle.add(assignment.client)

    def release(self, assignment: Assignment, *, back: bool) -> None:
        """Remove ``assignment`` from the active ones."""
        del self.active[assignment.id]
        self.late.discard(assignment.id)
        for having in (self.busy, self.sending):
            if having.get(assignment.client) == assignment.id:
                del having[assignment.client]
        if back:
            self.readmit(assignment.client)

    def readmit(self, client: int) -> None:
        """Make ``client`` idle after its task, if it is present, has no new task, and was not drawn to start one."""
        if client in self.clients and client not in self.busy and client not in self.drawn:
            self.idle.add(client)

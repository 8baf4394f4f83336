"""Track which clients are present, what each works on, and who may work next."""

from __future__ import annotations

import random
import statistics
from collections import Counter, OrderedDict

from raafl.core.sample import IdlePool, Sample
from raafl.core.types import Assignment, ClientInfo


class Roster:
    """Record of all clients and their assignments. Each client is idle, drawn (about to start), at work, or has reported.

    Attributes:
        clients: every client that joined and is neither lost nor suspended, by id.
        suspended: suspended clients that are still connected, by id.
        said_bytes: memory in bytes that a client declared, by id, for clients that turned out to have less.
        active: assignments whose updates may still arrive, by assignment id.
        away: clients at work whose connection broke and that may come back to their task; no decision depends on it.
        late: ids of active assignments whose round closed without them; their updates are refused.
        idle: clients that can be drawn.
        drawn: clients drawn to start as soon as concurrency allows, in order.
        busy: id of the assignment that a client works on, by client id.
        tasks: number of tasks that a client has had, by id.
        joins: number of times that a client joined, by id; its next incarnation.
        last_id: id of the newest assignment; ids count from 1.
    """

    def __init__(self) -> None:
        self.clients: dict[int, ClientInfo] = {}
        self.suspended: dict[int, ClientInfo] = {}
        self.said_bytes: dict[int, float] = {}
        self.active: dict[int, Assignment] = {}
        self.away: set[int] = set()
        self.late: set[int] = set()
        self.last_id = 0
        self.idle = IdlePool()
        self.drawn: OrderedDict[int, None] = OrderedDict()  # of a large fleet, whom anybody may leave
        self.busy: dict[int, int] = {}  # client -> assignment id
        self.tasks: Counter[int] = Counter()
        self.joins: Counter[int] = Counter()
        self._middle: int | None = None

    @property
    def num_out(self) -> int:
        """Number of updates that may still arrive: active tasks, and clients drawn to start."""
        return self.num_at_work + len(self.drawn)

    @property
    def num_at_work(self) -> int:
        """Number of active tasks, except late ones, so that a client that never answers does not use up concurrency."""
        return len(self.active) - len(self.late)

    @property
    def middle(self) -> int:
        """Lower median of all clients' numbers of training samples."""
        if self._middle is None:
            self._middle = statistics.median_low(client.num_samples for client in self.clients.values())
        return self._middle

    def find(self, client: int) -> ClientInfo | None:
        """Return ``client`` if it is present, suspended or not; else None."""
        return self.clients.get(client) or self.suspended.get(client)

    @property
    def out(self) -> list[ClientInfo]:
        """Ids of the clients at work, then of those drawn to start."""
        at_work = [client for client, number in self.busy.items() if number not in self.late]
        return [self.clients[client] for client in (*at_work, *self.drawn)]

    def join(self, client: ClientInfo) -> None:
        """Add ``client`` as idle."""
        self.clients[client.id] = client
        self._middle = None
        self.joins[client.id] = max(self.joins[client.id], client.incarnation + 1)
        self.idle.add(client.id)

    def suspend(self, client: ClientInfo, said_bytes: float | None = None) -> None:
        """Add ``client`` as suspended; ``said_bytes`` is the memory that it declared, to be restored when it returns."""
        self.suspended[client.id] = client
        if said_bytes is not None:
            self.said_bytes[client.id] = said_bytes
        self.joins[client.id] = max(self.joins[client.id], client.incarnation + 1)

    def drop(self, client: int) -> Assignment | None:
        """Remove ``client``; return the assignment that it was working on, which is no longer active, or None."""
        del self.clients[client]
        self.away.discard(client)
        self.said_bytes.pop(client, None)
        self._middle = None
        self.idle.discard(client)
        self.drawn.pop(client, None)
        if client not in self.busy:
            return None
        assignment = self.active[self.busy[client]]
        self.release(assignment, back=False)
        return assignment

    def draw(self, sample: Sample, rng: random.Random, *, rolling: bool) -> bool:
        """Draw clients from the idle ones by the part ``sample``; return whether any were drawn.

        Args:
            sample: the algorithm's sample part.
            rng: the run's random generator.
            rolling: whether clients start one by one as others end, rather than a cohort at a time.
        """
        chosen = sample.draw(self.idle, self.num_out, rng, rolling=rolling)
        self.drawn.update(dict.fromkeys(chosen))
        return bool(chosen)

    def next_to_start(self, concurrency: int | None) -> ClientInfo | None:
        """Remove and return the next drawn client; None if ``concurrency`` clients are at work already or none is drawn."""
        if not self.drawn or (concurrency is not None and self.num_at_work >= concurrency):
            return None
        return self.clients[self.drawn.popitem(last=False)[0]]

    def number(self, client: int) -> tuple[int, int]:
        """Return the id and the task number of the next assignment for ``client``."""
        self.last_id += 1
        task = self.tasks[client]
        self.tasks[client] += 1
        return self.last_id, task

    def start(self, assignment: Assignment) -> None:
        """Record ``assignment`` as active and its client as busy."""
        self.active[assignment.id] = assignment
        self.busy[assignment.client] = assignment.id

    def release(self, assignment: Assignment, *, back: bool) -> None:
        """Remove ``assignment`` from the active ones; with ``back``, its client becomes idle at once."""
        del self.active[assignment.id]
        self.late.discard(assignment.id)
        self.busy.pop(assignment.client, None)
        if back:
            self.idle.add(assignment.client)

    def readmit(self, client: int) -> None:
        """Make ``client`` idle after it has reported, if it is present and not at work again."""
        if client in self.clients and client not in self.busy:
            self.idle.add(client)

"""Who is there, who works on what, who may work next: the coordinator's books on clients and assignments."""

from __future__ import annotations

import random
import statistics
from collections import Counter, OrderedDict

from raafl.core.sample import IdlePool, Sample
from raafl.core.types import Assignment, ClientInfo


class Roster:
    """Clients and their assignments. A client is idle, drawn (to start as soon as it may), at work, or reported.

    Attributes:
        clients: all that have joined and are not lost, by id, but for those kept out.
        kept_out: who is there and may not take part yet, by id.
        said_bytes: memory that each client has said it has, where a task has shown that it is less.
        active: assignments that are out, by id.
        late: those of them that a round was closed without, where their updates are refused.
        idle: who could be drawn.
        drawn: who has been drawn to start as soon as concurrency allows, in order.
        busy: what each client works on, by assignment id.
        tasks: how many tasks each client has had.
        joins: how often each client has joined: the incarnation of its next life.
        last_id: the newest assignment's id; ids count from 1.
    """

    def __init__(self) -> None:
        self.clients: dict[int, ClientInfo] = {}
        self.kept_out: dict[int, ClientInfo] = {}
        self.said_bytes: dict[int, float] = {}
        self.active: dict[int, Assignment] = {}
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
        """Tasks that may still report: those out, and those drawn to start."""
        return self.num_at_work + len(self.drawn)

    @property
    def num_at_work(self) -> int:
        """Tasks that are out, but for late ones: who never answers takes nobody's place."""
        return len(self.active) - len(self.late)

    @property
    def middle(self) -> int:
        """The lower median of the clients' numbers of samples."""
        if self._middle is None:
            self._middle = statistics.median_low(client.num_samples for client in self.clients.values())
        return self._middle

    def find(self, client: int) -> ClientInfo | None:
        """Return a client that is there, kept out or not; None = it is not."""
        return self.clients.get(client) or self.kept_out.get(client)

    @property
    def out(self) -> list[ClientInfo]:
        """Clients at work, then those drawn to start."""
        at_work = [client for client, number in self.busy.items() if number not in self.late]
        return [self.clients[client] for client in (*at_work, *self.drawn)]

    def join(self, client: ClientInfo) -> None:
        """Add an idle client."""
        self.clients[client.id] = client
        self._middle = None
        self.joins[client.id] = max(self.joins[client.id], client.incarnation + 1)
        self.idle.add(client.id)

    def keep_out(self, client: ClientInfo, said_bytes: float | None = None) -> None:
        """Add a client that may not take part yet; ``said_bytes`` is remembered of it."""
        self.kept_out[client.id] = client
        if said_bytes is not None:
            self.said_bytes[client.id] = said_bytes
        self.joins[client.id] = max(self.joins[client.id], client.incarnation + 1)

    def drop(self, client: int) -> Assignment | None:
        """Forget a client and return what it was working on, now off the books."""
        del self.clients[client]
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
        """Let ``sample`` choose among the idle; return whether it chose anybody."""
        chosen = sample.draw(self.idle, self.num_out, rng, rolling=rolling)
        self.drawn.update(dict.fromkeys(chosen))
        return bool(chosen)

    def next_to_start(self, concurrency: int | None) -> ClientInfo | None:
        """Remove and return the next client drawn, if one more may work."""
        if not self.drawn or (concurrency is not None and self.num_at_work >= concurrency):
            return None
        return self.clients[self.drawn.popitem(last=False)[0]]

    def number(self, client: int) -> tuple[int, int]:
        """Return the id and the task number of the next assignment, to ``client``."""
        self.last_id += 1
        task = self.tasks[client]
        self.tasks[client] += 1
        return self.last_id, task

    def start(self, assignment: Assignment) -> None:
        """Put an assignment on the books."""
        self.active[assignment.id] = assignment
        self.busy[assignment.client] = assignment.id

    def release(self, assignment: Assignment, *, back: bool) -> None:
        """Take an assignment off the books; ``back`` makes its client idle at once."""
        del self.active[assignment.id]
        self.late.discard(assignment.id)
        self.busy.pop(assignment.client, None)
        if back:
            self.idle.add(assignment.client)

    def readmit(self, client: int) -> None:
        """Make a client that has reported idle, if it is still there and not at work again."""
        if client in self.clients and client not in self.busy:
            self.idle.add(client)

"""Drive coordinators of several levels in one process: a client of one may be the server of another."""

from __future__ import annotations

from collections import deque
from dataclasses import replace

from raafl.core.hooks import RunHooks
from raafl.core.subfederation import TaskBelow, check_contributions
from raafl.core.types import Arrived, Assign, Joined, Received, Settled, Timer
from raafl.runtime.driver import snapshots_of
from raafl.runtime.setup import build, make_executor


class _Wait:
    """Executor that trains nothing: tasks of the level above wait until the test starts them."""

    waits = True

    def merged(self, now):
        pass

    def next_to_start(self, concurrency):
        return None


class Level:
    """A server whose clients train in this process, or are servers of a level below.

    `events`: events of the coordinator in order. `settled`: outcomes of its tasks.
    """

    def __init__(self, experiment, clients):
        """Let ``clients`` join: by client id the server of a level below, or None for a plain client."""
        parts = build(experiment, pace=False, min_clients=len(clients), count_lost=False)
        self.parts, self.coordinator, self.clients = parts, parts.coordinator, clients
        self.executor, self.snapshots = make_executor(parts, 1), snapshots_of(parts.coordinator)
        self.settled, self.events, self._due, self._task = [], [], deque(), TaskBelow()
        self.hooks = RunHooks()
        for client, below in clients.items():
            info = parts.clients[client - 1]
            if below is not None:
                num = sum(each.num_samples for each in below.coordinator.roster.clients.values())
                info = replace(info, below=below.num_leaves, num_samples=num, own_data=True)
            self.tell(Joined(info))

    @property
    def values(self):
        return self.coordinator.state.values

    @property
    def num_leaves(self):
        return sum(1 if below is None else below.num_leaves for below in self.clients.values())

    def start_together(self, groups):
        """Let the clients of each group start their next tasks together, once the last of them has reported, and run on."""
        while self._due and self.coordinator.finished is None:
            group = next(group for group in groups if self._due[0][0].client in group)
            self.coordinator.change(above=_Wait())
            for _ in group:
                self._work()
            self.coordinator.change(above=None)
            self.tell(Timer(10**9))  # a timer of no part: the coordinator then looks which clients may start
        return self

    def tell(self, event, now=0.0):
        self.events.append(event)
        for action in self.coordinator.handle(event, now):
            if isinstance(action, Assign):
                self._due.append((action.assignment, self.snapshots.cut(action.assignment)))
            elif isinstance(action, Settled):
                self.settled.append(action)
                self._task.add(action)
                self.hooks.on_settled(action, now)
        self.hooks.on_event(event, self.coordinator, now)

    def run(self):
        """Work until no client has a task, or the run has ended."""
        while self._due and self.coordinator.finished is None:
            self._work()
        return self

    def _work(self):
        assignment, snapshot = self._due.popleft()
        below = self.clients[assignment.client]
        if below is None:
            self.executor.submit(assignment, snapshot, 0.0)
            update = self.executor.result(assignment.id)
        else:
            update = below.train(assignment, snapshot, self.coordinator.algorithm.merge.sends)
            submodels = self.coordinator.state.submodels
            told = check_contributions(update.contributions, submodels, assignment.spec, below.num_leaves)
            update.contributions = told
        self.snapshots.give_back(snapshot)
        self.tell(Arrived(update))

    def train(self, assignment, received, sends):
        """Train a task that the level above has assigned to this level as one client."""
        self._task = TaskBelow()
        self.tell(Received(assignment.id, assignment.version, assignment.spec, received))
        self.run()
        assert self.coordinator.above.waits
        return self._task.update(
            assignment,
            self.coordinator.state.submodels,
            received,
            self.values,
            sends=sends,
            num_merges=self.coordinator.above.num_merges,
            most_samples=10**9,
        )

"""Run on the wall clock: the server coordinates clients in processes of their own, one connection for each.

Sessions (`raafl.runtime.server.session_loop`) send and receive; the loop below takes what they report, in order, and is the
only one to touch the global state. Evaluation and checkpoints work on snapshots in threads of their own; a merge waits for
their copy alone, and for a checkpoint that is still being written when the next is due.
"""

from __future__ import annotations

import heapq
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

from raafl.config.options import Timeouts
from raafl.core.coordinator import TIME_UP, Coordinator
from raafl.core.hooks import RunHooks
from raafl.core.roster import Roster
from raafl.core.snapshots import Snapshots
from raafl.core.types import ERROR, RESTART, Arrived, Assignment, Event, Joined, Lost, Stop, Timer
from raafl.errors import USER_ERRORS, CodeFailed, TaskFailed, format_error
from raafl.local.evaluate import Evaluator
from raafl.local.failure import leave_traceback, of_evaluation, of_server
from raafl.log import Notices
from raafl.runfolder.record import RunRecord
from raafl.runtime.driver import Driver
from raafl.runtime.extensions import extensions_of
from raafl.runtime.lifecycle.signals import Interrupt
from raafl.runtime.protocol import PAUSED
from raafl.runtime.server.link import Away, Back, ForExtension, Inbox, Item, Resumption, Unassigned
from raafl.runtime.server.session import Session
from raafl.submodel import FlatTensors
from raafl.submodel.tensor_files import NoRoom, PayloadRoom
from raafl.transport import Refused
from raafl.units import duration, quantity

_Life = tuple[int, int]  # client id and incarnation, which identify a session
_MAX_ENTERING = 4
_MAX_KEPT = 20  # number of tracebacks that are saved
_MAX_LIVES = 8  # sessions that a client may have at once, with those that start or end
_ABANDONED_S = 5.0  # seconds in which sessions must end after their connections are closed
_TURN_S = 1.0  # longest turn of the loop that counts as a wait for clients; without events one takes 0.5 s
_LOOK_S = 0.05  # seconds between two looks for clients that come back at the run's end
_PARTING_S = 0.5  # seconds in which a replaced session may end by itself


class LoopExtension:
    """Extension of a real run's main loop by an optional feature; this base adds nothing. See `raafl.runtime.extensions`."""

    def __init__(self, server: Server) -> None:
        self.server = server

    @classmethod
    def notes(cls, *, certified: bool) -> list[str]:
        """Return lines to show before the run starts. ``certified``: whether both ends have certificates."""
        return []

    @property
    def is_busy(self) -> bool:
        """Whether the coordinator is to hear of nothing, timers included."""
        return False

    @property
    def least(self) -> int:
        """Smallest number of clients with which the run can go on."""
        return 1

    def take(self, item: Event | ForExtension | None) -> Event | ForExtension | None:
        """Take what a session has said, called in each turn of the loop; return what others are to see of it."""
        return item


class Server(Driver):
    """Runtime on the wall clock: passes events from real clients to a coordinator."""

    def __init__(
        self,
        coordinator: Coordinator,
        inbox: Inbox,
        record: RunRecord,
        evaluator: Evaluator | None,
        *,
        waits: Timeouts | None = None,
        hooks: RunHooks | None = None,
        progress: Notices | None = None,
        announce: Callable[[int | None, str], None] = lambda client, reason: None,
        patience_s: float | None = None,
        max_failures: int | None = None,
        storage: PayloadRoom | None = None,
    ) -> None:
        """Create the server of a run; `run` starts its clock.

        ``announce`` is called with the reason why a client (None = all) is released. ``storage`` allocates the values
        to send; None = in memory. With ``patience_s`` clients may join and leave at any time (`enter`), and the run
        fails after that many seconds without any. Without it all clients must enter before `run`, and the run fails
        when none is left.
        ``max_failures``: largest number of equal failures of the user's code before the run fails; None = no limit,
        since other clients may have valid data.
        """
        super().__init__(coordinator, record, evaluator, hooks, progress)
        self._max_failures, self._failures, self._num_failures = max_failures, Counter[tuple[int, str, str]](), 0
        self._announce = announce
        self._patience_s, self._alone_s, self._looked_s = patience_s, 0.0, 0.0
        self.inbox, self.waits = inbox, waits or Timeouts()
        self.sessions: dict[int, Session] = {}
        self._evaluator = SnapshotEvaluator(evaluator, self.hooks.on_values) if evaluator is not None else None
        self.storage = storage or PayloadRoom()
        self._snapshots = Snapshots(coordinator, self.storage)
        # values that were sent, by session and task; a session's thread may read them until the update has arrived or
        # the session has ended, after which they are released for reuse
        self._sent: dict[_Life, dict[int, FlatTensors]] = {}
        # The lock guards the next four attributes, which transport threads use in `enter`. All else, such as global
        # state, coordinator and record, belongs to the loop's thread.
        self._entering: dict[_Life, Session] = {}  # sessions of clients that have not joined yet
        self._lives: Counter[int] = Counter()
        self._farewell, self._is_closed = "", False  # farewell: reason that clients are told after the run's end
        self._enter_lock = threading.Lock()
        # sessions to be closed at a given time unless they end before
        self._leaving: list[tuple[float, Session]] = []
        self._timers: list[tuple[float, int]] = []
        self._links = LinkTracker(coordinator.roster, lambda row: record.link(row, self.now), self.note, self._offer)
        self._extensions: list[LoopExtension] = [make(self) for make in extensions_of(coordinator, "loop")]
        # `time.perf_counter` at time 0 of the clock; None = the clock stands still until the first task
        self._start: float | None = None
        self._resumed_at = 0.0  # time of the clock while it stands still
        self._standing_since = 0.0
        self._interrupt = Interrupt()

    @property
    def now(self) -> float:
        """Seconds on the run's clock, which starts with the first task: the time until clients have joined does not count."""
        return self._resumed_at if self._start is None else time.perf_counter() - self._start

    def save(self) -> dict[str, Any]:
        """Return the run's time and timers as plain data, for a checkpoint."""
        return {"now": self.now, "timers": [[at, number] for at, number in self._timers]}

    def restore(self, data: dict[str, Any]) -> None:
        """Restore time and timers from the result of `save`; clients must connect again."""
        self._resumed_at = data["now"]
        self._timers = [(at, number) for at, number in data["timers"] if number != TIME_UP]
        limit = self.coordinator.limits.max_time_s
        if limit is not None and self.coordinator.started:
            self._timers.append((limit, TIME_UP))
        heapq.heapify(self._timers)

    def enter(self, client: int, make: Callable[[int], Session]) -> None:
        """Admit a client; if an earlier session of the client is still open, end that session. Callable from any thread.

        ``make`` returns the new session; its argument is the number of times that the client has joined.

        Raises:
            Refused: this client opens too many connections at once, or the run has ended.
        """
        if self._patience_s is None:
            self.sessions[client] = make(self.coordinator.roster.joins[client])
            return
        with self._enter_lock:
            if self._is_closed:
                raise Refused("stopped", self._farewell)
            entering = sum(client == other for other, _ in self._entering)
            lives = entering + sum(client == session.client for _, session in list(self._leaving)) + 1
            if entering >= _MAX_ENTERING or lives >= _MAX_LIVES:
                raise Refused("busy", f"client {client} has {lives} connections, {entering} of them on their way in")
            incarnation = max(self._lives[client], self.coordinator.roster.joins[client])
            self._lives[client] = incarnation + 1
            session = self._entering[client, incarnation] = make(incarnation)
            if self._farewell:
                session.stop(self._farewell)  # sent as its first message, since the last evaluation may take minutes
            session.start()  # start within the lock, so that `close` finds each thread that starts

    def run(self) -> str:
        """Run until the coordinator finishes; return the reason. Sessions that have not ended then are closed by `close`."""
        self._looked_s = self._standing_since = time.perf_counter()
        roster = self.coordinator.roster
        before = [] if self.reason else [*roster.clients.values(), *roster.suspended.values()]
        for client in sorted(before, key=lambda client: client.id):
            # clients from before the restart are gone, and have to join again
            self._handle(Lost(client.id, RESTART, client.incarnation), self.now)
        if self._evaluator is not None:
            self._evaluator.start()
            self._evaluate_again()
        for session in self.sessions.values():
            session.start()
        if not self.coordinator.started:
            wait_s = self.waits.join_s if self._patience_s is None else self._patience_s
            wanted = quantity(self.coordinator.limits.min_clients, "client")
            self.note(f"waiting for {wanted}, for {duration(wait_s)} at most")
        with self._interrupt:
            try:
                if self.record.reached and not self.reason:  # the initial model may meet the targets
                    self.tell(Stop("target"))
                while not self.reason:
                    self._turn()
            except KeyboardInterrupt:
                self.stop("interrupted")
            except USER_ERRORS as error:  # clients' errors do not get here, since the coordinator handles them
                self._fail(of_server(error))
            finally:
                self._end()
        return self._ended()

    def _blame(self, client: int, error: Exception) -> None:
        self.record.turned_away(ERROR)
        self._keep_traceback(f"client {client} was disconnected: {format_error(error)}", error)

    def _keep_traceback(self, why: str, error: Exception) -> None:
        """Warn of an error that the run survives, and save its traceback unless `_MAX_KEPT` were saved."""
        self._num_failures += 1
        if self.progress is not None:
            self.progress.warn(why)
        if self.record.folder is not None and self._num_failures <= _MAX_KEPT:
            leave_traceback(self.record.folder.path, why, error)

    def _turn(self) -> None:
        """Wait for an event or the next timer, and handle what comes first."""
        wait = min(self._timers[0][0] - self.now, 0.5) if self._timers else 0.5
        event = self._taken(self._links.process(self.inbox.get(max(wait, 0.0))))
        if self._interrupt.asked:  # clients that got the same Ctrl-C must not count as lost
            self.stop("interrupted")
            return
        self._pass_suspension()
        busy = any(extension.is_busy for extension in self._extensions)
        while not busy and self._timers and self._timers[0][0] <= self.now and not self.reason:
            self.tell(Timer(heapq.heappop(self._timers)[1]))
        if event is not None and not self.reason:
            self.tell(event)
        if self._evaluator is not None and not self.reason:
            self._take_metrics(self._evaluator.done())
            self._fail(self._evaluator.failure)
        self._stop_if_asked()
        if not self.reason:
            self._look_after_sessions()
        if event is None and self.progress is not None:
            self.progress.update()  # the display shows the seconds that have passed

    def _pass_suspension(self) -> None:
        """Move the clock, which stands still before the start, to the end of a suspension that has passed in real time."""
        if self._start is None and self._timers and self._timers[0][1] != TIME_UP:
            at, now = self._timers[0][0], time.perf_counter()
            if at - self._resumed_at <= now - self._standing_since:
                self._resumed_at, self._standing_since = max(at, self._resumed_at), now

    def _offer(self, asked: Resumption) -> bool:
        """Offer a client's new connection to its earlier session; return whether the session goes on with it."""
        session = self.sessions[asked.client] if self._is_current(asked.client, asked.wanted) else None
        if session is None or not session.offer(asked.pair, asked.position):
            return False
        with self._enter_lock:
            return self._entering.pop((asked.client, asked.incarnation), None) is not None

    def _taken(self, item: Event | ForExtension | None) -> Event | None:
        """Pass a received item through the extensions; return what remains as event for the coordinator, or None."""
        for extension in self._extensions:
            item = extension.take(item)
        assert not isinstance(item, ForExtension)
        return item

    def _fail(self, error: CodeFailed | None) -> None:
        """End the run because of ``error`` in the user's code; do nothing for None."""
        if error is not None:
            self.error = self.error or error
            self.stop(f"failed: {error}")

    def _look_after_sessions(self) -> None:
        """Close replaced sessions that do not end; end the run if too few clients have been connected for too long."""
        now, there = time.perf_counter(), len(self.sessions)
        # a turn that took long (a merge, a suspended machine) was no wait for clients: they could not have come in
        waited_s, self._looked_s = min(now - self._looked_s, _TURN_S), now
        for until, session in list(self._leaving):
            if not session.is_alive():
                self._leaving.remove((until, session))
                self._sent_no_more(session.client, session.incarnation)
            elif until <= now:
                session.abandon()
        least = max((extension.least for extension in self._extensions), default=1)
        if self._patience_s is None:
            if there < least:
                every = "every client was lost" if not there else f"only {there} clients are left, of {least} or more"
                self.stop(f"failed: {every}")
            return
        good = self.coordinator.admission.num_good
        if good >= least and self.coordinator.started:
            self._alone_s = 0.0
        elif not self._entering:
            self._alone_s += waited_s
        if self._alone_s > self._patience_s:
            wanted = max(least, 0 if (started := self.coordinator.started) else self.coordinator.limits.min_clients)
            of = "" if started and least == 1 else f" of {wanted}"
            bad = f", and {there - good} whose updates are refused," if there > good else ""
            self.stop(f"failed: {good}{of} clients{bad} for {self._patience_s:g} s (waits.alone_s)")

    def _admit(self, event: Event, now: float) -> bool:
        if isinstance(event, Arrived):
            assignment = self.coordinator.roster.active.get(event.update.assignment)
            event.update.train_s = now - assignment.assigned_s if assignment is not None else 0.0
            self._sent_no_more(event.update.client, event.update.incarnation, event.update.assignment)
        elif isinstance(event, Joined):
            return self._take_in(event)
        elif isinstance(event, Lost):
            return self._let_go(event)  # the coordinator does not know a client that never joined
        return True

    def _handle(self, event: Event, now: float) -> None:
        super()._handle(event, now)
        if isinstance(event, Lost) and event.failure is not None:
            self._take_failure(event.failure)

    def _take_failure(self, failure: TaskFailed) -> None:
        """Report a failure of a client's code; end the run if there were too many, else save the traceback."""
        if self._max_failures is not None:
            self._failures[failure.kind] += 1
            if self._failures[failure.kind] > self._max_failures:
                self._fail(failure)
                return
        self._keep_traceback(str(failure), failure)

    def _deliver(self, assignment: Assignment) -> None:
        if self._start is None:
            self._start = time.perf_counter() - self._resumed_at
        # record the task before it is sent, so that its id is not used again after any failure
        self.record.assigned(assignment)
        session = self.sessions.get(assignment.client)
        if session is not None:
            try:
                snapshot = self._snapshots.cut(assignment)
            except NoRoom as error:
                session.fail(error)
                return
            self._sent.setdefault((assignment.client, assignment.incarnation), {})[assignment.id] = snapshot
            session.assign(assignment, snapshot, None if self.record.folder is None else self.record.folder.head)

    def _set_timer(self, id: int, at: float) -> None:
        heapq.heappush(self._timers, (at, id))

    def _measure(self, version: int, now: float) -> None:
        assert self._evaluator is not None
        self._evaluator.offer(version, now, self.coordinator.state.values)

    def _dismiss(self, client: int, incarnation: int, reason: str) -> None:
        """Tell a client that no work fits it, and close its session."""
        if self._is_current(client, incarnation):
            session = self.sessions.pop(client)
            self._announce(client, f"refused: {reason}")
            session.stop(f"refused: {reason}")
            self._leaving.append((time.perf_counter() + self.waits.stop_s, session))
        super()._dismiss(client, incarnation, reason)

    def _take_metrics(self, results: list[tuple[int, float, dict[str, float]]]) -> None:
        for version, at_s, measured in results:
            if self._measured(version, at_s, measured) and not self.reason:
                self.tell(Stop("target"))

    def _end(self) -> None:
        """Release the clients, and wait for the last evaluation."""
        is_paused = self.reason == "interrupted" and self._patience_s is not None and self._interrupt.by_manager
        farewell = PAUSED if is_paused else self.reason or "failed"
        # announce the reason before any connection closes, since a client whose connection closes looks for it
        self._announce(None, farewell)
        with self._enter_lock:
            # clients that are entering may still be building their models
            self._farewell, entering = farewell, list(self._entering.values())
        for session in [*self.sessions.values(), *entering]:
            session.stop(farewell)
        if self._evaluator is not None:  # its thread has ended if an evaluation has failed
            self._take_metrics(self._evaluator.finish(self.waits.eval_s))
            self.error = self.error or self._evaluator.failure
            if self._evaluator.is_alive() and self.progress is not None:
                self.progress.warn(f"the last evaluation did not end within waits.eval_s = {self.waits.eval_s:g} s")
        deadline = time.monotonic() + self.waits.stop_s
        for session in self.sessions.values():
            session.join(timeout=max(deadline - time.monotonic(), 0.0))
        if self.reason != "interrupted":
            self._await_absent(deadline)

    def _await_absent(self, deadline: float) -> None:
        """Give clients whose connection broke during their last task time to come back, and to hear that the run is over."""
        absent = set(self.coordinator.roster.away)
        if absent:
            self.note(f"{quantity(len(absent), 'client')} away may still come back and hear of the end")
        while absent and time.monotonic() < deadline:
            with self._enter_lock:
                absent -= {client for client, _ in self._entering}
            time.sleep(_LOOK_S)
        with self._enter_lock:
            entering = list(self._entering.values())
        for session in entering:
            session.join(timeout=max(deadline - time.monotonic(), 0.0))

    def close(self) -> None:
        """Close the connections of clients that are still connected."""
        with self._enter_lock:
            self._is_closed = True  # clients that connect before the port is closed must be refused
            everyone = [*self.sessions.values(), *self._entering.values(), *(session for _, session in self._leaving)]
        for session in everyone:
            if session.is_alive():
                session.abandon()
        deadline = time.monotonic() + _ABANDONED_S  # one deadline for all sessions, of which there may be ten thousand
        for session in everyone:
            if session.is_alive():
                session.join(timeout=max(deadline - time.monotonic(), 0.0))

    def _take_in(self, event: Joined) -> bool:
        """Make the session of a client that joined its active one, and stop the session that it replaces.

        Of two connections of a client the newer counts, whichever HELLO comes first; return False for the older.
        """
        client = event.client.id
        with self._enter_lock:
            session = self._entering.pop((client, event.client.incarnation), None)
        if session is None:  # the session was active from the start, as under torchrun
            if not self.coordinator.started:
                there = len(self.coordinator.roster.clients) + 1
                self.note(f"client {client} joined; {there} of {self.coordinator.limits.min_clients} are here")
            return True
        earlier = self.sessions.get(client)
        is_newer = earlier is None or earlier.incarnation < session.incarnation
        if is_newer:
            self.sessions[client] = session
            self._note_clients(f"client {client} joined{' again' if self.coordinator.roster.joins[client] else ''}")
        if earlier is not None:
            replaced = earlier if is_newer else session
            replaced.stop(f"replaced: client {client} has joined from elsewhere", wait_s=0.0)
            self._leaving.append((time.perf_counter() + min(_PARTING_S, self.waits.stop_s), replaced))
        return is_newer

    def _let_go(self, event: Lost) -> bool:
        """Remove a session that has ended; return whether its client had joined."""
        client, incarnation = event.client, event.incarnation or 0
        self._sent_no_more(client, incarnation)
        with self._enter_lock:
            entering = self._entering.pop((client, incarnation), None)
        if entering is not None:
            kind, _, detail = event.reason.partition(": ")
            self.record.turned_away(detail.partition(":")[0] if kind == "disconnected" else kind)
        elif self._is_current(client, incarnation):
            session = self.sessions.pop(client)
            if event.failure is not None:  # the client waits for a stop message
                session.stop(event.reason)
                self._leaving.append((time.perf_counter() + self.waits.stop_s, session))
            self._announce(client, f"lost: {event.reason}")
        text = f"client {client} was {'refused' if entering is not None else 'lost'}: {event.reason}"
        (self.note if self._patience_s is None else self._note_clients)(text)
        return entering is None

    def _note_clients(self, text: str) -> None:
        """Show ``text``, with the number of connected clients and of those that the run needs to start."""
        if self.progress is None:
            return
        there, wanted = len(self.sessions), self.coordinator.limits.min_clients
        here = f"{quantity(there, 'client')} {'are' if there != 1 else 'is'} here"
        if not self.coordinator.started and there < wanted:
            here += f", the run starts with {wanted}"
        self.note(f"{text}; {here}")

    def _is_current(self, client: int, incarnation: int) -> bool:
        return client in self.sessions and self.sessions[client].incarnation == incarnation

    def _sent_no_more(self, client: int, incarnation: int, assignment: int | None = None) -> None:
        """Release the values that were sent with a session's task (None = with all its tasks), which nobody reads any more."""
        tasks = self._sent.get((client, incarnation), {})
        for number in [number for number in tasks if assignment in (None, number)]:
            self._snapshots.give_back(tasks.pop(number))
        if not tasks:
            self._sent.pop((client, incarnation), None)


class SnapshotEvaluator(threading.Thread):
    """Evaluator on its own thread. If a newer snapshot is offered before one is evaluated, the older one is skipped.

    `failure`: error of the user's code in an evaluation, after which nothing more is evaluated; None = no error.
    """

    def __init__(self, evaluator: Evaluator, on_values: Callable[[int, dict[str, float], FlatTensors], None]) -> None:
        """Create the evaluation thread; ``on_values`` is called after each evaluation with version, metrics and values."""
        super().__init__(name="evaluator", daemon=True)
        self._evaluator, self._changed, self._ended = evaluator, threading.Condition(), False
        self._on_values = on_values
        self._next: tuple[int, float, FlatTensors] | None = None
        self._spare: FlatTensors | None = None
        self._done: list[tuple[int, float, dict[str, float]]] = []
        self.failure: CodeFailed | None = None

    def offer(self, version: int, at_s: float, values: FlatTensors) -> None:
        """Copy a snapshot of the model for evaluation, replacing a snapshot that still waits; return once it is copied."""
        with self._changed:
            # the waiting snapshot may be overwritten; one that is being evaluated is in neither variable
            snapshot = self._next[2] if self._next is not None else self._spare
            self._spare = None
            if snapshot is None:
                snapshot = values.clone()
            else:
                snapshot.copy_(values)
            self._next = (version, at_s, snapshot)
            self._changed.notify()

    def done(self) -> list[tuple[int, float, dict[str, float]]]:
        """Return (version, time of the snapshot, metrics) of each evaluation that was finished since the last call."""
        with self._changed:
            done, self._done = self._done, []
            return done

    def finish(self, timeout_s: float) -> list[tuple[int, float, dict[str, float]]]:
        """Evaluate the waiting snapshot, end the thread, and return the last results; give up after ``timeout_s`` seconds."""
        with self._changed:
            self._ended = True
            self._changed.notify()
        self.join(timeout_s)
        return self.done()

    def run(self) -> None:
        """Evaluate offered snapshots until `finish` is called; this is the main function of the thread."""
        while True:
            with self._changed:
                while self._next is None and not self._ended:
                    self._changed.wait()
                if self._next is None:
                    return
                version, at_s, snapshot = self._next
                self._next = None
            try:
                metrics = self._evaluator(snapshot, version)
                # called within `try`, so that its errors end the run and not only this thread
                self._on_values(version, metrics, snapshot)
            except USER_ERRORS as error:
                with self._changed:
                    self.failure = of_evaluation(error, version)
                return
            with self._changed:  # not held during an evaluation, for which the run's loop must not wait
                self._done.append((version, at_s, metrics))
                self._spare = snapshot


class LinkTracker:
    """Tracker of broken connections: it marks their clients as away until they are back, and writes to journal and log.

    The coordinator gets no event for a broken or resumed connection, since the client's task goes on.
    """

    def __init__(
        self,
        roster: Roster,
        write: Callable[[Mapping[str, Any]], None],
        note: Callable[[str], None],
        offer: Callable[[Resumption], bool],
    ) -> None:
        self._roster, self._write, self._note, self._offer = roster, write, note, offer

    def process(self, item: Item | None) -> Event | ForExtension | None:
        """Process an item of the inbox if it is about a broken or resumed connection, and return None; return any other item."""
        if isinstance(item, Resumption):
            item.is_taken.put(self._offer(item))
        elif isinstance(item, Unassigned):
            client = self._roster.find(item.client)
            is_current = client is not None and client.incarnation == item.incarnation
            item.assignment.put(self._roster.busy.get(item.client) if is_current else None)
        elif isinstance(item, Away | Back):
            client = self._roster.find(item.client)
            # otherwise another session has replaced this one
            if client is not None and client.incarnation == item.incarnation:
                self._tell(item)
        else:
            return item
        return None

    def _tell(self, item: Away | Back) -> None:
        row = {"client": item.client, "incarnation": item.incarnation, "assignment": item.assignment}
        if isinstance(item, Away):
            self._roster.away.add(item.client)
            self._write({"event": "away", **row, "reason": item.reason})
            kept = f"its task {item.assignment} is kept for {duration(item.wait_s)}"
            self._note(f"client {item.client} is away ({item.reason}); {kept}")
            return
        self._roster.away.discard(item.client)
        self._write({"event": "back", **row, "chunks": item.num_chunks, "away_s": item.away_s})
        here = f"; {item.num_chunks} chunks of its update had arrived" if item.num_chunks else ""
        self._note(f"client {item.client} is back after {duration(item.away_s)}{here}")

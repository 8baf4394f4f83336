"""The server's side of one client: its pair, and the thread that sends it work and receives its answers."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

import raafl
from raafl.core.types import Arrived, Assignment, ClientInfo, Joined, Lost, Update, assignment_to_json, client_from_json
from raafl.runtime.inbox import Inbox
from raafl.runtime.transport import Kind, Message, Pair, PeerLost, PeerTimeout, Refused
from raafl.submodel import FlatTensors, Layout, Submodels


@dataclass(frozen=True, slots=True)
class Waits:
    """Deadlines, in seconds.

    Attributes:
        join_s: for a client to be there.
        task_s: for the answer to an assignment.
        idle_s: for a client to hear anything at all; the server says it is alive three times as often.
        stop_s: for threads and clients to end.
    """

    join_s: float = 120.0
    task_s: float = 600.0
    idle_s: float = 60.0
    stop_s: float = 10.0


@dataclass(frozen=True, slots=True)
class _Task:
    assignment: Assignment
    snapshot: FlatTensors


class Session(threading.Thread):
    """Greets one client, then sends an assignment and receives its answer in turn, until stopped or the client is lost.

    Everything that happens goes to the inbox as an event. The received tensors are this session's own storage, used
    again for the next answer; that cannot come before the coordinator has seen this one, since it assigns the next.
    """

    def __init__(
        self, client: int, incarnation: int, connect: Callable[[], Pair], submodels: Submodels, inbox: Inbox,
        waits: Waits, moved: Callable[[int, int], None], device: torch.device | str = "cpu",
    ) -> None:  # fmt: skip
        """Prepare; `start` connects.

        Args:
            client: its id.
            incarnation: in which of its lives.
            connect: makes the pair.
            submodels: of the global model.
            inbox: where events go.
            waits: deadlines.
            moved: told of bytes over the link, (down, up).
            device: where received tensors are to lie.
        """
        super().__init__(name=f"client-{client}", daemon=True)
        self.client, self.incarnation = client, incarnation
        self._connect, self._submodels, self._inbox, self._waits, self._moved = connect, submodels, inbox, waits, moved
        self._outbox: queue.SimpleQueue[_Task | str] = queue.SimpleQueue()
        self._storage: dict[Layout, FlatTensors] = {}
        self._out: Assignment | None = None
        self._device = device
        self._pair: Pair | None = None

    def assign(self, assignment: Assignment, snapshot: FlatTensors) -> None:
        """Send work; returns at once."""
        self._outbox.put(_Task(assignment, snapshot))

    def stop(self, reason: str) -> None:
        """Tell the client to stop once its present task is answered; returns at once."""
        self._outbox.put(reason)

    def abandon(self) -> None:
        """Close the pair under a thread that has not ended in time; its client finds the server gone."""
        if self._pair is not None:
            self._pair.close()

    def run(self) -> None:
        """Serve the client; every end but `stop` becomes a `Lost` event."""
        pair: Pair | None = None
        try:
            pair = self._pair = self._connect()
            self._inbox.put(Joined(self._greet(pair)))
            self._serve(pair)
        except PeerTimeout as error:
            self._inbox.put(Lost(self.client, f"timeout: {error}", self.incarnation))
        except (PeerLost, Refused, OSError, RuntimeError) as error:
            self._inbox.put(Lost(self.client, f"disconnected: {error}", self.incarnation))
        except Exception as error:  # whatever it is, the run must hear that nothing more will come
            self._inbox.put(Lost(self.client, f"failed: {type(error).__name__}: {error}", self.incarnation))
        finally:
            if pair is not None:
                pair.close()

    def _greet(self, pair: Pair) -> ClientInfo:
        """Check that the client runs the same raafl and model, and welcome it."""
        hello = pair.recv(_nothing, self._waits.join_s)
        expected = {"raafl": raafl.__version__, "model": self._submodels.layout().fingerprint}
        problem = None if hello.kind is Kind.HELLO else f"expected HELLO, got {hello.kind.name}"
        for field, value in expected.items():
            if problem is None and hello.meta.get(field) != value:
                problem = f"different {field}: the server has {value}, client {self.client} has {hello.meta.get(field)}"
        if problem is not None:
            pair.send(Message(Kind.STOP, 0, self.incarnation, {"reason": f"refused: {problem}"}, None))
            raise Refused("incompatible", problem)
        pair.send(Message(Kind.WELCOME, 0, self.incarnation, {"client": self.client}, None))
        _count(hello.meta, "num_samples", least=1)
        try:
            info = client_from_json({**hello.meta, "client": self.client, "incarnation": self.incarnation})
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise Refused("bad-json", f"profile of client {self.client}: {error}") from None
        return info

    def _serve(self, pair: Pair) -> None:
        while True:
            try:
                command = self._outbox.get(timeout=self._waits.idle_s / 3)
            except queue.Empty:
                pair.send(Message(Kind.KEEPALIVE, 0, self.incarnation, {}, None))
                continue
            if isinstance(command, str):
                pair.send(Message(Kind.STOP, 0, self.incarnation, {"reason": command}, None))
                return
            self._task(pair, command)

    def _task(self, pair: Pair, task: _Task) -> None:
        self._out = task.assignment
        message = Message(
            Kind.ASSIGN, task.assignment.id, self.incarnation, assignment_to_json(task.assignment), task.snapshot
        )
        sent = pair.send(message)
        self._moved(sent, 0)
        try:
            answer = pair.recv(self._expect, self._waits.task_s, finite=True)
            update = self._update(answer)
        except Refused as refused:
            layout = self._submodels.layout(task.assignment.spec, "trained")
            update = Update(
                task.assignment.id, self.client, self.incarnation, self._buffer(layout), 0, refusal=refused.reason
            )
        update.bytes_down, update.bytes_up = sent, pair.received_bytes
        self._moved(0, pair.received_bytes)
        self._inbox.put(Arrived(update))
        if pair.closed:
            raise PeerLost("connection-broken", f"after a message refused as {update.refusal}")

    def _update(self, answer: Message) -> Update:
        meta = answer.meta
        if answer.kind is not Kind.UPDATE or answer.tensors is None:
            raise Refused("bad-kind", f"expected UPDATE, got {answer.kind.name}")
        return Update(
            answer.assignment, self.client, answer.incarnation, answer.tensors, _count(meta, "num_samples", least=1),
            _count(meta, "num_steps"), _metrics(meta),
        )  # fmt: skip

    def _expect(self, kind: Kind, assignment: int, meta: dict[str, Any]) -> FlatTensors | None:
        if kind is not Kind.UPDATE or self._out is None:
            raise Refused("bad-kind", f"expected UPDATE, got {kind.name}")
        if assignment != self._out.id:
            raise Refused("unknown-assignment", f"expected {self._out.id}, got {assignment}")
        return self._buffer(self._submodels.layout(self._out.spec, "trained"))

    def _buffer(self, layout: Layout) -> FlatTensors:
        """Return storage for ``layout``, the same each time; only the last few layouts are kept."""
        buffer = self._storage.get(layout)
        if buffer is None:
            while len(self._storage) >= 2:
                self._storage.pop(next(iter(self._storage)))
            buffer = self._storage[layout] = FlatTensors.empty(layout, self._device)
        return buffer


def _nothing(kind: Kind, assignment: int, meta: dict[str, Any]) -> FlatTensors | None:
    return None


def _count(meta: dict[str, Any], field: str, least: int = 0) -> int:
    value = meta.get(field)
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value < 2**53:
        raise Refused("bad-json", f"{field} is {value!r}")
    return value


def _metrics(meta: dict[str, Any]) -> dict[str, float]:
    metrics = meta.get("metrics", {})
    if not isinstance(metrics, dict) or len(metrics) > 100:
        raise Refused("bad-json", "metrics is not a small table")
    try:
        return {str(k): float(v) for k, v in metrics.items() if isinstance(v, int | float)}
    except OverflowError:
        raise Refused("bad-json", "a metric is out of range") from None

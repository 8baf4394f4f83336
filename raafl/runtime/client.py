"""A client's side of a distributed run: receive a submodel, train it, send it back, until told to stop."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import raafl
from raafl.core.types import Assignment, ClientInfo, assignment_from_json, client_to_json
from raafl.data.federated import ClientData
from raafl.local.train import LocalTrainer, Stopped
from raafl.runtime.session import Waits
from raafl.runtime.transport import Kind, Message, Pair, PeerLost, PeerTimeout, Refused
from raafl.submodel import FlatTensors, Layout, SpecError, Submodels


class Client:
    """Works for the server at the other end of a pair."""

    def __init__(
        self, info: ClientInfo, pair: Pair, submodels: Submodels, trainer: LocalTrainer, data: ClientData, waits: Waits,
        ended: Callable[[], str | None] = lambda: None,
    ) -> None:  # fmt: skip
        """Prepare; `run` greets the server. ``ended`` says whether, and why, the whole run has ended meanwhile."""
        self._ended, self._watching = ended, threading.Event()
        self._info, self._pair, self._submodels, self._trainer = info, pair, submodels, trainer
        self._data, self._waits = data, waits
        self._storage: tuple[Layout, FlatTensors] | None = None
        self._assignment: Assignment | None = None
        self._since = 0.0

    def run(self) -> str:
        """Work until the server says stop; return its reason.

        Raises:
            PeerLost: the server is gone.
            PeerTimeout: it has said nothing for ``Waits.idle_s``.
        """
        self._trainer.stop = threading.Event()
        watch = threading.Thread(target=self._watch, name="watch", daemon=True)
        watch.start()
        try:
            return self._work_until_stopped()
        except (Stopped, PeerLost, PeerTimeout):
            reason = self._ended()
            if reason is None:
                raise
            return reason
        finally:
            self._watching.set()
            watch.join()

    def _watch(self) -> None:
        """Interrupt the task at hand once the run has ended: nobody waits for its result."""
        while not self._watching.wait(0.5):
            if self._ended() is not None and self._trainer.stop is not None:
                self._trainer.stop.set()
                return

    def _work_until_stopped(self) -> str:
        self._pair.send(Message(Kind.HELLO, 0, self._info.incarnation, self._hello(), None))
        wait_s = self._waits.join_s
        while True:
            message = self._pair.recv(self._expect, wait_s)
            wait_s = self._waits.idle_s  # once greeted, it hears from the server that often, whatever the others do
            if message.kind is Kind.STOP:
                return str(message.meta.get("reason", ""))
            if message.kind is Kind.ASSIGN and self._assignment is not None and message.tensors is not None:
                self._work(self._assignment, message.tensors)

    def _hello(self) -> dict[str, Any]:
        return {
            "raafl": raafl.__version__,
            "model": self._submodels.layout().fingerprint,
            **client_to_json(self._info),
        }

    def _expect(self, kind: Kind, assignment: int, meta: dict[str, Any]) -> FlatTensors | None:
        if kind is not Kind.ASSIGN:
            return None
        self._since = time.perf_counter()
        try:
            self._assignment = assignment_from_json(meta)
            layout = self._submodels.layout(self._assignment.spec, "present")
        except (SpecError, TypeError, KeyError) as error:
            raise Refused("bad-json", f"assignment {assignment}: {error}") from None
        if self._storage is None or self._storage[0] != layout:
            self._storage = None  # the old submodel goes before the new one comes
            self._storage = (layout, FlatTensors.empty(layout, self._trainer.fabric.device))
        return self._storage[1]

    def _work(self, assignment: Assignment, received: FlatTensors) -> None:
        update = self._trainer.run(assignment, received, self._data)
        left = assignment.pace_s - (time.perf_counter() - self._since)
        if left > 0 and self._trainer.stop is not None and self._trainer.stop.wait(left):
            raise Stopped
        meta = {"num_samples": update.num_samples, "num_steps": update.num_steps, "metrics": _finite(update.metrics)}
        self._pair.send(Message(Kind.UPDATE, assignment.id, assignment.incarnation, meta, update.tensors))


def _finite(metrics: dict[str, float]) -> dict[str, float]:
    return {name: value for name, value in metrics.items() if value - value == 0.0}

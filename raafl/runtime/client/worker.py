"""A client's side of a distributed run: receive a submodel, train it, send it back, until told to stop."""

from __future__ import annotations

import math
import queue
import threading
import time
import warnings
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

from raafl._version import __version__
from raafl.compression.plan import CompressionPlan
from raafl.compression.streams import Down, Up
from raafl.config.options import Timeouts
from raafl.core.payload import Payload
from raafl.core.types import OUT_OF_MEMORY, Assignment, ClientInfo, assignment_from_json
from raafl.data.federated import ClientData
from raafl.errors import InvalidPayload, TaskFailed
from raafl.local.failure import attempt, to_meta
from raafl.local.malloc import give_back
from raafl.local.metrics import PEAK, peak_bytes
from raafl.local.train import LocalTrainer, Stopped
from raafl.runtime.answers import hello_of
from raafl.runtime.exchange import ClientSide
from raafl.sanitize import sanitize_text
from raafl.submodel import FlatTensors, Layout, SpecError, Submodels
from raafl.transport import Connection, Kind, Message, PeerLost, PeerTimeout, Refused


class Client:
    """Works for the server at the other end of a pair.

    One thread receives all the time, so that a stop, or the end of the connection, interrupts the task at hand: nobody
    waits for its result. The server sends nothing but a stop or a sign of life while a task is out.

    Attributes:
        unsent: id of an assignment that was answered but could not be sent; None = there is none.
        num_answered: how many tasks it has answered here.
    """

    def __init__(
        self, info: ClientInfo, pair: Connection, submodels: Submodels, trainer: LocalTrainer, data: ClientData, waits: Timeouts,
        *, config: Mapping[str, str] | None = None, unsent: int | None = None,
        on_welcome: Callable[[], None] = lambda: None, plan: CompressionPlan | None = None,
    ) -> None:  # fmt: skip
        """Prepare; `run` greets the server.

        ``submodels`` are without values; ``config`` has a digest of each section that the server is to compare with its
        own; ``unsent`` is an answer from an earlier connection, for the server to count; ``on_welcome`` is called once
        the server has taken the client in; ``plan`` None = nothing is compressed.
        """
        self._plan = plan
        travels = plan or CompressionPlan(Payload(submodels))
        self._down, self._up = Down(travels), Up(travels)
        self._side = ClientSide(pair, trainer, waits.idle_s + waits.task_s + waits.stop_s)
        self._info, self._pair, self._submodels, self._trainer = info, pair, submodels, trainer
        self._data, self._waits, self._config = data, waits, config
        self.unsent, self._on_welcome = unsent, on_welcome
        self.num_answered = 0
        # The reader's thread receives into `_storage`, the other trains from it; `_free` hands it back. `_assignment` is cleared
        # before the answer goes out, not after: the next may be here while that send has not returned yet.
        self._storage: tuple[Layout, FlatTensors] | None = None
        self._assignment: Assignment | None = None
        self._since = 0.0
        self._free = threading.Event()
        self._free.set()
        self._received: queue.SimpleQueue[tuple[Assignment, FlatTensors] | str | Exception] = queue.SimpleQueue()

    def run(self) -> str:
        """Work until the server says stop; return its reason. The pair is closed then.

        Raises:
            TaskFailed: the user's code has failed, which the server has been told.
            PeerLost: the server is gone.
            PeerTimeout: it has said nothing for ``Timeouts.idle_s``.
            Refused: it has sent what is not raafl's.
        """
        self._trainer.stop = threading.Event()
        self._pair.send(Message(Kind.HELLO, 0, self._info.incarnation, self._hello(), None))
        reader = threading.Thread(target=self._read, name="reader", daemon=True)
        reader.start()
        try:
            while True:
                item = self._received.get()  # the reader's last word is a reason or an error
                if isinstance(item, str):
                    return item
                if isinstance(item, Exception):
                    raise item
                self._work(*item)
                del item  # its submodel goes before the next one comes
                self._free.set()
        finally:
            self._pair.close()
            reader.join(timeout=self._waits.stop_s)

    def _read(self) -> None:
        """Receive until the server says stop or is gone."""
        wait_s = self._waits.join_s
        try:
            while True:
                message = self._pair.recv(self._expect, wait_s)
                wait_s = self._waits.idle_s  # it is heard from that often, whatever the others do
                if message.kind is Kind.WELCOME:
                    self._keep_whole(message.meta.get("kept_whole", []))
                    self.unsent = None
                    self._on_welcome()
                if message.kind is Kind.STOP:
                    self._received.put(sanitize_text(message.meta.get("reason", "")))
                    break
                if message.kind is Kind.ASSIGN and self._assignment is not None and message.tensors is not None:
                    self._received.put((self._assignment, message.tensors))
                    wait_s += self._waits.task_s  # a server that waits for an answer says nothing
                if message.kind is Kind.REPLY:
                    self._side.hear(message.tensors)
                    wait_s += self._waits.task_s
                if message.kind is Kind.REFUSED:  # of a task with an exchange; nothing is packed now
                    self._up.forget()
                if message.kind is Kind.REFUSED and self._is_out(message.assignment):
                    reason = sanitize_text(message.meta.get("reason", ""))
                    warnings.warn(f"client {self._info.id}: the server refuses a task: {reason}", stacklevel=1)
                    self._assignment = None  # given up in the middle; the next may come
                    self._side.hear(None)
        except Exception as error:
            self._received.put(error)
        if self._trainer.stop is not None:
            self._trainer.stop.set()
        self._side.hear(None)

    def _keep_whole(self, names: Any) -> None:
        """Take out the axes that the server has not proven; raises `Refused` for anything but names of axes."""
        if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
            raise Refused("bad-meta", "kept_whole is no list of names of axes")
        try:
            self._submodels.keep_whole(dict.fromkeys(names, "not proven by the server"))
        except SpecError as error:
            raise Refused("bad-meta", f"kept_whole: {error}") from None

    def _is_out(self, number: int) -> bool:
        return self._assignment is not None and self._assignment.id == number

    def _hello(self) -> dict[str, Any]:
        return {
            "raafl": __version__,
            "model": self._submodels.layout().fingerprint,
            "base": self._submodels.base.digest if self._submodels.base is not None else None,
            "config": None if self._config is None else dict(self._config),
            "unsent": self.unsent,
            **hello_of(self._info),
        }

    def _expect(self, kind: Kind, assignment: int, meta: dict[str, Any]) -> FlatTensors | None:
        if kind is Kind.REPLY:
            return self._side.expect(assignment)
        if kind is not Kind.ASSIGN:
            return None
        if self._assignment is not None:
            raise Refused("bad-kind", f"assignment {assignment} came before {self._assignment.id} was answered")
        self._since = time.perf_counter()
        try:
            found = assignment_from_json(meta)
            layout = self._layout(found)  # what came before is unpacked: an answer to it has been sent
        except (SpecError, TypeError, KeyError) as error:
            raise Refused("bad-json", f"assignment {assignment}: {sanitize_text(error)}") from None
        self._free.wait(self._waits.stop_s)
        self._free.clear()
        if self._storage is None or self._storage[0] != layout:
            self._storage = None  # the old submodel goes before the new one comes
            self._storage = (layout, FlatTensors.empty(layout, self._trainer.fabric.device))
        self._assignment = found
        return self._storage[1]

    def _layout(self, assignment: Assignment) -> Layout:
        """Return the layout of what comes down for a task; raises `SpecError` where it is not of the part that is known."""
        exchange = self._side.exchange(assignment)
        if exchange is not None:
            plain = exchange.client.layout(assignment.spec, "sent")
            if self._plan is None:
                return plain
            if plain != self._plan.submodels.layout(assignment.spec, "sent"):
                raise SpecError("it is of another part of the model than by this client's own config")
        return self._down.layout(assignment.spec)

    def _work(self, assignment: Assignment, wire: FlatTensors) -> None:
        try:
            device = self._trainer.fabric.device
            peak_bytes(device, anew=True)
            received = self._down.unpack(assignment.spec, wire)
            update = attempt(self._side.trainer(assignment), assignment, received, self._data)
            left = assignment.pace_s - (time.perf_counter() - self._since)
            if left > 0 and self._trainer.stop is not None and self._trainer.stop.wait(left):
                raise Stopped
        except Stopped:
            return  # what the reader has to say comes next
        except InvalidPayload as unsound:
            raise Refused(unsound.reason, str(unsound)) from None
        except TaskFailed as failed:
            self._give_up(assignment, to_meta(failed, private=self._info.own_data))
            with suppress(queue.Empty):  # until the server has taken it in
                self._received.get(timeout=self._waits.stop_s)
            raise
        if update.refusal == OUT_OF_MEMORY:
            warnings.warn(f"client {self._info.id}: memory is too small for {assignment.spec}", stacklevel=1)
            self._give_up(assignment, {"reason": OUT_OF_MEMORY})
            return
        packed = self._up.pack(assignment, update.tensors, received)
        metrics = {name: value for name, value in update.metrics.items() if math.isfinite(value)}
        metrics |= {PEAK: float(peak_bytes(device))}
        meta = {"num_samples": update.num_samples, "num_steps": update.num_steps, "metrics": metrics}
        meta |= {"extra": dict(update.extra)} if update.extra else {}
        if assignment.spec.base is not None:
            meta["base"] = self._submodels.bases.digest(assignment.spec.base)
        self.unsent, self._assignment = assignment.id, None  # from here on the server may send the next
        try:
            self._pair.send(Message(Kind.UPDATE, assignment.id, assignment.incarnation, meta, packed))
        except (PeerLost, PeerTimeout):
            return
        finally:
            give_back()
        self.unsent = None
        self.num_answered += 1

    def _give_up(self, assignment: Assignment, meta: dict[str, str]) -> None:
        """Tell the server that there will be no answer, and why."""
        self._assignment = None
        with suppress(PeerLost, PeerTimeout):
            self._pair.send(Message(Kind.FAILED, assignment.id, assignment.incarnation, meta))

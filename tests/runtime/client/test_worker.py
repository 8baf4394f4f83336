"""What a client does with the tasks that it receives."""

from __future__ import annotations

import threading
import time

from raafl.config.options import Timeouts
from raafl.runtime.client.worker import Client
from raafl.runtime.protocol import Assign
from raafl.transport import Kind, Message
from tests.helpers.coordinators import filled
from tests.runtime.client import test_worker_fuzz as fuzz
from tests.runtime.server.sessions import task as task_of

WAIT_S = 30.0


def test_the_next_task_is_not_written_over_values_that_the_last_one_still_reads(monkeypatch):
    """A task that is answered may read on, such as for its receipt, while the server sends the next one."""
    answered, go, seen = threading.Semaphore(0), threading.Semaphore(0), []

    def work(self, arrival):
        self.out = None
        answered.release()
        assert go.acquire(timeout=WAIT_S)
        (buffer,) = arrival.tensors.buffers.values()
        seen.append((arrival.assignment.id, set(buffer.tolist())))

    monkeypatch.setattr(Client, "_work", work)
    monkeypatch.setattr(fuzz, "TIMES", Timeouts(stop_s=WAIT_S))
    lied = fuzz.Lied()
    lied.reach("idle")
    for number, value in ((1, 1.0), (2, 5.0)):
        meta = Assign(task_of(number)).to_meta()
        lied.pair.send(Message(Kind.ASSIGN, number, 0, meta, filled(fuzz.STATE, value)))
        if number == 1:
            assert answered.acquire(timeout=WAIT_S)
    deadline = time.monotonic() + 0.3
    while time.monotonic() < deadline:
        assert lied.client.out is None, "the second task has arrived, in the place of the first"
        time.sleep(0.01)
    go.release(2)
    assert answered.acquire(timeout=WAIT_S)
    lied.pair.send(fuzz.MESSAGES["stop"]())
    lied.thread.join(WAIT_S)
    lied.pair.close()
    assert seen == [(1, {1.0}), (2, {5.0})]

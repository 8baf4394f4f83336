"""A session that sends the next task while an update arrives, with a client that the test plays."""

from __future__ import annotations

import pytest

from raafl.core.types import Arrived, Lost, Sending
from raafl.runtime.overlap import OverlappedSession
from raafl.runtime.protocol import Assign
from raafl.submodel import FlatTensors
from raafl.submodel.tensor_files import NoRoom
from raafl.transport import Kind, Message
from tests.helpers.coordinators import filled
from tests.helpers.raw_frames import encode
from tests.runtime.server.sessions import WAIT_S, Table, task

pytestmark = pytest.mark.timeout(60)
COUNTS = {"num_samples": 17, "num_steps": 2, "metrics": {}}


@pytest.fixture(params=[False, True], ids=["loop", "thread"])
def table(request):
    made = Table(extensions=[OverlappedSession], has_thread=request.param)
    made.greet()
    yield made
    made.close()


class Half:
    """An update of which the server has received all but the last bytes of the tensors."""

    def __init__(self, table, number, value):
        frame = encode(Message(Kind.UPDATE, number, 0, COUNTS, filled(table.state, value)))
        self._socket, self._rest = table.theirs, frame[-8:]
        self._socket.sendall(frame[:-8])

    def finish(self):
        self._socket.sendall(self._rest)


def half_sent(table):
    """Give the client its first task, and let it send half of the update, which the server says."""
    table.assign(1)
    half = Half(table, 1, 3.0)
    assert table.event() == Sending(4, 0, 1)
    return half


def test_the_next_task_is_received_while_the_update_is_half_sent(table):
    assert Assign.from_meta(table.assign(1).meta).ahead
    first = Half(table, 1, 3.0)
    assert table.event() == Sending(4, 0, 1)
    assert table.assign(2).assignment == 2  # with half of an update on its way
    first.finish()
    arrived = table.event()
    assert isinstance(arrived, Arrived) and (arrived.update.assignment, arrived.update.refusal) == (1, None)
    second = Half(table, 2, 4.0)
    assert table.event() == Sending(4, 0, 2)
    second.finish()
    assert table.event().update.assignment == 2


def test_two_updates_that_await_the_loop_do_not_overwrite_each_other(table):
    table.assign(1)
    table.update(1, filled(table.state, 3.0))
    assert table.event() == Sending(4, 0, 1)
    table.assign(2)
    table.update(2, filled(table.state, 4.0))
    first, sending, second = table.event(), table.event(), table.event()
    assert sending == Sending(4, 0, 2)
    values = [set(update.tensors.buffers.popitem()[1].tolist()) for update in (first.update, second.update)]
    assert values == [{3.0}, {4.0}]


def test_a_refused_update_leaves_the_task_that_was_sent_meanwhile(table):
    table.assign(1)
    broken = Half(table, 1, float("nan"))
    assert table.event() == Sending(4, 0, 1)
    table.assign(2)
    broken.finish()
    assert table.event().update.refusal == "non-finite"
    table.update(2)
    assert table.event() == Sending(4, 0, 2)
    assert table.event().update.refusal is None


def test_a_task_that_its_site_refuses_is_no_update_that_travels(table):
    table.assign(1)
    table.say(Kind.FAILED, 1, {"reason": "policy"})
    assert table.event().update.refusal == "policy"
    table.assign(2)  # as without overlap


def test_a_client_without_a_next_task_gets_one_later(table):
    table.assign(1)
    table.update(1)
    assert [type(table.event()) for _ in range(2)] == [Sending, Arrived]
    assert table.assign(2).assignment == 2


def test_a_client_that_dies_with_two_tasks_is_lost_once(table):
    half_sent(table)
    table.assign(2)
    table.pair.close()
    lost = table.event()
    assert isinstance(lost, Lost) and lost.reason.startswith("disconnected")
    table.session.join(WAIT_S)
    assert table.event(0.3) is None


def test_a_client_that_dies_before_it_has_received_its_next_task_is_lost_once(table):
    """The thread that sends finds the connection broken, or never begins."""
    half_sent(table)
    table.pair.close()
    table.session.assign(task(2), table.state.values.clone())
    assert isinstance(table.event(), Lost)
    table.session.join(WAIT_S)
    assert not table.session.is_alive() and table.event(0.3) is None


def test_a_stop_with_two_tasks_in_flight_is_told_at_once(table):
    half = half_sent(table)
    table.assign(2)
    table.session.stop("max_updates")
    assert table.hear().kind is Kind.STOP
    half.finish()
    assert isinstance(table.event(), Arrived)


def test_an_answer_to_another_task_is_refused(table):
    table.assign(1)
    table.update(2, FlatTensors.empty(table.state.submodels.layout()))
    assert table.event().update.refusal == "unknown-assignment"


def test_a_stop_before_the_next_task_ends_the_session_once_the_update_has_come(table):
    half = half_sent(table)
    table.session.stop("max_updates")
    assert table.hear().kind is Kind.STOP
    half.finish()
    assert isinstance(table.event(), Arrived)
    table.session.join(WAIT_S)
    assert not table.session.is_alive() and table.event(0.0) is None


def test_a_next_task_for_which_there_is_no_room_ends_the_session(table):
    half = half_sent(table)
    table.session.fail(NoRoom("no room"))
    half.finish()
    assert isinstance(table.event(), Arrived)
    assert table.event() == Lost(4, "no-space: no room", 0, counts=True)

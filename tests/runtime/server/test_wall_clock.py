"""How many connections of one client the server of real ranks bears."""

from __future__ import annotations

import threading
import time
from collections import Counter
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from raafl.algorithms import fed_avg
from raafl.core.coordinator import TIME_UP
from raafl.core.types import Arrived, ClientInfo, Joined, Lost, Update
from raafl.runtime.server.wall_clock import Server
from raafl.submodel import FlatTensors, Layout
from raafl.submodel.tensor_files import NoRoom
from raafl.transport import Refused


class Life:
    """Stands for a session: who, in which life, and whether it was started or told to stop."""

    def __init__(self, client: int, incarnation: int) -> None:
        self.client, self.incarnation, self.started = client, incarnation, False
        self.stopped: list[str] = []

    def start(self) -> None:
        self.started = True

    def stop(self, reason: str, wait_s: float = 0.0) -> None:
        self.stopped.append(reason)

    def join(self, timeout: float | None = None) -> None:
        pass

    def is_alive(self) -> bool:
        return False


def server() -> Server:
    parts = {"state": None, "payload": None, "algorithm": fed_avg()}
    coordinator: Any = SimpleNamespace(
        roster=SimpleNamespace(joins=Counter(), away=set()), overlap=False, works_ahead=False, finished=None, **parts
    )
    unused: Any = SimpleNamespace()
    return Server(coordinator, unused, unused, None, patience_s=60.0)  # clients may come and go


def test_a_task_for_which_there_is_no_room_goes_to_its_session_as_an_error():
    house, heard = server(), []
    house.record = SimpleNamespace(assigned=lambda assignment: heard.append("recorded"))

    def cut(assignment):
        raise NoRoom("no room")

    house._snapshots = SimpleNamespace(cut=cut)
    house.sessions[1] = SimpleNamespace(fail=lambda error: heard.append(str(error)))
    house._deliver(SimpleNamespace(id=1, client=1, incarnation=0))
    assert heard == ["recorded", "no room"] and house._sent == {}


def test_an_answer_of_an_earlier_connection_frees_no_values_that_this_one_is_being_sent():
    """A client says which answer it could not send; it may guess the number of the task that it has just been given."""
    house, freed = server(), []
    house._snapshots = SimpleNamespace(give_back=freed.append)
    house.coordinator.roster.active = {8: SimpleNamespace(assigned_s=0.0)}
    house._sent[1, 3] = {8: "values"}

    def arrived(incarnation):
        return Arrived(Update(8, 1, incarnation, FlatTensors.empty(Layout(())), 0, refusal="late"))

    house._admit(arrived(2), 1.0)
    assert freed == [] and house._sent == {(1, 3): {8: "values"}}
    house._admit(arrived(3), 1.0)
    assert freed == ["values"] and house._sent == {}


def test_the_log_says_who_joined_and_left_and_how_many_the_run_waits_for():
    house, said = server(), []
    house.progress = SimpleNamespace(note=said.append)
    house.record, house._announce = SimpleNamespace(turned_away=lambda reason: None), lambda client, reason: None
    house.coordinator.limits, house.coordinator.started = SimpleNamespace(min_clients=2), False

    def joins(client, incarnation=0):
        house.enter(client, lambda incarnation: Life(client, incarnation))
        house._take_in(SimpleNamespace(client=SimpleNamespace(id=client, incarnation=incarnation)))

    joins(1)
    joins(2)
    house.coordinator.started = True
    house._let_go(Lost(1, "disconnected: the peer is gone", 0))
    house.coordinator.roster.joins[1] = 1
    house.enter(3, lambda incarnation: Life(3, incarnation))
    house._let_go(Lost(3, "disconnected: the peer is gone", 0))
    joins(1, 1)
    joins(3, 1)  # its first session ended before it had joined
    assert said == [
        "client 1 joined; 1 client is here, the run starts with 2",
        "client 2 joined; 2 clients are here",
        "client 1 was lost: disconnected: the peer is gone; 1 client is here",
        "client 3 was refused: disconnected: the peer is gone; 1 client is here",
        "client 1 joined again; 2 clients are here",
        "client 3 joined; 3 clients are here",
    ]


def test_a_client_may_have_four_connections_on_their_way_in_and_others_are_not_kept_out_by_them():
    house = server()
    for _ in range(4):
        house.enter(1, lambda incarnation: Life(1, incarnation))
    with pytest.raises(Refused, match="client 1 has 5 connections, 4 of them on their way in"):
        house.enter(1, lambda incarnation: Life(1, incarnation))
    house.enter(2, lambda incarnation: Life(2, incarnation))
    assert sorted(house._entering) == [(1, 0), (1, 1), (1, 2), (1, 3), (2, 0)]
    assert all(life.started for life in house._entering.values())


def test_a_client_that_comes_again_and_again_is_refused_while_seven_of_its_sessions_are_ending():
    house = server()
    for number in range(8):
        house.enter(1, lambda incarnation: Life(1, incarnation))
        house._take_in(SimpleNamespace(client=SimpleNamespace(id=1, incarnation=number)))
    assert len(house._leaving) == 7 and house.sessions[1].incarnation == 7  # one current session, seven that end
    assert all(life.stopped for _, life in house._leaving)
    with pytest.raises(Refused, match="client 1 has 8 connections, 0 of them on their way in"):
        house.enter(1, lambda incarnation: Life(1, incarnation))
    house.enter(2, lambda incarnation: Life(2, incarnation))
    del house._leaving[0]  # one has ended
    house.enter(1, lambda incarnation: Life(1, incarnation))


def test_of_two_connections_of_a_client_the_newer_counts_whichever_hello_comes_first():
    house = server()
    for _ in range(2):
        house.enter(1, lambda incarnation: Life(1, incarnation))
    older, newer = (house._entering[1, incarnation] for incarnation in (0, 1))
    said = [house._admit(Joined(ClientInfo(1, 5, incarnation=incarnation)), 1.0) for incarnation in (1, 0)]
    assert said == [True, False]  # the coordinator does not hear of the older
    assert house.sessions == {1: newer} and newer.stopped == []
    assert older.stopped == ["replaced: client 1 has joined from elsewhere"]
    assert [life for _, life in house._leaving] == [older] and not house._entering


def test_clients_on_their_way_in_are_told_of_the_end_and_so_are_those_that_come_later():
    """One may build its model, another come while the last evaluation is under way."""
    house = server()
    house.enter(1, lambda incarnation: Life(1, incarnation))
    house.reason = "max_updates"
    house._end()
    house.enter(2, lambda incarnation: Life(2, incarnation))
    assert [(life.client, life.stopped, life.started) for life in house._entering.values()] == [
        (1, ["max_updates"], True),
        (2, ["max_updates"], True),
    ]


@pytest.mark.parametrize(
    ("reason", "comes", "waits"), [("max_updates", True, True), ("target", False, True), ("interrupted", False, False)]
)
def test_a_client_that_is_away_at_the_end_may_come_back_and_hear_of_it(reason, comes, waits):
    house = server()
    house.waits, house.reason = replace(house.waits, stop_s=20.0 if comes else 0.3), reason
    house.coordinator.roster.away = {1}
    caller = threading.Timer(0.1, lambda: house.enter(1, lambda incarnation: Life(1, incarnation)))
    if comes:
        caller.start()
    since = time.monotonic()
    house._end()
    took_s = time.monotonic() - since
    assert took_s < 10.0 and (took_s >= (0.1 if comes else 0.3)) == waits
    assert [life.stopped for life in house._entering.values()] == ([[reason]] if comes else [])


def test_a_client_that_comes_once_all_is_closed_is_refused_for_the_reason_of_the_end():
    house = server()
    house.reason = "max_updates"
    house._end()
    house.close()
    with pytest.raises(Refused, match=r"^stopped: max_updates$"):
        house.enter(1, lambda incarnation: Life(1, incarnation))


def test_the_clock_stands_until_the_first_task_however_long_clients_take_to_come():
    house = server()
    house._resumed_at = 30.0
    house.record, house._snapshots = (
        SimpleNamespace(assigned=lambda assignment: None),
        SimpleNamespace(cut=lambda assignment: None),
    )
    house._standing_since = time.perf_counter() - 5.0
    assert house.now == 30.0
    house._deliver(SimpleNamespace(id=1, client=1, incarnation=0))
    first = house.now
    assert 30.0 <= first < 32.0
    time.sleep(0.01)
    assert house.now > first


def test_a_suspension_ends_while_the_run_waits_for_clients_and_the_limit_does_not_begin():
    house = server()
    house._standing_since = time.perf_counter() - 5.0
    house._set_timer(TIME_UP, 1.0)
    house._pass_suspension()
    assert house.now == 0.0  # the time of the run has not begun
    house._timers.clear()
    house._set_timer(-1, 20.0)
    house._pass_suspension()
    assert house.now == 0.0
    house._standing_since -= 20.0
    house._pass_suspension()
    assert house.now == 20.0


def test_a_server_waits_for_clients_only_while_it_could_take_them_in():
    house, ends = server(), []
    house.stop = ends.append
    house.coordinator.started, house.coordinator.admission = True, SimpleNamespace(num_good=0)
    house._looked_s = time.perf_counter()

    def look_after(seconds, times):
        for _ in range(times):
            house._looked_s -= seconds
            house._look_after_sessions()

    look_after(0.5, 119)  # of 60 s
    look_after(500.0, 1)  # suspended, which counts a second as the longest turn
    assert len(ends) == 1 and "0 clients for 60 s" in ends[0]
    house._alone_s = 0.0
    house._entering[1, 0] = SimpleNamespace()
    look_after(0.5, 200)
    assert len(ends) == 1  # one is on its way in
    house._entering.clear()
    look_after(0.5, 100)
    house.coordinator.admission.num_good = 1
    look_after(0.5, 1)
    house.coordinator.admission.num_good = 0
    look_after(0.5, 119)
    assert len(ends) == 1

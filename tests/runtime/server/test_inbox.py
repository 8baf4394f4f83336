"""Events in the order they come, or in a script's."""

from __future__ import annotations

import itertools
import threading
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raafl.core.types import Arrived, ClientInfo, Joined, Lost, Stop, Timer, Update
from raafl.runtime.server.link import Inbox
from tests.helpers.coordinators import filled, line_state
from tests.helpers.scripted_inbox import ScriptedInbox, key_of

NOTHING = filled(line_state(), 0.0)


def arrived(number):
    return Arrived(Update(number, 1, 0, NOTHING, 1))


EVENTS = [Joined(ClientInfo(1, 5)), Joined(ClientInfo(2, 5)), arrived(1), arrived(2), arrived(3), Lost(2, "gone", 0)]
ORDER = [key_of(event) for event in EVENTS]


def take_all(inbox):
    return [key_of(event) for event in iter(lambda: inbox.get(0.0), None)]


def test_events_are_named_by_what_they_are_about():
    assert ORDER == [("joined", 1), ("joined", 2), ("arrived", 1), ("arrived", 2), ("arrived", 3), ("lost", 2)]
    assert key_of(Timer(3)) is key_of(Stop("x")) is None


def test_an_inbox_gives_what_came_first_first():
    inbox = Inbox()
    for event in reversed(EVENTS):
        inbox.put(event)
    assert take_all(inbox) == list(reversed(ORDER))


@pytest.mark.parametrize("make", [Inbox, lambda: ScriptedInbox(ORDER)])
def test_waiting_ends_at_the_deadline(make):
    inbox, began = make(), time.monotonic()
    assert inbox.get(0.1) is None
    assert time.monotonic() - began > 0.05
    assert inbox.get(-1.0) is None


@pytest.mark.parametrize("make", [Inbox, lambda: ScriptedInbox([("arrived", 1)])])
def test_an_event_wakes_the_waiter(make):
    inbox = make()
    later = threading.Timer(0.05, inbox.put, [arrived(1)])
    later.start()
    event = inbox.get(5.0)
    later.join()
    assert key_of(event) == ("arrived", 1)


@pytest.mark.parametrize("come", itertools.permutations(range(4)))
def test_a_script_is_followed_whatever_comes_first(come):
    inbox = ScriptedInbox(ORDER[:4])
    for place in come:
        inbox.put(EVENTS[place])
    assert take_all(inbox) == ORDER[:4]


def test_what_comes_early_is_held_back_until_its_turn():
    inbox = ScriptedInbox(ORDER)
    inbox.put(EVENTS[1])
    inbox.put(EVENTS[2])
    assert inbox.get(0.01) is None
    inbox.put(EVENTS[0])
    assert take_all(inbox) == ORDER[:3]
    assert inbox.get(0.01) is None


def test_what_no_script_can_name_passes_at_once():
    inbox = ScriptedInbox(ORDER)
    inbox.put(EVENTS[1])
    inbox.put(Stop("enough"))
    assert inbox.get(0.1) == Stop("enough")


def test_after_the_script_events_pass_as_they_come_the_held_ones_first():
    inbox = ScriptedInbox([("arrived", 2)])
    for number in (3, 2, 1):
        inbox.put(arrived(number))
    assert take_all(inbox) == [("arrived", 2), ("arrived", 3), ("arrived", 1)]


@given(st.permutations(range(6)), st.integers(0, 6))
def test_nothing_is_lost_and_nothing_is_given_twice(come, length):
    inbox = ScriptedInbox(ORDER[:length])
    for place in come:
        inbox.put(EVENTS[place])
    taken = take_all(inbox)
    assert taken[:length] == ORDER[:length]
    assert sorted(taken) == sorted(ORDER)

"""How long TimelyFL waits for late clients, by how late their tasks were."""

from __future__ import annotations

import pytest

from raafl.algorithms import timely_fl
from raafl.algorithms.timely_fl.workload import Interval, TimelyMemory
from raafl.core.algorithm import TriggerContext
from raafl.core.types import Adjusted, Assignment, SetTimer, Timer
from raafl.submodel import FULL
from tests.algorithms.test_timely_fl import line_fleet, report
from tests.helpers.coordinators import assigned, line_state


def test_the_slack_follows_how_late_four_fifths_of_the_tasks_are():
    """Of 20 tasks 16 are at most 0.16 late. A change of less than a quarter is none, and 0.3 is the most."""
    trigger, state = Interval(0.0, 0.3), line_state()
    memory, task = state.memory.of(TimelyMemory), Assignment(1, 1, 0, 0, 0, FULL, 0, None, None, 0, 0.0)

    def after(late):
        memory.late += late
        return trigger.on_update(task, 1, state)

    assert after([0.01 * i for i in range(1, 20)]) is None and memory.slack is None
    assert after([0.2]) == Adjusted("slack", 0.0, 0.16, 0.16, 0.0, "the share of its time by which a task is late")
    waiting = TriggerContext([1.0], 1, 3, 5.0, 6.0, state.memory)
    memory.T_k = 8.0
    assert trigger.wake_at(waiting) == pytest.approx(5.0 + 8.0 * 1.16)
    assert after([0.2] * 20) is None and memory.slack == 0.16 and memory.late == []
    assert after([0.9] * 20).after == 0.3 and after([-0.5] * 20).after == 0.0


def test_a_task_is_late_by_what_it_takes_more_than_the_one_before():
    coordinator, actions = line_fleet(timely_fl(layers="share", slack=0.0, most_slack=0.5), [2.0, 2.0])
    first = assigned(actions)
    (timer,) = (a for a in report(coordinator, first[2], 0.0, now=2.0) if isinstance(a, SetTimer))
    second = assigned(coordinator.handle(Timer(timer.id), timer.at))
    assert coordinator.state.memory.of(TimelyMemory).late == []  # nothing is known of a client's first
    report(coordinator, second[2], 0.0, now=timer.at + 2.5)
    assert coordinator.state.memory.of(TimelyMemory).late == [pytest.approx(0.25)]

"""Who did what when, and where the time went, against figures worked out by hand."""

from __future__ import annotations

import numpy as np
import pytest

from raafl.lab.report.timeline import (
    AWAY,
    NOTHING,
    TASK,
    TRAIN,
    TRANSFER,
    WAIT,
    busy_share,
    transfer_s,
    uses,
)
from raafl.runfolder.intervals import task_intervals, worked_s
from raafl.runfolder.reading import read
from tests.lab.report.folders import EVENTS, TASKS, write


def by_client(run):
    found = task_intervals(run)
    rows = zip(found.client, found.start_s, found.stop_s, found.kind, strict=True)
    return sorted((int(c), float(a), float(b), int(k)) for c, a, b, k in rows)


def test_tasks_end_with_their_arrival_the_loss_of_their_client_or_the_run(tmp_path):
    assert by_client(read(write(tmp_path / "run"))) == [
        (1, 0.0, 4.0, 0),
        (1, 4.0, 9.0, 0),
        (1, 9.0, 10.0, 1),  # not used: under way when the run ended
        (2, 0.0, 5.0, 0),
        (2, 5.0, 6.0, 3),  # lost with its client
        (2, 8.0, 10.0, 4),  # in the journal alone
    ]


def test_without_a_journal_a_lost_task_ends_where_the_next_begins(tmp_path):
    again = {**TASKS[1], "assignment": 9, "assigned_s": 7.0, "arrived_s": 8.0}
    run = read(write(tmp_path / "run", events=None, tasks=[*TASKS, again]))
    assert (2, 5.0, 7.0, 3) in by_client(run)


def test_where_the_time_went(tmp_path):
    run = read(write(tmp_path / "run"))
    # client 1: 1000 B at 1000 B/s and 500 B at 500 B/s, and twice 0.5 s: 3 s of each task
    assert transfer_s(run)[:3].tolist() == [3.0, 0.0, 3.0]
    spent = uses(run, task_intervals(run))
    assert spent[1] == pytest.approx({TRAIN: 3, TRANSFER: 6, TASK: 0, NOTHING: 1, WAIT: 0, AWAY: 0})
    assert spent[2] == pytest.approx({TRAIN: 5, TRANSFER: 0, TASK: 0, NOTHING: 3, WAIT: 0, AWAY: 2})
    assert worked_s(run) == {1: 10.0, 2: 8.0}  # what was lost, not used or under way is work, too


def test_each_batch_of_a_model_in_two_halves_takes_the_latency_both_ways(tmp_path):
    split = {"time_s": 4.0, "event": "assigned", "id": 3, "client": 1, "extra": {"split": {"batches": 1}}}
    run = read(write(tmp_path / "run", events=[*EVENTS, split]))
    assert transfer_s(run)[:3].tolist() == [3.0, 0.0, 4.0]  # twice 0.5 s more


def test_waiting_is_presence_without_a_task(tmp_path):
    run = read(write(tmp_path / "run", events=EVENTS[:-1]))  # without the task that never ended
    spent = uses(run, task_intervals(run))
    assert (spent[2][WAIT], spent[2][NOTHING], spent[2][AWAY]) == (2.0, 1.0, 2.0)


def test_a_second_in_which_a_client_trains_and_sends_counts_once(tmp_path):
    """Client 1 has its second task 1.5 s before its first update is there, and its third, not used, 2 s before the second's."""
    first, second, third = ({**task} for task in (TASKS[0], TASKS[2], TASKS[4]))
    second |= {"assigned_s": 2.5, "train_s": 6.5}
    third |= {"assigned_s": 7.0}
    run = read(write(tmp_path / "run", tasks=[first, TASKS[1], second, TASKS[3], third]))
    found = task_intervals(run)
    assert [row[1:3] for row in by_client(run)[:3]] == [(0.0, 4.0), (2.5, 9.0), (7.0, 10.0)]
    assert uses(run, found)[1] == pytest.approx({TRAIN: 3, TRANSFER: 6, TASK: 0, NOTHING: 1, WAIT: 0, AWAY: 0})
    assert worked_s(run) == pytest.approx({1: 10.0, 2: 8.0})
    edges = np.array([0.0, 2.0, 8.0, 10.0])
    assert busy_share(found, [[1, 2]], edges)[0] == pytest.approx([1.0, (6 + 4) / 12, 1.0])  # client 2 is away for 2 s


def test_a_task_in_real_time_over_links_of_unknown_speed_is_not_divided(tmp_path):
    real = [{**EVENTS[0], "runtime": "distributed"}, *EVENTS[1:]]
    run = read(write(tmp_path / "run", events=real))
    spent = uses(run, task_intervals(run))
    assert (spent[2][TASK], spent[2][TRAIN], spent[2][TRANSFER]) == (5.0, 0.0, 0.0)
    assert (spent[1][TASK], spent[1][TRAIN], spent[1][TRANSFER]) == (0.0, 3.0, 6.0)  # whose profile names its links


def test_shares_of_bands_agree_with_a_sum_over_small_steps(tmp_path):
    run = read(write(tmp_path / "run"))
    found = task_intervals(run)
    edges = np.array([0.0, 3.0, 4.5, 7.0, 10.0])
    shares = np.concatenate([busy_share(found, [[1], [2]], edges), busy_share(found, [[1, 2]], edges)])
    step = 0.001
    middles = np.arange(0, 10, step) + step / 2
    busy = {
        client: (
            (found.start_s[found.client == client][:, None] <= middles)
            & (middles < found.stop_s[found.client == client][:, None])
        ).any(0)
        for client in (1, 2)
    }
    for left, right, column in zip(edges, edges[1:], shares.T, strict=False):
        within = (middles >= left) & (middles < right)
        one, two = busy[1][within].mean(), busy[2][within].mean()
        assert column == pytest.approx([one, two, (one + two) / 2], abs=2e-3)

"""The view of a run from its rows: figures by hand, files that grow, are torn, come late or are written anew."""

from __future__ import annotations

import io
import json

import pytest
from rich.console import Console

from raafl.config.targets import Target
from raafl.submodel.spec import Spec
from raafl.watch.progress import plain, sentence, table
from raafl.watch.state import (
    ClientProgress,
    Eta,
    Goals,
    Mark,
    Marks,
    RunState,
    Trainings,
    ends_in_s,
    etas,
    spec_in_words,
    speed,
)
from tests.watch.rows import Clock, arrived, assigned, ended, joined, run_row

# ---- rates and when it ends, by hand ----


def test_trainings_are_counted_over_the_last_ten_seconds():
    trainings = Trainings()
    assert trainings.per_s(5.0) is None
    for _ in range(50):
        trainings.arrived(1.0)  # all that a folder had at the first look
    assert trainings.per_s(2.0) is None
    for tenth in range(15, 45):
        trainings.arrived(tenth / 10)
    assert trainings.per_s(4.5) == 30 / 3.5
    for tenth in range(45, 205):
        trainings.arrived(tenth / 10)
    assert trainings.per_s(20.5) == pytest.approx(10, rel=0.05)


def test_rates_are_those_since_twenty_merges_ago():
    marks = Marks()
    assert marks.rates(Mark()) == (0.0, 0.0)
    for version in range(1, 11):  # one update of 100 bytes each 2 s
        marks.merged(Mark(2.0 * version, version, 100 * version), replaces=False)
    assert marks.rates(Mark(25.0, 10, 1000)) == (10 / 25, 1000 / 25)  # fewer than twenty: since the run began
    for version in range(11, 41):  # then two updates, of 300 bytes, each second
        marks.merged(Mark(20.0 + version - 10, 2 * version - 10, 1000 + 300 * (version - 10)), replaces=False)
    # 21 marks are kept, of versions 20 to 40; version 20 was at 30 s with 30 updates and 4,000 bytes
    assert marks.rates(Mark(50.0, 70, 10_000)) == ((70 - 30) / 20, (10_000 - 4_000) / 20)
    assert marks.rates(Mark(70.0, 70, 10_000)) == (1.0, 150.0)  # nothing for 20 s more: the rate falls


def test_merges_at_one_time_are_one_mark():
    """Of 1,000 clients on equal devices all are done at one time, up to rounding: 100 merges of 10 updates each 2 s."""
    marks = Marks()
    for burst in range(1, 31):
        for merge in range(1, 101):
            updates = 1000 * (burst - 1) + 10 * merge
            marks.merged(Mark(2.0 * burst + 1e-15 * merge, updates, 100 * updates), replaces=False)
        assert marks.rates(Mark(2.0 * burst, 1000 * burst, 100_000 * burst)) == pytest.approx((500, 50_000))


def test_several_updates_of_one_merge_are_one_mark():
    marks = Marks()
    for updates, at_s in ((1, 5.0), (2, 3.0), (3, 4.0)):
        marks.merged(Mark(at_s, updates, 10 * updates), replaces=updates > 1)
    assert list(marks.marks) == [Mark(), Mark(5.0, 3, 30)]


def test_when_it_ends_is_when_the_first_limit_or_all_targets_are_met():
    accuracy, loss = Target("accuracy", 0.9), Target("loss", 0.5)
    goals = Goals(100, 60.0, (accuracy, loss))
    # accuracy rises by 0.1 in 10 s, from 0.5 at 0 s; loss falls by 0.25 in 10 s, from 2.0
    rows = [{"time_s": t, "accuracy": 0.5 + t / 100, "loss": 2.0 - t / 40} for t in (0.0, 10.0, 20.0)]
    found = etas(goals, 25.0, 40, 4.0, rows)
    # (100 - 40) / 4; 60 - 25; 0.9 at 40 s; 0.5 at 60 s
    assert [eta.goal for eta in found] == ["max_updates", "max_time", "accuracy=0.9", "loss=0.5"]
    assert [eta.in_s for eta in found] == pytest.approx([15.0, 35.0, 15.0, 35.0])
    assert ends_in_s(goals, found) == pytest.approx(15.0)
    assert ends_in_s(Goals(targets=(accuracy, loss)), found[2:]) == pytest.approx(35.0)
    (reached, _) = etas(Goals(targets=(accuracy, loss)), 25.0, 40, 4.0, rows, {accuracy})
    assert reached == Eta("accuracy=0.9", 0.0)


@pytest.mark.parametrize(
    ("values", "in_s"),
    [
        ([0.5, 0.6], None),  # two points say too little
        ([0.6, 0.6, 0.6], None),
        ([0.7, 0.6, 0.5], None),  # away from it
        ([0.4, 0.6, 0.5], pytest.approx(65.0)),  # the line 0.45 + 0.005 t reaches 0.9 at 90 s
        ([0.0, 0.8, 0.85, 0.89], None),  # mean 0.635 at 15 s, slope 13.6/500: 0.9 at 24.7 s has passed, and was not met
    ],
)
def test_a_target_is_met_where_the_line_through_the_evaluations_meets_it(values, in_s):
    rows = [{"time_s": 10.0 * i, "accuracy": value} for i, value in enumerate(values)]
    (found,) = etas(Goals(targets=(Target("accuracy", 0.9),)), 25.0, 0, 0.0, rows)
    assert found.in_s == in_s


def test_targets_keep_their_direction_in_the_journal():
    goals = Goals(targets=(Target("loss", 0.5), Target("gap", 0.1, "min"), Target("accuracy", 0.2, "min")))
    assert Goals.from_json(goals.to_json()) == goals
    for name in ("max_updates", "max_time_s"):  # an altered journal says nothing of goals
        assert Goals.from_json({**goals.to_json(), name: []}) == Goals()


def test_without_progress_nothing_is_promised():
    assert etas(Goals(10), 5.0, 0, 0.0, []) == (Eta("max_updates", None),)
    assert ends_in_s(Goals(10), [Eta("max_updates", None)]) is None
    assert etas(Goals(10), 5.0, 12, 0.0, []) == (Eta("max_updates", 0.0),)  # a round that was begun is merged whole
    assert etas(Goals(), 5.0, 0, 0.0, []) == ()


def test_a_simulation_has_a_speed():
    assert (
        speed([{"wall_s": 1.0, "time_s": 0.0}, {"wall_s": 3.0, "time_s": 50.0}, {"wall_s": 5.0, "time_s": 200.0}]) == 50
    )
    assert speed([{"wall_s": 1.0, "time_s": 0.0}]) is None
    assert speed([{"wall_s": 1.0, "time_s": 0.0}, {"wall_s": 1.0, "time_s": 5.0}]) is None


def test_who_trains_what_since_when_and_when_it_should_be_back():
    clock = Clock(100.0)
    state = RunState(clock=clock)
    for row in (run_row(max_updates=9), joined(1, name="phone"), joined(2), assigned(1, 1, 1.0), assigned(2, 2, 1.0)):
        state.event(row)
    fragment = {"kept": {"fc1": {"range": [0, 40]}}}
    state.event(arrived(1, 1, 4.0))
    state.client(ended(1, 1, 1.0, 4.0, 1, spec="fc1[0:40]"))
    state.event(assigned(3, 1, 4.0, version=1, spec=fragment))
    clock.now = 101.0  # a second after the last row, which was at 4 s
    snapshot = state.snapshot()
    assert (snapshot.time_s, snapshot.version, snapshot.num_updates, snapshot.bytes_down) == (5.0, 1, 1, 1000)
    phone, other = snapshot.clients
    # its last took 3 s
    assert phone == ClientProgress(1, "fc1[0:40]", 1, "phone", True, version=1, behind=0, since_s=1.0, due_in_s=2.0)
    assert other == ClientProgress(2, "full", 0, "", True, version=0, behind=1, since_s=4.0, due_in_s=None)
    assert (snapshot.updates_per_s, snapshot.bytes_per_s) == (1 / 5, 1500 / 5)
    assert snapshot.ends_in_s == 8 * 5
    state.event({"time_s": 6.0, "event": "lost", "client": 1, "reason": "disconnected"})
    state.client(
        {"client": "1", "outcome": "lost:disconnected", "assignment": "3", "assigned_s": "4.0", "arrived_s": ""}
    )
    snapshot = state.snapshot()
    assert snapshot.clients[0] == ClientProgress(1, "", 1, "phone", there=False)
    assert (snapshot.num_there, snapshot.num_working, dict(snapshot.outcomes)) == (1, 1, {"merged": 1, "lost": 1})


def test_an_emulated_pace_and_the_last_task_on_the_same_submodel_say_when():
    state = RunState(clock=Clock())
    for row in (run_row("simulated"), joined(1), assigned(1, 1, 0.0, pace_s=7.0)):
        state.event(row)
    assert state.snapshot().clients[0].due_in_s == 7.0
    for number, (spec, lasted_s) in enumerate((("full", 2.0), ("fc1[0:40]", 1.0)), start=1):
        state.event(arrived(number, 1, lasted_s))
        state.client(ended(number, 1, 0.0, lasted_s, number, spec=spec))
        state.event(assigned(number + 1, 1, 2.0))
    assert state.snapshot().clients[0].due_in_s == 2.0  # the whole model took 2 s, a fragment 1 s
    state.event(assigned(9, 1, 2.0, spec={"kept": {"fc1": {"range": [40, 60]}}}))
    assert state.snapshot().clients[0].due_in_s == 1.0  # never had before: as long as the last


def test_a_client_cannot_steer_the_terminal():
    said = []
    state = RunState(say=said.append, clock=Clock())
    state.event(joined(1, name="\x1b[2J" + "phone" * 20))
    state.event({"time_s": 1.0, "event": "lost", "client": 1, "reason": "gone\x1b[1A\r"})
    assert state.snapshot().clients[0].device == r"\x1b[2J" + "phone" * 3 + "p…"
    assert not any("\x1b" in text or "\r" in text for text in said) and len(said) == 2


def test_an_answer_of_an_earlier_life_ends_no_task():
    state = RunState(clock=Clock())
    for row in (
        run_row(),
        joined(1, incarnation=1),
        assigned(2, 1, 0.0, incarnation=1),
        arrived(2, 1, 1.0, incarnation=0),
    ):
        state.event(row)
    assert state.snapshot().num_working == 1


def test_of_many_clients_those_at_work_are_shown_the_longest_first():
    state = RunState(clock=Clock())
    state.event(run_row("simulated"))
    for client in range(1, 101):
        state.event(joined(client))
    for number, client in enumerate((70, 50, 60), start=1):
        state.event(assigned(number, client, float(number)))
    snapshot = state.snapshot()
    assert [client.client for client in snapshot.clients] == [70, 50, 60, *range(1, 14)]
    assert (snapshot.num_clients, snapshot.num_there, snapshot.num_working) == (100, 100, 3)
    assert len(state.snapshot(None).clients) == 100
    console = Console(file=io.StringIO(), width=100)
    console.print(table(snapshot, "title"))
    assert "84 more, 0 at work" in console.file.getvalue()


def test_a_task_that_is_due_now_is_not_due_in_the_rounding_of_a_sum():
    """0.1 + 0.2 is 0.3 and 4e-17: a task of 0.1 s that began at 0.2 s is due at 0.3 s."""
    state = RunState(clock=Clock())
    for row in (run_row("simulated"), joined(1), assigned(1, 1, 0.0), arrived(1, 1, 0.1), assigned(2, 1, 0.2)):
        state.event(row)
        if row["event"] == "arrived":
            state.client(ended(1, 1, 0.0, 0.1, 1))
    state.event(joined(2, 0.3))
    (client, _) = state.snapshot().clients
    assert 0.1 + 0.2 - 0.3 > 0 and client.due_in_s == 0.0


def test_targets_that_were_met_stay_met():
    state = RunState(clock=Clock())
    # before the journal's first row
    state.metrics({"version": "0", "time_s": "0.0", "wall_s": "0.1", "accuracy": "0.95"})
    state.event(run_row("simulated", targets=(Target("accuracy", 0.9), Target("loss", 1.0))))
    for version in range(1, 20):
        state.metrics({"version": version, "time_s": 2.0 * version, "wall_s": 0.1, "accuracy": 0.5, "loss": 2.0})
    assert state.snapshot().etas == (Eta("accuracy=0.9", 0.0), Eta("loss=1", None))
    assert state.snapshot().metrics == {"accuracy": 0.5, "loss": 2.0}


def test_the_table_says_everything():
    state = RunState(clock=Clock())
    for row in (run_row("simulated", max_updates=4, max_time_s=100.0), joined(1, name="phone"), joined(2), joined(3)):
        state.event(row)
    state.event(assigned(1, 1, 0.0))
    state.event(assigned(2, 2, 0.0))
    state.event(arrived(1, 1, 10.0))
    state.client(ended(1, 1, 0.0, 10.0, 1))
    state.metrics({"version": 0, "time_s": 0.0, "wall_s": 0.0, "accuracy": 0.1, "coverage": 1.0})
    beside = {"peak_bytes": 5000, "measured_bytes": 6000, "time_to/accuracy=0.2": 10.0}
    state.metrics({"version": 1, "time_s": 10.0, "wall_s": 2.0, "accuracy": 0.25, **beside})
    state.event({"time_s": 10.0, "event": "lost", "client": 3, "reason": "unavailable"})
    state.client({"client": 3, "outcome": "lost:unavailable", "assignment": 7})
    state.event(assigned(3, 1, 10.0, version=1))
    console = Console(file=io.StringIO(), width=160)
    console.print(table(state.snapshot(), "title"))
    lines = [" ".join(line.split()) for line in console.file.getvalue().splitlines()]
    assert lines == [
        "title",
        "a run",
        "client trains version for back in merged",
        "1 phone full 1 0 s 10.0 s 1",
        "2 full 0 (-1) 10.0 s ? 0",
        "3 gone 0",
        "version 1 1 of 4 updates 10.0 s 0.1 updates/s 150 B/s 5 times real time staleness 0 (at most 0) 1 lost",
        "accuracy 0.25",
        "max_updates in 30.0 s, here 6 s max_time in 1.5 min, here 18.0 s",
        "ends in 30.0 s, here 6 s",
    ]
    assert sentence(state.snapshot()).endswith("2 of 2 at work  ends in 30.0 s, here 6 s")
    assert json.loads(json.dumps(plain(state.snapshot())))["etas"][0] == {"goal": "max_updates", "in_s": 30.0}


@pytest.mark.parametrize(
    "spec",
    [
        Spec(),
        Spec.select({"fc1": range(40), "conv1": (0, 2, 5)}, trained=["fc2", "fc1"]),
        Spec.select({f"axis{i}": range(8) for i in range(6)}, blocks={"blocks": (0, 2)}, exits=[]),
        Spec.select(blocks={"blocks": range(1, 4)}, exits=["exit_2"]),
    ],
)
def test_submodels_are_named_as_elsewhere(spec):
    assert spec_in_words(json.loads(json.dumps(spec.to_json()))) == str(spec)
    assert len(spec_in_words(spec.to_json(), 5)) <= 5

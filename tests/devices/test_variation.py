"""Times of tasks on devices that vary, against sums made by hand."""

from __future__ import annotations

import json
import math
import statistics
from dataclasses import replace
from functools import partial

import pytest

from raafl.core.restoring import client_from_json
from raafl.core.saving import client_to_json
from raafl.core.types import Arrived, Assign, ClientInfo, Joined, Timer, Update, Work, derive_seed
from raafl.devices.profiles import Profile, TaskTime
from raafl.devices.variation import MOST_STEPS, STEPS, description, real_time
from tests.helpers.crash import crash
from tests.helpers.refusals import refuses
from tests.helpers.small_runs import equal_replay, experiment, finish, unequal

DRAW = partial(derive_seed, 7, "device", 1)


def timed(profile: Profile, predicted: TaskTime, start_s: float = 0.0, task: int = 0) -> TaskTime:
    return real_time(profile, predicted, start_s, task, DRAW)


# ---- changes ----


@pytest.mark.parametrize(
    ("start_s", "compute_s"),
    [
        (0.0, 8.0),  # from 1 to 9, before the change
        (5.0, 4.0 + 4.0 + 1.0),  # from 6: 4 s at full speed, 4 s at half that do 2, the last 2 at double speed
        (10.0, 3.0 + 6.5 / 2),  # from 11: 3 s at half that do 1.5
        (20.0, 4.0),
    ],
)
def test_a_task_takes_as_long_as_the_speed_at_each_moment_makes_it(start_s, compute_s):
    took = timed(Profile(speed_changes=((10, 0.5), (14, 2))), TaskTime(1.0, 8.0, 2.0), start_s)
    assert (took.down_s, took.up_s) == (1.0, 2.0) and took.compute_s == pytest.approx(compute_s)
    assert timed(Profile(), TaskTime(1.0, 8.0, 2.0), start_s) == TaskTime(1.0, 8.0, 2.0)


def test_a_transfer_takes_as_long_as_the_link_at_its_own_time_makes_it():
    """Down: latency 1 until 1, then 4 s of bytes, of which 3 until 4 and 1 at a quarter: 4. Compute 2 until 10. Up: latency
    until 11, then 6 s of bytes: 4 s at a quarter until 15 do 1, the other 5 at double speed take 2.5."""
    profile = Profile(link_changes=((4, 0.25), (15, 2)))
    took = timed(profile, TaskTime(down_s=5.0, compute_s=2.0, up_s=7.0, latency_s=1.0))
    assert (took.down_s, took.compute_s, took.up_s) == pytest.approx((1 + 3 + 4, 2.0, 1 + 4 + 2.5))


def test_computing_begins_when_the_slow_download_has_ended():
    profile = Profile(link_changes=((0, 0.5),), speed_changes=((3, 0.1), (6, 1)))
    took = timed(profile, TaskTime(2.0, 1.0, 0.0))  # down until 4; then 2 s that do 0.2, and 0.8
    assert (took.down_s, took.compute_s) == pytest.approx((4.0, 2.8))


def test_what_repeats_begins_again_at_full_speed():
    """Half speed in 4 to 10 of every 10 s: 7 s of work a period. From 6: 4 s do 2, then 10 s do 7, the last 1 at full speed."""
    profile = Profile(speed_changes=((4, 0.5),), repeat_s=10)
    assert timed(profile, TaskTime(0.0, 10.0, 0.0), 6.0).compute_s == pytest.approx(4 + 10 + 1)
    assert timed(profile, TaskTime(0.0, 10.0, 0.0), 10_006.0).compute_s == pytest.approx(15)


def test_after_very_many_changes_the_rest_goes_at_the_mean_rate():
    profile = Profile(speed_changes=((1, 0.5),), repeat_s=2)
    took = timed(profile, TaskTime(0.0, 3.0 * MOST_STEPS, 0.0))  # 1.5 s of work every 2 s
    assert took.compute_s == pytest.approx(4.0 * MOST_STEPS)


def test_no_moment_and_no_period_stops_the_clock():
    profile = Profile(speed_changes=((0.0, 0.5),), repeat_s=1e-3, speed_drift=2.0, drift_s=1e-3)
    assert math.isfinite(timed(profile, TaskTime(0.0, 1e50, 0.0), 1e12 / 3).compute_s)


# ---- what is drawn ----


def test_jitter_is_drawn_for_each_task_and_each_transfer():
    profile = Profile(speed_jitter=0.1, link_jitter=0.3)
    took = [timed(profile, TaskTime(2.0, 1.0, 2.0, 1.0), task=task) for task in range(400)]
    logs = [math.log(time.compute_s) for time in took]
    assert statistics.stdev(logs) == pytest.approx(0.1, rel=0.15) and abs(statistics.mean(logs)) < 0.02
    assert statistics.stdev(math.log(time.up_s - 1) for time in took) == pytest.approx(0.3, rel=0.15)
    assert all(time.down_s != time.up_s for time in took)
    later = timed(profile, TaskTime(2.0, 1.0, 2.0, 1.0), 99.0, task=5)
    assert later.total_s == pytest.approx(took[5].total_s, rel=1e-12)
    other = real_time(profile, TaskTime(2.0, 1.0, 2.0, 1.0), 0.0, 5, partial(derive_seed, 8, "device", 1))
    assert other.compute_s != took[5].compute_s


def test_drift_wanders_in_steps_with_the_same_spread_at_each_moment():
    profile = Profile(speed_drift=0.5, drift_s=80.0)
    step_s = 80.0 / STEPS
    short = TaskTime(0.0, 1e-6, 0.0)  # within one step
    logs = [-math.log(timed(profile, short, step * step_s + 1).compute_s / 1e-6) for step in range(400 * STEPS)]
    for part in range(STEPS):
        assert statistics.stdev(logs[part::STEPS]) == pytest.approx(0.5, rel=0.2)
    near = statistics.correlation(logs[:-1], logs[1:])
    far = statistics.correlation(logs[: -2 * STEPS], logs[2 * STEPS :])
    assert near > 0.85 and abs(far) < 0.2
    long = timed(profile, TaskTime(0.0, 30.0, 0.0), 5.0).compute_s  # the factors of the steps that it goes through
    done, now = 0.0, 5.0
    while done < 30.0 - 1e-9:
        step = math.floor(now / step_s)
        seconds = min((step + 1) * step_s - now, (30.0 - done) / math.exp(logs[step]))
        done, now = done + seconds * math.exp(logs[step]), now + seconds
    assert long == pytest.approx(now - 5.0)


def test_a_profile_says_in_words_how_it_varies():
    profile = Profile(speed_changes=((4, 0.5),), repeat_s=10, speed_jitter=0.1, link_drift=0.3, drift_s=60)
    assert description(profile) == "speed: 1 change in 10 s, jitter 0.1; links: drift 0.3 over 60 s"
    assert description(Profile()) == ""


test_bad_fields_are_named_with_a_remedy = refuses(
    Profile,
    ({"link_changes": ((5, 0),)}, r"link_changes has \[5, 0\]"),
    ({"speed_jitter": -0.1}, "speed_jitter is -0.1; it must be the standard deviation"),
    ({"link_drift": 3.0, "drift_s": 5}, "link_drift is 3.0; .* 0 to 2"),
    ({"speed_drift": 0.1}, "drift_s is not given; speed_drift and link_drift need it"),
    ({"drift_s": 5.0}, "drift_s is 5.0 but nothing drifts"),
    ({"speed_drift": 0.1, "drift_s": 0}, "drift_s is 0; it must be a finite number of seconds"),
    ({"repeat_s": 5.0}, "repeat_s is 5.0 but nothing repeats"),
    ({"speed_changes": ((5, 1),), "repeat_s": 5.0}, "a change at 5 s but repeat_s is 5"),
    ({"speed_changes": ((5, 1),), "repeat_s": math.inf}, "repeat_s is inf"),
    error=ValueError,
)


# ---- in a run ----


VARYING = {"speed_jitter": 0.2, "link_jitter": 0.2, "speed_drift": 0.5, "link_drift": 0.5, "drift_s": 0.5}


def test_a_run_on_devices_that_vary_is_the_same_on_every_executor_and_replays(tmp_path):
    devices = unequal(**VARYING, link_changes=((0.2, 0.5),))
    made = experiment(tmp_path / "one", "fed_buff", devices=devices)
    one, two = finish(made), finish(experiment(tmp_path / "two", "fed_buff", devices=devices, workers=2))
    steady = finish(experiment(tmp_path / "steady", "fed_buff"))
    assert one.digest == two.digest and one.text("clients.csv") == two.text("clients.csv")
    assert equal_replay(made, one)
    assert one.summary["time_s"] != steady.summary["time_s"]
    other = finish(experiment(tmp_path / "seed", "fed_buff", devices=devices, seed=1))
    assert other.rows()[0]["train_s"] != one.rows()[0]["train_s"]


def test_a_resumed_run_goes_on_with_the_same_times(tmp_path, monkeypatch):
    made = experiment(tmp_path / "whole", "fed_async", devices=unequal(**VARYING), checkpoint_every=1)
    whole, half = finish(made), replace(made, output=str(tmp_path / "half"))
    with crash(monkeypatch, 6):
        finish(half)
    resumed = finish(replace(half, output=None, resume=half.output))
    assert resumed.digest == whole.digest and resumed.summary["time_s"] == whole.summary["time_s"]


def test_how_a_device_varies_survives_the_journal():
    profile = Profile(
        speed_changes=((10, 0.5),), link_changes=((1, 2),), repeat_s=20, availability=((0, 5),), **VARYING
    )
    client = ClientInfo(1, 5, profile)
    assert client_from_json(json.loads(json.dumps(client_to_json(client)))) == client
    plain = client_to_json(ClientInfo(1, 5, Profile()))["profile"]
    assert not {"link_changes", "repeat_s", "drift_s", *VARYING} & plain.keys()


def test_timely_fl_gives_a_device_that_slows_down_in_mid_run_less():
    """T_k is the steady client's unit of work; at a quarter of its speed the other has time for less than all layers."""
    from raafl.algorithms import timely_fl
    from tests.helpers.coordinators import coordinator_for, filled

    speeds = [Profile(flops_per_s=1.0), Profile(flops_per_s=1.0, speed_changes=((100.0, 0.25),))]
    coordinator = coordinator_for(timely_fl(participation=0.5))
    clients = [ClientInfo(i, 1, profile) for i, profile in enumerate(speeds, start=1)]
    due: list[tuple[float, int, object]] = []
    given: list[tuple[float, int, int]] = []  # when, who, values that train

    def tell(event, now):
        for action in coordinator.handle(event, now):
            if isinstance(action, Assign):
                task = action.assignment
                work = Work(task.spec, task.region, task.num_epochs, task.num_steps)
                client = clients[task.client - 1]
                fleet = coordinator.fleet
                time = fleet.real_time(client, fleet.task_time(client, work), now, task.task)
                tensors = filled(coordinator.state, 0.0, task.spec)
                given.append((now, task.client, tensors.layout.num_bytes * (task.num_epochs or 1)))
                due.append((now + time.total_s, len(given), Arrived(Update(task.id, task.client, 0, tensors, 1))))
            elif type(action).__name__ == "SetTimer":
                due.append((action.at, len(given) + 10_000, Timer(action.id)))

    for client in clients:
        tell(Joined(client), 0.0)
    while due and len(given) < 30:
        due.sort(key=lambda item: item[:2])
        now, _, event = due.pop(0)
        tell(event, now)
    before = {amount for now, who, amount in given if who == 2 and now < 90}
    after = [amount for now, who, amount in given if who == 2 and now > 100][2:]
    steady = {amount for _, who, amount in given if who == 1}
    assert len(before) == 1 and before == steady
    assert after and max(after) < min(before)

"""Profiles fitted to a run's tasks: fits against hand-made times, and a run of real ranks at a pace that the fit is not told."""

import json
import math
from dataclasses import replace
from types import SimpleNamespace

import pytest

from raafl.algorithms import split_fed
from raafl.algorithms.split_fed.exchange import KEY
from raafl.commands.calibrate import _warnings
from raafl.commands.cli import main
from raafl.config.parse import load_experiment, parse
from raafl.core.types import Assignment, ClientInfo
from raafl.devices import Profile, assign
from raafl.devices.files import load_devices, write_rows
from raafl.errors import BadInput
from raafl.lab.plan.calibrate import (
    MOST_FITTED,
    Fit,
    TimedTask,
    _timed,
    calibrate,
    check,
    device_rows,
    fit_tasks,
    profiles_of,
    read_real,
)
from raafl.lab.plan.dry import World
from raafl.submodel import FULL
from tests.helpers.real_ranks import ranks


def tasks(*rows, client=1):
    """Tasks of (predicted computation, predicted transfers, real seconds), one after another."""
    found, now = [], 0.0
    for compute_s, link_s, seconds in rows:
        found.append(TimedTask(client, 0, now, now + seconds, compute_s, link_s))
        now += seconds
    return found


def test_of_one_kind_of_task_all_that_is_no_transfer_is_computation():
    fit = fit_tasks(1, tasks((2.0, 0.5, 6.5), (2.0, 0.5, 6.5)))
    assert fit == Fit(1, 3.0, 0.0, 0.0, 2)
    assert fit.expected_s(tasks((4.0, 0.25, 1.0))[0]) == 12.25


def test_tasks_of_several_sizes_show_an_overhead():
    """Seconds are 3 x computation + 0.5, on a free link."""
    fit = fit_tasks(1, tasks((1.0, 0.0, 3.5), (2.0, 0.0, 6.5), (4.0, 0.0, 12.5)))
    assert (fit.slowdown, fit.overhead_s) == (pytest.approx(3.0), pytest.approx(0.5))
    assert fit.jitter == 0.0


def test_an_overhead_below_zero_is_none():
    """On the line 2 x computation - 0.5; with no overhead the factors are 1.5 and 1.75, and their mean 1.625."""
    fit = fit_tasks(1, tasks((1.0, 0.0, 1.5), (2.0, 0.0, 3.5)))
    assert (fit.slowdown, fit.overhead_s) == (1.625, 0.0)


def test_the_mean_of_the_jitter_is_the_mean_of_the_tasks():
    """Factors 1, 1 and e have logarithms 0, 0, 1, whose deviation is sqrt(2/9); their mean is (2 + e) / 3."""
    fit = fit_tasks(1, tasks((1.0, 0.0, 1.0), (1.0, 0.0, 1.0), (1.0, 0.0, math.e)))
    mean = (2 + math.e) / 3
    assert fit.jitter == pytest.approx(math.sqrt(2 / 9))
    assert fit.slowdown * math.exp(fit.jitter**2 / 2) == pytest.approx(mean)
    assert fit.expected_s(tasks((1.0, 0.0, 9.0))[0]) == pytest.approx(mean)


def test_a_task_of_a_machine_that_slept_is_left_out():
    rows = [(1.0, 0.0, 2.0)] * 9
    assert fit_tasks(1, tasks(*rows, (1.0, 0.0, 500.0))).slowdown == 2.0


def test_an_overhead_counts_once_for_each_exchange_of_a_task_as_the_latency_of_its_profile_does():
    """Seconds are 2 x computation + 0.1 for a task's round trip and 0.1 for each of 0, 9 or 39 exchanges in it."""
    base = Profile("any", 1.0e9, latency_s=0.05)
    sizes = ((1.0, 0), (4.0, 9), (2.0, 39))
    done = []
    for flops, exchanges in sizes:
        time = base.task_time(flops * 1e9, 0, 0, num_exchanges=exchanges)
        seconds = 2 * time.compute_s + time.down_s + time.up_s + 0.1 * (1 + exchanges)
        done.append(TimedTask(1, 0, 0.0, seconds, time.compute_s, time.down_s + time.up_s, round_trips=1 + exchanges))
    fit = fit_tasks(1, done)
    assert (fit.slowdown, fit.overhead_s, fit.jitter) == (pytest.approx(2.0), pytest.approx(0.1), 0.0)
    fitted = fit.profile(base)
    for task, (flops, exchanges) in zip(done, sizes, strict=True):
        assert fit.expected_s(task) == pytest.approx(task.seconds)
        assert fitted.task_time(flops * 1e9, 0, 0, num_exchanges=exchanges).total_s == pytest.approx(task.seconds)


def test_an_overhead_of_tasks_whose_exchanges_grow_with_them_is_slower_computation():
    """In split learning each batch is an exchange: 1 s of computation and 0.1 s more for each of 10 or 100 batches."""
    done = [TimedTask(1, 0, 0.0, 1.1 * num, 1.0 * num, 0.0, round_trips=1 + num) for num in (10, 100, 10, 100)]
    fit = fit_tasks(1, done)
    assert (fit.slowdown, fit.overhead_s) == (pytest.approx(1.1), 0.0)


def test_the_exchanges_of_a_task_are_those_of_its_method():
    fleet = World(load_experiment("configs/quickstart.yaml", "--algorithm", "split_fed")).fleet(split_fed())
    client = ClientInfo(1, 100, Profile("any", 1.0e9))
    work = {"spec": FULL, "region": 0, "num_epochs": 1, "num_steps": None, "seed": 0, "assigned_s": 2.0}
    for extra, trips in (({}, 1), ({KEY: {"batches": 7, "samples": 100}}, 8)):
        task = Assignment(id=1, client=1, incarnation=0, task=1, version=0, extra=extra, **work)
        assert _timed(task, 3.0, client, fleet).round_trips == trips


def test_a_profile_has_the_fitted_speeds_and_hides_them_from_a_check():
    base = Profile("any", 8.0e9, bytes_per_s=4.0e9, launch_s=1e-6, latency_s=0.1, speed_changes=((0.0, 0.5),))
    fit = Fit(3, 4.0, 0.2, 0.1, 5)
    assert fit.profile(base) == Profile(
        "client-3", 2.0e9, bytes_per_s=1.0e9, launch_s=4e-6, latency_s=0.2, speed_jitter=0.1
    )
    hidden = fit.slowed(base)
    assert (hidden.flops_per_s, hidden.latency_s, hidden.speed_changes) == (8.0e9, 0.2, ((0.0, 0.25),))


def test_the_first_task_and_half_of_the_others_are_no_part_of_the_fit():
    """After a first task of 9 s: two of 2 s are fitted, and 2.5 s and 4 s held out, which are expected to take 2 s."""
    run = RunOf(tasks(*[(1.0, 0.0, seconds) for seconds in (9.0, 2.0, 2.0, 2.5, 4.0)]))
    (fit,) = calibrate(run).values()
    assert (fit.num_fitted, fit.num_held_out, fit.warm_up_s) == (2, 2, 7.0)
    assert fit.task_error == pytest.approx((0.2 + 0.5) / 2) and fit.sum_error == pytest.approx(4 / 6.5 - 1)
    (alone,) = calibrate(RunOf(tasks((1.0, 0.0, 9.0)))).values()
    assert (alone.slowdown, alone.num_held_out, alone.task_error, alone.warm_up_s) == (9.0, 0, None, None)
    assert calibrate(RunOf(tasks(*[(1.0, 0.0, 1.0)] * 99)))[1].num_fitted == MOST_FITTED


class RunOf:
    """The part of a run that a fit reads."""

    def __init__(self, tasks):
        self.tasks = tasks


def test_an_unlimited_speed_cannot_be_scaled():
    with pytest.raises(BadInput, match="the profile of client 1 has no flops_per_s: give --base FILE"):
        fit_tasks(1, tasks((0.0, 0.0, 1.0)))


def test_a_client_without_a_task_keeps_its_place_in_the_file(tmp_path):
    """Of clients 1 to 3, the second joined with a link of its own and finished no task."""
    joined = {i: ClientInfo(i, 10, Profile("a100", 8e9, up_bytes_per_s=i)) for i in (1, 2)}
    world = SimpleNamespace(clients=[ClientInfo(i, 10, Profile("a100", 4e9)) for i in (1, 2, 3)])
    found = profiles_of(SimpleNamespace(world=world, clients=joined), {1: Fit(1, 2.0, 0.0, 0.0, 5)})
    write_rows(tmp_path / "d.yaml", device_rows(found.values()))
    profiles = assign(load_devices(tmp_path / "d.yaml"), 3)
    assert [(one.name, one.flops_per_s, one.up_bytes_per_s, one.down_bytes_per_s) for one in profiles] == [
        ("client-1", 4e9, 1, math.inf),
        ("client-2", 8e9, 2, math.inf),
        ("client-3", 4e9, math.inf, math.inf),
    ]


def test_a_declared_speed_beyond_all_bounds_needs_another_base():
    with pytest.raises(BadInput, match=r"client 4 says 2e\+07 times its real speed: give --base FILE"):
        Fit(4, 2e7, 0.0, 0.0, 5).slowed(Profile(flops_per_s=1e15))


# ---- a real run ----

REAL = (5.0e7, 2.5e7)
"""FLOP/s at whose pace the clients work: so slow that they keep it beside busy neighbours."""


@pytest.fixture(scope="module")
def real(tmp_path_factory):
    """A finished run of two real clients, with the config's text; its devices are to be found out."""
    argv = ["--config", "configs/quickstart.yaml", "--clients", "2", "--algorithm", "fed_buff", "--max_updates", "12"]
    argv += ["--algorithm.buffer_size", "2", "--train.num_epochs", "1", "--progress", "quiet", "--devices"]
    devices = [{"name": f"d{i}", "flops_per_s": speed} for i, speed in enumerate(REAL)]
    folder = tmp_path_factory.mktemp("real") / "run"
    parsed = parse("fit", [*argv, json.dumps(devices), "--output", str(folder)])
    with ranks(parsed.experiment) as started:
        started.serve()
        started.exit_codes()
    (folder / "config.yaml").write_text(parse("fit", [*argv, "null"]).config_yaml)
    return folder, replace(parsed.experiment, devices=None)


def test_real_tasks_give_the_speed_that_they_were_slowed_to(real, tmp_path):
    run = read_real(*real, base=Profile(flops_per_s=5.0e9, bytes_per_s=1.0e12))
    fits = calibrate(run)
    found = [fits[i].profile(run.clients[i].profile).flops_per_s for i in (1, 2)]
    assert found == [pytest.approx(speed, rel=0.25) for speed in REAL]
    assert all(abs(fit.sum_error) < 0.25 for fit in fits.values())
    assert run.num_paced == len(run.tasks)
    beside = check(run, fits)
    assert beside.updates == 12 and abs(beside.error) < 0.25
    assert beside.predicted_s == pytest.approx(beside.real_s * (1 + beside.error))


@pytest.mark.parametrize("overlap", [False, True])
def test_waits_for_the_uplink_in_the_times_of_a_run_with_overlap_are_said(real, overlap):
    run = read_real(real[0], replace(real[1], overlap=overlap), base=Profile(flops_per_s=5.0e9, bytes_per_s=1.0e12))
    said = [line for line in _warnings(run, calibrate(run)) if "calibrate on a run with overlap: false" in line]
    assert len(said) == overlap


def test_the_command_writes_a_device_file_and_says_its_error(real, tmp_path, capsys):
    folder, _ = real
    file = tmp_path / "mine.yaml"
    assert main(["calibrate", str(folder), "--check", str(folder), "--output", str(file), "--trust_config"]) == 0
    said = capsys.readouterr().out
    assert f"written: devices: {file}" in said and "took as long as an emulated device" in said
    assert f"{folder}: predicted" in said
    devices = load_devices(file)
    assert [one.name for one in devices] == ["client-1", "client-2"]
    assert devices[0].flops_per_s > devices[1].flops_per_s
    assert main(["calibrate", str(folder), "--tasks", "0"]) == 2
    assert "tasks is 0" in capsys.readouterr().err


def test_a_run_to_check_that_is_missing_is_named_before_a_file_is_written(real, tmp_path, capsys):
    folder, _ = real
    file, missing, empty = tmp_path / "mine.yaml", tmp_path / "missing", tmp_path / "empty"
    empty.mkdir()
    for runs, said in (
        ([folder, "--check", missing], f"check is '{missing}', which is not a folder: name that of a real run"),
        ([folder, "--check", folder, empty], f"'{empty}' is not a run folder: it has no config.yaml"),
        ([missing], f"run is '{missing}', which is not a folder: name that of a real run"),
        ([folder, "--check"], "--check: expected at least one argument"),
        (
            [missing, "--output", empty / "no" / "x.yaml"],
            "x.yaml', which cannot be written (No such file or directory)",
        ),
    ):
        assert main(["calibrate", "--output", str(file), "--trust_config", *map(str, runs)]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert said in line
    assert not file.exists()

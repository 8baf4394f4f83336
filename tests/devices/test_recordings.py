"""Recorded series: CSV files of times, factors and states."""

from __future__ import annotations

import csv
import math
import runpy

import pytest
import yaml

from raafl.config.shared import for_clients
from raafl.devices import Device, assign
from raafl.devices.files import load_devices


def csv_file(tmp_path, text: str) -> str:
    file = tmp_path / "day.csv"
    file.write_text(text)
    return str(file)


def test_a_file_of_times_and_factors_gives_a_profile_its_changes(tmp_path):
    file = csv_file(tmp_path, "time_s,speed,link\n0,1,0.5\n60,0.25,\n120,,2\n")
    profile = Device("x", flops_per_s=1e9, recorded=file, repeat_s=200).profile
    assert profile.speed_changes == ((0, 1), (60, 0.25)) and profile.link_changes == ((0, 0.5), (120, 2))
    assert profile.repeat_s == 200 and profile.availability is None


@pytest.mark.parametrize(
    ("rows", "repeat_s", "windows", "period_s"),
    [
        ("0,0\n10,1\n30,0", None, ((10, 30),), None),
        ("5,0\n10,1", None, ((0, 5), (10, math.inf)), None),
        ("10,1\n30,0\n40,1", 50, ((0, 30), (40, 50)), 50),
    ],
)
def test_states_become_windows(tmp_path, rows, repeat_s, windows, period_s):
    profile = Device(
        "x", flops_per_s=1e9, recorded=csv_file(tmp_path, "time_s,available\n" + rows), repeat_s=repeat_s
    ).profile
    assert (profile.availability, profile.period_s, profile.repeat_s) == (windows, period_s, None)


def test_changes_of_a_devices_own_repeat_beside_recorded_hours(tmp_path):
    file = csv_file(tmp_path, "time_s,available\n0,1\n5,0\n8,1\n")
    profile = Device("x", flops_per_s=1e9, recorded=file, link_changes=((0, 1), (5, 0.5)), repeat_s=10).profile
    assert (profile.availability, profile.period_s, profile.repeat_s) == (((0, 5), (8, 10)), 10, 10)


def test_each_client_takes_the_next_device_of_a_file(tmp_path):
    file = csv_file(tmp_path, "device,time_s,speed\na,0,0.5\nb,0,0.25\na,10,1\n")
    found = assign([Device("x", flops_per_s=1e9, recorded=file, count=3)], 3)
    assert [p.speed_changes for p in found] == [((0, 0.5), (10, 1)), ((0, 0.25),), ((0, 0.5), (10, 1))]


def test_a_device_file_may_name_it(tmp_path):
    file = csv_file(tmp_path, "time_s,speed\n5,0.5\n")
    devices = tmp_path / "devices.csv"
    devices.write_text(f"name,flops_per_s,recorded,link_jitter\nx,1e9,{file},0.1\n")
    (device,) = load_devices(devices)
    assert device.profile.speed_changes == ((5, 0.5),) and device.profile.link_jitter == 0.1


def test_what_a_device_was_recorded_to_do_stays_with_the_server(tmp_path):
    row = {"name": "x", "flops_per_s": 1e9, "recorded": csv_file(tmp_path, "time_s,speed\n5,0.5\n"), "repeat_s": 9.0}
    changes = {"name": "y", "flops_per_s": 1e9, "speed_changes": [[1, 0.5]], "speed_jitter": 0.1}
    sent = yaml.safe_load(for_clients(yaml.safe_dump({"devices": [row, changes]})))
    assert sent["devices"] == [
        {"name": "x", "flops_per_s": 1e9},
        {"name": "y", "flops_per_s": 1e9, "speed_jitter": 0.1},
    ]


def test_flashs_states_become_a_file_of_devices(tmp_path):
    rows = runpy.run_path("docs/examples/flash_states.py")["rows"]
    messages = (
        "2020-01-31 00:00:10\tscreen_off\n2020-01-31 00:00:10\twifi\n2020-01-31 00:01:00\tbattery_charged_on\n"
        "2020-01-31 00:02:10\t4G\n2020-01-31 00:03:10\tscreen_unlock\n"
    )
    file = tmp_path / "states.csv"
    with file.open("w", newline="") as out:
        csv.writer(out).writerows(
            rows({"a": {"messages": messages}, "never": {"messages": "2020-01-31 00:00:10\twifi"}})
        )
    (profile,) = Device("x", flops_per_s=1e9, recorded=str(file)).profiles()
    assert profile.availability == ((50, 180),)
    assert profile.link_changes == ((0, 1), (50, 1), (120, 0.25), (180, 0.25))


@pytest.mark.parametrize(
    ("text", "fields", "said"),
    [
        (None, {}, "which is not a file; give the path of a CSV file"),
        ("seconds,speed\n0,1\n", {}, "has the columns 'seconds, speed'; it must have time_s and any of"),
        ("time_s,speed\n", {}, "has no rows"),
        ("time_s,speed\n0,fast\n", {}, "has speed 'fast' in line 2; write a factor above 0"),
        ("time_s,speed\n0,0\n", {}, "has speed '0' in line 2"),
        ("time_s,speed\n5,1\n5,2\n", {}, "has time_s 5 in line 3 after 5; write increasing seconds"),
        ("time_s,available\n0,0.5\n", {}, "has available '0.5' in line 2; write 1 or 0"),
        ("time_s,speed\n0,1,\n0,5,1\n", {}, "has more cells than columns in line 3"),
        ("time_s,available\n0,0\n", {}, "has a device that is never available"),
        ("time_s,speed\n5,1\n", {"repeat_s": 5.0}, "has a row at 5 s but repeat_s is 5"),
        ("time_s,speed\n5,1\n", {"speed_changes": ((1, 2),)}, "speed_changes is given as well"),
        ("time_s,available\n5,0\n", {"presence": "leaves", "on_s": 5.0}, "presence is given as well"),
    ],
)
def test_a_bad_file_is_named_with_a_remedy(tmp_path, text, fields, said):
    file = str(tmp_path / "none.csv") if text is None else csv_file(tmp_path, text)
    with pytest.raises(ValueError, match="recorded is '") as raised:
        Device("x", flops_per_s=1e9, recorded=file, **fields)
    assert said in str(raised.value)

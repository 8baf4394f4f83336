"""Profiles by name, devices that are drawn, and hours that are drawn."""

import json
import math
import statistics
from dataclasses import fields

import numpy as np
import pytest

from raafl.devices import Device, Profile, assign, catalog
from raafl.devices.files import load_devices, write_rows

NAMED = ["jetson-nano", "jetson-tx2", "jetson-xavier-nx", "jetson-agx-orin", "raspberry-pi-4", "a100", "h100"]


def test_every_figure_has_a_source_and_is_its_share_of_the_peak():
    devices = catalog.catalogue()["devices"]
    assert set(NAMED) <= set(devices)
    assert sum(name.startswith("phone-") for name in devices) >= 3 and any(n.startswith("laptop-") for n in devices)
    for name, device in devices.items():
        for field in (*catalog.FIGURES, "bandwidth"):
            figure = device[field]
            assert len(figure["source"]) > 10, (name, field)
            if "peak" in figure:
                assert figure["value"] == pytest.approx(figure["peak"] * figure["share"], rel=0.02), (name, field)
    assert "BSD" in catalog.catalogue()["generators"]["flash-phones"]["source"]


def test_a_name_alone_takes_the_shipped_profile_and_any_field_overrides():
    nano = Device("jetson-nano", count=4)
    assert (nano.flops_per_s, nano.memory_bytes, nano.latency_s) == (1.34e11, 2.6e9, 0.001)
    slower = Device("jetson-nano", flops_per_s=1e9, up_bytes_per_s=math.inf)
    assert (slower.flops_per_s, slower.up_bytes_per_s, slower.memory_bytes) == (1e9, math.inf, 2.6e9)
    assert [type(p) for p in assign([nano], 4)] == [Profile] * 4
    assert Device("other", flops_per_s=1e9).memory_bytes == math.inf


def test_a_name_that_is_not_shipped_is_an_error_unless_something_says_what_it_can_do():
    with pytest.raises(ValueError, match="did you mean 'jetson-nano'"):
        Device("jetson-nanno", count=2)
    with pytest.raises(
        ValueError, match="'iphone-99' is not in raafl's catalogue, and flops_per_s is missing: give flops_per_s"
    ):
        Device("iphone-99")
    assert Device().flops_per_s == Device("night", availability=((0, 5),)).flops_per_s == 1e9
    assert Device("jetson-nanno", flops_per_s=1e9).flops_per_s == 1e9


def test_names_work_in_files(tmp_path):
    (tmp_path / "d.csv").write_text("name,count,seed,speed_changes\na100,2,,\nflash-phones,3,5,10:0.5;20:1\n")
    a100, phones = load_devices(tmp_path / "d.csv")
    assert a100.flops_per_s == catalog.figures("a100")["flops_per_s"]
    assert phones.speed_changes == ((10.0, 0.5), (20.0, 1.0)) and phones.seed == 5
    write_rows(tmp_path / "d.yaml", [{"name": "x: y", "flops_per_s": 1.5e9, "up_bytes_per_s": math.inf}], "a\nb")
    assert load_devices(tmp_path / "d.yaml") == [Device("x: y", flops_per_s=1.5e9)]


def test_a_file_has_the_numbers_that_were_written_to_it(tmp_path):
    """A period rounded to five digits would end before its last window, and `inf` is a text in YAML."""
    first = Profile("a", 1.23456789e9, availability=((0.0, 10.0), (20.0, 123454.0)), period_s=123454.0, latency_s=1e-17)
    second = Profile(
        "b", 2e17, availability=((5.0, math.inf),), speed_changes=((0.0, 1 / 3), (7.0, 1e-6)), repeat_s=1e8 / 3
    )
    rows = [{field.name: getattr(one, field.name) for field in fields(Profile)} for one in (first, second)]
    write_rows(tmp_path / "d.yaml", rows)
    assert [device.profile for device in load_devices(tmp_path / "d.yaml")] == [first, second]


def test_names_and_drawn_devices_work_in_a_config_and_survive_its_own_yaml(tmp_path):
    from raafl.config.parse import load_experiment, parse

    devices = "[{name: jetson-nano, count: 2}, {name: flash-phones, count: 3, seed: 7, presence: markov, on_s: 60, off_s: 30}]"
    parsed = parse("simulate", ["--config", "configs/quickstart.yaml", "--clients", "5", "--devices", devices])
    profiles = parsed.experiment.profiles()
    assert [p.name for p in profiles] == ["jetson-nano"] * 2 + ["flash-phones"] * 3
    assert len({p.flops_per_s for p in profiles}) == 4 and profiles[2].availability is not None
    (tmp_path / "again.yaml").write_text(parsed.config_yaml)
    assert load_experiment(tmp_path / "again.yaml").profiles() == profiles


# ---- drawn ----


def test_drawn_devices_repeat_by_seed_and_follow_their_distributions():
    law = catalog.catalogue()["generators"]["flash-phones"]
    phones = Device("flash-phones", count=1500, seed=3).profiles()
    assert phones == Device("flash-phones", count=1500, seed=3).profiles()
    assert phones[:5] != Device("flash-phones", count=5, seed=4).profiles()
    assert phones[:5] == Device("flash-phones", count=5, seed=3).profiles()  # a longer list begins alike
    logs = {f: [math.log(getattr(p, f)) for p in phones] for f in ("flops_per_s", "down_bytes_per_s", "up_bytes_per_s")}
    speed = law["flops_per_s"]
    middle = speed["intercept"] + speed["slope"] * law["score"]["mean_log"]
    assert statistics.median(logs["flops_per_s"]) == pytest.approx(middle, abs=0.1)
    assert min(logs["flops_per_s"]) >= speed["intercept"] + speed["slope"] * math.log(law["score"]["least"]) - 1e-9
    for field in ("down_bytes_per_s", "up_bytes_per_s"):
        assert statistics.mean(logs[field]) == pytest.approx(law[field]["mean_log"], abs=0.08)
        assert statistics.stdev(logs[field]) == pytest.approx(law[field]["sd_log"], rel=0.1)
    rho = np.corrcoef(logs["down_bytes_per_s"], logs["up_bytes_per_s"])[0, 1]
    assert rho == pytest.approx(law["link_correlation"], abs=0.08)


def test_of_drawn_devices_a_given_field_is_the_same_for_all():
    phones = Device("flash-phones", count=20, memory_bytes=5e8).profiles()
    assert {p.memory_bytes for p in phones} == {5e8} and len({p.flops_per_s for p in phones}) == 20


def test_the_shipped_parameters_are_those_of_the_data(raafl_data):
    folder = raafl_data / "devices"
    if not folder.is_dir():
        pytest.skip(f"no devices in {raafl_data}: benchmark2score.json and speed_distri.json of PKU-Chengxu/FLASH")
    law = catalog.catalogue()["generators"]["flash-phones"]
    scores = [float(s) for s in json.loads((folder / "benchmark2score.json").read_text()).values()]
    logs = np.log(scores)
    assert len(scores) == 307 and (min(scores), max(scores)) == (law["score"]["least"], law["score"]["most"])
    assert (logs.mean(), logs.std(ddof=1)) == pytest.approx(
        (law["score"]["mean_log"], law["score"]["sd_log"]), abs=1e-3
    )
    links = json.loads((folder / "speed_distri.json").read_text()).values()
    down, up = (np.log([link[key] * 1024 for link in links]) for key in ("down_u", "up_u"))
    for found, field in ((down, "down_bytes_per_s"), (up, "up_bytes_per_s")):
        assert (found.mean(), found.std(ddof=1)) == pytest.approx(
            (law[field]["mean_log"], law[field]["sd_log"]), abs=1e-3
        )
    assert np.corrcoef(down, up)[0, 1] == pytest.approx(law["link_correlation"], abs=1e-3)
    rows = json.loads((folder / "raw_ai_benchmark_list.json").read_text())
    x = np.log([float(row["AI_Score"].split()[0]) for row in rows])
    y = np.log([float(row["RAM"].removesuffix("GB")) for row in rows])
    slope, intercept = np.polyfit(x, y, 1)
    memory, left = law["memory_bytes"], y - intercept - slope * x
    assert (slope, intercept) == pytest.approx((memory["slope"], memory["intercept"]), abs=1e-3)
    assert math.sqrt((left**2).sum() / (len(left) - 2)) == pytest.approx(memory["sd_log"], abs=1e-3)
    by_name = json.loads((folder / "benchmark2score.json").read_text())
    stand_ins = [by_name[name] for name in json.loads((folder / "supported_devices.json").read_text())]
    phones = ["phone-nexus-6", "phone-redmi-note-8", "phone-galaxy-note10"]  # FLASH's order, slowest first
    speeds = [catalog.figures(name)["flops_per_s"] for name in phones]
    slope, intercept = np.polyfit(np.log(stand_ins), np.log(speeds), 1)
    assert (slope, intercept) == pytest.approx((law["flops_per_s"]["slope"], law["flops_per_s"]["intercept"]), rel=5e-3)


# ---- hours ----


@pytest.mark.parametrize("number", range(6))
def test_a_diurnal_device_is_there_so_long_of_each_day(number):
    windows, period_s = catalog.presence("diurnal", 8 * 3600.0, None, 1, number)
    profile = Profile(availability=windows, period_s=period_s)
    assert period_s == 86400 and sum(stop - start for start, stop in windows) == pytest.approx(8 * 3600)
    there = [profile.available(60.0 * minute) for minute in range(3 * 1440)]
    assert sum(there) == pytest.approx(3 * 480, abs=6) and there[:1440] == there[1440:2880]


def test_markov_devices_come_and_go_at_the_given_rates_each_in_its_own_way():
    profiles = Device("x", flops_per_s=1e9, count=200, presence="markov", on_s=60.0, off_s=30.0, seed=2).profiles()
    assert len({p.availability for p in profiles}) == 200
    stays = [stop - start for p in profiles for start, stop in p.availability]
    assert statistics.mean(stays) == pytest.approx(60, rel=0.05)
    assert statistics.mean(p.available(0.0) for p in profiles) == pytest.approx(2 / 3, abs=0.1)
    assert statistics.mean(p.available(1234.5) for p in profiles) == pytest.approx(2 / 3, abs=0.1)


@pytest.mark.parametrize("presence", ["diurnal", "markov", "leaves"])
def test_hours_at_the_bounds_are_hours(presence):
    for on_s, off_s in ((1e-3, 1e10), (1e10, 1e-3), (1e10, 1e10), (1e-3, 1e-3)):
        times = {"on_s": on_s} if presence == "leaves" else {"on_s": on_s, "off_s": off_s}
        for profile in Device("x", flops_per_s=1e9, presence=presence, count=50, **times).profiles():
            assert profile.available(0.0) or 0.0 < profile.next_change_s(0.0) < math.inf


def test_a_device_that_leaves_never_comes_back():
    (profile,) = Device("x", flops_per_s=1e9, presence="leaves", on_s=50.0).profiles()
    gone_s = profile.next_change_s(0.0)
    assert profile.available(0.0) and 0 < gone_s < 1000 and profile.next_change_s(gone_s) == math.inf


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"presence": "nightly"}, "presence is 'nightly'"),
        ({"presence": "markov", "on_s": 5.0}, "off_s is not given"),
        ({"presence": "diurnal"}, "on_s is not given"),
        ({"presence": "diurnal", "on_s": 90000.0}, "a day or more"),
        ({"presence": "leaves", "on_s": -1.0}, "on_s is -1.0"),
        ({"presence": "leaves", "on_s": 1e15}, "on_s is 1000000000000000.0; it must be a number of seconds, 0.001"),
        ({"presence": "diurnal", "on_s": 1e-9, "off_s": 1.0}, "on_s is 1e-09"),
        ({"presence": "markov", "on_s": 1.0, "off_s": 1e12}, "off_s is 1000000000000.0"),
        ({"on_s": 5.0}, "presence is 'always'"),
        ({"presence": "markov", "on_s": 1.0, "off_s": 1.0, "availability": ((0, 1),)}, "availability is given"),
        ({"seed": -1}, "seed is -1"),
        ({"speed_changes": ((5, 1), (3, 1))}, r"speed_changes has \[3, 1\]"),
        ({"speed_changes": ((5, 0),)}, r"speed_changes has \[5, 0\]"),
        ({"speed_changes": "slow"}, "speed_changes is 'slow'"),
    ],
)
def test_bad_fields_of_a_device_are_named(fields, said):
    with pytest.raises(ValueError, match=said):
        Device("x", flops_per_s=1e9, **fields)

import json
import math
import re
import textwrap

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raafl.devices import Device, Profile, assign
from raafl.devices.files import load_devices
from raafl.devices.variation import real_time


def test_task_time_is_latency_plus_size_over_rate():
    profile = Profile(flops_per_s=2e9, down_bytes_per_s=1e6, up_bytes_per_s=5e5, latency_s=0.25)
    time = profile.task_time(flops=6e9, down_bytes=500_000, up_bytes=1_000_000)
    assert (time.down_s, time.compute_s, time.up_s) == (0.75, 3.0, 2.25)
    assert time.total_s == 6.0


def test_each_exchange_in_the_middle_of_a_task_takes_the_latency_both_ways():
    profile = Profile(flops_per_s=2e9, down_bytes_per_s=1e6, up_bytes_per_s=5e5, latency_s=0.25)
    time = profile.task_time(flops=6e9, down_bytes=500_000, up_bytes=1_000_000, num_exchanges=3)
    assert (time.down_s, time.compute_s, time.up_s) == (4 * 0.25 + 0.5, 3.0, 4 * 0.25 + 2.0)


def test_memory_bandwidth_takes_time_beside_compute():
    profile = Profile(flops_per_s=2.0, bytes_per_s=4.0)
    assert profile.task_time(6.0, 0, 0, moved_bytes=8.0).compute_s == 3.0 + 2.0
    assert profile.task_time(6.0, 0, 0, moved_bytes=8.0, padding_flops=5.0).compute_s == 3.0 + 2.0 + 2.5
    assert Profile(flops_per_s=2.0).task_time(6.0, 0, 0, moved_bytes=8.0, padding_flops=5.0).compute_s == 3.0


def test_a_step_on_a_gpu_takes_the_longer_of_host_and_device():
    profile = Profile(flops_per_s=1e12, host_op_s=1e-5, bandwidth_bytes_per_s=1e9)
    kernels = ((2.0, 1e9, 1e3), (3.0, 0.0, 5e6), (10.0, 0.0, 10.0))
    assert profile.device_s(kernels) == pytest.approx(2 * 1e-3 + 3 * 5e-3 + 10 * 2e-6)
    # what is beside its operations counts as 40 of them, a product as 2.5, an operation without autograd as 0.4
    assert profile.host_s(1, 100, 20, 50) == pytest.approx(1e-5 * (40 + 100 + 50 + 20))
    assert profile.gpu_s(1, 100, 20, 50, kernels) == profile.device_s(kernels)
    assert profile.gpu_s(10, 1000, 200, 500, kernels) == profile.host_s(10, 1000, 200, 500)
    assert Profile(host_op_s=1e-5, host_product_s=1e-4).host_s(0, 0, 20) == pytest.approx(2e-3)
    assert Profile(flops_per_s=1e12).device_s(((1.0, 1e9, 1e12),)) == 1e-3, "its speed covers its memory"
    for field, words in (("host_op_s", "a finite number of seconds"), ("bandwidth_bytes_per_s", "a number above 0")):
        with pytest.raises(ValueError, match=f"{field} is -1.0; it must be {words}"):
            Profile(**{field: -1.0})


def test_each_operation_takes_a_launch():
    profile = Profile(flops_per_s=2.0, bytes_per_s=4.0, launch_s=0.125)
    assert profile.task_time(6.0, 0, 0, moved_bytes=8.0, num_kernels=40.0).compute_s == 3.0 + 2.0 + 5.0
    assert Profile(flops_per_s=2.0).task_time(6.0, 0, 0, num_kernels=40.0).compute_s == 3.0
    with pytest.raises(ValueError, match=r"launch_s is -1\.0; it must be a finite number of seconds, 0 or more"):
        Profile(launch_s=-1.0)


def test_infinite_links_cost_latency_only():
    time = Profile(flops_per_s=math.inf, latency_s=0.5).task_time(1e9, 10**12, 10**12)
    assert (time.down_s, time.compute_s, time.up_s) == (0.5, 0.0, 0.5)


def test_without_windows_a_client_is_always_there():
    assert Profile().available(1e9)
    assert Profile().next_change_s(0.0) == math.inf


def test_windows_are_half_open():
    profile = Profile(availability=((2.0, 5.0), (8.0, 9.0)))
    assert [t for t in range(12) if profile.available(t)] == [2, 3, 4, 8]
    assert [profile.next_change_s(t) for t in (0, 2, 4.5, 5, 8.5)] == [2, 5, 5, 8, 9]
    assert profile.next_change_s(9) == math.inf


def test_periodic_windows_that_meet_at_the_period_are_one():
    night = Profile(availability=((0.0, 6.0), (22.0, 24.0)), period_s=24.0)
    assert night.available(23) and night.available(24) and night.available(29.9) and not night.available(30)
    assert [night.next_change_s(t) for t in (0, 6, 22, 24, 30)] == [6, 22, 30, 30, 46]


def test_touching_windows_are_joined_and_a_full_period_never_changes():
    profile = Profile(availability=((0.0, 5.0), (5.0, 20.0)), period_s=20.0)
    assert profile.availability == ((0.0, 20.0),)
    assert profile.available(123.0) and profile.next_change_s(123.0) == math.inf


@given(
    edges=st.lists(st.integers(0, 1000), min_size=2, max_size=8, unique=True).map(sorted),
    scale=st.sampled_from([1.0, 0.1, 1 / 3]),
    periodic=st.booleans(),
    at=st.integers(0, 5000),
)
def test_availability_changes_exactly_at_the_next_change(edges, scale, periodic, at):
    windows = tuple((a * scale, b * scale) for a, b in zip(edges[::2], edges[1::2], strict=False))
    profile = Profile(availability=windows, period_s=1000 * scale if periodic else None)
    now = at * scale
    change = profile.next_change_s(now)
    assert change > now
    if change < math.inf:
        assert profile.available(change) != profile.available(now)
        # no change is skipped: half way there everything is as it was
        assert profile.available(now + (change - now) / 2) == profile.available(now)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("flops_per_s", 0),
        ("flops_per_s", -2e9),
        ("bytes_per_s", 0),
        ("down_bytes_per_s", 0),
        ("up_bytes_per_s", math.nan),
        ("memory_bytes", -1),
        ("latency_s", -0.1),
        ("latency_s", math.inf),
        ("flops_per_s", "fast"),
        ("availability", ((5, 1),)),
        ("availability", ((0, 4), (3, 5))),
        ("availability", ()),
        ("availability", "0:5"),
        ("period_s", 5.0),
    ],
)
def test_bad_fields_are_named_with_their_value(field, value):
    with pytest.raises(ValueError, match=rf"device profile 'phone': .*{field}") as caught:
        Profile(name="phone", **{field: value})
    shown = value[-1][0] if isinstance(value, tuple) and value else value
    assert str(shown) in str(caught.value)


def test_all_problems_are_told_at_once():
    with pytest.raises(ValueError) as caught:
        Profile(flops_per_s=0, up_bytes_per_s=-1, latency_s=-1)
    assert all(name in str(caught.value) for name in ("flops_per_s", "up_bytes_per_s", "latency_s"))


def test_windows_must_lie_within_the_period():
    with pytest.raises(ValueError, match="period_s is 10"):
        Profile(availability=((5, 12),), period_s=10)


def test_counts_deal_consecutive_clients_and_the_pattern_repeats():
    devices = [Device(name="phone", flops_per_s=1e9, count=2), Profile(name="laptop")]
    assert [p.name for p in assign(devices, 7)] == ["phone", "phone", "laptop"] * 2 + ["phone"]
    assert type(assign(devices, 7)[0]) is Profile


def test_counts_that_do_not_fit_are_an_error_but_a_plain_list_is_cut():
    with pytest.raises(ValueError, match="add up to 60 but clients is 10"):
        assign([Device("slow", 1e9, count=30), Device("fast", 2e9, count=30)], 10)
    assert [p.name for p in assign([Profile(name=str(i)) for i in range(5)], 3)] == ["0", "1", "2"]


def test_no_devices_or_no_clients_is_an_error():
    with pytest.raises(ValueError, match="devices is empty"):
        assign([], 3)
    with pytest.raises(ValueError, match="clients is 0"):
        assign([Profile()], 0)


def test_yaml_device_file(tmp_path):
    path = tmp_path / "devices.yaml"
    path.write_text(
        textwrap.dedent(
            """
            devices:
              - {name: phone, flops_per_s: 2e9, up_bytes_per_s: 1e6, memory_bytes: 1.0e+8, count: 2}
              - {name: night, availability: [[0, 5], [10, 20]], period_s: 24, down_bytes_per_s: .inf}
            """
        )
    )
    assert load_devices(path) == [
        Device("phone", flops_per_s=2e9, up_bytes_per_s=1e6, memory_bytes=1e8, count=2),
        Device("night", availability=((0, 5), (10, 20)), period_s=24),
    ]


def test_json_device_file_with_small_and_large_numbers(tmp_path):
    """JSON has numbers without a decimal point, such as 1e-05 and 1e+16; a name that is null is none."""
    row = {"name": None, "flops_per_s": 1e16, "speed_changes": [[0.0, 1e-5], [5.0, 1.0]], "latency_s": 1e-7}
    (tmp_path / "d.json").write_text(json.dumps([row]))
    (device,) = load_devices(tmp_path / "d.json")
    assert device.profile == Profile("default", 1e16, speed_changes=((0.0, 1e-5), (5.0, 1.0)), latency_s=1e-7)
    (tmp_path / "d.json").write_text(json.dumps([{**row, "speed_changes": [[0.0, "fast"]]}]))
    with pytest.raises(ValueError, match="speed_changes is 'fast'; it must be a number"):
        load_devices(tmp_path / "d.json")


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig"])
def test_csv_device_file(tmp_path, encoding):
    """With the byte order mark that spreadsheets write, and without."""
    path = tmp_path / "devices.csv"
    path.write_text(
        "name,flops_per_s,latency_s,availability,period_s,count\nphone,2e9,0.1,0:5;10:20,24,3\nbox,1e12,,,,\n",
        encoding=encoding,
    )
    assert load_devices(path) == [
        Device("phone", flops_per_s=2e9, latency_s=0.1, availability=((0, 5), (10, 20)), period_s=24, count=3),
        Device("box", flops_per_s=1e12),
    ]


@pytest.mark.parametrize("suffix", [".csv", ".yaml", ".json"])
def test_a_device_file_in_another_encoding_is_named(tmp_path, suffix):
    path = tmp_path / f"devices{suffix}"
    path.write_text("name,flops_per_s\nbox,1e12\n", encoding="utf-16")
    said = f"{path} is not text in UTF-8 (byte 0xff at position 0): save it as UTF-8, from a spreadsheet as CSV UTF-8"
    with pytest.raises(ValueError, match=re.escape(said)):
        load_devices(path)


@pytest.mark.parametrize(("sign", "word"), [(";", "semicolons"), ("\t", "tabs")])
def test_columns_parted_by_another_sign(tmp_path, sign, word):
    path = tmp_path / "devices.csv"
    path.write_text(f"name{sign}flops_per_s\nbox{sign}1e12\n")
    with pytest.raises(ValueError, match=re.escape(f"{path} has {word} between its columns: save it with commas")):
        load_devices(path)


def test_bad_entries_of_a_file_are_all_named(tmp_path):
    path = tmp_path / "devices.yaml"
    path.write_text(
        "- {name: a, flops_per_s: fast}\n- {name: b, latency_s: 0}\n- {name: c, speed: 3}\n- {name: d, latency_s: 0, count: 1.5}\n"
    )
    with pytest.raises(ValueError) as caught:
        load_devices(path)
    message = str(caught.value)
    assert "entry 1: flops_per_s is 'fast'" in message and "entry 3: unknown field speed" in message
    assert "entry 4" in message and "count is 1.5" in message and "entry 2" not in message


def test_a_list_that_is_written_out_is_no_path():
    assert load_devices("[{name: box, flops_per_s: 1e12}]") == [Device("box", flops_per_s=1e12)]
    for text, said in (
        ("[{name: box", "devices, given as '[{name: box', is not valid YAML: line 1, column"),
        ("{name: box}", "devices, given as '{name: box}', must hold a list of devices"),
        ("[{name: box, flops: 1}]", "devices: entry 1: unknown field flops; did you mean 'flops_per_s'?"),
        ("[{name: iphone-99}]", "devices: entry 1: device 'iphone-99' is not in raafl's catalogue, and flops_per_s is"),
    ):
        with pytest.raises(ValueError, match=re.escape(said)):
            load_devices(text)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("auto", "devices is auto: it says what the clients can do, by names, fields or a file"),
        ("2", "their number is `clients`, the hardware that is used `fabric.accelerator`"),
        ("a100", "no device file at a100; to have devices of that name, give a list: [{name: a100}]"),
        (
            "nowhere.yaml",
            "no device file at nowhere.yaml; give the path of a .yaml, .json or .csv file, or a list such as",
        ),
    ],
)
def test_what_was_meant_by_a_text_that_names_no_file(text, said):
    with pytest.raises(FileNotFoundError, match=re.escape(said)):
        load_devices(text)


def test_missing_and_unknown_device_files(tmp_path):
    with pytest.raises(FileNotFoundError, match="nowhere"):
        load_devices(tmp_path / "nowhere.yaml")
    (tmp_path / "devices.txt").write_text("x")
    with pytest.raises(ValueError, match=r"unknown kind of device file '\.txt'"):
        load_devices(tmp_path / "devices.txt")
    (tmp_path / "empty.yaml").write_text("[]")
    with pytest.raises(ValueError, match="holds no devices"):
        load_devices(tmp_path / "empty.yaml")


def test_devices_parse_as_config_lists():
    from jsonargparse import ArgumentParser

    parser = ArgumentParser()
    parser.add_argument("--devices", type=list[Device])
    parsed = parser.parse_args(["--devices", "[{name: phone, flops_per_s: 2e9, count: 2, availability: [[0, 5]]}]"])
    init = getattr(parser, "instantiate", None) or parser.instantiate_classes
    assert init(parsed).devices == [Device("phone", flops_per_s=2e9, availability=((0, 5),), count=2)]


@pytest.mark.parametrize(
    "fields",
    [
        {"flops_per_s": 5e-324},
        {"down_bytes_per_s": 5e-324},
        {"up_bytes_per_s": 1e300},
        {"memory_bytes": 10**400},
        {"bytes_per_s": 1e-7},
        {"latency_s": 1e308},
        {"launch_s": 1e13},
        {"availability": ((0, 1),), "period_s": 5e-324},
        {"availability": ((0, 1e300),)},
        {"speed_changes": ((0, 1e-300),)},
        {"speed_changes": ((1e300, 1),)},
    ],
)
def test_every_number_has_bounds(fields):
    with pytest.raises(ValueError, match=r"(is|has) "):
        Profile(**fields)


def test_at_the_bounds_the_largest_task_takes_a_finite_time():
    from raafl.devices.checks import LEAST_FACTOR, LEAST_RATE, MOST_S

    slowest = Profile(
        flops_per_s=LEAST_RATE,
        down_bytes_per_s=LEAST_RATE,
        up_bytes_per_s=LEAST_RATE,
        bytes_per_s=LEAST_RATE,
        latency_s=MOST_S,
        launch_s=MOST_S,
        speed_changes=((0.0, LEAST_FACTOR),),
        link_changes=((0.0, LEAST_FACTOR),),
        speed_jitter=2.0,
        link_jitter=2.0,
        speed_drift=2.0,
        link_drift=2.0,
        drift_s=1e-3,
    )
    largest = 1e15 * 2.0**53 * 1e6  # FLOPs for a sample, samples, units of work
    time = slowest.task_time(largest, 2**53, 2**53, largest, largest, 10**6, largest)
    assert math.isfinite(real_time(slowest, time, MOST_S, 0, lambda *parts: 0).total_s)

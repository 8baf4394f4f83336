"""Fleets by name, slowed down, and FLHetBench's environments from files of its form."""

from __future__ import annotations

import json
import math
import statistics

import pytest

from raafl.devices import assign, catalog, fleets
from raafl.devices.files import load_devices


def speeds(text, num=4):
    return [profile.flops_per_s for profile in assign(load_devices(text), num)]


def test_every_fleet_says_what_it_is_and_loads():
    named = "equal two-kinds four-classes phones long-tail gpus mild-delays large-delays four-speeds"
    assert set(fleets.bundled()) == set(named.split())
    for name, fleet in fleets.bundled().items():
        assert fleet["what"] and fleet["source"], name
        assert len(assign(load_devices(f"fleet:{name}"), 12)) == 12


def test_classes_follow_their_sources():
    nano = catalog.figures("jetson-nano")["flops_per_s"]
    assert speeds("fleet:four-classes")[3] == nano and speeds("fleet:four-classes")[0] == 3.04e12
    assert [round(one / speeds("fleet:gpus")[3]) for one in speeds("fleet:gpus")] == [8, 4, 2, 1]
    # FADAS: 3, 2 and 1 of 6 clients, tasks of 1 GFLOP in the mean of U(1, 2), U(3, 5) and U(50, 80) seconds
    large = sorted(1e9 / one for one in speeds("fleet:large-delays", 6))
    assert large == pytest.approx([1.5, 1.5, 1.5, 4.0, 4.0, 65.0], rel=0.01)
    assert sorted(1e9 / one for one in speeds("fleet:mild-delays", 6))[-1] == pytest.approx(6.5, rel=0.01)
    assert [1e9 / one for one in speeds("fleet:four-speeds")] == pytest.approx([0.58, 0.75, 1.51, 3.33], rel=0.01)
    # Pareto of exponent 1: the quantile q of slowness is 1 / (1 - q)
    tail = [1e11 / one for one in speeds("fleet:long-tail", 8)]
    assert tail == pytest.approx([1 / (1 - (2 * number + 1) / 16) for number in range(8)], rel=0.01)


def test_gpus_wait_for_their_hosts_unless_they_stand_for_a_large_model():
    assert {profile.host_op_s for profile in assign(load_devices("fleet:gpus"), 4)} == {1.5e-5}
    slower, linked = (assign(load_devices(f"fleet:gpus/{text}"), 4) for text in ("1000", "1/10"))
    assert {(one.host_op_s, one.host_product_s, one.bandwidth_bytes_per_s) for one in slower} == {(0.0, 0.0, math.inf)}
    assert {profile.host_op_s for profile in linked} == {1.5e-5}


def test_phones_differ_and_are_there_for_eight_hours_of_a_day():
    phones = assign(load_devices("fleet:phones"), 30)
    assert len({phone.flops_per_s for phone in phones}) == 30
    assert all(
        phone.period_s == 86400 and math.isclose(sum(stop - start for start, stop in phone.availability or ()), 28800)
        for phone in phones
    )


def test_speeds_and_links_are_divided_and_nothing_else():
    whole, slowed = (assign(load_devices(text), 3) for text in ("fleet:phones", "fleet:phones/1e3/10"))
    for one, other in zip(whole, slowed, strict=True):
        assert other.flops_per_s == pytest.approx(one.flops_per_s / 1e3)
        assert other.up_bytes_per_s == pytest.approx(one.up_bytes_per_s / 10)
        assert (other.latency_s, other.memory_bytes, other.availability) == (
            one.latency_s,
            one.memory_bytes,
            one.availability,
        )
    assert speeds("fleet:gpus/2")[0] == 1.14e13


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("fleet:gpu", "there is no fleet 'gpu'; did you mean 'gpus'"),
        ("fleet:gpus/0", "'0' is no number above 0"),
        ("fleet:gpus/1/x", "'x' is no number above 0"),
        ("fleet:gpus/1/2/3", "write fleet:NAME"),
        ("flhetbench:5-1:x", "numbers from 1 to 4"),
        ("flhetbench:1-1:nowhere", "case1.json is missing"),
    ],
)
def test_bad_names_are_explained(text, message):
    with pytest.raises(ValueError, match=message):
        load_devices(text)


def copy_of_flhetbench(folder, **changes):
    """Write two phones and users in the form of FLHetBench's files."""
    content = {
        "bench/cached_sample_data/device/case2.json": [
            {"id": "a", "tcp_speed_results": [8000.0, 16000.0]},
            {"id": "b", "tcp_speed_results": [4000.0]},
        ],
        "bench/cached_sample_data/state/case3.json": ["37", "5"],
        "data/cached_timers.json": {
            "37": {
                "isSuccess": True,
                "trace_start": 100.0,
                "trace_end": 1100.0,
                "ready_time": [[150.0, 250.0], [300.0, 300.0]],
            },
            "5": {"isSuccess": True, "trace_start": 0.0, "trace_end": 500.0, "ready_time": [[0.0, 500.0]]},
        },
    } | changes
    for name, data in content.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(data))
    return f"flhetbench:2-3:{folder}"


def test_an_environment_of_flhetbench_is_read_from_its_files(tmp_path, caplog):
    first, second = assign(load_devices(copy_of_flhetbench(tmp_path)), 2)
    assert first.down_bytes_per_s == first.up_bytes_per_s == 12000 * 125  # the mean, of kbit/s
    assert first.link_jitter == pytest.approx(statistics.stdev([math.log(8000), math.log(16000)]))
    assert second.link_jitter == 0.0 and second.up_bytes_per_s == 4000 * 125
    assert (first.availability, first.period_s) == (((50.0, 150.0),), 1000.0)  # an empty window is left out
    assert second.availability == ((0.0, 500.0),) and first.flops_per_s == second.flops_per_s > 0
    assert "differs from the published copy" in caplog.text
    assert [path.is_file() for path in fleets.files(f"flhetbench:2-3:{tmp_path}")] == [True] * 3


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"data/cached_timers.json": {"37": {}}}, "user 37 has no trace_start"),
        (
            {"bench/cached_sample_data/device/case2.json": [{"tcp_speed_results": [0]}]},
            "entry 1 has no tcp_speed_results above 0",
        ),
        ({"bench/cached_sample_data/state/case3.json": {}}, "has no lists of phones and users"),
    ],
)
def test_files_of_another_form_are_refused(tmp_path, changes, message):
    with pytest.raises(ValueError, match=message):
        load_devices(copy_of_flhetbench(tmp_path, **changes))


def test_digests_are_of_all_sixteen_environments():
    named = {path.as_posix() for d in "1234" for s in "1234" for path in fleets.benchmark_files(fleets.Path(), d, s)}
    assert named == set(fleets.DIGESTS) and all(len(digest) == 64 for digest in fleets.DIGESTS.values())

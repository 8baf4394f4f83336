import json
import math
import subprocess
import sys

import pytest

from raafl.devices import measure as measuring


def test_meminfo_is_read_in_kib(tmp_path):
    path = tmp_path / "meminfo"
    path.write_text("MemTotal:       8000 kB\nMemFree:        1000 kB\nMemAvailable:   3000 kB\n")
    assert measuring._system_available_bytes(path) == 3000 * 1024


def test_a_container_leaves_its_limit_less_what_it_cannot_give_up(tmp_path):
    for name, text in (
        ("memory.max", "1000\n"),
        ("memory.current", "700\n"),
        ("memory.stat", "anon 1\nactive_file 150\ninactive_file 50\n"),
    ):
        (tmp_path / name).write_text(text)
    assert measuring._cgroup_left_bytes(tmp_path) == 1000 - 700 + 150 + 50
    for unlimited in ("max\n", "", "unknown\n"):
        (tmp_path / "memory.max").write_text(unlimited)
        assert measuring._cgroup_left_bytes(tmp_path) == math.inf
    assert measuring._cgroup_left_bytes(tmp_path / "nowhere") == math.inf


def test_the_tightest_of_the_groups_above_counts(tmp_path):
    membership = tmp_path / "membership"
    membership.write_text("4:memory:/jobs/one\n0::/slice/unit\n")
    for folder, limit, used in (("slice", 500, 450), ("slice/unit", 900, 100)):
        (tmp_path / folder).mkdir()
        for name, text in (("memory.max", limit), ("memory.current", used), ("memory.stat", "inactive_file 5\n")):
            (tmp_path / folder / name).write_text(str(text))
    assert measuring._cgroup_left_bytes(tmp_path, membership) == 500 - 450 + 5


@pytest.mark.parametrize(("limit", "left"), [("1000", 1000 - 700 + 200), (str(2**63 - 4096), math.inf)])
def test_version_1_has_files_of_its_own_and_says_none_as_a_large_number(tmp_path, limit, left):
    membership, group = tmp_path / "membership", tmp_path / "memory" / "jobs" / "one"
    membership.write_text("5:cpu,cpuacct:/\n4:memory:/jobs/one\n0::/\n")
    group.mkdir(parents=True)
    for name, text in (
        ("memory.limit_in_bytes", limit),
        ("memory.usage_in_bytes", "700"),
        ("memory.stat", "inactive_file 1\ntotal_inactive_file 200\n"),
    ):
        (group / name).write_text(f"{text}\n")
    assert measuring._cgroup_left_bytes(tmp_path, membership) == left


def test_ranks_share_what_is_not_their_own(monkeypatch):
    monkeypatch.setattr(measuring, "_system_available_bytes", lambda: 9e9)
    monkeypatch.setattr(measuring, "_cgroup_left_bytes", lambda: 6e9)
    monkeypatch.setattr(measuring, "_own_limits", lambda: iter([measuring.MemoryRoom(2.5e9, "RLIMIT_AS")]))
    assert measuring.memory_room() == measuring.MemoryRoom(2.5e9, "RLIMIT_AS")
    assert measuring.memory_room(num_sharing=3) == measuring.MemoryRoom(2e9, "control group")
    assert measuring.memory_room(num_sharing=6) == measuring.MemoryRoom(1e9, "control group")
    assert measuring.memory_room(num_sharing=6).for_task_bytes == pytest.approx(0.9e9 - 64 * 2**20)


LIMITED = """
import json, os, resource, sys
import torch
from raafl.devices.measure import memory_room

spare, held = map(int, sys.argv[1:3])
for limit, field in (("RLIMIT_DATA", "VmData"), ("RLIMIT_AS", "VmSize")):
    if os.fork():
        os.wait()
        continue
    kind = getattr(resource, limit)
    used = int(next(line for line in open("/proc/self/status") if line.startswith(field)).split()[1]) * 1024
    resource.setrlimit(kind, (used + spare, resource.getrlimit(kind)[1]))
    first = memory_room()
    kept = torch.ones(held // 4)
    second = memory_room()
    try:
        torch.ones(int(first.num_bytes) // 4)
        outcome = "it was there"
    except RuntimeError as error:
        outcome = str(error)
    room = torch.ones(int(second.num_bytes * 0.9) // 4)
    print(json.dumps([limit, [first.num_bytes, first.limit, second.num_bytes, outcome]]), flush=True)
    os._exit(0)
"""
SPARE, HELD = 256 * 2**20, 64 * 2**20


@pytest.fixture(scope="module")
def rooms():
    """What a fork of one process finds under each limit."""
    command = [sys.executable, "-c", LIMITED, str(SPARE), str(HELD)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=100, check=True)
    return dict(map(json.loads, result.stdout.splitlines()))


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="resource limits hold for mapped memory on Linux only")
@pytest.mark.parametrize("limit", ["RLIMIT_DATA", "RLIMIT_AS"])
def test_a_process_under_a_limit_finds_what_it_leaves(rooms, limit):
    first, name, second, outcome = rooms[limit]
    assert name == limit
    assert first == pytest.approx(SPARE, abs=8 * 2**20)
    assert first - second == pytest.approx(HELD, abs=2**20), "what the process holds already is not counted twice"
    assert "allocate memory" in outcome, "more than that is not to be had"


def test_prices_of_a_host_come_from_chains_of_layers(monkeypatch):
    """A GELU is an operation forward and one backward; a linear layer is a product forward, two and a sum backward."""
    ticks, pairs = iter([0.0, 128e-5, 0.0, 9e-3, 0.0, 9.0, 2.0]), []
    found = measuring.measure_host("cpu", 0.0, lambda: pairs.append(1) or next(ticks))
    assert len(pairs) == 7
    assert found["host_op_s"] == pytest.approx(1e-5)
    # 64 sums of the bias' gradients, and 3 products of each layer
    assert found["host_product_s"] == pytest.approx((9e-3 - 64e-5) / (3 * 64))
    layer = measuring.Probes("cpu").layer.launched
    assert found["bandwidth_bytes_per_s"] == sum(number * size for (_, _, size), number in layer.items()) / 2.0

import math
import time

import pytest
import torch

from raafl.devices import measure as measuring
from raafl.devices.profiles import Profile


def test_measured_speed_agrees_with_a_plain_timing_loop():
    """Counted by hand: two 64x256x256 products, each with two gradients, at 2 FLOPs per multiply-add."""
    flops = 2 * 3 * 2 * 64 * 256 * 256
    x = torch.randn(64, 256, requires_grad=True)
    a, b = (torch.randn(256, 256, requires_grad=True) for _ in range(2))
    best_s = math.inf
    for _ in range(200):
        start_s = time.perf_counter()
        torch.autograd.grad((x @ a).relu().mm(b).sum(), [x, a, b])
        best_s = min(best_s, time.perf_counter() - start_s)
    measured = measuring.measure_flops_per_s(duration_s=0.3)
    assert 0.2 < measured / (flops / best_s) < 2.0  # loose: other processes share the machine


def test_measure_returns_a_profile():
    profile = measuring.measure(name="here", duration_s=0.05)
    assert isinstance(profile, Profile) and profile.name == "here"
    assert profile.up_bytes_per_s == math.inf
    assert profile.memory_bytes > 1e6


def test_duration_must_be_positive():
    with pytest.raises(ValueError, match="duration_s is 0"):
        measuring.measure_flops_per_s(duration_s=0)


def test_meminfo_is_read_in_kib(tmp_path):
    path = tmp_path / "meminfo"
    path.write_text("MemTotal:       8000 kB\nMemFree:        1000 kB\nMemAvailable:   3000 kB\n")
    assert measuring._system_available_bytes(path) == 3000 * 1024


def test_a_container_leaves_its_limit_less_what_it_cannot_give_up(tmp_path):
    for name, text in (
        ("memory.max", "1000\n"),
        ("memory.current", "700\n"),
        ("memory.stat", "anon 1\ninactive_file 200\n"),
    ):
        (tmp_path / name).write_text(text)
    assert measuring._cgroup_left_bytes(tmp_path) == 1000 - 700 + 200
    (tmp_path / "memory.max").write_text("max\n")
    assert measuring._cgroup_left_bytes(tmp_path) == math.inf
    assert measuring._cgroup_left_bytes(tmp_path / "nowhere") == math.inf

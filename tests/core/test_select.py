"""Samples that clients evaluate on, and problems collected over all clients."""

from __future__ import annotations

import pytest

from raafl.core.algorithm import OwnTests
from raafl.core.types import ClientInfo
from raafl.devices.profiles import Profile


def client(number, num_samples, own_data=False):
    return ClientInfo(number, num_samples, Profile(), 0, own_data)


def test_own_tests_are_counted_for_the_run_s_data_and_estimated_for_a_client_s_own():
    tests = OwnTests({1: 7}, share=0.2)
    assert tests.of(client(1, 28)) == 7.0 and tests.of(client(2, 28)) == 0.0, "a client that is not named has none"
    # 40 samples train, which are 80 % of 50: 10 are left to test on, and rounding may make one more of them
    assert tests.of(client(3, 40, own_data=True)) == pytest.approx(10.0)
    assert tests.most(client(3, 40, own_data=True)) == 11 and tests.most(client(1, 28)) == 7
    assert OwnTests().of(client(3, 40, own_data=True)) == 0.0

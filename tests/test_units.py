"""Quantities in units that fit."""

from __future__ import annotations

import math

import pytest

from raafl.units import duration, percent, quantity, size


@pytest.mark.parametrize(
    ("write", "value", "text"),
    [
        (duration, 0, "0 s"),
        (duration, 0.142, "0.14 s"),
        (duration, 9.951, "10.0 s"),
        (duration, 120, "2.0 min"),
        (duration, 12_600, "3.5 h"),
        (duration, 200_000, "2.3 d"),
        (size, 0, "0 B"),
        (size, 999, "999 B"),
        (size, 30_040, "30 kB"),
        (size, 999_700, "1 MB"),
        (size, 1.5e6, "1.5 MB"),
        (size, 2e9, "2 GB"),
        (size, 3.21e12, "3.21 TB"),
        (size, math.inf, "no limit"),
        (percent, 0, "0 %"),
        (percent, 0.004, "0.4 %"),
        (percent, 0.0625, "6.2 %"),
        (percent, 0.0999, "10 %"),
        (percent, 0.25, "25 %"),
        (percent, 1, "100 %"),
    ],
)
def test_a_quantity_has_the_unit_that_suits_it(write, value, text):
    assert write(value) == text


def test_one_thing_is_singular():
    assert [quantity(number, "revoked certificate") for number in (0, 1, 2)] == [
        "0 revoked certificates",
        "1 revoked certificate",
        "2 revoked certificates",
    ]

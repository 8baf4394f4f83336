"""Values that Python gives, against the declared types of settings."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest

from raafl.api.modules import check_types, fits
from raafl.core.options import Training
from raafl.errors import BadInput
from tests.helpers.small_federations import federation
from tests.helpers.small_runs import digits, small_mlp


@pytest.mark.parametrize(
    ("hint", "good", "bad"),
    [
        (int, [3, np.int64(3)], [1.5, True, "3", None]),
        (float, [1, 0.5, float("inf"), np.float32(1)], [True, "5m", None]),
        (bool, [True], ["no", 1, None]),
        (str, ["a"], [3, Path("a"), None]),
        (int | None, [None, 3], ["auto", 2.5]),
        (Literal["min", "max"], ["min", "mean"], [3, None]),  # an unknown word has a better message elsewhere
        (int | Literal["auto"], ["auto", 3], [0.5]),
        (str | list[str] | None, ["a=1", ["a=1"], ("a=1",)], [0.9, [0.9]]),
        (tuple[float, float], [(0, 1.0), [0, 1]], [(1,), (0, "a"), 3]),
        (tuple[tuple[float, float], ...], [(), [(0, 1)]], [[0, 1]]),
        (Sequence[int], [[1]], [["a"], "1"]),
        (dict[str, int], [{}], [[]]),
        (Training, [Training(), {}], [3]),
        (Any, [3, None], []),
        (object, [print], []),
    ],
)
def test_a_value_fits_its_declared_type_or_not(hint, good, bad):
    assert [value for value in good if not fits(value, hint)] == []
    assert [value for value in bad if fits(value, hint)] == []


def test_each_wrong_value_has_a_line():
    with pytest.raises(BadInput) as refused:
        check_types(
            {"lr_time_s": "5m", "num_steps": 2.5, "other": 3}, {"lr_time_s": float | None, "num_steps": int}, "train"
        )
    assert str(refused.value).splitlines() == [
        "train.lr_time_s is '5m': give a number or null",
        "train.num_steps is 2.5: give a whole number",
    ]


def test_numbers_of_numpy_are_taken_as_python_s(tmp_path):
    made = federation(tmp_path / "run", batch_size=np.int64(8), max_time=np.float64(30.0), max_updates=np.int64(3))
    assert made.simulate(small_mlp, digits()).summary["finished"] == "max_updates"

"""Keys of arrays, tensors and records: different where values differ in any digit, equal for copies."""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch

from raafl.exact_key import exact_key


@dataclass
class Record:
    value: Any
    secret: Any = field(default=0, repr=False)


class Undeclared(Record):
    """Has an attribute that is no field, so that its repr leaves it out."""

    def __init__(self, value, more):
        super().__init__(value)
        self.more = more


@dataclass(frozen=True, slots=True)
class Slots:
    value: Any


def changed(values):
    """Return values of which one in the middle differs in the ninth digit."""
    found = copy.deepcopy(values)
    found[len(found) // 2] += 1e-9
    return found


LONG = np.full(2000, 0.5)
WIDE = torch.full((2000,), 0.5, dtype=torch.float64)
PRINT_ALIKE = {
    "a long array": (LONG, changed(LONG)),
    "a short array": (LONG[:4], changed(LONG[:4])),
    "a long tensor": (WIDE, changed(WIDE)),
    "a short tensor": (WIDE[:4], changed(WIDE[:4])),
    "a parameter": (torch.nn.Parameter(WIDE[:4]), torch.nn.Parameter(changed(WIDE[:4]))),
    "a scalar": (torch.tensor(0.9), torch.tensor(0.90001)),
    "a tuple of tensors": ((torch.tensor(0.9), 1), (torch.tensor(0.90001), 1)),
    "a list in a dict": ({"a": [LONG]}, {"a": [changed(LONG)]}),
    "a record": (Record(LONG), Record(changed(LONG))),
    "a record with slots": (Slots(LONG), Slots(changed(LONG))),
    "a field without repr": (Record(1, 2), Record(1, 3)),
    "an attribute that is no field": (Undeclared(1, 2), Undeclared(1, 3)),
    "a distribution": (
        torch.distributions.Normal(torch.zeros(3), torch.ones(3)),
        torch.distributions.Normal(torch.zeros(3), 2 * torch.ones(3)),
    ),
}
DIFFERENT = PRINT_ALIKE | {
    "types": (1, 1.0),
    "truth": (1, True),
    "signs of zero": (0.0, -0.0),
    "dtypes": (torch.zeros(2), torch.zeros(2, dtype=torch.int32)),
    "shapes": (np.zeros((2, 3)), np.zeros((3, 2))),
    "containers": ((1, 2), [1, 2]),
    "slices": (slice(1, 2), slice(1, 3)),
    "arrays of objects": (np.array([object()]), np.array([object()])),
    "functions": (lambda: 1, lambda: 1),
    "classes of records": (Record(1), Undeclared(1, 2)),
}


@pytest.mark.parametrize("case", DIFFERENT)
def test_different_values_have_different_keys(case):
    one, other = DIFFERENT[case]
    if case in PRINT_ALIKE:
        assert repr(one) == repr(other)
    assert exact_key(one) != exact_key(other)
    assert exact_key(one) == exact_key(one) and hash(exact_key(one)) == hash(exact_key(one))


@pytest.mark.parametrize(
    "value",
    [
        *(one for case, (one, _) in PRINT_ALIKE.items() if case != "a distribution"),
        float("nan"),
        complex(0.0, float("nan")),
        np.float32(0.1),
        np.array(["a", "b"]),
        np.zeros(0),
        torch.zeros(0),
        torch.randn(3, dtype=torch.complex64).conj(),
        torch.ones(3).bfloat16(),
        torch.arange(6).reshape(2, 3).t(),
        torch.tensor([True]),
        slice(1, None),
        range(3),
        {1, 2},
        torch.float32,
        torch.Size([1, 2]),
    ],
    ids=lambda value: type(value).__name__,
)
def test_copies_have_equal_keys(value):
    one, other = exact_key(value), exact_key(copy.deepcopy(value))
    assert one == other and hash(one) == hash(other)


def test_a_key_of_an_object_keeps_it_alive_so_that_no_other_takes_its_place():
    keys = {exact_key(object()) for _ in range(100)}
    assert len(keys) == 100


def test_a_record_that_contains_itself_has_a_key():
    one, other = Record(1), Record(1)
    one.value, other.value = one, other
    assert exact_key(one) == exact_key(one) != exact_key(other)

"""Check that cases outside a test's quick ones are long, and that a quick case that does not exist is an error."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from tests.helpers.long_cases import mark_long_cases


class Case:
    """Stand-in for a pytest item, with only what `mark_long_cases` reads."""

    def __init__(self, name, number, *quick):
        self.nodeid, self.marks = f"tests/test_a.py::test_a[{name}]", []
        self.callspec = SimpleNamespace(id=name, indices={"value": number})
        self.quick = pytest.mark.quick_cases(*quick).mark if quick else None

    def get_closest_marker(self, name):
        return self.quick

    def add_marker(self, marker):
        self.marks.append(marker.name)


def cases(*quick):
    return [Case(name, number, *quick) for number, name in enumerate("abc")]


@pytest.mark.parametrize(("quick", "long"), [(("b",), "ac"), ((0, "c"), "b"), ((), "")])
def test_the_other_cases_are_long(quick, long):
    found = cases(*quick)
    mark_long_cases(found)
    assert "".join(case.callspec.id for case in found if case.marks == ["long"]) == long


def test_a_quick_case_that_is_none_is_named():
    with pytest.raises(pytest.UsageError, match=r"test_a has no cases \['d'\]"):
        mark_long_cases(cases("a", "d"))
    mark_long_cases(cases("d")[:1])  # the command line names one case

"""Mark the cases of a test `long` that are not among its quick ones: `@pytest.mark.quick_cases("one", "another")`."""

from __future__ import annotations

from collections import defaultdict

import pytest


def mark_long_cases(items: list[pytest.Item]) -> None:
    """Mark each case `long` unless the test's mark `quick_cases` names it, by its id or number.

    Raises `pytest.UsageError` for a quick case that does not exist.
    """
    functions: dict[str, list[pytest.Item]] = defaultdict(list)
    for item in items:
        if item.get_closest_marker("quick_cases"):
            functions[item.nodeid.partition("[")[0]].append(item)
    for name, cases in functions.items():
        marker = cases[0].get_closest_marker("quick_cases")
        assert marker is not None
        found = set()
        for case in cases:
            mine = _names(case) & set(marker.args)
            found |= mine
            if not mine:
                case.add_marker(pytest.mark.long)
        missing = set(marker.args) - found
        if missing and len(cases) > len(marker.args):  # fewer cases: the command line names one of them
            raise pytest.UsageError(f"{name} has no cases {sorted(map(str, missing))}, which quick_cases names")


def _names(case: pytest.Item) -> set[object]:
    """Return a case's id and, if the test has one parametrisation, its number."""
    callspec = case.callspec  # type: ignore[attr-defined]
    numbers = set(callspec.indices.values())
    return {callspec.id} | (numbers if len(numbers) == 1 else set())

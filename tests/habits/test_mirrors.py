"""Each package of raafl has its tests in the folder of the same name."""

from __future__ import annotations

from tests.habits.source import ROOT

FACADE = "api"
"""Tested by the files at the top of tests, such as tests/test_federation_api.py."""


def test_each_package_has_a_folder_of_tests():
    packages = [path.parent for path in (ROOT / "raafl").glob("*/__init__.py") if path.parent.name != FACADE]
    assert len(packages) > 15
    lacking = [path.name for path in packages if not list((ROOT / "tests" / path.name).glob("**/test_*.py"))]
    assert lacking == [], "write tests where one looks for them"

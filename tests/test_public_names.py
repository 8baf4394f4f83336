"""Public names do not come or go by accident: docs/stability.md promises those of a committed list."""

from __future__ import annotations

import re

import raafl
import raafl.algorithm
from tests.habits.source import ROOT

LIST = ROOT / "tests" / "public_names.txt"


def public_names() -> list[str]:
    """Name what docs/stability.md calls public in Python."""
    classes = {"Federation": raafl.Federation, "Result": raafl.Result, "Callback": raafl.Callback}
    names = [f"raafl.{name}" for name in raafl.__all__]
    names += [f"raafl.algorithm.{name}" for name in raafl.algorithm.__all__]
    for name, kind in classes.items():
        names += [f"raafl.{name}.{member}" for member in dir(kind) if not member.startswith("_")]
    return sorted(names)


def test_public_names_are_those_of_the_list():
    """To change the list on purpose: python -m tests.test_public_names."""
    assert public_names() == LIST.read_text().splitlines()


def test_every_name_of_the_facade_is_there():
    assert all(getattr(raafl.algorithm, name) is not None for name in raafl.algorithm.__all__)


def test_the_classes_that_the_docs_name_are_public():
    pages = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]
    named = {
        name for page in pages for name in re.findall(r"\braafl\.([A-Z][a-z]\w*)", page.read_text(encoding="utf-8"))
    }
    assert "Federation" in named and named <= set(raafl.__all__)


if __name__ == "__main__":
    LIST.write_text("\n".join(public_names()) + "\n")

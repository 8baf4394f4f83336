"""Public names do not come or go by accident: docs/command-line.md promises those of a committed list."""

from __future__ import annotations

import inspect
import re

import raafl
import raafl.algorithm
from tests.habits.source import ROOT

LIST = ROOT / "tests" / "public_names.txt"


def public_names() -> list[str]:
    """Name what docs/command-line.md calls public in Python."""
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


def undescribed(name: str) -> list[str]:
    """Return the parameters of a public function or class that its docstring does not describe, if it has three or more."""
    found = raafl
    for part in name.split(".")[1:]:
        found = getattr(found, part)
    if found is raafl.Experiment:  # each field has its help text in its metadata
        return []
    if isinstance(found, type) and issubclass(found, Exception):
        return []
    if not callable(found) or not getattr(found, "__module__", "").startswith("raafl"):
        return []
    parameters = [one for one in inspect.signature(found).parameters if one != "self" and not one.startswith("_")]
    text = (
        f"{inspect.getdoc(found) or ''}\n{inspect.getdoc(found.__init__) or ''}"
        if inspect.isclass(found)
        else inspect.getdoc(found)
    )
    if len(parameters) < 3 or re.search(r"\b[Ss]ee `", text or ""):
        return []
    listed = {one for line in re.findall(r"^ {4}(\S[^:]*):", text or "", re.M) for one in re.findall(r"\w+", line)}
    return [one for one in parameters if one not in listed]


def test_public_names_describe_their_arguments():
    wrong = {name: missing for name in LIST.read_text().splitlines() if (missing := undescribed(name))}
    assert wrong == {}, "add a line to the section Args for each"


if __name__ == "__main__":
    LIST.write_text("\n".join(public_names()) + "\n")

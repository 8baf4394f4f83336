"""A family of transformers is one file, which one line of imports registers."""

from __future__ import annotations

import importlib
import re

import pytest

from raafl.submodel import families
from raafl.submodel.known import BLOCKS, TAILS
from raafl.submodel.layers import RESIZES
from tests.habits.source import ROOT

FOLDER = ROOT / "raafl" / "submodel"
FILES = sorted(path.stem for path in (FOLDER / "families").glob("*.py") if path.stem != "__init__")
NAMED = sorted({name for table in (RESIZES, BLOCKS, TAILS) for name in table if isinstance(name, str)})


def test_every_file_is_imported():
    assert sorted(families.__all__) == FILES


def test_types_of_other_packages_are_named_in_families_alone():
    named = {
        path.relative_to(FOLDER).as_posix()
        for path in FOLDER.rglob("*.py")
        if re.search(r"modeling_\w+\.[A-Z]|\.vision_transformer\.[A-Z]", path.read_text())
    }
    assert named == {"known.py", *(f"families/{name}.py" for name in FILES)}


@pytest.mark.parametrize("package", ["transformers", "torchvision"])
def test_every_type_that_is_named_is_one_of_its_package(package):
    pytest.importorskip(package)
    for name in NAMED:
        if name.startswith(package):
            module, _, kind = name.rpartition(".")
            assert isinstance(getattr(importlib.import_module(module), kind), type), name

"""What is known of other packages' transformers is one table, by types that are there."""

from __future__ import annotations

import importlib
import re

import pytest

from raafl.submodel.cut.sizes import RESIZES
from raafl.submodel.depth import TAILS
from raafl.submodel.find.discover import WHOLE_LAYERS
from tests.habits.source import ROOT

FOLDER = ROOT / "raafl" / "submodel"
NAMED = sorted({name for table in (RESIZES, WHOLE_LAYERS, TAILS) for name in table if isinstance(name, str)})


def test_types_of_other_packages_are_named_in_tables_alone():
    named = {
        path.name
        for path in FOLDER.rglob("*.py")
        if re.search(r"modeling_\w+\.[A-Z]|\.vision_transformer\.[A-Z]|modeling_\{", path.read_text())
    }
    assert named == {"depth.py", "sizes.py"}


@pytest.mark.parametrize("package", ["transformers", "torchvision"])
def test_every_type_that_is_named_is_one_of_its_package(package):
    pytest.importorskip(package)
    for name in NAMED:
        if name.startswith(package):
            module, _, kind = name.rpartition(".")
            assert isinstance(getattr(importlib.import_module(module), kind), type), name

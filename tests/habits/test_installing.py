"""raafl is on no package index: nothing tells anybody to install it from one, and every remedy names an extra that is there."""

from __future__ import annotations

import re
import tomllib

from raafl.errors import installing
from tests.habits.source import ROOT

EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
FOLDERS = ("raafl", "model_zoo", "docs", "configs", "launch", "benchmarks")
TEXTS = {
    path.relative_to(ROOT): path.read_text(encoding="utf-8")
    for path in [*ROOT.glob("*.md"), *(path for name in FOLDERS for path in (ROOT / name).rglob("*"))]
    if path.suffix in (".md", ".py", ".yaml", ".sh")
}


def test_nothing_says_to_install_raafl_from_an_index():
    assert not [path for path, text in TEXTS.items() if re.search(r"pip install (-\S+ )*['\"]?raafl\b", text)]


def test_every_extra_that_is_named_is_there():
    named = {
        name for text in TEXTS.values() for names in re.findall(r"'\.\[([\w,]+)\]'", text) for name in names.split(",")
    }
    named |= {name for text in TEXTS.values() for name in re.findall(r"\binstalling\(['\"](\w+)['\"]\)", text)}
    assert {"hf", "report"} <= named <= EXTRAS.keys()


def test_the_remedy_is_one_sentence():
    assert installing("hf") == "pip install '.[hf]' in the checkout of raafl"

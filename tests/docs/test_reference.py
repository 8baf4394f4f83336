"""Pages that are made from the code are as the code is, and messages that a page explains are messages."""

from __future__ import annotations

import re

import pytest

from benchmarks.reference import DOCS, PAGES
from tests.habits.source import ROOT


@pytest.mark.parametrize("name", PAGES)
def test_a_page_that_is_made_from_the_code_is_as_the_code_is(name):
    text = (DOCS / name).read_text(encoding="utf-8")
    assert text == PAGES[name](), f"docs/{name} is stale: python -m benchmarks.reference writes it anew"


def test_every_message_of_the_troubleshooting_page_is_one():
    """The words in backticks of the first column, apart from what stands for `...`, stand in the code or in one template of it."""
    source = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "raafl").rglob("*.py"))
    source = re.sub(r'"\s+f?"', "", source)  # messages are broken over lines
    rows = re.findall(r"^\| (`.*?`) \| ", (DOCS / "troubleshooting.md").read_text(encoding="utf-8"), re.M)
    phrases = [part.strip(" :") for row in rows for text in re.findall(r"`(.+?)`", row) for part in text.split("...")]
    assert len(phrases) > 25
    assert not [phrase for phrase in phrases if phrase not in source]

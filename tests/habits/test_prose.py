"""Documentation has one sentence a line, short lines, and short pages."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.habits.prose import can_be_broken, prose, sentence_ends
from tests.habits.source import ROOT

WIDTH = 120
WORDS = 1500
DOCS = sorted((ROOT / "docs").rglob("*.md"))
PAGES = [*DOCS, ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "benchmarks" / "README.md"]


def name(page: Path) -> str:
    return str(page.relative_to(ROOT))


def faults(text: str) -> list[str]:
    """Return what is wrong with the lines of a page, in its order."""
    found = []
    for number, line in prose(text):
        if len(line) >= WIDTH and can_be_broken(line):
            found.append(f"line {number}: {len(line)} characters")
        if sentence_ends(line):
            found.append(f"line {number}: more than one sentence")
    return found


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_a_line_is_short_and_has_one_sentence(page):
    assert faults(page.read_text(encoding="utf-8")) == []


def test_what_is_and_what_is_no_fault():
    text = (
        "# 1. Title\n\nOne is by Li et al. Two is `a. B`. Three.\nSee Eq. 4 (or Eqs. 4 and 5).\n\n" + "x " * 60 + "\n\n"
    )
    assert faults(text) == ["line 3: more than one sentence", "line 6: 120 characters"]
    assert faults("Installed. raafl runs.\n- Is it? [Yes](a.md).\n") == [
        "line 1: more than one sentence",
        "line 2: more than one sentence",
    ]
    skipped = (
        "    A. B\n\n```text\nA. B\n```\n| A. B |\n<!-- table: x.json -->\nA. B\n<!-- end of table -->\n<p>A. B</p>\n"
    )
    assert faults(skipped) == [] and faults(skipped + "A. B\n") == ["line 11: more than one sentence"]
    assert faults("- [long](https://a.example/" + "x" * 120 + ")\n- `" + "x y " * 40 + "`\n") == []


def words(text: str) -> int:
    """Count the words of a page, without generated tables."""
    written = re.sub(r"<!-- (?:table|settings): .*?<!-- end of \w+ -->", "", text, flags=re.S)
    return len(re.findall(r"\S*\w\S*", written))


@pytest.mark.parametrize("page", DOCS, ids=name)
def test_a_page_is_short_unless_it_is_a_methods(page):
    assert words(page.read_text(encoding="utf-8")) <= WORDS or page.parent.name == "methods"


def test_words_are_counted_without_generated_tables():
    assert words("# A\n\n| b | c-d |\n<!-- table: x.json -->\n| e |\n<!-- end of table -->\n- f `g h`\n") == 6


def test_the_glossary_has_each_term_once_in_order():
    text = (ROOT / "docs" / "glossary.md").read_text(encoding="utf-8")
    terms = re.findall(r"^\| ([^|]+?) \| [^|]+ \|[^|]*\|$", text, re.M)[2:]
    assert len(terms) > 60 and terms == sorted(set(terms), key=str.lower)

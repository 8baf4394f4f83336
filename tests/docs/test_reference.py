"""What is made from the code is as the code is, pages of methods have one form, and messages that a page explains are messages."""

from __future__ import annotations

import re

import pytest

from benchmarks.reference import DOCS, PAGES, described, with_settings
from raafl.algorithms import ALGORITHMS, DESCRIBED
from raafl.core.types import LOSSES
from raafl.runfolder.schema import CLIENT_COLUMNS, LOGGED_COLUMNS, MEMORY_COLUMNS
from tests.habits.source import ROOT


@pytest.mark.parametrize("name", PAGES)
def test_a_page_that_is_made_from_the_code_is_as_the_code_is(name):
    text = (DOCS / name).read_text(encoding="utf-8")
    assert text == PAGES[name](), f"docs/{name} is stale: python -m benchmarks.reference writes it anew"


def test_the_list_of_methods_says_what_the_methods_say():
    text = DESCRIBED.read_text(encoding="utf-8")
    assert text == described(), "the list of methods is stale: python -m benchmarks.reference writes it anew"


METHODS = sorted(page for page in (DOCS / "methods").glob("*.md") if page.name != "index.md")
FORM = ["What it does", "When to take it", "Settings", "What the paper leaves open", "Measured"]


def test_every_method_has_its_settings_on_one_page():
    text = "".join(page.read_text(encoding="utf-8") for page in METHODS)
    marked = " ".join(re.findall(r"<!-- settings: ([\w ]+) -->", text)).split()
    assert sorted(marked) == sorted(ALGORITHMS)


@pytest.mark.parametrize("page", METHODS, ids=lambda page: page.stem)
def test_the_page_of_a_method_has_the_one_form(page):
    text = page.read_text(encoding="utf-8")
    assert [re.sub("papers leave", "paper leaves", title) for title in re.findall("^## (.*)$", text, re.M)] == FORM
    assert f"]({page.name})" in (DOCS / "methods" / "index.md").read_text(encoding="utf-8")


def test_a_table_of_settings_keeps_symbols_and_drops_what_is_gone(tmp_path):
    page = tmp_path / "page.md"
    old = "| `prox` | `fed_prox` | mu | 9 | wrong |\n| `gone` | all | x | 1 | y |\n"
    page.write_text(f"<!-- settings: fed_avg fed_prox -->\n{old}<!-- end of settings -->\n", encoding="utf-8")
    text = with_settings(page)
    assert "| `prox` | `fed_prox` | mu | `0.01` | weight of the proximal term (mu), at least 0. |" in text
    assert (
        "\n\nAnd [shared](index.md#shared-settings): `cohort`, `concurrency`" in text
        and "gone" not in text
        and "wrong" not in text
    )
    page.write_text(text, encoding="utf-8")
    assert with_settings(page) == text


def test_every_message_of_the_troubleshooting_page_is_one():
    """The words in backticks of the first column, apart from what stands for `...`, stand in the code or in one template of it."""
    source = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "raafl").rglob("*.py"))
    source = re.sub(r'"\s+f?"', "", source)  # messages are broken over lines
    rows = re.findall(r"^\| (`.*?`) \| ", (DOCS / "troubleshooting.md").read_text(encoding="utf-8"), re.M)
    phrases = [part.strip(" :") for row in rows for text in re.findall(r"`(.+?)`", row) for part in text.split("...")]
    assert len(phrases) > 25
    assert not [phrase for phrase in phrases if phrase not in source]


def test_each_field_is_described():
    rows = [line.split(" | ") for line in PAGES["configuration.md"]().splitlines() if line.startswith("| `")]
    assert len(rows) > 20 and [row[0] for row in rows if not row[2].strip(" |")] == []


def test_the_page_of_the_run_folder_has_every_reason_of_a_loss():
    text = (DOCS / "run-folder.md").read_text(encoding="utf-8").split("| `lost:` |")[1].split("## ")[0]
    assert set(re.findall(r"`([a-z-]+)`", text.replace("`overlap`", ""))) == LOSSES


def test_the_page_of_the_run_folder_has_every_column_of_the_clients():
    text = (DOCS / "run-folder.md").read_text(encoding="utf-8").split("## Columns of clients.csv")[1].split("## ")[0]
    names = set(re.findall(r"`([a-z_]+)`", text)) - {"training_step"}
    assert names == {*CLIENT_COLUMNS, *MEMORY_COLUMNS, *LOGGED_COLUMNS}

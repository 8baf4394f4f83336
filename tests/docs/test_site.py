"""`make docs`: the site builds without a warning, has all its pages, and asks no other host for anything."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from raafl.algorithms import ALGORITHMS
from tests.habits.source import ROOT
from tests.helpers.forked_command import command

pytest.importorskip("material")
pytest.importorskip("mkdocstrings")
pytestmark = [pytest.mark.timeout(900), pytest.mark.long]  # .ci/run builds the site by `make docs`
FETCHED = re.compile(
    r"<(?:script|img|iframe|source|video)\b[^>]*\bsrc=\"?(https?:)?//|@import\s+(?:url\()?[\"']?(?:https?:)?//"
)
LINKED = re.compile(r"<link\b(?![^>]*rel=\"?canonical)[^>]*href=\"?(?:https?:)?//[^>]*>")


def mkdocs(argv: list[str]) -> None:
    """Run `mkdocs ARGV` in this process, which has imported what the reference describes."""
    from mkdocs.__main__ import cli

    cli(argv)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site") / "docs"
    argv = ("build", "--quiet", "--strict", "-f", str(ROOT / "docs" / "mkdocs" / "mkdocs.yml"), "-d", str(folder))
    with command(folder.parent / "c", *argv, entry=mkdocs, NO_MKDOCS_2_WARNING="1") as started:
        assert (started.end(800), started.out, started.err) == (0, "", "")
    return folder


def test_every_page_is_there_and_in_the_navigation(site):
    docs = ROOT / "docs"
    pages = {file.relative_to(docs).with_suffix("").as_posix() for file in docs.rglob("*.md")}
    pages |= {f"algorithms/{name}" for name in ALGORITHMS}
    home = (site / "index.html").read_text()
    assert not [page for page in pages if not (site / f"{page}.html").is_file()]
    assert not [page for page in pages - {"index"} if f'href="{page}.html"' not in home]


def test_an_algorithm_has_its_docstring_answers_and_arguments(site):
    text = (site / "algorithms" / "fed_raa.html").read_text()
    for part in ("Gre-RAA", "Its five answers", "each arrival", "mixing weight (alpha), in (0, 1]", "<code>0.9</code>"):
        assert part in text, part


def test_the_reference_has_the_public_names(site):
    import raafl

    text = (site / "api" / "raafl.html").read_text()
    assert not [name for name in raafl.__all__ if not name.startswith("_") and name not in text]


def test_nothing_is_fetched_from_elsewhere(site):
    files = [*site.rglob("*.html"), *site.rglob("*.css")]
    assert len(files) > 40
    for file in files:
        text = file.read_text()
        assert not FETCHED.search(text) and not LINKED.search(text), file

"""Count raafl itself: its code, what a run loads of it and enters for an event, its pages and its tests.

`before` are the counts of November 2026, when nothing told the spine from the rooms beside it; where it is empty, the count of
then was made in another way. A statement is a node `ast.stmt`; words are those between spaces.

    python -m benchmarks.size [--json] [--out FILE]
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path

from benchmarks import way
from benchmarks.common import ROOT, Row, main

_LOADED = """
import sys
from raafl.commands.cli import main
code = main(["simulate", "--config", "quickstart", "--max_updates", "4", "--output", sys.argv[1], "--progress", "quiet"])
print(*(m.__file__ for n, m in list(sys.modules.items()) if n.partition(".")[0] == "raafl"), sep="\\n")
raise SystemExit(code)
"""
WRITTEN = ("claims.md", "configuration.md", "parts.md")
"""Pages that a program writes, whole."""
BEFORE = {
    "modules": 513,
    "lines": 81_000,
    "modules that the quick start loads": 356,
    "their lines": 56_400,
    "pages": 96,
    "their words": 122_000,
    "lines of tests": 70_600,
    "files entered by a merge": 72,
    "calls between files in a merge": 767,
    "files entered by a join": 108,
    "calls between files in a join": 4_688,
}


def num_lines(paths: Iterable[Path]) -> int:
    """Return the number of lines of all files."""
    return sum(len(path.read_text(encoding="utf-8").splitlines()) for path in paths)


def loaded() -> list[Path]:
    """Return the files of raafl that a process has loaded after the quick start."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-c", _LOADED, f"{folder}/run"]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    return [Path(line) for line in done.stdout.splitlines() if line.endswith(".py")]


def by_hand(page: Path) -> str:
    """Return the text of a page that nothing writes."""
    text = page.read_text(encoding="utf-8")
    if page.relative_to(ROOT / "docs").as_posix() in WRITTEN:
        return ""
    return re.sub(r"<!-- (table|settings)\b.*?<!-- end of \1 -->", "", text, flags=re.S)


def rows() -> list[Row]:
    """Return a row for each count."""
    modules, tests = sorted((ROOT / "raafl").rglob("*.py")), sorted((ROOT / "tests").rglob("*.py"))
    pages = sorted(path for path in (ROOT / "docs").rglob("*.md"))
    nodes = [node for path in modules for node in ast.walk(ast.parse(path.read_bytes()))]
    spine = re.findall(r"^\| `(raafl/[\w/]+\.py)` \|", (ROOT / "docs" / "spine.md").read_text(encoding="utf-8"), re.M)
    quick, entered = loaded(), {row["event"]: row for row in way.rows()}
    now = {
        "modules": len(modules),
        "of these first files of packages": sum(path.name == "__init__.py" for path in modules),
        "lines": num_lines(modules),
        "statements": sum(isinstance(node, ast.stmt) for node in nodes),
        "of these imports": sum(isinstance(node, ast.Import | ast.ImportFrom) for node in nodes),
        "modules of the spine": len(spine),
        "lines of the spine": num_lines(ROOT / path for path in spine),
        "modules that the quick start loads": len(quick),
        "their lines": num_lines(quick),
        **{
            f"{what} {event}": entered[event.split()[1]][key]
            for event in ("a merge", "an update", "a join")
            for key, what in (("files", "files entered by"), ("switches", "calls between files in"))
        },
        "pages": len(pages),
        "their words": sum(len(path.read_text(encoding="utf-8").split()) for path in pages),
        "of these by hand": sum(len(by_hand(page).split()) for page in pages),
        "lines of tests": num_lines(tests),
    }
    return [{"what": what, "before": BEFORE.get(what), "now": value} for what, value in now.items()]


if __name__ == "__main__":
    main("size", rows)

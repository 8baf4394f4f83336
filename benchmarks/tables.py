"""Write the tables of docs from results of `raafl compare`: python -m benchmarks.tables [--check].

A table stands between `<!-- table: benchmarks/results/NAME.json -->` and `<!-- end of table -->`; what is between is replaced.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

from raafl.compare.tables import Cells, cells, sentences

ROOT = Path(__file__).parent.parent
_TABLE = re.compile(r"(<!-- table: (\S+) -->\n).*?(<!-- end of table -->)", re.S)


def markdown(table: Cells) -> str:
    """Return a table as Markdown."""
    lines = ["| " + " | ".join(cell.replace("|", r"\|") for cell in line) + " |" for line in table]
    return "\n".join([lines[0], "| " + " | ".join("---" for _ in table[0]) + " |", *lines[1:]])


def written(result: dict[str, Any]) -> str:
    """Return what a page says of a result: the table, what its intervals show, and where it is from."""
    seeds = max(len(row["seeds"]) for row in result["rows"])
    shown = "\n".join(f"- {line}" for line in sentences(result["rows"], result["reference"], result["metric"]))
    source = (
        f"`raafl compare configs/papers/{result['name']}.yaml`, {result['date'][:10]}, {result['hardware']['processor']}, commit "
        f"`{(result['commit'] or 'unknown')[:8]}`: mean over {seeds} seeds ± half of its 95 % interval."
    )
    missing = (
        [f"Not run: {'; '.join(result['not_run'])}; the command without `--rows` runs them."]
        if result.get("not_run")
        else []
    )
    return "\n\n".join(filter(None, [source, markdown(cells(result)), shown, *missing]))


def renewed(text: str) -> str:
    """Return a page with each of its tables made anew."""
    return _TABLE.sub(lambda m: f"{m[1]}\n{written(json.loads((ROOT / m[2]).read_text()))}\n\n{m[3]}", text)


def pages() -> list[Path]:
    """Return the pages that may have tables."""
    return [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def main() -> int:
    """Write the pages; with --check only name those that differ, and return 1 where any does."""
    stale = [page for page in pages() if renewed(page.read_text()) != page.read_text()]
    for page in stale:
        print(f"{page.relative_to(ROOT)}: {'differs from its results' if '--check' in sys.argv else 'written'}")
        if "--check" not in sys.argv:
            page.write_text(renewed(page.read_text()))
    return int(bool(stale) and "--check" in sys.argv)


if __name__ == "__main__":
    raise SystemExit(main())

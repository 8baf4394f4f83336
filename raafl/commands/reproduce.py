"""Run a table or figure of a paper as a comparison, or list the papers that raafl can reproduce (`raafl reproduce`)."""

from __future__ import annotations

import json
from argparse import ArgumentParser
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

import yaml

from raafl.commands.compare import options_in, run, with_common
from raafl.config.argv import folder
from raafl.errors import BadInput, nearest
from raafl.lab.compare.comparison import Comparison, read


def reproduce(argv: Sequence[str]) -> str:
    """Run the experiments behind a table or figure of a paper and return their results; without a table, list all tables.

    Raises:
        BadInput: a paper, table or option is unknown, the size of the experiments (`--scale`) is neither small nor full, or
            the table cannot be reproduced.
        RunFailed: some runs failed, or a replay gave another result.
        KeyboardInterrupt: the user ended it; the same command continues it.
    """
    options = options_in(parser(), argv)
    if options.table is None:
        papers = list(catalogue().values()) if options.paper is None else [paper(options.paper)]
        return json.dumps([_as_json(one) for one in papers]) if options.json else "\n\n".join(map(_listed, papers))
    return run(paper(options.paper).exhibit(options.table).comparison(options.scale), options)


def parser() -> ArgumentParser:
    """Return a parser for the options of `raafl reproduce`."""
    found = ArgumentParser(
        prog="raafl reproduce",
        exit_on_error=False,
        description="Run a table or figure of a paper as a comparison: rows, seeds and searches are those of its file in "
        "configs/papers. Without a table, list what there is.",
    )
    found.add_argument("paper", nargs="?", metavar="PAPER", help="such as fed-raa")
    found.add_argument("table", nargs="?", metavar="TABLE", help="such as table-2-mnist")
    found.add_argument(
        "--scale",
        choices=("small", "full"),
        default="small",
        help="small: what two cores do; full: the paper's setting (default: small)",
    )
    return with_common(found)


def _listed(one: Paper) -> str:
    lines = [f"{one.name}: {one.title}"]
    width = max(map(len, one.exhibits), default=0)
    for exhibit in one.exhibits.values():
        state = f"cannot be reproduced: {exhibit.missing}" if exhibit.missing else f"[{', '.join(exhibit.scales)}]"
        lines.append(
            f"  {exhibit.name:<{width}}  {exhibit.shows}  {state}{'  ' + exhibit.note if exhibit.note else ''}"
        )
    return "\n".join(lines)


def _as_json(one: Paper) -> dict[str, object]:
    return {"paper": one.name, "title": one.title, "tables": [asdict(exhibit) for exhibit in one.exhibits.values()]}


Scale = Literal["small", "full"]


@dataclass(frozen=True, slots=True)
class Exhibit:
    """A table or figure of a paper that raafl can reproduce, or the reason why it cannot."""

    name: str  # name on the command line
    shows: str  # what it shows, and its number in the paper
    # comparison file by scale (small or full); `#VARIANT` at its end names a variant in the file
    scales: Mapping[str, str]
    missing: str = ""  # why raafl cannot reproduce it; "" = it can
    note: str = ""  # remark for the reader, such as which data set replaces the paper's

    def comparison(self, scale: Scale) -> Comparison:
        """Read the comparison file of this table at the scale "small" or "full"; raise `BadInput` if there is none."""
        if self.missing:
            raise BadInput(f"table is '{self.name}', which cannot be reproduced: {self.missing}")
        if scale not in self.scales:
            raise BadInput(f"scale is '{scale}', which '{self.name}' does not have: {nearest(scale, self.scales)}")
        stem, _, variant = self.scales[scale].partition("#")
        return read(papers_folder() / f"{stem}.yaml", variant or None)


@dataclass(frozen=True, slots=True)
class Paper:
    """A paper, and its tables and figures by name."""

    name: str
    title: str
    exhibits: Mapping[str, Exhibit]

    def exhibit(self, name: str) -> Exhibit:
        """Return a table or figure of the paper by name; raise `BadInput` for an unknown name."""
        if name not in self.exhibits:
            raise BadInput(
                f"table is '{name}', which the catalogue of {self.name} does not have: {nearest(name, self.exhibits)}"
            )
        return self.exhibits[name]


def papers_folder() -> Path:
    """Return the folder that contains the papers' comparison files."""
    return folder() / "papers"


def catalogue() -> dict[str, Paper]:
    """Return the papers that raafl can reproduce, by name."""
    raw = yaml.safe_load((papers_folder() / "index.yaml").read_text(encoding="utf-8"))
    return {
        name: Paper(name, entry["title"], {key: _exhibit(key, given) for key, given in entry["tables"].items()})
        for name, entry in raw.items()
    }


def paper(name: str) -> Paper:
    """Return a paper by name; raise `BadInput` for an unknown name."""
    papers = catalogue()
    if name not in papers:
        raise BadInput(f"paper is '{name}', which the catalogue does not have: {nearest(name, papers)}")
    return papers[name]


def _exhibit(name: str, given: Mapping[str, str]) -> Exhibit:
    scales = {scale: given[scale] for scale in ("small", "full") if scale in given}
    return Exhibit(name, given["shows"], scales, given.get("missing", ""), given.get("note", ""))

"""Find the tables and figures of papers that raafl reproduces, by the catalogue `configs/papers/index.yaml`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import yaml

from raafl.compare.comparison import Comparison, read
from raafl.config.bundled import folder
from raafl.errors import BadInput, nearest

Scale = Literal["small", "full"]


@dataclass(frozen=True, slots=True)
class Exhibit:
    """A table or figure of a paper.

    Attributes:
        name: its name on the command line.
        shows: what it shows, with the paper's number.
        scales: comparison file of each scale, with `#VARIANT` where it is a variant of the file.
        missing: why it cannot be reproduced; "" where it can.
        note: what else a reader should know, such as a data set that stands in for the paper's.
    """

    name: str
    shows: str
    scales: Mapping[str, str]
    missing: str = ""
    note: str = ""

    def comparison(self, scale: Scale) -> Comparison:
        """Read the comparison of a scale; raises `BadInput` where there is none."""
        if self.missing:
            raise BadInput(f"table is '{self.name}', which cannot be reproduced: {self.missing}")
        if scale not in self.scales:
            raise BadInput(f"scale is '{scale}', which '{self.name}' does not have: {nearest(scale, self.scales)}")
        stem, _, variant = self.scales[scale].partition("#")
        return read(papers_folder() / f"{stem}.yaml", variant or None)


@dataclass(frozen=True, slots=True)
class Paper:
    """A paper, with its tables and figures by name."""

    name: str
    title: str
    exhibits: Mapping[str, Exhibit]

    def exhibit(self, name: str) -> Exhibit:
        """Return a table or figure; raises `BadInput` for an unknown one."""
        if name not in self.exhibits:
            raise BadInput(
                f"table is '{name}', which the catalogue of {self.name} does not have: {nearest(name, self.exhibits)}"
            )
        return self.exhibits[name]


def papers_folder() -> Path:
    """Return the folder of the papers' comparison files."""
    return folder() / "papers"


def catalogue() -> dict[str, Paper]:
    """Return the papers, by name."""
    raw = yaml.safe_load((papers_folder() / "index.yaml").read_text(encoding="utf-8"))
    return {
        name: Paper(name, entry["title"], {key: _exhibit(key, given) for key, given in entry["tables"].items()})
        for name, entry in raw.items()
    }


def paper(name: str) -> Paper:
    """Return the catalogue's entry of the paper ``name``; raises `BadInput` for an unknown one."""
    papers = catalogue()
    if name not in papers:
        raise BadInput(f"paper is '{name}', which the catalogue does not have: {nearest(name, papers)}")
    return papers[name]


def _exhibit(name: str, given: Mapping[str, str]) -> Exhibit:
    scales = {scale: given[scale] for scale in ("small", "full") if scale in given}
    return Exhibit(name, given["shows"], scales, given.get("missing", ""), given.get("note", ""))

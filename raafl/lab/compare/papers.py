"""Find the tables and figures of papers that raafl can reproduce, in `configs/papers/index.yaml`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import yaml

from raafl.config.bundled import folder
from raafl.errors import BadInput, nearest
from raafl.lab.compare.comparison import Comparison, read

Scale = Literal["small", "full"]


@dataclass(frozen=True, slots=True)
class Exhibit:
    """A table or figure of a paper that raafl can reproduce, or the reason why it cannot."""

    name: str  # name for the command line
    shows: str  # description of the table or figure, with its number in the paper
    # comparison file for each scale (small or full); `#VARIANT` at the end names a variant in the file
    scales: Mapping[str, str]
    missing: str = ""  # reason why it cannot be reproduced; "" = it can
    note: str = ""  # remark for the reader, for example about a data set that replaces the paper's

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

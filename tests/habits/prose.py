"""Read the prose of a documentation page, line by line, and find where sentences end.

Code blocks, tables, HTML, and what a command writes between `<!-- table: ... -->` or `<!-- settings: ... -->` and
`<!-- end of ... -->`, are not prose.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

_UNBREAKABLE = re.compile(r"`[^`]*`|\]\([^)\s]*\)|https?://\S+")
_MARKER = re.compile(r"(?:#+ +)?(?:(?:[-*]|\d+\.|>) +)?")
_END = re.compile(r"(?<=[^\s.])[.?!][)\"'*_]*(?= +[\"'(*_]*(?:[A-Z`\[]|raafl\b))")
# A full stop behind these ends no sentence.
_ABBREVIATION = re.compile(r"\b(?:al|cf|vs|etc|e\.g|i\.e|Eqs?|Figs?|No|St|approx)\.$")


def prose(text: str) -> Iterator[tuple[int, str]]:
    """Yield (line number, line) for each line of prose, headings and list items included."""
    fence, generated, in_code, in_list, blank = "", False, False, False, True
    for number, line in enumerate(text.splitlines(), 1):
        bare = line.strip()
        in_code = line.startswith("    ") and not in_list and (blank or in_code)
        if bare and not line.startswith(" "):
            in_list = re.match(r"([-*]|\d+\.) ", line) is not None
        blank = not bare
        if fence:
            fence = "" if bare == fence else fence
        elif opened := re.match(r"(```+)", bare):
            fence = opened[1]
        elif generated:
            generated = not bare.startswith("<!-- end of ")
        elif bare.startswith(("<!-- table: ", "<!-- settings: ")):
            generated = True
        elif bare and not in_code and not bare.startswith(("|", "<")):
            yield number, line


def sentence_ends(line: str) -> list[int]:
    """Return the places within a line where a sentence ends and another begins."""
    marker = _MARKER.match(line.lstrip())
    start = len(line) - len(line.lstrip()) + (marker.end() if marker else 0)
    plain = _UNBREAKABLE.sub(lambda found: "`" + "x" * (len(found[0]) - 1), line)
    ends = [(found.start() + 1, found.end()) for found in _END.finditer(plain, start)]
    return [end for stop, end in ends if not _ABBREVIATION.search(plain[:stop])]


def can_be_broken(line: str) -> bool:
    """Return whether a line has a space that is outside of code, link targets and its list marker."""
    return " " in _UNBREAKABLE.sub("", _MARKER.sub("", line.strip(), count=1)).strip()

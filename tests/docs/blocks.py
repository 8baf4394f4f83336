"""The code blocks of the documentation, and the command lines in them.

A block is fenced or indented. A comment `<!-- not run: REASON -->` on the line above one, or a blank line further up, says
that it cannot run here: its command lines are parsed all the same. A block after a paragraph that ends in a file's name and a
colon, such as "`mine.yaml`:", is that file.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.habits.source import ROOT

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
MARKER = re.compile(r"<!-- not run: (.+?) -->")
NAMED = re.compile(r"`([\w./-]+\.\w+)`:$")
COMMAND = re.compile(r"\$?\s*((?:[A-Z_]+=\S+ )*(?:raafl|torchrun|python -m|python \S+\.py|make|pip install)\b.*)$")


@dataclass(frozen=True)
class Block:
    """A code block: where it is, what it says, the file it is, and why it does not run."""

    page: Path
    line: int
    language: str
    text: str
    file: str | None = None
    reason: str | None = None

    def __str__(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"

    @property
    def commands(self) -> list[list[str]]:
        """The words of each command line in a block that is not Python or YAML; text behind # is none of it."""
        if self.language in ("python", "yaml", "json", "svg", "text"):
            return []
        joined = re.sub(r"\\\n\s*", "", self.text)
        lines = [part for line in joined.splitlines() for part in line.split(" && ")]
        found = [match[1] for line in lines if (match := COMMAND.match(line.strip()))]
        # A line of output that begins like a command has a colon behind the word: "raafl: ..." or "raafl, client 2: ...".
        return [words(text) for text in found if not re.match(r"raafl[:,]", text)]


def words(command: str) -> list[str]:
    """Split a command line as a shell does, up to a comment, a pipe, & or `> FILE`; without [--options in brackets]."""
    lexer = shlex.shlex(re.sub(r"(?<=\s)\[(--?\w[^\]]*)\]", "", command), posix=True, punctuation_chars="|><&;()")
    lexer.whitespace_split = True
    lexer.commenters = "#"
    kept: list[str] = []
    for word in lexer:
        if word == ">":
            kept += [word, next(lexer)]
        if word and all(sign in "|><&;()" for sign in word):
            break
        kept.append(word)
    return [word for word in kept if word not in ("...", "…")]


def blocks(page: Path) -> Iterator[Block]:
    """Yield the blocks of a page in order."""
    lines = page.read_text(encoding="utf-8").splitlines()
    i = 0
    while i < len(lines):
        if fence := re.match(r"( *)(```+)\s*([\w-]*)", lines[i]):
            end = next(j for j in range(i + 1, len(lines) + 1) if j == len(lines) or lines[j].strip() == fence[2])
            yield _block(page, lines, i, end, fence[3], [line[len(fence[1]) :] for line in lines[i + 1 : end]])
            i = end + 1
        elif lines[i].startswith("    ") and i and not lines[i - 1].strip() and not _in_list(lines, i):
            end = next((j for j in range(i, len(lines)) if lines[j].strip() and lines[j][:4].strip()), len(lines))
            text = [line[4:] for line in lines[i:end]]
            yield _block(page, lines, i, end, "", text)
            i = end
        else:
            i += 1


def _block(page: Path, lines: list[str], start: int, end: int, language: str, text: list[str]) -> Block:
    above = [line for line in lines[max(0, start - 4) : start] if line.strip()][-2:]
    reasons = [match[1] for line in above if (match := MARKER.search(line))]
    says = next((line for line in reversed(above) if not MARKER.search(line)), "")
    named = NAMED.search(says.rstrip())
    language = {"sh": "bash", "shell": "bash", "py": "python", "yml": "yaml"}.get(language, language)
    return Block(
        page, start + 1, language, "\n".join(text) + "\n", named[1] if named else None, reasons[-1] if reasons else None
    )


def _in_list(lines: list[str], i: int) -> bool:
    """Whether an indented line goes on with an item of a list above it."""
    for line in reversed(lines[:i]):
        if line.strip() and not line.startswith(" "):
            return re.match(r"([-*]|\d+\.) ", line) is not None
    return False

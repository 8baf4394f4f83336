"""Check that the records of a run (journal, tables, checkpoints) were not changed after they were written."""

from __future__ import annotations

import csv
import hashlib
import os
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any, Final

from raafl.runfolder.append_file import CHAIN_END, CHAIN_FIELD, START, complete_rows, link
from raafl.runfolder.schema import CHECKPOINTS, CONFIG, GROWING, JOURNAL, MODEL, SEALS, SUMMARY
from raafl.runfolder.seals import Seal, TableDigest, file_digest, is_signed, key_name, read_seals, seal_digest
from raafl.sanitize import sanitize_text
from raafl.units import quantity

UNSIGNED: Final = "unsigned"
ALTERED: Final = "altered"
SIGNED: Final = "signed"
END_UNSEALED: Final = (
    f"{SEALS}: the run has ended, and its end is not sealed: seals were removed or could not be written, or the run was "
    "killed just then, and --resume makes up for it"
)
"""Finding of a run that has a summary, but no final seal."""


@dataclass
class Books:
    """Result of checking the records of a run against their hashes and signatures."""

    # what was changed, removed or added, a line each
    findings: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)  # what cannot be checked, a line each
    # rows after the last seal of an unfinished run, a line for each file
    unsealed: list[str] = field(default_factory=list)
    num_rows: int = 0  # number of rows in the journal
    num_signed: int = 0  # number of journal rows that a signed seal covers
    head: str = ""  # hash of the journal's last row
    has_chain: bool = False  # whether rows of the journal carry hashes
    heads: set[str] = field(default_factory=set)  # hashes of all journal rows, if the caller wants them
    key: str | None = None  # public key of the seals; None = they are unsigned
    num_seals: int = 0  # number of seals: entries, signed or not, with hashes of all files
    final: bool = False  # whether the last seal was written at the end of the run

    @property
    def state(self) -> str:
        """State of the run's records: `ALTERED`, `UNSIGNED` or `SIGNED`."""
        return ALTERED if self.findings else SIGNED if self.key is not None else UNSIGNED

    def line(self) -> str:
        """Return one line of text that says whether the run's records are altered, unsigned or signed."""
        if self.findings:
            more = f", and {len(self.findings) - 1} more: raafl audit names them" if len(self.findings) > 1 else ""
            return f"books: {ALTERED}: {self.findings[0]}{more}"
        if self.key is None:
            return f"books: {UNSIGNED}{', ' + self.notes[0] if self.notes else ''}"
        line = f"books: {SIGNED} by {key_name(self.key)}, {self.num_signed} of {self.num_rows} journal rows"
        return "; ".join([line, *self.unsealed])


def signature_warning(folder: Path, *, unsealed: bool = False) -> str | None:
    """Return a line about a run whose records are unsigned or changed; None if they are signed, or there are none yet.

    Large files (checkpoints, model, config and summary) are not read.
    """
    try:
        if not any((folder / name).is_file() for name in (JOURNAL, SEALS)):
            return None
        books = check_books(folder, whole_files=False)
    except OSError as error:
        return f"books: cannot be read: {error.strerror or error}"
    return None if books.state == SIGNED and not (unsealed and books.unsealed) else books.line()


def check_books(folder: Path, *, keys: Collection[str] = (), whole_files: bool = True, heads: bool = False) -> Books:
    """Check the records of a run, which may still be in progress.

    Raises:
        OSError: a file cannot be read.
    """
    books = Books()
    seals = _read_seals(folder, books)  # seals first: the journal may grow meanwhile
    seen = _check_journal(folder, books, {seal.data["rows"] for _, seal in seals}, collect=heads)
    _check_seals(books, seals, seen, keys)
    _check_end(folder, books, seals, keys)
    if whole_files and not (folder / CONFIG).is_file():
        books.findings.append(f"{CONFIG} was removed")
    if seals:
        last = seals[-1][1].data
        _check_tail(folder, books, JOURNAL, books.num_rows - last["rows"])
        _check_tables(folder, books, last["tables"])
        _check_tail(folder, books, SEALS, 0)
        if whole_files:
            _check_files(folder, books, [seal for _, seal in seals])
    return books


def _read_seals(folder: Path, books: Books) -> list[tuple[int, Seal]]:
    """Read the file of seals; return the valid ones, numbered from 1, and add a finding to ``books`` for each invalid one."""
    path = folder / SEALS
    found = read_seals(path) if path.is_file() else []
    books.num_seals = len(found)
    books.findings += [f"{SEALS}: line {number} is not a seal" for number, seal in enumerate(found, 1) if seal is None]
    before = START
    lines = complete_rows(path.read_bytes()) if found else []
    for number, seal in enumerate(found, 1):
        if seal is not None and seal.data.get("before") != before:
            books.findings.append(f"{SEALS}: seal {number} does not follow the line before it")
        before = seal_digest(lines[number - 1])
    return [(number, seal) for number, seal in enumerate(found, 1) if seal is not None]


def _check_journal(folder: Path, books: Books, wanted: set[int], *, collect: bool) -> Mapping[int, str]:
    """Check the journal's hash chain; return the chain's hash after each row whose number is in ``wanted``."""
    chain, seen = ChainCheck(), dict[int, str]()
    seen[0] = chain.head
    if not (folder / JOURNAL).is_file():
        books.findings.append(f"{JOURNAL} was removed")
        return seen
    for line in _lines(folder / JOURNAL):
        chain.add(line)
        if collect:
            books.heads.add(chain.head)
        if chain.num_rows in wanted:
            seen[chain.num_rows] = chain.next_head
    books.num_rows, books.head, books.has_chain = chain.num_rows, chain.next_head, chain.has_chain
    for row in chain.broken:
        books.findings.append(f"{JOURNAL}: row {row} was altered, or is not the one that followed row {row - 1}")
    if chain.num_broken > MAX_NAMED:
        books.findings.append(f"{JOURNAL}: {chain.num_broken - MAX_NAMED} more rows do not fit the chain")
    if not chain.has_chain:
        books.notes.append(
            "no chain: the journal was written by a version of raafl before it, or its chain was removed"
        )
    elif chain.num_unlinked:
        books.notes.append(f"no chain in the first {chain.num_unlinked} rows, which an earlier version of raafl wrote")
    return seen


def _lines(path: Path) -> Iterator[bytes]:
    with path.open("rb") as file:
        for line in file:
            if line.endswith(b"\n"):
                yield line


def _check_seals(books: Books, seals: list[tuple[int, Seal]], heads: Mapping[int, str], keys: Collection[str]) -> None:
    """Check the seals' signatures and keys, and that the journal has the hashes that they contain."""
    for number, seal in seals:
        data, name = seal.data, f"{SEALS}: seal {number} (version {sanitize_text(seal.data.get('version'), 20)})"
        problem = _problem_of_signature(seal, books.key, keys)
        if problem:
            books.findings.append(f"{name} {problem}")
        if data["rows"] > books.num_rows:
            books.findings.append(
                f"{JOURNAL}: rows {books.num_rows + 1} to {data['rows']}, which seal {number} covers, are missing"
            )
        elif heads.get(data["rows"]) != data.get("head"):
            books.findings.append(f"{JOURNAL}: its first {data['rows']} rows are not those that seal {number} covers")
        elif not problem and data.get("key") is not None:
            books.num_signed = data["rows"]
        books.key = books.key or (data["key"] if isinstance(data.get("key"), str) else None)
        told = data.get("altered")
        for line in told if isinstance(told, list) else []:
            books.findings.append(f"before seal {number}, when the run was resumed: {sanitize_text(line, 300)}")


def _problem_of_signature(seal: Seal, before: str | None, keys: Collection[str]) -> str:
    """Describe what is wrong with a seal's signature or key; "" if nothing is.

    `before`: public key of the seals before it; None = they are unsigned.
    """
    key = seal.data.get("key")
    if key is None:
        return "is unsigned, those before it are signed" if before is not None else ""
    if not is_signed(seal.text, seal.signature, key):
        return "was altered: its signature does not match its content"
    if keys and key not in keys:
        return f"is signed by {key_name(key)}, which is not the key given to check"
    if not keys and before not in (None, key):
        return f"is signed by {key_name(key)}, those before it by {key_name(str(before))}: name both keys if both are yours"
    return ""


def _check_end(folder: Path, books: Books, seals: list[tuple[int, Seal]], keys: Collection[str]) -> None:
    """Check that a finished run has a final seal and, if keys were given, that seals are signed."""
    books.final = bool(seals) and seals[-1][1].data.get("final") is True
    if keys and books.key is None:
        books.findings.append(f"{SEALS}: no seal is signed, but a key was given to check")
    if not seals:
        books.notes.append("no seals")
    if not seals and (folder / SUMMARY).is_file():
        books.findings.append(
            f"{SEALS}: the run has ended, and nothing of it is sealed: seals were removed, or it is of a version before them"
        )
    elif not seals and books.has_chain and books.num_rows > 1:  # a run writes its first row and its first seal together
        books.findings.append(
            f"{SEALS}: the run has begun, and nothing of it is sealed: seals were removed, or not written"
        )
    elif seals and not books.final and (folder / SUMMARY).is_file():
        was_resumed = any(seal.data.get("final") is True for _, seal in seals)
        kind = books.notes if was_resumed else books.findings
        kind.append(END_UNSEALED)


def _check_tail(folder: Path, books: Books, name: str, num_rows: int) -> None:
    """Report rows of a file after the last seal: for a finished run as a finding, otherwise as not yet sealed."""
    if num_rows < 0 or not (folder / name).is_file():
        return
    num_bytes = measure(folder / name)[1]
    parts = [(num_rows, "row"), (num_bytes, "byte")]
    what = " and ".join(quantity(num, unit) for num, unit in parts if num)
    if what and books.final:
        books.findings.append(f"{name}: {what} too many, added after the end of the run")
    elif what:
        books.unsealed.append(f"{name}: unsealed: {what} after the last seal, in which an alteration is not found")


def _check_tables(folder: Path, books: Books, tables: Mapping[str, Any]) -> None:
    for name, sealed in tables.items():
        if name not in GROWING:
            books.findings.append(f"{SEALS}: it names '{sanitize_text(name)}', which is not a table")
            continue
        path = folder / name
        if not path.is_file():
            books.findings.append(f"{name} was removed")
            continue
        try:
            lines, columns, wanted = int(sealed["lines"]), list(sealed["columns"]), sealed["sha256"]
            found = TableDigest.of_file(path, lines)
            header, uneven = _check_cells(path, lines)
        except (KeyError, TypeError, ValueError, csv.Error):
            books.findings.append(f"{name}: its seal cannot be read")
            continue
        # an unfinished run may have added columns since
        if header[: None if books.final else len(columns)] != columns:
            books.findings.append(f"{path.name}: its header was altered")
        if found.lines < lines:
            books.findings.append(f"{path.name}: {lines - found.lines} of its last {lines} sealed lines are missing")
        elif found.seal(()).sha256 != wanted:
            books.findings.append(f"{path.name}: a line of its first {lines} was altered")
        elif uneven:
            books.findings.append(f"{path.name}: line {uneven} was altered: it has not as many cells as the header")
        _check_tail(folder, books, name, found.lines + found.more_lines - lines)


def _check_cells(path: Path, lines: int) -> tuple[list[str], int]:
    """Return a table's header, and the number of the first line with another number of cells, 0 if there is none.

    The seal's digest ignores empty cells at the end of a row, so it does not show whether any were added or removed.
    """
    with path.open(encoding="utf-8", errors="replace", newline="\n") as file:
        header = next(csv.reader(file), [])
        rows = csv.reader(islice(file, lines))
        try:
            return header, next((rows.line_num for row in rows if len(row) != len(header)), 0)
        except csv.Error:
            return header, rows.line_num


def _check_files(folder: Path, books: Books, seals: list[Seal]) -> None:
    """Compare each file with the latest seal that lists it; a finished run must have the sealed files and no others."""
    sealed: dict[str, str] = {}
    for seal in seals:
        if seal.data.get("final") is not True:
            # a run that is resumed after an end writes its best checkpoint and its model anew, and seals them at its end
            sealed = {name: digest for name, digest in sealed.items() if name.startswith(_UNCHANGED)}
        sealed |= seal.data["files"]
    there = {*_files(folder, CHECKPOINTS), *_files(folder, MODEL)}
    for name in sorted({*sealed, *there}):
        path, shown = folder / name, sanitize_text(name)
        if "\0" in name or not path.resolve().is_relative_to(folder.resolve()):
            books.findings.append(f"{SEALS}: it names '{shown}', which is not in the folder")
        elif path.is_file():
            if name not in sealed:
                kind = books.findings if books.final else books.notes
                kind.append(f"{shown} is not sealed" + (": it was added after the end" if books.final else ""))
            elif file_digest(path) != sealed[name]:
                books.findings.append(f"{shown} was altered")
        elif name == SUMMARY or (name != CONFIG and name in seals[-1].data["files"]):  # a run deletes old checkpoints
            books.findings.append(f"{shown} was removed")


_UNCHANGED: Final = (CONFIG, SUMMARY, f"{CHECKPOINTS}/version-")
"""Beginnings of the names of files that a resumed run leaves as an end before it has sealed them, until it seals them itself."""


def _files(folder: Path, name: str) -> list[str]:
    paths = (path for path in (folder / name).rglob("*") if path.is_file() and not path.name.startswith("."))
    return [path.relative_to(folder).as_posix() for path in paths]


_READ_BYTES = 2**16  # number of bytes read at a time from a file's end


def measure(path: Path) -> tuple[int, int]:
    """Return the sizes in bytes of a file up to its last line end, and of what follows: an incomplete row, or nothing.

    Raises:
        OSError: the file cannot be read.
    """
    with path.open("rb") as file:
        size = end = file.seek(0, os.SEEK_END)
        while end:
            start = max(end - _READ_BYTES, 0)
            file.seek(start)
            if (found := file.read(end - start).rfind(b"\n")) >= 0:
                return start + found + 1, size - start - found - 1
            end = start
    return 0, size


def cut_incomplete_row(path: Path) -> None:
    """Remove an incomplete last row, which a crash has left, from a file."""
    os.truncate(path, measure(path)[0])


MAX_NAMED: Final = 20
"""Rows that do not fit which are named one by one; the others are counted."""


_DIGITS: Final = frozenset(b"0123456789abcdef")


_LENGTH: Final = len(CHAIN_FIELD) + 64 + len(CHAIN_END)


def unlink(line: bytes) -> tuple[bytes, str] | None:
    """Split a line of a journal into the original row and its hash (``chain``); None for a line without a hash."""
    digest = line[-_LENGTH + len(CHAIN_FIELD) : -len(CHAIN_END)]
    if (
        line[-_LENGTH : -_LENGTH + len(CHAIN_FIELD)] != CHAIN_FIELD
        or not line.endswith(CHAIN_END)
        or not _DIGITS.issuperset(digest)
    ):
        return None
    return line[:-_LENGTH] + b"}\n", digest.decode()


@dataclass
class ChainCheck:
    """Checker of a journal's hash chain; it gets the lines one by one.

    After a row with a wrong hash, the check continues from that hash, so that every wrong row is found.
    """

    num_rows: int = 0  # number of lines checked
    num_unlinked: int = 0  # number of rows before the first row with a hash, which an earlier version of raafl wrote
    head: str = START  # hash of the last row
    # numbers, from 1, of rows whose hash is wrong; at most `MAX_NAMED`
    broken: list[int] = field(default_factory=list)
    num_broken: int = 0  # number of rows whose hash is wrong

    def __post_init__(self) -> None:
        """Start the digest of the first rows, which have no hash; the hash chain begins with it."""
        self._before = hashlib.sha256()

    def add(self, line: bytes) -> None:
        """Check the next line, which must be complete (with a line end)."""
        self.num_rows += 1
        found = unlink(line)
        if found is None and self.num_unlinked == self.num_rows - 1:
            self.num_unlinked += 1
            self._before.update(line)
            return
        head = self._before.hexdigest() if 0 < self.num_unlinked == self.num_rows - 1 else self.head
        if found is None or link(head, found[0])[1] != found[1]:
            self.num_broken += 1
            if len(self.broken) < MAX_NAMED:
                self.broken.append(self.num_rows)
        self.head = hashlib.sha256(line).hexdigest() if found is None else found[1]

    @property
    def has_chain(self) -> bool:
        """Whether hashes protect the journal: some row has a hash, or the journal is empty."""
        return self.num_unlinked < self.num_rows or self.num_rows == 0

    @property
    def next_head(self) -> str:
        """Hash of the last row, from which the next row's hash will be computed."""
        return self._before.hexdigest() if 0 < self.num_unlinked == self.num_rows else self.head


def check_lines(lines: Iterable[bytes]) -> ChainCheck:
    """Check the hashes of a journal's lines; an incomplete last line, as a crash leaves, is ignored."""
    found = ChainCheck()
    for line in lines:
        if line.endswith(b"\n"):
            found.add(line)
    return found


def read_head(path: Path) -> tuple[str, int]:
    """Return the hash of the journal's last row, from which the next row's hash is computed, and the number of rows."""
    with path.open("rb") as file:
        found = check_lines(file)
    return found.next_head, found.num_rows

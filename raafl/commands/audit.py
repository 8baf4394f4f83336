"""Check the books of a run, and replay it (`raafl audit RUN`)."""

from __future__ import annotations

import json
from argparse import ArgumentParser
from pathlib import Path
from typing import TYPE_CHECKING, Any

from raafl.config.argv import options_of
from raafl.errors import BadInput, at_least
from raafl.lean_import import quick_imports
from raafl.runfolder.books import Books, check_books
from raafl.runfolder.schema import CONFIG, JOURNAL
from raafl.runfolder.signing import key_name, read_public_key
from raafl.sanitize import sanitize_text

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


def parser() -> ArgumentParser:
    """Return the parser of the command's options."""
    found = ArgumentParser(
        prog="raafl audit",
        exit_on_error=False,
        description="Check the books of a run, and re-execute what they record.",
    )
    found.add_argument("run", type=Path, metavar="RUN", help="the run's folder")
    found.add_argument(
        "--key", action="append", default=[], metavar="KEY",
        help="the public key that must have signed: base64, or a PEM file; may be given again",
    )  # fmt: skip
    found.add_argument("--books_only", action="store_true", help="re-execute nothing")
    found.add_argument("--workers", type=int, default=1, help="processes that train")
    found.add_argument(
        "--client_data", action="append", default=[], metavar="ID=FILE",
        help="YAML file with the data section of a client that trained on data of its own; once for each",
    )  # fmt: skip
    found.add_argument(
        "--trust_config", action="store_true", help="import what the run's config names, though it is not raafl's own"
    )
    found.add_argument("--json", action="store_true", help="print the result as JSON")
    return found


def audit(argv: Sequence[str]) -> tuple[str, bool]:
    """Audit the run that ``argv`` names; return the text to print, and whether nothing was found.

    Raises:
        BadInput: an option is wrong, or the folder is not a run's.
    """
    options = options_of(parser(), argv)
    at_least("workers", options.workers, 1)
    folder: Path = options.run
    for name in (CONFIG, JOURNAL):
        if not (folder / name).is_file():
            raise BadInput(f"'{folder}' is not a run folder: it has no {name}")
    try:
        books = check_books(folder, keys=[read_public_key(text) for text in options.key])
    except OSError as error:
        raise BadInput(f"'{folder}' cannot be read: {error}") from None
    result: dict[str, Any] = {
        "books": books.state, "findings": list(books.findings), "notes": list(books.notes), "rows": books.num_rows,
        "signed_rows": books.num_signed, "head": books.head, "seals": books.num_seals, "key": books.key, "replay": None,
    }  # fmt: skip
    if not options.books_only:
        _replay(folder, options, result)
    text = (
        json.dumps(result) if options.json else "\n".join(sanitize_text(line, 1000) for line in _lines(books, result))
    )
    return text, not result["findings"]


def _replay(folder: Path, options: Any, result: dict[str, Any]) -> None:
    """Replay the run, and add to ``result`` what came of it."""
    with quick_imports():
        from raafl.commands.replay import client_file, replay

    files = {number: Path(file) for number, file in map(client_file, options.client_data)}
    try:
        played = replay(folder, workers=options.workers, client_data=files, trust_config=options.trust_config)
    except BadInput as error:
        result["notes"].append(f"not replayed: {error}")
        return
    result["replay"] = played
    if played["differences"]:
        result["notes"] += [f"{line}: a replay need not give the same bits" for line in played["differences"]]
    if parted := played["parted_at"]:
        result["findings"].append(
            f"replay: event {parted['event']}, {parted['what']}: recorded {parted['recorded']}, now {parted['replayed']}"
        )
    elif played["equal"] is False:
        result["findings"].append(
            f"replay: the model is {played['model_digest'][:16]}, the run recorded {played['recorded_digest'][:16]}"
        )


def _lines(books: Books, result: Mapping[str, Any]) -> list[str]:
    """Return the lines of text that report an audit."""
    lines = [
        f"journal: {books.num_rows} rows, head {books.head[:16]}",
        f"seals: {books.num_seals}" + ("" if books.key is None else f", key {key_name(books.key)}: {books.key}")
        + f"; {books.num_signed} rows are signed",
    ]  # fmt: skip
    if (played := result["replay"]) is not None:
        equal = {True: "equal to the recorded model", False: "NOT equal to the recorded model", None: "no end recorded"}
        lines.append(f"replay: {played['events']} events, version {played['versions']}, {equal[played['equal']]}")
    lines += [f"note: {note}" for note in result["notes"]]
    lines += [f"FOUND: {finding}" for finding in result["findings"]]
    lines.append(f"books: {books.state}" if not result["findings"] else f"{len(result['findings'])} findings")
    return lines

"""Check that the records of a run were not changed, and replay it (`raafl audit RUN`)."""

from __future__ import annotations

from argparse import ArgumentParser
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from raafl.commands.stored_runs import run_folder
from raafl.config.argv import add_replay_options, names_section, own_options
from raafl.config.remote_options import share_of
from raafl.errors import BadInput, at_least
from raafl.lean_import import quick_imports
from raafl.runfolder.append_file import to_json
from raafl.runfolder.books import Books, check_books
from raafl.runfolder.schema import GROWING, JOURNAL, SEALS, SUMMARY
from raafl.runfolder.seals import key_name, read_public_key
from raafl.sanitize import sanitize_text
from raafl.units import quantity

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from raafl.sites.receipts import SiteReceipts


def parser() -> ArgumentParser:
    """Return a parser for the options of `raafl audit`."""
    found = ArgumentParser(
        prog="raafl audit",
        exit_on_error=False,
        description="Check that the records of a run were not changed, and repeat the run from them.",
    )
    found.add_argument("run", metavar="RUN", help="the run's folder, or its URL in an object store")
    found.add_argument(
        "--key",
        action="append",
        default=[],
        metavar="KEY",
        help="the public key that must have signed: base64, or a PEM file; may be given again",
    )
    found.add_argument("--books_only", action="store_true", help="check the records only; repeat nothing")
    found.add_argument(
        "--site",
        type=Path,
        action="append",
        default=[],
        metavar="DIR",
        help="a folder of receipts of raafl join: compare them, and train a share of its tasks again; may be given again",
    )
    found.add_argument(
        "--share",
        default="0.05",
        help="with --site: share of its tasks to train again, of those whose inputs were kept",
    )
    add_replay_options(found)
    found.add_argument("--json", action="store_true", help="print the result as JSON")
    return found


def audit(argv: Sequence[str]) -> tuple[str, bool]:
    """Check that a run's records were not changed, and replay it; return the text to print, and whether all was correct.

    With `--site`, instead of the replay, a share of the site's training tasks is repeated.

    Raises:
        BadInput: an option is wrong, or the folder does not contain a run.
    """
    options, rest = own_options(parser(), argv)
    unknown = [item for item in rest if item.startswith("--") and not (options.site and names_section([item], "data"))]
    if unknown or (rest and not rest[0].startswith("--")):
        raise BadInput(f"unknown option '{(unknown or rest)[0]}': raafl audit --help lists the options")
    at_least("workers", options.workers, 1)
    share = share_of("share", options.share)
    folder = run_folder(options.run)
    if not any((folder / name).is_file() for name in (*GROWING, SEALS, SUMMARY)):
        raise BadInput(f"'{folder}' is not a run folder: it has no {JOURNAL}, and none of a run's other files")
    sites = _sites(options.site)
    keys = [read_public_key(text) for text in options.key] or [key for site in sites for key in site.keys]
    try:
        books = check_books(folder, keys=keys, heads=bool(sites))
    except OSError as error:
        raise BadInput(f"'{folder}' cannot be read ({error}): give a run folder whose files you may read") from None
    result: dict[str, Any] = {
        "books": books.state,
        "findings": list(books.findings),
        "notes": [*books.notes, *books.unsealed],
        "rows": books.num_rows,
        "signed_rows": books.num_signed,
        "head": books.head,
        "seals": books.num_seals,
        "key": books.key,
        "replay": None,
        "sites": [],
    }
    for site in sites:
        site.audit(folder, books, result, None if options.books_only else share, rest, trusted=options.trust_config)
    if not options.books_only and not sites:
        _replay(folder, options, result)
    text = to_json(result) if options.json else "\n".join(sanitize_text(line, 1000) for line in _lines(books, result))
    return text, not result["findings"]


@dataclass(frozen=True)
class _Site:
    """Receipts of one site (signed records of its client's tasks), with the server's public keys that are named in them."""

    books: SiteReceipts
    keys: list[str]

    def audit(
        self,
        run: Path,
        books: Books,
        result: dict[str, Any],
        share: float | None,
        overrides: Sequence[str],
        *,
        trusted: bool,
    ) -> None:
        """Check a server's run against the receipts of a site, and add the findings to ``result``.

        Some of the site's tasks are trained again, and their updates compared with those in the receipts.

        `share`: share of the tasks to train again; None = none.
        """
        from raafl.config.parse import load_run
        from raafl.runtime.client.setup import ClientSetup
        from raafl.runtime.lifecycle.environment import conditions
        from raafl.sites.receipts import compare, retrain, site_notes

        site = self.books
        try:
            findings, notes = compare(site, run, books)
        except (ValueError, OSError) as error:
            findings, notes = [f"receipts were not compared: {error}"], []
        entry = {"site": str(site.folder), "client": site.client, "receipts": len(site.receipts), "trained_again": 0}
        if share is not None and any(site.inputs()):
            experiment = load_run(site.folder, *overrides, trusted=trusted, for_replay=True)
            setup = ClientSetup.build(experiment, "", site.client, own_data=site.own_data)
            notes += site_notes(site, conditions(experiment))
            again = retrain(site, setup, share)
            findings += again.findings
            entry["trained_again"] = again.num_tasks
        result["sites"].append(entry)
        result["findings"] += findings
        result["notes"] += notes


def _sites(folders: Sequence[Path]) -> list[_Site]:
    if not folders:
        return []
    with quick_imports():
        from raafl.sites.receipts import SiteReceipts, server_keys

    return [_Site(site, server_keys(site.receipts)) for site in map(SiteReceipts.read, folders)]


def _replay(folder: Path, options: Any, result: dict[str, Any]) -> None:
    """Replay the run of ``folder``; add the comparison with the recorded model to ``result``."""
    with quick_imports():
        from raafl.commands.replay import client_file
        from raafl.runtime.replay import replay

    files = {number: Path(file) for number, file in map(client_file, options.client_data)}
    try:
        played = replay(folder, workers=options.workers, client_data=files, trust_config=options.trust_config)
    except BadInput as error:
        result["notes"].append(f"not replayed: {error}")
        return
    result["replay"] = played
    if played["differences"]:
        result["notes"] += [f"{line}: a replay may give other bits" for line in played["differences"]]
    if parted := played["parted_at"]:
        result["findings"].append(
            f"replay: event {parted['event']}, {parted['what']}: recorded {parted['recorded']}, now {parted['replayed']}"
        )
    elif played["equal"] is False:
        result["findings"].append(
            f"replay: the model is {played['model_digest'][:16]}, the run recorded {played['recorded_digest'][:16]}"
        )


def _lines(books: Books, result: Mapping[str, Any]) -> list[str]:
    """Format the result of an audit as lines of text."""
    lines = [
        f"journal: {quantity(books.num_rows, 'row')}, head {books.head[:16]}",
        f"seals: {books.num_seals}"
        + ("" if books.key is None else f", key {key_name(books.key)}: {books.key}")
        + f"; {quantity(books.num_signed, 'row')} {'are' if books.num_signed != 1 else 'is'} signed",
    ]
    if (played := result["replay"]) is not None:
        equal = {True: "equal to the recorded model", False: "NOT equal to the recorded model", None: "no end recorded"}
        lines.append(
            f"replay: {quantity(played['events'], 'event')}, version {played['versions']}, {equal[played['equal']]}"
        )
    lines += [
        f"site: client {one['client']}, {quantity(one['receipts'], 'receipt')}, "
        f"{quantity(one['trained_again'], 'task')} trained again"
        for one in result["sites"]
    ]
    lines += [f"note: {note}" for note in result["notes"]]
    lines += [f"FOUND: {finding}" for finding in result["findings"]]
    lines.append(f"books: {books.state}" if not result["findings"] else quantity(len(result["findings"]), "finding"))
    return lines

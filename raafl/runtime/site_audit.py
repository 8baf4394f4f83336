"""Audit a run at a client's site: compare its journal with the site's receipts, and repeat tasks whose inputs were stored."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from raafl.core.records_json import assignment_from_json
from raafl.errors import BadInput, TaskFailed
from raafl.local.failure import attempt
from raafl.local.train import LocalTrainer
from raafl.runfolder.books import Books
from raafl.runfolder.events import JournalReader
from raafl.runfolder.schema import JournalRow
from raafl.runtime.client.receipts import Receipt, SiteReceipts, read_inputs
from raafl.runtime.client.setup import ClientSetup
from raafl.runtime.fields import SignedHead
from raafl.runtime.lifecycle.environment import differences
from raafl.submodel import SpecError

_NOT_COMPARED = ("time_s", "event", "chain")


def server_keys(receipts: Sequence[Receipt]) -> list[str]:
    """Return the public keys that belong to the server's signatures in these receipts, without duplicates."""
    keys = (receipt.head["head_key"] for receipt in receipts if receipt.head is not None)
    return sorted({key for key in keys if key})


def compare(site: SiteReceipts, run: Path, books: Books) -> tuple[list[str], list[str]]:
    """Compare a site's receipts with the journal of a run; return errors found, and remarks on what cannot be checked.

    Raises:
        ValueError: the journal has an invalid line.
    """
    findings, notes = list(site.findings), list[str]()
    assigned, arrived = _rows_of(run, site.client)
    last = max((receipt.assignment["id"] for receipt in site.receipts), default=0)
    for receipt in site.receipts:
        number = receipt.assignment["id"]
        name = f"assignment {number} of client {site.client}"
        findings += [f"{name}: {problem}" for problem in _head_problems(receipt, books)]
        row = assigned.get(number)
        if row is None:
            findings.append(f"{name}: this site has a receipt of it, the journal has no such assignment")
        elif {key: value for key, value in row.items() if key not in _NOT_COMPARED} != receipt.assignment:
            findings.append(f"{name}: the journal records another assignment than the site was sent")
        answer = arrived.get(number)
        if answer is None:
            (notes if number == last else findings).append(f"{name}: the site sent an update, the journal has none")
        elif receipt.sent is not None and answer["fingerprint"] != receipt.sent and answer["refusal"] is None:
            findings.append(f"{name}: the journal records another update than the site sent")
    known = {receipt.assignment["id"] for receipt in site.receipts}
    first = min(known, default=0)
    for number, answer in arrived.items():
        if number not in known and answer["refusal"] is None:
            inside = first <= number <= last
            more = "" if inside else ": give --site for every folder of receipts of this client"
            text = f"assignment {number} of client {site.client}: the journal has an update, this site no receipt of it{more}"
            (findings if inside else notes).append(text)
    return findings, notes


def _rows_of(run: Path, client: int) -> tuple[dict[int, JournalRow], dict[int, JournalRow]]:
    """Return a client's assignment rows and update rows, by assignment, including those that were rolled back."""
    assigned, arrived = dict[int, JournalRow](), dict[int, JournalRow]()
    for row in JournalReader(run).written():
        if row.get("client") != client:
            continue
        if row.get("event") == "assigned":
            assigned[row["id"]] = row
        elif row.get("event") == "arrived":
            arrived.setdefault(row["assignment"], row)
    return assigned, arrived


def _head_problems(receipt: Receipt, books: Books) -> list[str]:
    head = None if receipt.head is None else SignedHead.from_meta(receipt.head)
    if head is None:
        return []
    if head.key and not head.is_signed(receipt.assignment["id"]):
        return ["the server's signature of its journal's head does not fit"]
    if head.head not in books.heads:
        proof = ", and its signature proves that it sent it" if head.key else ""
        return [f"the journal was rewritten since: it never had the head that the server sent{proof}"]
    return []


@dataclass(frozen=True)
class Retrained:
    """Result of repeating training tasks at a site."""

    num_tasks: int  # number of tasks that were repeated
    num_receipts: int  # number of tasks whose results the site had sent
    findings: list[str]  # description of each task with a different result, a line each


def retrain(site: SiteReceipts, setup: ClientSetup, share: float) -> Retrained:
    """Repeat some of a site's training tasks from the inputs that it stored, and compare the results."""
    kept = list(site.inputs())
    most = math.ceil(share * len(site.receipts))
    chosen = random.SystemRandom().sample(kept, min(most, len(kept)))
    findings = []
    for receipt, path in chosen:
        if (problem := _problem_of_task(receipt, path, setup)) is not None:
            findings.append(f"assignment {receipt.assignment['id']} of client {site.client}: {problem}")
    return Retrained(len(chosen), len(site.receipts), findings)


def _problem_of_task(receipt: Receipt, path: Path, setup: ClientSetup) -> str | None:
    """Train a task again; describe how its result differs from the receipt, None if it is equal to the bit."""
    trainer: LocalTrainer = setup.trainer
    try:
        assignment = assignment_from_json(dict(receipt.assignment))
        values = read_inputs(path, lambda: trainer.payload.layout(assignment.spec, "sent")).to(trainer.fabric.device)
    except (BadInput, SpecError) as error:
        return str(error)
    if values.fingerprint() != receipt.inputs:
        return f"its inputs in '{path}' were altered"
    try:
        update = attempt(trainer, assignment, values, setup.data)
    except (TaskFailed, BadInput) as error:
        return f"it cannot be trained again: {error}"
    found = update.tensors.fingerprint()
    return None if found == receipt.trained else f"trained again it gives {found}, the site had {receipt.trained}"


def site_notes(site: SiteReceipts, here: dict[str, Any]) -> list[str]:
    """Describe each condition (version, hardware, setting) that differs here from the site's run, a line each."""
    return [f"{line}: tasks trained again may give other bits" for line in differences(site.conditions, here)]

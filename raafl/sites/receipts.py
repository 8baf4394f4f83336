"""Store evidence at a client's site that the server cannot change: signed receipts of sent updates, and inputs of some tasks.

A receipt has the assignment, the journal's head that the server signed with it, and digests of the update. Of tasks drawn by
the site, which nobody else can know, the values that it was sent are kept, so that an audit can train them again. All lies in
a folder of its own for each `raafl join`, in this user's state folder.
"""

from __future__ import annotations

import json
import logging
import math
import os
import random
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Self

import torch

from raafl.atomic_file import atomic_file, state_folder
from raafl.core.restoring import assignment_from_json
from raafl.core.saving import assignment_to_json
from raafl.core.types import Assignment
from raafl.errors import BadInput, TaskFailed
from raafl.local.train import LocalTrainer
from raafl.runfolder.append_file import AppendFile, complete_rows, to_json
from raafl.runfolder.books import Books
from raafl.runfolder.checkpoint_reader import load_plain
from raafl.runfolder.events import JournalReader, RolledBackLines
from raafl.runfolder.journal import unused_path
from raafl.runfolder.schema import CONFIG, JournalRow
from raafl.runfolder.seals import Signer, is_signed
from raafl.runtime.client.setup import ClientSetup
from raafl.runtime.client.worker import Client, ClientExtension, TrainedTask
from raafl.runtime.executors.base import attempt
from raafl.runtime.lifecycle.environment import conditions, differences
from raafl.runtime.protocol import SignedHead
from raafl.submodel import FlatTensors, Layout, SpecError
from raafl.transport import Refused

if TYPE_CHECKING:
    from raafl.runtime.client.setup import ClientSetup

SHARE: Final = 0.05
"""Share of tasks whose inputs are kept, unless the site says otherwise."""
MAX_KEPT_BYTES: Final = 2 << 30
"""Inputs that one folder holds at most; beyond it, ones drawn from them are deleted."""
RECEIPTS: Final = "receipts.jsonl"
SITE: Final = "site.json"
INPUTS: Final = "inputs"
_CONTEXT: Final = "raafl receipt 1\n"
_LOST: Final = (
    "training goes on; receipts that cannot be written later are lost, and raafl audit --site reports their updates"
)
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Receipt:
    """Receipt of a site: its signed record of one update that it sent to the server."""

    assignment: dict[str, Any]  # description of the task, as received, as plain data
    # signed hash of the server's journal that came with the task, as returned by `SignedHead.to_meta`; None = none came
    head: dict[str, str] | None
    trained: str  # fingerprint of the trained values
    # fingerprint of the update as sent, which must equal the one in the server's journal; None = the two are not
    # compared, since transfers are compressed or the server trained a part of the model
    sent: str | None
    num_samples: int  # number of samples that the client reported
    inputs: str | None = None  # fingerprint of the received values, if these are stored


class Receipts:
    """Writer of a site's receipts (signed records of sent updates), which also stores the inputs of some tasks.

    A thread of its own writes the inputs.

    Attributes:
        folder: folder of the receipts.
    """

    def __init__(
        self,
        folder: Path,
        client: int,
        config_yaml: str,
        conditions: dict[str, Any],
        signer: Signer,
        *,
        share: float = SHARE,
        own_data: bool = False,
        say: Callable[[str], None] = _log.info,
    ) -> None:
        """Create the folder for the receipts.

        Args:
            folder: folder for the receipts, which must not exist.
            client: id of this client.
            config_yaml: config with which the client trains, including its own data section.
            conditions: versions, hardware and settings on which the bits of results depend.
            signer: holder of this site's key.
            share: share of tasks whose inputs are stored, from 0 to 1.
            own_data: whether the client trains on data of its own.
            say: function that shows a line to the user.

        Raises:
            OSError: the folder cannot be made.
        """
        site = {"client": client, "share": share, "own_data": own_data, "key": signer.public, "conditions": conditions}
        self._texts = {CONFIG: config_yaml, SITE: to_json(site) + "\n"}
        self._first, self._signer, self._share, self._say = folder, signer, share, say
        self._last: dict[str, Any] | None = None
        self.folder, self._file = folder, self._begun(folder)
        # the system's randomness: whoever knows the run's seed must not know which tasks can be audited
        self._draw = random.SystemRandom()
        self._kept: dict[Path, int] = {}
        self._writer = ThreadPoolExecutor(max_workers=1, thread_name_prefix="inputs")

    @classmethod
    def open(
        cls,
        client: int,
        config_yaml: str,
        conditions: dict[str, Any],
        *,
        share: float,
        own_data: bool,
        signer: Signer | None = None,
        say: Callable[[str], None] = _log.info,
    ) -> Self | None:
        """Create a new folder of receipts (signed records of sent updates), and return its writer.

        The folder is in this user's state folder; return None if no file can be written there.

        Args:
            client: id of this client.
            config_yaml: config of the run as text.
            conditions: versions, hardware and settings on which the bits of results depend.
            share: share of the tasks whose inputs are stored, from 0 to 1.
            own_data: whether the client trains on its own data.
            signer: holder of the key that signs receipts; None = this user's own key.
            say: function that shows a line to the user.
        """
        try:
            signer = signer or Signer.own()
            if signer is None:
                return None
            first = state_folder() / "receipts" / f"client-{client}-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}"
            return cls(
                unused_path(first), client, config_yaml, conditions, signer, share=share, own_data=own_data, say=say
            )
        except (OSError, RuntimeError):
            return None

    def draw_inputs(self, received: FlatTensors) -> FlatTensors | None:
        """Decide at random whether the inputs of a task are stored; return a copy of them if so, else None.

        Args:
            received: values from which the task starts.
        """
        if self._draw.random() >= self._share:
            return None
        return FlatTensors.empty(received.layout).copy_(received)

    def sent(self, receipt: Receipt, inputs: FlatTensors | None) -> None:
        """Write the receipt of an update that was sent.

        Args:
            receipt: the receipt, without inputs.
            inputs: values from which the task started, from `draw_inputs`; None = they are not stored.
        """
        self._follow(receipt.assignment)
        if inputs is not None:
            receipt = replace(receipt, inputs=inputs.fingerprint())
            self._writer.submit(self._keep, self.folder, receipt.assignment["id"], inputs)
        text = to_json(receipt)
        signature = self._signer.sign(_CONTEXT + text)
        self._file.add(to_json({"receipt": text, "signature": signature}).encode() + b"\n")

    def _follow(self, assignment: dict[str, Any]) -> None:
        """Begin another folder if a task is of another run than the one before.

        A server that has no checkpoint to resume begins its run anew, at the same address and with the same ids. In one
        folder the receipts of both runs would contradict the journal of either.
        """
        last, self._last = self._last, assignment
        if last is None or last == assignment or not _comes_again(last, assignment):
            return
        folder = unused_path(self._first)
        try:
            new = self._begun(folder)
        except OSError as error:
            _log.warning(f"{folder} cannot be made ({error}): {self.folder} has the receipts of two runs")
            return
        self._end_file()
        self.folder, self._file = folder, new
        self._writer.submit(self._kept.clear)
        self._say(f"the server has begun another run: keeps receipts in {folder}")

    def _begun(self, folder: Path) -> AppendFile[bytes]:
        """Create a folder, and return its file of receipts."""
        folder.mkdir(parents=True, mode=0o700)
        remake = partial(self._remake, folder)
        remake()
        return AppendFile(folder / RECEIPTS, bytes, remake=remake, consequence=_LOST)

    def _remake(self, folder: Path) -> None:
        """Create the folder and the files that an audit reads, unless they exist."""
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        (folder / INPUTS).mkdir(exist_ok=True)
        for name, text in self._texts.items():
            if not (folder / name).exists():
                (folder / name).write_text(text, encoding="utf-8")

    def _keep(self, folder: Path, number: int, values: FlatTensors) -> None:
        path = folder / INPUTS / f"{number:09d}.pt"
        try:
            with atomic_file(path) as file:
                torch.save(dict(values.items()), file)
        except (OSError, RuntimeError) as error:
            _log.warning(f"inputs of assignment {number} cannot be kept in {path.parent}: {error}")
            return
        self._kept[path] = path.stat().st_size
        while sum(self._kept.values()) > MAX_KEPT_BYTES:
            gone = self._draw.choice(list(self._kept))
            del self._kept[gone]
            with suppress(OSError):
                gone.unlink()

    def close(self) -> None:
        """Finish writing the receipts, and end the thread that writes inputs; warn if receipts could not be written."""
        self._writer.shutdown()
        self._end_file()

    def _end_file(self) -> None:
        self._file.close()
        if self._file.num_unwritten:
            _log.warning(f"not written: {self._file.num_unwritten} of {self._file.path}")


def _comes_again(last: Mapping[str, Any], assignment: Mapping[str, Any]) -> bool:
    """Check whether a task's numbers do not come after those of the last: no run has an id, or an incarnation, twice."""
    before, now = ((one["incarnation"], one["task"]) for one in (last, assignment))
    return assignment["id"] <= last["id"] or now <= before


def receipt_of(
    assignment: Assignment, head: SignedHead | None, *, trained: str, sent: str | None, num_samples: int
) -> Receipt:
    """Build the receipt of an update (a site's record that it sent this update).

    `head`: signed hash of the journal that came with the task; None = none.
    `sent`: fingerprint of the update as sent, which must equal the one in the server's journal; None = the two are
    not compared, since transfers are compressed or the server trained a part of the model.
    """
    told = None if head is None else head.to_meta()
    return Receipt(assignment_to_json(assignment), told, trained, sent, num_samples)


class ReceiptsClient(ClientExtension):
    """A client of which each update that it sends leaves a receipt; it stands before extensions that change updates."""

    def __init__(self, client: Client, receipts: Receipts) -> None:
        super().__init__(client)
        self._receipts = receipts

    def after(self, work: TrainedTask) -> None:
        """Record the fingerprint of the trained values, before the site's policy adds noise to them."""
        work.notes["trained"] = work.update.tensors.fingerprint()

    def send(self, work: TrainedTask, plain: Callable[[TrainedTask], None]) -> None:
        """Draw whether the task's inputs are kept, and send the update."""
        client, assignment, update = self.client, work.assignment, work.update
        leaves, trained = update.tensors.fingerprint(), work.notes["trained"]
        whole = client.trains_whole(assignment)
        plan = client.plan
        as_it_is = plan is None or not (plan.up is not None or plan.payload.is_resident or plan.adds_lag)
        # None if the server receives other values than these, such as compressed ones, or adds what `compress.down` has not
        # sent: the fingerprints could not be compared
        sent = leaves if whole and as_it_is and client.may("send as trained") else None
        head, num_samples = work.arrival.head, update.num_samples
        work.notes["receipt"] = receipt_of(assignment, head, trained=trained, sent=sent, num_samples=num_samples)
        # whether an audit can repeat the task: one process trained the whole model, and the site added no noise
        alone = whole and client.context.process_group is None and trained == leaves
        work.notes["inputs"] = self._receipts.draw_inputs(work.received) if alone else None
        plain(work)

    def sent(self, work: TrainedTask) -> None:
        """Write the receipt of an update that was sent."""
        self._receipts.sent(work.notes["receipt"], work.notes["inputs"])


@contextmanager
def receipts_kept(
    site: ClientSetup, share: float, say: Callable[[str], None], signer: Signer | None = None
) -> Iterator[None]:
    """Return a context in which a client writes a receipt (a signed record) for each update that it sends.

    `share`: share of the tasks whose inputs are stored, from 0 to 1.
    `signer`: holder of the key that signs receipts; None = this user's own key.
    """
    made = conditions(site.experiment)
    receipts = Receipts.open(
        site.info.id, site.config_yaml, made, share=share, own_data=site.info.own_data, signer=signer, say=say
    )
    if receipts is None:
        say("no receipts are stored, since no file can be written in the state folder")
        yield
        return
    say(f"keeps receipts in {receipts.folder}")
    site.extensions.append(partial(ReceiptsClient, receipts=receipts))
    with closing(receipts):
        yield


@dataclass(frozen=True)
class SiteReceipts:
    """Receipts of a site (signed records of the updates that it sent), read from their folder."""

    folder: Path  # folder of the receipts
    client: int  # id of the client
    own_data: bool  # whether the client trained on data of its own
    conditions: dict[str, Any]  # versions, hardware and settings on which the bits of results depended
    receipts: list[Receipt]  # receipts in the order in which the updates were sent
    findings: list[str]  # description of each receipt that was changed after it was written, a line each

    @classmethod
    def read(cls, folder: Path) -> SiteReceipts:
        """Read a folder of receipts and check their signatures.

        Raises:
            BadInput: the folder was not written by `raafl join`.
        """
        try:
            site = json.loads((folder / SITE).read_text(encoding="utf-8"))
            client, key, known = int(site["client"]), site["key"], dict(site["conditions"])
            lines = complete_rows((folder / RECEIPTS).read_bytes())
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise BadInput(
                f"site is '{folder}', which is not a folder of receipts written by raafl join: {error}"
            ) from None
        receipts, findings = list[Receipt](), list[str]()
        for number, line in enumerate(lines, 1):
            receipt = _read(line, key)
            if receipt is not None:
                receipts.append(receipt)
            else:
                findings.append(f"{RECEIPTS}: receipt {number} was altered")
        return cls(folder, client, site.get("own_data") is True, known, receipts, findings)

    def inputs(self) -> Iterator[tuple[Receipt, Path]]:
        """Yield each receipt whose task has stored inputs, together with the file of these inputs."""
        for receipt in self.receipts:
            path = self.folder / INPUTS / f"{receipt.assignment['id']:09d}.pt"
            if receipt.inputs is not None and path.is_file():
                yield receipt, path


def _read(line: bytes, key: object) -> Receipt | None:
    try:
        data = json.loads(line)
        text = data["receipt"]
        if not isinstance(text, str) or not is_signed(_CONTEXT + text, data["signature"], key):
            return None
        receipt = Receipt(**json.loads(text))
        assignment_from_json(receipt.assignment)
        return receipt if receipt.head is None or receipt.head == _head(receipt.head) else None
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError, Refused, SpecError):
        return None


def _head(meta: Mapping[str, Any]) -> dict[str, Any] | None:
    head = SignedHead.from_meta(meta)
    return None if head is None else head.to_meta()


def read_inputs(path: Path, layout_of: Callable[[], Layout]) -> FlatTensors:
    """Read the values from which a task started.

    Raises:
        BadInput: the file is damaged, or belongs to another model.
    """
    try:
        return FlatTensors.from_named(load_plain(path), layout_of())
    except Exception as error:  # torch.load raises many types of error for a damaged file
        raise BadInput(
            f"inputs in '{path}' are damaged or of another model ({type(error).__name__}): restore the file from a "
            "copy, or delete it"
        ) from None


_NOT_COMPARED = ("time_s", "event", "chain")


def server_keys(receipts: Sequence[Receipt]) -> list[str]:
    """Return the public keys that belong to the server's signatures in these receipts, without duplicates."""
    keys = (receipt.head["head_key"] for receipt in receipts if receipt.head is not None)
    return sorted({key for key in keys if key})


def compare(site: SiteReceipts, run: Path, books: Books) -> tuple[list[str], list[str]]:
    """Compare a site's receipts with a run's journal; return contradictions, and remarks on points that cannot be checked.

    Raises:
        ValueError: the journal has an invalid line.
    """
    findings, notes = list(site.findings), list[str]()
    assigned, arrived, dropped, begun = _rows_of(run, site.client)
    before, last = sorted([0, 0, *(receipt.assignment["id"] for receipt in site.receipts)])[-2:]
    # updates that may have been on their way at the end: the last, and with `overlap` one that began to arrive before it
    under_way = {last, *({before} & begun if last not in arrived else ())}
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
            drop, text = dropped.get(number), f"{name}: the site sent an update, the journal has none"
            if drop is None:
                (notes if number in under_way else findings).append(text)
            elif (later := drop.contradicted_by(receipt, site.receipts)) is not None:
                findings.append(f"{text}, since {drop.cause}: but assignment {later} came by the same connection")
            else:
                notes.append(f"{text}, since {drop.cause}")
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


@dataclass(frozen=True)
class _Drop:
    """Reason for which a journal may have no update of a task."""

    cause: str
    # id of the last assignment before; None = the client may later have the same incarnation, since it joined after the
    # checkpoint from which the server was restarted
    last: int | None

    def contradicted_by(self, receipt: Receipt, receipts: Iterable[Receipt]) -> int | None:
        """Return a later assignment that the client got as if its connection had not ended; None = there is none.

        Before it assigns that one, a server has handled the update of ``receipt``.
        """
        if self.last is None:
            return None
        same = (one for one in receipts if one.assignment["incarnation"] == receipt.assignment["incarnation"])
        return next((one.assignment["id"] for one in same if one.assignment["id"] > self.last), None)


def _rows_of(run: Path, client: int) -> tuple[dict[int, JournalRow], dict[int, JournalRow], dict[int, _Drop], set[int]]:
    """Return a client's journal rows about assigned tasks, and those about updates, by assignment id; also of undone tasks.

    The third mapping says why there can be no update of a task: the client was lost, or the server restarted, before it came.
    The set has the tasks whose update began to arrive while the next task was sent.
    """
    assigned, arrived, dropped, begun = dict[int, JournalRow](), dict[int, JournalRow](), dict[int, _Drop](), set[int]()
    lines, joined = RolledBackLines(), dict[int, int]()  # by incarnation: line at which the client joined
    for line, row in enumerate(JournalReader(run).written()):
        kind, kept = row.get("event"), row.get("kept")
        lines.add(kind, kept if isinstance(kept, int) else None)
        if kind == "resumed" or (kind == "lost" and row.get("client") == client):
            cause = "the server was restarted" if kind == "resumed" else "the client was lost"
            undone = {incarnation for incarnation, at in joined.items() if at in lines}
            under_way = assigned.keys() - arrived.keys() - dropped.keys()
            lives = {number: assigned[number].get("incarnation") for number in under_way}
            dropped |= {
                number: _Drop(cause, None if life in undone else max(assigned))
                for number, life in lives.items()
                if row.get("incarnation") in (None, life)
            }
        if row.get("client") != client:
            continue
        if kind == "joined":
            joined[row["incarnation"]] = line
        elif kind == "assigned":
            assigned[row["id"]] = row
        elif kind == "sending":
            begun.add(row["assignment"])
        elif kind == "arrived":
            arrived.setdefault(row["assignment"], row)
    return assigned, arrived, dropped, begun


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
    return Retrained(len(chosen), findings)


def _problem_of_task(receipt: Receipt, path: Path, setup: ClientSetup) -> str | None:
    """Train a receipt's task again; describe how the result differs from the receipt, or return None if it is bitwise equal."""
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

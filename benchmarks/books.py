"""Measure what books that show tampering cost: linking a journal's row, a site's receipts, training a share of tasks again.

A row is timed with and without its link to the chain, in turns in one run. The site's rows train tasks of the quick start's
model as `raafl join` does, without a server; then each update gets its receipt, and the inputs of a share of them are kept;
then `raafl audit --site` trains that share again. CPU seconds of this process; medians of each turn's ratio.

    python -m benchmarks.books [--json] [--out FILE]
"""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from pathlib import Path
from unittest import mock

from benchmarks.common import Row, main
from raafl.config.parse import parse
from raafl.core.snapshots import Snapshots
from raafl.core.types import Assignment, derive_seed
from raafl.runfolder import journal
from raafl.runfolder.journal import RunFolder
from raafl.runfolder.schema import JournalRow
from raafl.runtime.client.setup import ClientSetup
from raafl.runtime.executors.base import attempt
from raafl.runtime.setup import build
from raafl.sites.receipts import SiteReceipts, receipt_of, retrain
from raafl.submodel import FULL

CONFIG = "configs/quickstart.yaml"
REPEATS = 3
ROW: JournalRow = {
    "time_s": 12.5,
    "event": "arrived",
    "assignment": 1234,
    "client": 7,
    "incarnation": 0,
    "num_samples": 495,
    "refusal": None,
    "fingerprint": "0123456789abcdef0123456789abcdef",
}


def append(num_rows: int) -> Row:
    """Measure the microseconds to append a row to the journal, with and without its link in the hash chain."""
    times: dict[str, list[float]] = {"plain": [], "linked": []}
    for _ in range(REPEATS):
        times["linked"].append(_append_us(num_rows))
        with mock.patch.object(journal, "link", lambda head, row: (row, head)):
            times["plain"].append(_append_us(num_rows))
    found = {f"{name}_us": statistics.median(kept) for name, kept in times.items()}
    return {"what": "append a row", "tasks": num_rows, **found, "more_us": found["linked_us"] - found["plain_us"]}


def _append_us(num_rows: int) -> float:
    with tempfile.TemporaryDirectory() as scratch, RunFolder(Path(scratch) / "run", "") as folder:
        start = time.process_time()
        for _ in range(num_rows):
            folder.event(ROW)
        return (time.process_time() - start) / num_rows * 1e6


def site(num_tasks: int, num_steps: int, share: float) -> Row:
    """Measure a client's CPU seconds for tasks, and which share of them receipts and an audit add.

    `num_tasks`, `num_steps`: tasks in each turn, and their steps. `share`: share of the tasks whose inputs are stored,
    and which are trained again.
    """
    parsed = parse("simulate", ["--config", CONFIG, "--progress=quiet"])
    setup = ClientSetup.build(parsed.experiment, parsed.config_yaml, 1, own_data=False)
    values = Snapshots(build(parsed.experiment, pace=False).coordinator).cut(_task(0, 1))
    trained, receipts, audit = [], [], []
    for turn in range(REPEATS):
        tasks = [_task(turn * num_tasks + number, num_steps) for number in range(1, num_tasks + 1)]
        start = time.process_time()
        answers = []
        for task in tasks:
            update = attempt(setup.trainer, task, values, setup.data)
            answers.append((task, update.tensors.fingerprint(), update.num_samples))
        trained.append(time.process_time() - start)
        start = time.process_time()
        with setup.receipts_kept(share, lambda text: None):
            assert setup.receipts is not None
            for task, digest, num_samples in answers:
                # takes as long as the fingerprint of the update, whose storage the next task reuses
                values.fingerprint()
                receipt = receipt_of(task, None, trained=digest, sent=digest, num_samples=num_samples)
                setup.receipts.sent(receipt, setup.receipts.draw_inputs(values))
            books = setup.receipts.folder
        receipts.append(time.process_time() - start)
        start = time.process_time()
        again = retrain(SiteReceipts.read(books), setup, share)
        audit.append(time.process_time() - start)
        assert not again.findings
    more = statistics.median(b / a for a, b in zip(trained, receipts, strict=True))
    audited = statistics.median(b / a for a, b in zip(trained, audit, strict=True))
    return {
        "what": "a site",
        "tasks": num_tasks,
        "steps": num_steps,
        "share": share,
        "train_s": statistics.median(trained),
        "receipts_of_run": more,
        "audit_of_run": audited,
        "both_of_run": more + audited,
    }


def _task(number: int, num_steps: int) -> Assignment:
    seed = derive_seed(0, 1, number)
    return Assignment(number, 1, 0, number, 0, FULL, 0, None, num_steps, seed, 0.0)


def rows(num_rows: int = 50_000, share: float = 0.05) -> list[Row]:
    """Measure rows of a journal and tasks of a site, with a state folder of its own."""
    with tempfile.TemporaryDirectory() as state, mock.patch.dict(os.environ, {"XDG_STATE_HOME": state}):
        return [append(num_rows), site(60, 100, share), site(20, 400, share)]


if __name__ == "__main__":
    main("books", rows)

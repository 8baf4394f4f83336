"""Receipts at a site: what is kept, how much of it, and where nothing can be written."""

from __future__ import annotations

import shutil
from dataclasses import replace

import pytest
import torch

from raafl.core.types import Assignment
from raafl.runfolder.append_file import AppendFile
from raafl.runfolder.seals import Signer
from raafl.runtime.protocol import SignedHead
from raafl.sites import receipts as module
from raafl.sites.receipts import Receipts, SiteReceipts, receipt_of
from raafl.submodel import FULL, FlatTensors

VALUES = FlatTensors.from_named({"w": torch.arange(1000.0)})


def task(number):
    return Assignment(number, 1, 0, number, 0, FULL, 0, 1, None, 7, 0.5)


def opened(monkeypatch, tmp_path, share=0.0):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    return Receipts.open(1, "seed: 1\n", {"threads": 1}, share=share, own_data=True)


def write(monkeypatch, tmp_path, num, share):
    made = opened(monkeypatch, tmp_path, share)
    signer = Signer.own()
    for number in range(1, num + 1):
        head = SignedHead.sign("a" * 64, number, signer)
        receipt = receipt_of(task(number), head, trained="t", sent="t", num_samples=5)
        made.sent(receipt, made.draw_inputs(VALUES) if number != 3 else None)
    made.close()
    return SiteReceipts.read(made.folder)


def test_receipts_come_back_and_the_inputs_of_each_task_that_can_be_repeated(monkeypatch, tmp_path):
    site = write(monkeypatch, tmp_path, 4, share=1.0)
    assert (site.client, site.own_data, site.conditions, site.findings) == (1, True, {"threads": 1}, [])
    assert [receipt.assignment["id"] for receipt in site.receipts] == [1, 2, 3, 4]
    assert [receipt.assignment["id"] for receipt, _ in site.inputs()] == [1, 2, 4]
    for receipt, path in site.inputs():
        values = module.read_inputs(path, lambda: VALUES.layout)
        assert values.fingerprint() == receipt.inputs == VALUES.fingerprint()
        assert SignedHead.from_meta(receipt.head).is_signed(receipt.assignment["id"])
        assert not SignedHead.from_meta(receipt.head).is_signed(receipt.assignment["id"] + 1)
    assert (site.folder.stat().st_mode & 0o777) == 0o700


def test_inputs_stay_within_a_bound_and_a_share(monkeypatch, tmp_path):
    size = 2 * write(monkeypatch, tmp_path / "one", 1, share=1.0).inputs().__next__()[1].stat().st_size
    monkeypatch.setattr(module, "MAX_KEPT_BYTES", size)
    assert len(list(write(monkeypatch, tmp_path / "many", 20, share=1.0).inputs())) == 2
    assert list(write(monkeypatch, tmp_path / "none", 20, share=0.0).inputs()) == []


def send(receipts, *numbers):
    for number in numbers:
        receipts.sent(receipt_of(task(number), None, trained="t", sent="t", num_samples=5), None)


def test_receipts_that_cannot_be_written_are_said_and_counted_at_the_client(monkeypatch, tmp_path, caplog):
    made = opened(monkeypatch, tmp_path)
    send(made, 1)
    monkeypatch.setattr(AppendFile, "_write", lambda *_: (_ for _ in ()).throw(OSError(28, "No space left on device")))
    send(made, 2, 3)
    made.close()
    file = made.folder / "receipts.jsonl"
    assert caplog.messages == [
        f"{file} cannot be written: No space left on device; training goes on; receipts that cannot be written "
        "later are lost, and raafl audit --site reports their updates",
        f"not written: 2 of {file}",
    ]
    assert [receipt.assignment["id"] for receipt in SiteReceipts.read(made.folder).receipts] == [1]


@pytest.mark.parametrize("delete", [lambda folder: (folder / "receipts.jsonl").unlink(), shutil.rmtree])
def test_receipts_that_were_deleted_are_made_again_with_what_an_audit_reads(monkeypatch, tmp_path, delete):
    monkeypatch.setattr("raafl.runfolder.append_file.RETRY_S", 0.0)
    made = opened(monkeypatch, tmp_path)
    send(made, 1)
    delete(made.folder)
    send(made, 2)
    made.close()
    site = SiteReceipts.read(made.folder)
    assert (site.client, [receipt.assignment["id"] for receipt in site.receipts]) == (1, [2])


def opened_again(monkeypatch, tmp_path, *tasks):
    """Write receipts of these tasks, and return their ids by the folder in which they are, in the order of folders."""
    made = opened(monkeypatch, tmp_path, share=1.0)
    for one in tasks:
        made.sent(receipt_of(one, None, trained="t", sent="t", num_samples=5), VALUES)
    made.close()
    sites = [SiteReceipts.read(folder) for folder in sorted(made.folder.parent.iterdir())]
    assert all(len(list(site.inputs())) == len(site.receipts) for site in sites)
    return [[receipt.assignment["id"] for receipt in site.receipts] for site in sites]


def of_run(number, incarnation, count, at_s=0.5):
    return replace(task(number), incarnation=incarnation, task=count, assigned_s=at_s)


@pytest.mark.parametrize(
    ("last", "then", "is_another"),
    [
        ((3, 0, 2), (4, 0, 3), False),
        ((3, 0, 2), (9, 1, 0), False),  # resumed: the client's tasks are counted from the checkpoint, ids are not
        ((3, 0, 2), (3, 0, 2), False),  # the same again
        ((3, 0, 2), (3, 0, 2, 0.7), True),
        ((3, 0, 2), (1, 0, 0), True),
        ((3, 0, 2), (4, 0, 0), True),
        ((3, 1, 0), (4, 0, 1), True),
        ((3, 0, 2), (2, 1, 0), True),
    ],
)
def test_each_run_of_a_server_that_begins_anew_has_a_folder(monkeypatch, tmp_path, last, then, is_another):
    """A client that waits for its server joins whatever run that has; see `tests/distributed` for such a server."""
    ids = opened_again(monkeypatch, tmp_path, of_run(*last), of_run(*then), of_run(10, 2, 3))
    assert ids == ([[last[0]], [then[0], 10]] if is_another else [[last[0], then[0], 10]])


def test_where_no_folder_can_be_made_for_another_run_its_receipts_are_in_the_one_before(monkeypatch, tmp_path, caplog):
    made = opened(monkeypatch, tmp_path)
    monkeypatch.setattr(type(made.folder), "mkdir", lambda *_, **__: (_ for _ in ()).throw(OSError(28, "No space")))
    send(made, 2, 1)
    made.close()
    monkeypatch.undo()
    assert [receipt.assignment["id"] for receipt in SiteReceipts.read(made.folder).receipts] == [2, 1]
    (line,) = caplog.messages
    assert "cannot be made ([Errno 28] No space)" in line and line.endswith("has the receipts of two runs")


def test_where_no_file_can_be_written_there_are_no_receipts(monkeypatch):
    monkeypatch.setenv("XDG_STATE_HOME", "/dev/null")
    assert Receipts.open(1, "", {}, share=0.05, own_data=False) is None

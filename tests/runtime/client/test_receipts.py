"""Receipts at a site: what is kept, how much of it, and where nothing can be written."""

from __future__ import annotations

import torch

from raafl.core.types import Assignment
from raafl.runfolder.signing import Signer
from raafl.runtime.client import receipts as module
from raafl.runtime.client.receipts import Receipts, SiteReceipts, receipt_of
from raafl.runtime.fields import SignedHead
from raafl.submodel import FULL, FlatTensors

VALUES = FlatTensors.from_named({"w": torch.arange(1000.0)})


def task(number):
    return Assignment(number, 1, 0, number, 0, FULL, 0, 1, None, 7, 0.5)


def write(monkeypatch, tmp_path, num, share):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    made = Receipts.open(1, "seed: 1\n", {"threads": 1}, share=share, own_data=True)
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


def test_where_no_file_can_be_written_there_are_no_receipts(monkeypatch):
    monkeypatch.setenv("XDG_STATE_HOME", "/dev/null")
    assert Receipts.open(1, "", {}, share=0.05, own_data=False) is None

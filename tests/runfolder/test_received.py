"""Tensors of another run: kept for a replay, unless the disk has hardly room for the run's own files."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from raafl.errors import BadInput
from raafl.runfolder import received
from raafl.runfolder.received import keep_received, load_received
from raafl.submodel import FlatTensors

VALUES = FlatTensors.from_named({"w": torch.arange(1000.0)})  # 4,000 bytes


def test_what_was_received_is_read_again_and_must_be_what_it_was(tmp_path):
    keep_received(tmp_path, VALUES.fingerprint(), VALUES)
    found = load_received(tmp_path, VALUES.fingerprint(), VALUES.layout)
    assert found.buffers[torch.float32].tolist() == VALUES.buffers[torch.float32].tolist()
    (file,) = (tmp_path / "received").iterdir()
    torch.save({"w": torch.zeros(1000)}, file)
    with pytest.raises(BadInput, match="was changed"):
        load_received(tmp_path, VALUES.fingerprint(), VALUES.layout)


@pytest.mark.parametrize("free,is_kept", [(32_000, True), (31_999, False)])
def test_checkpoints_have_the_last_of_the_disk(tmp_path, monkeypatch, caplog, free, is_kept):
    monkeypatch.setattr(received.shutil, "disk_usage", lambda folder: SimpleNamespace(free=free))
    keep_received(tmp_path, VALUES.fingerprint(), VALUES)
    assert len(list((tmp_path / "received").iterdir())) == is_kept
    assert ("but cannot be replayed" in caplog.text) is not is_kept
    if not is_kept:
        with pytest.raises(BadInput, match="is missing, which a replay needs"):
            load_received(tmp_path, VALUES.fingerprint(), VALUES.layout)

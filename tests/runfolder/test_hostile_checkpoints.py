"""Pickles, archives and damaged files in the place of a checkpoint: a line of bad input, nothing executed, no memory taken."""

from __future__ import annotations

import gzip
import io
import os
import pickle
import random
import tarfile
import zipfile
from collections import Counter

import pytest
import torch

from raafl.errors import BadInput
from raafl.runfolder import checkpoint_reader
from tests.helpers.bent_frames import NUM_LONG
from tests.helpers.checkpoints import save_checkpoint

MARKS: list[str] = []


def mark(text):
    MARKS.append(text)


class Evil:
    def __reduce__(self):
        return mark, ("executed",)


class Shell:
    def __reduce__(self):
        return os.system, ("echo executed",)


@pytest.fixture
def good(tmp_path):
    """The bytes of a checkpoint."""
    state = {"w": torch.arange(600.0), "n": torch.tensor(7)}
    return save_checkpoint(tmp_path, 1, state, raafl={"a": [1, 2.5, None]}).read_bytes()


def archive(good, change=lambda name, data: data, compression=zipfile.ZIP_STORED, more=()):
    """Return the zip file of a checkpoint, each record as ``change`` leaves it."""
    out = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(good)) as source, zipfile.ZipFile(out, "w", compression) as target:
        for name in source.namelist():
            target.writestr(name, change(name, source.read(name)))
        for name, data in more:
            target.writestr(name, data)
    return out.getvalue()


def pickled(good, thing):
    return archive(good, lambda name, data: pickle.dumps(thing, 2) if name.endswith("data.pkl") else data)


def tar(good):
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as file:
        for name in ("pickle", "tensors", "../../evil"):
            file.addfile(tarfile.TarInfo(name), io.BytesIO())
    return out.getvalue()


def legacy(thing):
    out = io.BytesIO()
    torch.save(thing, out, _use_new_zipfile_serialization=False)
    return out.getvalue()


def deep(num):
    return b"\x80\x02" + b"]" * num + b"a" * (num - 1) + b"."


def overlapping(good):
    """A zip whose entries share one record, as those of a bomb without compression do."""
    with zipfile.ZipFile(io.BytesIO(good)) as source:
        infos = source.infolist()
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as target:
        target.writestr("run/data.pkl", bytes(100_000))
        first = target.filelist[0]
        for number in range(50):
            again = zipfile.ZipInfo(f"run/data/{number}")
            again.header_offset, again.CRC, again.compress_size, again.file_size = 0, first.CRC, 100_000, 100_000
            target.filelist.append(again)
    assert infos
    return out.getvalue()


def scripted(good):
    out = io.BytesIO()
    torch.jit.save(torch.jit.script(torch.nn.Linear(2, 2)), out)
    return out.getvalue()


MAKE = {
    "a pickle that runs code": lambda good: pickle.dumps(Evil()),
    "a pickle that runs a shell": lambda good: pickle.dumps(Shell()),
    "the same in an archive": lambda good: pickled(good, Evil()),
    "the shell in an archive": lambda good: pickled(good, Shell()),
    "in a dict beside tensors": lambda good: pickled(good, {"raafl": {"format": 1}, "x": [Evil()]}),
    "an object of a module": lambda good: pickled(good, torch.nn.Linear(2, 2)),
    "the format before torch 1.6": lambda good: legacy({"raafl": {"format": 1}}),
    "that format, with code": lambda good: legacy({"raafl": Evil()}),
    "a tar": tar,
    "a gzip": gzip.compress,
    "TorchScript": scripted,
    "a compressed archive": lambda good: archive(good, compression=zipfile.ZIP_DEFLATED),
    "a bomb": lambda good: archive(
        good, lambda name, data: data + bytes(20 << 20) * name.endswith("data.pkl"), zipfile.ZIP_DEFLATED
    ),
    "overlapping entries": overlapping,
    "names that lead out": lambda good: archive(good, lambda name, data: b"", more=[("../../evil", b"x")]),
    "very deep lists": lambda good: archive(good, lambda name, data: deep(10**5) if name.endswith(".pkl") else data),
    "no record": lambda good: archive(good, lambda name, data: b""),
    "an empty archive": lambda good: b"PK\5\6" + bytes(18),
    "text": lambda good: b"version 1\n",
    "nothing": lambda good: b"",
    "half of it": lambda good: good[: len(good) // 2],
}


UNPACKS = {
    "a compressed archive": "it is compressed",
    "a bomb": "it is compressed",
    "overlapping entries": "it unpacks to more than its own length",
}


@pytest.mark.parametrize("name", MAKE)
def test_what_is_no_checkpoint_is_bad_input_and_runs_nothing(tmp_path, good, name, capfd):
    path = tmp_path / "version-000001.ckpt"
    path.write_bytes(MAKE[name](good))
    with pytest.raises(
        BadInput, match=r"^checkpoint is .*version-000001.ckpt, which is damaged or not one of raafl's"
    ) as told:
        checkpoint_reader.load(path)
    assert "\n" not in str(told.value)
    assert MARKS == [] and capfd.readouterr().out == "" and not (tmp_path.parent / "evil").exists()
    if name in UNPACKS:  # refused before anything is unpacked
        assert UNPACKS[name] in str(told.value)


def test_a_pipe_or_folder_in_its_place_is_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "version-000001.ckpt")
    (tmp_path / "checkpoints" / "version-000002.ckpt").mkdir(parents=True)
    for place in (tmp_path / "version-000001.ckpt", tmp_path / "checkpoints" / "version-000002.ckpt", tmp_path):
        with pytest.raises(BadInput, match="checkpoint is"):
            checkpoint_reader.load(place)


def flipped(good, num, seed, path):
    """Load a checkpoint with bytes changed, ``num`` times; return what came of it."""
    rng, seen = random.Random(seed), Counter()
    for _ in range(num):
        data = bytearray(good)
        for _ in range(rng.choice([1, 1, 4, 30])):
            data[rng.randrange(len(data))] = rng.choice([0, 1, 0x7F, 0x80, 0xFF, rng.randrange(256)])
        path.write_bytes(data[: rng.randrange(len(data))] if rng.random() < 0.1 else data)
        try:
            checkpoint_reader.load(path)
            seen["read"] += 1
        except BadInput as refused:
            assert "\n" not in str(refused)
            seen["refused"] += 1
    return seen


def test_damaged_checkpoints_are_read_or_bad_input(tmp_path, good):
    seen = flipped(good, 100, 1, tmp_path / "version-000001.ckpt")
    assert seen["refused"] > 0 and MARKS == []


@pytest.mark.slow("ten thousand damaged checkpoints")
@pytest.mark.long("test_damaged_checkpoints_are_read_or_bad_input")
def test_many_damaged_checkpoints_are_read_or_bad_input(tmp_path, good, capsys):
    seen = flipped(good, NUM_LONG, 2, tmp_path / "version-000001.ckpt")
    assert MARKS == []
    with capsys.disabled():
        print(f" {NUM_LONG} checkpoints: {dict(seen)} ", end="")

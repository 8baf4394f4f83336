from __future__ import annotations

import multiprocessing as mp
import os
import re
import warnings

import numpy as np
import pytest
import torch

from raafl.errors import BadInput
from raafl.lean_import import import_lightning
from raafl.runfolder import checkpoint_reader
from raafl.runfolder import checkpoints as checkpoint
from tests.helpers.checkpoints import save_checkpoint

L = import_lightning()


class Line(L.LightningModule):
    def __init__(self, width: int = 2, lr: float = 0.1, optimizer: object = None) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.layer = torch.nn.Linear(width, 1)


class ByConfig(L.LightningModule):
    def __init__(self, conf: dict) -> None:
        super().__init__()
        self.save_hyperparameters(conf)
        self.layer = torch.nn.Linear(conf["width"], 1)


def test_what_is_saved_comes_back(tmp_path):
    state = {"w": torch.arange(6.0).reshape(2, 3), "n": torch.tensor(7), "h": torch.ones(2, dtype=torch.bfloat16)}
    section = {"coverage": {"w": torch.tensor([1.0, 2.0])}, "seen": [1, (2, "x")], "none": None, "at_s": 1.5}
    path = save_checkpoint(tmp_path, 123, state, raafl=section)
    assert path == tmp_path / "checkpoints" / "version-000123.ckpt"

    for place in (path, tmp_path):
        found = checkpoint_reader.load(place)
        assert (found.path, found.version, found.hyper_parameters) == (path, 123, {})
        assert found.state_dict.keys() == state.keys()
        assert all(
            torch.equal(found.state_dict[k], v) and found.state_dict[k].dtype == v.dtype for k, v in state.items()
        )
        assert torch.equal(found.raafl.pop("coverage")["w"], torch.tensor([1.0, 2.0]))
        assert found.raafl == {"seen": [1, (2, "x")], "none": None, "at_s": 1.5}


def test_lightning_loads_it_with_its_hyper_parameters(tmp_path):
    module = Line(width=3, lr=0.5)
    path = save_checkpoint(tmp_path, 1, module.state_dict(), module=module, raafl={"x": 1})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        loaded = Line.load_from_checkpoint(path, weights_only=True)
    assert (loaded.hparams.width, loaded.hparams.lr) == (3, 0.5)
    assert torch.equal(loaded.layer.weight, module.layer.weight)


def test_lightning_loads_a_module_made_from_one_config_argument(tmp_path):
    module = ByConfig({"width": 4})
    path = save_checkpoint(tmp_path, 1, module.state_dict(), module=module)
    assert ByConfig.load_from_checkpoint(path).layer.in_features == 4


def test_a_hyper_parameter_that_is_not_plain_is_left_out_with_a_remedy(tmp_path, caplog):
    module = Line(width=np.int64(3), optimizer=torch.optim.SGD)
    for _ in range(2):
        path = save_checkpoint(tmp_path, 1, module.state_dict(), module=module)
    (message,) = [record.message for record in caplog.records]  # once, however many checkpoints are written
    assert re.match(
        r"hyper-parameter optimizer is a type and is left out.*load_from_checkpoint\(optimizer=\.\.\.\)", message
    )
    assert checkpoint_reader.load(path).hyper_parameters == {"width": 3, "lr": 0.1}
    assert Line.load_from_checkpoint(path).layer.in_features == 3


def test_an_array_as_hyper_parameter_is_left_out(tmp_path, caplog):
    module = Line(width=3, optimizer=np.array([1.0, 2.0]))
    path = save_checkpoint(tmp_path, 1, module.state_dict(), module=module)
    assert ["hyper-parameter optimizer is a ndarray" in record.message for record in caplog.records] == [True]
    assert checkpoint_reader.load(path).hyper_parameters == {"width": 3, "lr": 0.1}


@pytest.mark.parametrize(
    ("section", "where"),
    [({"a": {"b": [0, {1}]}}, r"raafl\.a\.b\[1\] is a set"), ({"a": np.float64(1)}, r"raafl\.a is a float64")],
)
def test_a_section_that_is_not_plain_is_refused_before_anything_is_written(tmp_path, section, where):
    with pytest.raises(TypeError, match=where):
        save_checkpoint(tmp_path, 1, {}, raafl=section)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("keep_last", "kept"), [(1, [30]), (3, [4, 5, 30]), (5, [1, 4, 5, 30]), (None, [1, 4, 5, 30])])
def test_the_last_ones_are_kept(tmp_path, keep_last, kept):
    for version in (1, 4, 5):
        save_checkpoint(tmp_path, version, {})
    (tmp_path / "checkpoints" / "version-best.ckpt").touch()
    save_checkpoint(tmp_path, 30, {}, keep_last=keep_last)
    names = sorted(path.name for path in (tmp_path / "checkpoints").iterdir())
    assert names == [*(f"version-{version:06d}.ckpt" for version in kept), "version-best.ckpt"]
    assert checkpoint.newest(tmp_path) == tmp_path / "checkpoints" / "version-000030.ckpt"


def test_versions_are_ordered_as_numbers_and_the_new_one_is_never_removed(tmp_path):
    save_checkpoint(tmp_path, 999_999, {})
    save_checkpoint(tmp_path, 1_000_000, {})
    assert checkpoint_reader.load(tmp_path).version == 1_000_000
    path = save_checkpoint(tmp_path, 5, {}, keep_last=1)
    assert checkpoint.newest(tmp_path) == path


def test_bad_input_is_named(tmp_path):
    with pytest.raises(BadInput, match=r"but there is none: give a version-"):
        checkpoint_reader.load(tmp_path)
    assert checkpoint.newest(tmp_path) is None

    path = save_checkpoint(tmp_path, 1, {"w": torch.ones(1000)})
    path.write_bytes(path.read_bytes()[:2000])
    with pytest.raises(
        BadInput, match=r"version-000001\.ckpt, which is damaged or not one of raafl's .*: give an earlier one"
    ):
        checkpoint_reader.load(path)
    torch.save({"state_dict": {}}, path)
    with pytest.raises(BadInput, match=r"not one of raafl's \(KeyError"):
        checkpoint_reader.load(path)
    torch.save({"raafl": {"format": 99}}, path)
    with pytest.raises(BadInput, match="of format 99, but this version reads format 1"):
        checkpoint_reader.load(path)


class Payload:
    def __reduce__(self):
        return os.system, ("touch executed",)


def test_nothing_in_a_checkpoint_is_executed(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    torch.save({"raafl": Payload()}, tmp_path / "version-000001.ckpt")
    with pytest.raises(BadInput, match=r"not one of raafl's \(it holds more than tensors and plain values\)"):
        checkpoint_reader.load(tmp_path / "version-000001.ckpt")
    assert not (tmp_path / "executed").exists()


def save_for_ever(folder, ready):
    state = {"w": torch.zeros(500_000)}
    for version in range(1, 10**6):
        state["w"].fill_(version)
        save_checkpoint(str(folder), version, state, keep_last=3)
        if version == 5:
            ready.set()


def test_a_run_killed_while_it_saves_leaves_only_whole_checkpoints(tmp_path):
    context = mp.get_context("fork")
    ready = context.Event()
    process = context.Process(target=save_for_ever, args=(tmp_path, ready))
    process.start()
    try:
        assert ready.wait(90)
    finally:
        process.kill()
        process.join()
    files = list((tmp_path / "checkpoints").glob("version-*.ckpt"))
    assert 2 <= len(files) <= 4  # killed before or after the rename, or before the oldest was removed
    for file in files:
        found = checkpoint_reader.load(file)
        assert torch.equal(found.state_dict["w"], torch.full((500_000,), float(found.version)))

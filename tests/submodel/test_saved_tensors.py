"""A model without a library of its own as a safetensors file: by a run, and by the module of a Trainer."""

from __future__ import annotations

import logging
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from raafl.local.trainer_module import TrainerModule
from raafl.runtime.lifecycle.export import _save_safetensors

load_file = pytest.importorskip("safetensors.torch").load_file


class Odd(nn.Module):
    """Module with a parameter that has gaps between its columns, a second name for it, and a state that is no tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.turned = nn.Parameter(torch.arange(6.0).reshape(2, 3).t())
        self.again = self.turned

    def get_extra_state(self) -> int:
        return 7


def by_a_run(module, folder):
    form = SimpleNamespace(contents=lambda *_: {"state_dict": module.state_dict()})
    progress = SimpleNamespace(warn=logging.getLogger("raafl").warning)
    _save_safetensors(folder, form, SimpleNamespace(version=1, values=None), progress, lambda _: "")
    return folder / "model"


def by_a_trainer(module, folder):
    TrainerModule.save_pretrained(SimpleNamespace(model=module), folder)
    return folder


@pytest.mark.parametrize("save", [by_a_run, by_a_trainer])
def test_all_tensors_are_saved_and_what_is_none_is_named(tmp_path, caplog, save):
    module = Odd()
    found = load_file(save(module, tmp_path) / "model.safetensors")
    assert found.keys() == {"turned", "again"}
    assert all(torch.equal(value, module.turned) for value in found.values())
    assert "model.safetensors holds tensors only, without _extra_state: load the checkpoint" in caplog.text

from __future__ import annotations

import warnings
from dataclasses import replace

import torch
from lightning.fabric import Fabric

from raafl.local.numerics import numerics_left, precision_of, set_numerics
from raafl.local.train import FabricOptions
from raafl.runtime.lifecycle.environment import conditions, differences
from tests.helpers.emulated_cuda import Emulated
from tests.helpers.small_runs import experiment


def test_a_run_on_the_cpu_says_nothing_of_gpus(tmp_path, emulated_cuda: Emulated):
    assert not {"gpu", "driver", "cuda", "cudnn", "tf32"} & set(conditions(experiment(tmp_path)))


def test_another_processor_is_named_and_one_that_was_not_recorded(tmp_path):
    """Of two processors with AVX-512 each may give other bits: libraries look at the maker, too."""
    found = conditions(experiment(tmp_path))
    here = found["processor"]
    assert here and differences(found, found) == []
    assert differences({**found, "processor": "Z80"}, found) == [f"processor was Z80, is {here} here"]
    del (earlier := dict(found))["processor"]  # as raafl 0.1.0 recorded it
    assert differences(earlier, found) == [f"processor was not recorded, is {here} here"]
    assert differences({}, found) == []


def test_where_there_is_no_gpu_one_entry_says_so(tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    plain = experiment(tmp_path)
    found = conditions(replace(plain, fabric=FabricOptions(accelerator="auto")))
    assert found == {**conditions(plain), "accelerator": "auto", "gpu": None}


def test_the_precision_is_the_one_that_lightning_takes_here(tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for accelerator, asked, trains in (("auto", "16-mixed", "bf16-mixed"), ("auto", "bf16-mixed", "bf16-mixed")):
        options = FabricOptions(accelerator=accelerator, precision=asked)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            assert Fabric(accelerator=accelerator, devices=1, precision=asked).strategy.precision.precision == trains
        made = replace(experiment(tmp_path), fabric=options)
        assert conditions(made)["precision"] == trains
        assert conditions(made, trains=False)["precision"] == asked  # the clients' GPUs are elsewhere
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert precision_of(FabricOptions(accelerator="auto", precision="16-mixed")) == "16-mixed"


def test_an_emulated_gpu_is_described_and_its_absence_is_a_difference(tmp_path, monkeypatch, emulated_cuda: Emulated):
    made = experiment(tmp_path, server_device="cuda:0", fabric=FabricOptions(deterministic=True, tf32=False))
    with numerics_left():
        set_numerics(1, made.fabric)
        found = conditions(made)
        loose = conditions(replace(made, fabric=FabricOptions()))
    assert {"driver", "cuda", "cudnn"} < set(found) and found == loose  # what holds counts, not what was asked for
    assert (found["gpu"], found["tf32"]) == ("Emulated GPU", "matmul False, convolutions False")
    assert found["deterministic"] is True and differences(found, found) == []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert differences(found, conditions(made)) == ["gpu was Emulated GPU, is None here"]

"""The typed config: every field out of range is found, all at once, before anything is built."""

from __future__ import annotations

import re
from dataclasses import fields

import pytest
import torch
from torch import nn

import raafl
from raafl.api.settings import Settings
from raafl.config.experiment import ABOUT, SECTIONS, Experiment, SubmodelOptions, marked
from raafl.config.options import Timeouts, seconds
from raafl.core.algorithm import Training
from raafl.core.options import FabricOptions, Privacy
from raafl.devices.profiles import Device
from raafl.errors import BadInput
from raafl.runtime.setup import limits_of, submodels_of
from tests.helpers.refusals import refuses


def nothing():
    raise AssertionError("a check builds neither model nor data")


def make(**fields) -> Experiment:
    return Experiment(**{"model": nothing, "data": nothing, "algorithm": raafl.fed_avg(), "max_updates": 1, **fields})


def problems(**fields) -> list[str]:
    try:
        make(**fields).check()
    except BadInput as error:
        return str(error).splitlines()
    return []


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("90", 90.0),
        ("90s", 90.0),
        ("1.5m", 90.0),
        ("2h", 7200.0),
        ("1d", 86400.0),
        (" 2 H ", 7200.0),
        (0.5, 0.5),
        ("1e3", 1000.0),
        ("1e-2s", 0.01),
        (".5m", 30.0),
        ("2.s", 2.0),
        (None, None),
    ],
)
def test_durations(text, value):
    assert seconds("max_time", text) == value


@pytest.mark.parametrize(
    "text", ["2x", "", "h", "-1", "0", "1.2.3", "inf", "nan", "2 h 3 m", "1e999", ".", "1e-", "1e+-2"]
)
def test_no_durations(text):
    with pytest.raises(BadInput, match=r"max_time is .*: give seconds above 0, or text such as 90s, 5m, 2h"):
        seconds("max_time", text)


def test_a_sound_experiment_has_no_problem():
    assert problems() == []
    assert problems(max_updates=None, max_time="2h") == []
    assert problems(max_updates=None, target="accuracy=0.9") == []


@pytest.mark.parametrize(
    ("fields", "line"),
    [
        ({"clients": 0}, "clients is 0: give 1 or more"),
        ({"max_updates": -1}, "max_updates is -1: give 1 or more"),
        *(
            (
                {"eval_every": every},
                f"eval_every is {every}: give 1 or more versions, seconds above 0 such as 10s, or samples "
                "such as '5000 samples'",
            )
            for every in (0, -3, "0 samples", "often", "5 clients", "1.5")
        ),
        ({"eval_every": "0s"}, "eval_every is 0s: give seconds above 0, or text such as 90s, 5m, 2h"),
        ({"checkpoint_every": 0}, "checkpoint_every is 0: give 1 or more"),
        ({"keep_checkpoints": 0}, "keep_checkpoints is 0: give 1 or more"),
        ({"workers": 0}, "workers is 0: give 1 or more"),
        (
            {"batch_clients": "fast", "workers": 2},
            "batch_clients is fast, which is for one process, so that a replay trains the same clients together: leave workers "
            "and engine out, or give auto",
        ),
        ({"fabric": FabricOptions(data_on_device=1.5)}, "fabric.data_on_device is 1.5: give a share from 0 to 1"),
        (
            {"payload_memory_total_bytes": 1000},
            "payload_memory_total_bytes is 1000: give at least payload_memory_bytes, 16777216, or lower that, too",
        ),
        ({"payload_memory_total_bytes": -1}, "payload_memory_total_bytes is -1: give 0 or more"),
        ({"batch_clients": 0}, "batch_clients is 0: give 1 or more"),
        ({"batch_clients": "all"}, "batch_clients is 'all': give auto, fast, or a number from 1"),
        ({"threads": 0}, "threads is 0: give 1 or more"),
        ({"seed": -1}, "seed is -1: give 0 or more"),
        # config.yaml with a larger number is refused when the run is resumed or replayed
        ({"seed": 2**63}, "seed is 9223372036854775808: give at most 9223372036854775807"),
        ({"train": Training(num_epochs=0)}, "train.num_epochs is 0: give 1 or more"),
        ({"train": Training(num_steps=0)}, "train.num_steps is 0: give 1 or more"),
        ({"train": Training(batch_size=0)}, "train.batch_size is 0: give 1 or more"),
        ({"train": Training(num_epochs=None)}, "train.num_epochs and train.num_steps are both null: give one of them"),
        (
            {"max_updates": None},
            "max_updates, max_time and target are all null: give at least one, or the run would never end",
        ),
        ({"progress": "loud"}, "progress is 'loud': give auto, live, plain, verbose or quiet"),
        ({"waits": Timeouts(task_s=0)}, "waits.task_s is 0: give seconds above 0"),
        ({"fabric": FabricOptions(accumulate_grad_batches=0)}, "fabric.accumulate_grad_batches is 0: give 1 or more"),
        (
            {"fabric": FabricOptions(gradient_clip_val=0.0)},
            "fabric.gradient_clip_val is 0.0: give a number above 0, or null for no clipping",
        ),
        ({"fabric": FabricOptions(accelerator="gpus")}, "fabric.accelerator is 'gpus': did you mean 'gpu'?"),
        (
            {"fabric": FabricOptions(precision="bf16-true")},
            "fabric.precision is 'bf16-true': give 32-true, bf16-mixed or 16-mixed, which leave the model's dtype alone",
        ),
        (
            {"fabric": FabricOptions(precision="16-mixed")},
            "fabric.precision is 16-mixed, which is for GPUs: use bf16-mixed, or fabric.accelerator cuda",
        ),
        (
            {"fabric": FabricOptions(accelerator="cuda"), "workers": 2},
            "workers is 2, whose processes are forked and can use no GPU: leave it out with fabric.accelerator cuda, or start "
            "`torchrun --nproc-per-node 2 -m raafl simulate`",
        ),
        ({"server_device": "gpu"}, "server_device is 'gpu': give cpu, or a GPU such as cuda:0"),
        ({"transport": "nvlink"}, "transport is 'nvlink': give staged or nccl"),
        ({"server_device": "meta"}, "server_device is 'meta': give cpu, or a GPU such as cuda:0"),
        (
            {"algorithm": raafl.fed_avg(cohort=11)},
            "cohort is 11, more than there are clients: give at most 10, or use more --clients",
        ),
        (
            {"algorithm": raafl.fed_mezo(), "train": Training(lr_schedule="linear", lr_versions=9)},
            "train.lr_schedule is linear, but fed_mezo steps without the module's optimizer: leave it out",
        ),
        (
            {"target": ["accuracy=0.9", "loss"]},
            "target is 'loss': give METRIC=VALUE, for example accuracy=0.93, or METRIC<=VALUE or METRIC>=VALUE",
        ),
        ({"max_time": "soon"}, "max_time is soon: give seconds above 0, or text such as 90s, 5m, 2h"),
        (
            {"devices": "nowhere.csv"},
            "no device file at nowhere.csv; give the path of a .yaml, .json or .csv file, or a list such as [{name: a100}]",
        ),
        (
            {"devices": [Device(count=7), Device(count=4)]},
            "the counts in devices add up to 11 but clients is 10; lower the counts or set clients to 11",
        ),
    ],
)
def test_each_problem_is_one_line(fields, line):
    assert problems(**fields) == [line]


@pytest.mark.parametrize("there", [True, False])
def test_workers_are_for_the_cpu_also_where_the_accelerator_is_found(monkeypatch, there):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: there)
    found = problems(fabric=FabricOptions(accelerator="auto"), workers=2)
    assert [line.partition(":")[0] for line in found] == [
        "workers is 2, whose processes are forked and can use no GPU"
    ] * there


test_how_a_model_is_cut_is_checked_where_it_is_said = refuses(
    SubmodelOptions,
    ({"batch_norm": "dynamic"}, "submodels.batch_norm is 'dynamic': give merged, static or null"),
    ({"residual_width": "no"}, "submodels.residual_width is 'no': give true, false or null"),
    ({"static_batches": 0}, "submodels.static_batches is 0: give a number above 0"),
)


def test_settings_of_a_run_go_before_the_models_own():
    module = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    module.submodel_batch_norm, module.submodel_residual_width = "static", True
    found = submodels_of(SubmodelOptions(), module)
    assert (found.batch_norm, found.residual_width) == ("static", True)
    found = submodels_of(SubmodelOptions(residual_width=False, batch_norm="merged"), module)
    assert (found.batch_norm, found.residual_width) == ("merged", False)


def test_all_problems_are_named_at_once():
    found = problems(clients=0, seed=-5, max_time="2x", progress="loud", target="x", train=Training(num_epochs=-1))
    assert [line.split(" is ")[0] for line in found] == [
        "clients",
        "seed",
        "train.num_epochs",
        "progress",
        "max_time",
        "target",
    ]


def test_output_may_be_new_or_empty_and_nothing_else(tmp_path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").touch()
    assert problems(output=str(tmp_path / "empty")) == []
    assert problems(output=str(tmp_path / "new" / "folder")) == []
    assert not (tmp_path / "new").exists(), "a check makes nothing"
    for path in (tmp_path, tmp_path / "file"):
        assert problems(output=str(path)) == [
            f"output is '{path}', which is not an empty folder: name a new folder, or remove that one"
        ]
    below = tmp_path / "file" / "run"
    assert problems(output=str(below)) == [
        f"output is '{below}', and {tmp_path / 'file'} is not writable: name another folder"
    ]
    long = tmp_path / ("n" * 300)
    assert problems(output=str(long)) == [
        f"output is '{long}', which cannot be used (File name too long): name another folder"
    ]


@pytest.mark.parametrize(
    ("content", "line"),
    [
        ("- {name: a, flops: 1}\n", "unknown field flops"),
        ("a: 1\n", "must hold a list of devices, alone or under the key 'devices'"),
        ("[]\n", "holds no devices; write at least one entry"),
        ("- {name: a, flops_per_s: [\n", "is not valid YAML"),
        ("- {name: a, flops_per_s: 0}\n", "flops_per_s is 0; it must be a number above 0"),
    ],
)
def test_a_bad_device_file_is_named(content, line, tmp_path):
    path = tmp_path / "devices.yaml"
    path.write_text(content)
    found = problems(devices=str(path))
    assert str(path) in found[0]
    assert line in " ".join(found)


def test_devices_are_dealt_in_turn():
    devices = [Device(name="a", flops_per_s=1e9, count=2), Device(name="b", flops_per_s=1e9)]
    assert [p.name for p in make(clients=5, devices=devices).profiles()] == ["a", "a", "b", "a", "a"]
    assert [p.name for p in make(clients=2).profiles()] == ["default", "default"]


@pytest.mark.parametrize(
    ("algorithm", "versions"),
    [
        (raafl.fed_avg(), 1),  # a version is a round: N updates
        (raafl.fed_async(), 12),  # a version is an update
        (raafl.fed_buff(buffer_size=5), 2),  # a version is five updates: two of them are nearest below twelve
        (raafl.fed_buff(buffer_size=20), 1),
        (raafl.fed_raa(trigger="all"), 1),
    ],
)
def test_without_eval_every_the_model_is_measured_about_once_in_n_updates(algorithm, versions):
    assert limits_of(make(algorithm=algorithm, clients=12), 1).eval_every == versions
    assert limits_of(make(algorithm=algorithm, clients=12, eval_every=3), 1).eval_every == 3


@pytest.mark.parametrize(
    ("every", "size", "unit"),
    [
        (7, 7, "versions"),
        ("7", 7, "versions"),
        ("0.5s", 0.5, "seconds"),
        ("2m", 120.0, "seconds"),
        ("1e-3 s", 1e-3, "seconds"),
        ("5000 samples", 5000, "samples"),
        ("1 sample", 1, "samples"),
    ],
)
def test_the_distance_between_evaluations_has_a_unit(every, size, unit):
    limits = limits_of(make(eval_every=every), 1)
    assert (limits.eval_every, limits.eval_unit) == (size, unit)


def test_what_the_fields_say_of_themselves():
    both = {
        "model",
        "data",
        "algorithm",
        "partition",
        "clients",
        "seed",
        "train",
        "submodels",
        "secure_aggregation",
        "compress",
        "threads",
        "rules",
    }
    assert set(marked("must_match")) == both
    assert set(marked("sent_to_clients")) == both | {"devices", "memory", "fabric", "waits"}
    assert set(marked("may_change")) == {
        "max_updates",
        "max_time",
        "target",
        "output",
        "resume",
        "progress",
        "logger",
        "workers",
        "engine",
        "name",
        "waits",
        "transport",
        "checkpoint_every",
        "checkpoint_s",
        "keep_checkpoints",
        "keep_best",
        "strict",
        "batch_clients",
        "monitor",
        "monitor_clients",
        "monitor_stall_s",
        "samples",
        "safetensors",
        "push_to_hub",
        "payload_memory_bytes",
        "payload_memory_total_bytes",
    }
    assert set(ABOUT) - set(marked("used_by_replay")) == {
        "output",
        "resume",
        "logger",
        "monitor",
        "monitor_clients",
        "monitor_stall_s",
        "push_to_hub",
        "payload_memory_bytes",
        "payload_memory_total_bytes",
        "engine",
        "samples",
    }
    assert list(SECTIONS) == [
        "train",
        "submodels",
        "fabric",
        "guard",
        "rounds",
        "privacy",
        "subfederation",
        "subfederations",
        "secure_aggregation",
        "compress",
        "samples",
        "engine",
        "waits",
    ]
    assert all(kind().__class__ is kind for kind in SECTIONS.values())


def test_federation_types_every_setting_that_it_takes():
    flat = [f.name for group in ("train", "fabric") for f in fields(SECTIONS[group]) if f.name != "device"]
    assert set(Settings.__annotations__) == {*marked("keyword"), *flat}


@pytest.mark.parametrize(
    ("recorded", "given", "says"),
    [
        (
            "{clip_norm: 1.0, seed_file: old}",
            "new",
            "'new', which does not exist, but .* follows from the file 'old': give",
        ),
        (
            "{clip_norm: 1.0, seed_file: old}",
            None,
            "null, but the noise of 'run' follows from the file 'old': give that",
        ),
        (
            "{clip_norm: 1.0, seed_file: null}",
            "new",
            "'new', but the noise of 'run' follows from the run's seed: leave it",
        ),
        ("{clip_norm: 1.0}", "moved", "'moved', but the noise of 'run' follows from the run's seed: leave it out"),
        (
            "{clip_norm: 1.0, seed_file: old}",
            "old",
            "'old', which is missing: restore the file from which the noise of",
        ),
        ("{clip_norm: 1.0, seed_file: old}", "moved", None),
        ("{clip_norm: 1.0, seed_file: null}", None, None),
        ("{clip_norm: null, seed_file: null}", "moved", None),  # refused for its clip_norm, once the folder is opened
    ],
)
def test_a_run_goes_on_with_noise_from_where_it_began(tmp_path, monkeypatch, recorded, given, says):
    """A new seed would make a replay differ, and the run's own seed is known to every client."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.yaml").write_text(f"privacy: {recorded}\n")
    (tmp_path / "moved").write_text("sum " + "ab" * 32)
    found = problems(resume="run", privacy=Privacy(clip_norm=1.0, seed_file=given))
    assert len(found) == (says is not None)
    assert says is None or re.match(f"privacy.seed_file is {says}", found[0])
    assert not (tmp_path / "new").exists()

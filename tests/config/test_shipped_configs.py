"""Every shipped config loads, and everything that can be built from it before training starts is built."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from raafl.config.parse import load_experiment
from raafl.runtime.run import Run
from raafl.runtime.setup import build
from tests.habits.source import ROOT
from tests.helpers.methods import long_except
from tests.helpers.small_runs import finish

CONFIGS = sorted(path.relative_to(ROOT).as_posix() for path in (ROOT / "configs").glob("*.yaml"))
LARGE = (
    "cifar10-timely-fl",
    "cifar10-vit",
    "co-s2p",
    "co-s2p-paper",
    "gre-raa-windows",
    "shakespeare-llama",
    "sst2-minilm",
    "sst2-minilm-lora",
)
"""As large as their papers' models, from one to eight seconds each: loaded here, and built in `make test-long`."""
SIMULATED = ("hetero-fl-mnist", "mnist-ram-fed", "niid-bench")
"""Bases of papers' tables, in which other methods run, too: their rounds have no deadline."""
NEED_DATA = r"class_path: raafl\.data\.(MNIST|CIFAR10|CIFAR100|SST2|AGNews|FPB|Shakespeare)\b"
NEED_PACKAGE = r": package:(\w+)/"


def test_there_are_configs():
    assert "configs/quickstart.yaml" in CONFIGS


@pytest.mark.parametrize("config", CONFIGS)
def test_config_says_how_to_run_it(config):
    """The comment at the top names the command, with the config's own path."""
    head = re.match(r"(#.*\n)+", (ROOT / config).read_text())
    assert head is not None
    assert f"--config {config}" in head[0]


def loaded(config):
    """The config's experiment, checked."""
    experiment = load_experiment(ROOT / config)
    experiment.check()
    assert experiment.output is None, "a config names no folder, or its second run would find it full"
    assert experiment.name == config.removeprefix("configs/").removesuffix(".yaml")
    waits = experiment.algorithm.trigger.waits_for_all and not experiment.rounds.is_on
    assert not waits or experiment.name in SIMULATED, "a client that never answers holds up each round of raafl serve"
    return experiment


@pytest.mark.parametrize("name", LARGE)
def test_a_large_config_loads(name):
    assert loaded(f"configs/{name}.yaml").clients >= 1


@pytest.mark.slow("some of the models are as large as their papers'")
@pytest.mark.parametrize("config", long_except(CONFIGS, *(path for path in CONFIGS if Path(path).stem not in LARGE)))
def test_config_builds(config, tmp_path, request, monkeypatch):
    """Model, data, partition, devices and algorithm are built; the model is measured and tried for one step.

    Its axes are not proven here: tests/submodel/prove/test_proof.py proves the zoo's, and each run its own.
    """
    monkeypatch.setattr("raafl.submodel.prove.proof.refuted", lambda *_, **__: {})
    experiment = loaded(config)
    text = (ROOT / config).read_text()
    for package in re.findall(NEED_PACKAGE, text):
        pytest.importorskip(package, reason=f"pip install --no-deps {package.replace('_', '-')}")
    if re.search(NEED_DATA, text):
        request.getfixturevalue("raafl_data")
        experiment = load_experiment(ROOT / config, "--data.download", "false", "--data.num_test", "32")
        experiment.check()  # 32 samples are enough to measure once
    experiment = replace(experiment, output=str(tmp_path / "run"), progress="quiet")
    parts = build(experiment, pace=False)
    assert len(parts.clients) == experiment.clients
    assert all(client.num_samples >= 1 for client in parts.clients)
    run = Run(parts, "", "simulated")
    run.close()
    assert (tmp_path / "run" / "metrics.csv").read_text().count("\n") == 2  # the header, and the initial model


@pytest.mark.long("test_config_builds")
@pytest.mark.parametrize(
    "config",
    [path for path in CONFIGS if Path(path).stem not in LARGE and not re.search(NEED_DATA, (ROOT / path).read_text())],
)
def test_config_runs(config, tmp_path):
    """Those of made or bundled data, for a few updates."""
    limits = ["--max_updates=3", "--max_time=1h", "--progress=quiet", f"--output={tmp_path / 'run'}"]
    assert finish(load_experiment(ROOT / config, *limits)).summary["updates_merged"] >= 3

"""Run small experiments on the bundled digits to their end, and read their run folders."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lightning import LightningModule

from model_zoo import MLP
from raafl.algorithms import ALGORITHMS
from raafl.config.experiment import Experiment
from raafl.core.algorithm import Algorithm, Training
from raafl.data import Digits, Iid
from raafl.devices.profiles import Device
from raafl.runfolder.events import read_run
from raafl.runtime.replay import Replay
from raafl.runtime.run import simulate
from raafl.runtime.setup import build, make_executor
from tests.helpers import cached_models

SPEEDS = (8e7, 5e7, 3e7, 2e7)
"""FLOP/s of four clients, none a multiple of another: no two tasks end at the same instant."""


def small_mlp() -> LightningModule:
    return MLP(64, (24,), 10, lr=0.05, momentum=0.5)


def digits() -> Digits:
    return Digits(batch_size=64)


def unequal(speeds: Sequence[float] = SPEEDS, **more: Any) -> list[Device]:
    """Return one device for each speed, with a link, so that transfers take time."""
    link = {"down_bytes_per_s": 1e6, "up_bytes_per_s": 5e5, "latency_s": 0.01, **more}
    return [Device(name=f"device-{i}", flops_per_s=speed, **link) for i, speed in enumerate(speeds, start=1)]


def windows(*periods: tuple[tuple[float, float], float]) -> list[Device]:
    """Return four unequal devices, each present only in its own windows of time."""
    return [
        Device(name=f"d{i}", flops_per_s=speed, up_bytes_per_s=2e5, availability=(window,), period_s=period)
        for i, (speed, (window, period)) in enumerate(zip(SPEEDS, periods, strict=True), start=1)
    ]


# tasks take about 0.05 to 0.15 s, so clients 3 and 4 often leave during one
COMING_AND_GOING = windows(((0.0, 0.4), 0.5), ((0.1, 0.6), 0.7), ((0.0, 0.2), 0.3), ((0.05, 0.22), 0.25))


SHORT_TASKS = {"fed_compass": {"min_steps": 2, "max_steps": 6}}
"""Arguments of methods that choose the number of steps, so that tasks are about as long as those of others."""


def experiment(output: Path, algorithm: Algorithm | str = "fed_avg", **fields: Any) -> Experiment:
    """Return an experiment of four unequal clients on digits that ends after twelve updates; ``fields``: those that differ."""
    if isinstance(algorithm, str):
        algorithm = ALGORITHMS[algorithm](**SHORT_TASKS.get(algorithm, {}))
    clients = fields.get("clients", 4)
    speeds = [SPEEDS[i % 4] / (1 + i // 4) for i in range(clients)]
    settings: dict[str, Any] = {
        "model": small_mlp,
        "data": digits,
        "partition": Iid(),
        "clients": clients,
        "devices": unequal(speeds),
        "train": Training(num_epochs=None, num_steps=3),
        "max_updates": 12,
        "progress": "quiet",
        "output": str(output),
    }
    return Experiment(algorithm=algorithm, **{**settings, **fields})


@dataclass(frozen=True)
class Finished:
    """A run that has ended: its summary, and the content of its folder."""

    summary: dict[str, Any]
    folder: Path

    @property
    def digest(self) -> str:
        digest: str = self.summary["model_digest"]
        return digest

    def text(self, name: str) -> str:
        return (self.folder / name).read_text(encoding="utf-8")

    def events(self, kind: str | None = None) -> list[dict[str, Any]]:
        rows = [json.loads(line) for line in self.text("events.jsonl").splitlines()]
        return [row for row in rows if kind in (None, row["event"])]

    def rows(self, name: str = "clients.csv") -> list[dict[str, str]]:
        with (self.folder / name).open(newline="", encoding="utf-8") as file:
            return list(csv.DictReader(file))

    def journal(self) -> list[dict[str, Any]]:
        """Return the journal's events, without the first line about the run's conditions."""
        return [row for row in self.events() if row["event"] != "run"]


def finish(experiment: Experiment, run: Callable[[Experiment], tuple[dict[str, Any], Path]] = simulate) -> Finished:
    """Run an experiment to its end."""
    with cached_models.reuse_findings():
        return Finished(*whole(run(experiment)))


def two_speeds(folder: Path, algorithm: Algorithm | str, **more: Any) -> Finished:
    """Simulate client 1, which takes 1 s for a task, and client 2, which takes 2 s: equal data, three steps, no link."""
    flops = 3 * 64 * (4 * 64 * 24 + 6 * 24 * 10)
    devices = [Device(name="fast", flops_per_s=flops), Device(name="slow", flops_per_s=flops / 2)]
    training = Training(num_epochs=None, num_steps=3)
    return finish(experiment(folder / "r", algorithm, clients=2, devices=devices, train=training, **more))


def equal_replay(made: Experiment, run: Finished) -> bool:
    """Check whether a replay of the run gives the same model."""
    rows, summary = read_run(run.folder)
    with cached_models.reuse_findings():
        parts = build(made, pace=False, **next(iter(rows))["start"])
        with closing(make_executor(parts, 1)) as executor:
            Replay(parts.coordinator, executor).run(rows)
    return parts.coordinator.state.values.model_digest() == summary["model_digest"]


def whole(run: tuple[dict[str, Any], Path]) -> tuple[dict[str, Any], Path]:
    """Return a run's summary and folder; end the whole test session if a signal has interrupted the run.

    A run ends early at SIGTERM or Ctrl-C. Such a signal to the tests' own process, as from `timeout`, is meant for the
    session, not for the run in progress, whose model would only look wrong.
    """
    if run[0]["finished"] == "interrupted":
        raise KeyboardInterrupt(f"a signal to the tests has ended the run in {run[1]}")
    return run

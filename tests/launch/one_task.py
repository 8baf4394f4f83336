"""Run by torchrun: the processes of one client train tasks, and the leader writes what they come to."""

from __future__ import annotations

import sys
from pathlib import Path

import torch

from raafl.core.types import Assignment
from raafl.local.context import TaskContext
from raafl.runtime.client.multiprocess import together
from raafl.runtime.client.setup import ClientSetup
from raafl.submodel import FULL, FlatTensors, Spec
from tests.helpers.small_runs import experiment

CLIENT = 2
SPECS = (FULL, Spec.select({"layers.1": range(3, 15)}), FULL)


def site(folder):
    run = experiment(Path(folder) / "run", "fed_raa", clients=4, progress="quiet")
    return ClientSetup.build(run, "", CLIENT, own_data=False)


def tasks(site, names=("first", "second", "third")):
    """Each task's update by name, of values that a seed decides: a submodel, and the full model twice."""
    found = {}
    for number, (name, spec) in enumerate(zip(names, SPECS, strict=True), start=1):
        torch.manual_seed(number)
        received = FlatTensors.empty(site.submodels.layout(spec, "sent"))
        for buffer in received.buffers.values():
            buffer.normal_(0, 0.2)
        task = Assignment(
            id=number, client=CLIENT, incarnation=0, task=number, version=0, spec=spec, region=0, num_epochs=1,
            num_steps=None, seed=100 + number, assigned_s=0.0,
        )  # fmt: skip
        update = site.trainer.run(task, received, site.data, TaskContext(process_group=site.process_group))
        tensors = {entry.name: update.tensors[entry.name].clone() for entry in update.tensors.layout.entries}
        found[name] = {"tensors": tensors, "num_steps": update.num_steps, "loss": update.metrics["loss"]}
    return found


def main():
    folder = sys.argv[1]

    def work(make_site):
        torch.save(tasks(make_site("the config")), Path(folder) / "found.pt")
        return 0

    return together(lambda config: site(folder), work, CLIENT, lambda text: print(text, file=sys.stderr))


if __name__ == "__main__":
    sys.exit(main())

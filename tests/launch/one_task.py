"""Run by torchrun: the processes of one client train tasks, and the leader writes what they come to."""

from __future__ import annotations

import sys
from pathlib import Path

import torch

from model_zoo import MLP
from raafl.algorithms import diloco, fed_raa
from raafl.core.types import Assignment
from raafl.local.context import TaskContext
from raafl.runtime.client.multiprocess import together
from raafl.runtime.client.setup import ClientSetup
from raafl.submodel import FULL, FlatTensors, Spec
from tests.helpers.small_runs import experiment, small_mlp

CLIENT = 2
METHODS = {"fed_raa": (fed_raa(), small_mlp), "diloco": (diloco(inner_state="kept"), lambda: WithAdam(64, (24,), 10))}
"""Method and model: one with the gradients alone, one whose optimizer goes on from moments that the server sends."""
SPECS = (FULL, Spec.select({"layers.1": range(3, 15)}), FULL)


class WithAdam(MLP):
    """The zoo's perceptron with Adam."""

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=1e-3)


def site(folder, name):
    algorithm, model = METHODS[name]
    run = experiment(Path(folder) / "run", algorithm, model=model, clients=4, progress="quiet")
    return ClientSetup.build(run, "", CLIENT, own_data=False)


def tasks(site, names=("first", "second", "third")):
    """Each task's update by name, of values that a seed decides: a submodel, and the full model twice."""
    found = {}
    for number, (name, spec) in enumerate(zip(names, SPECS, strict=True), start=1):
        torch.manual_seed(number)
        received = FlatTensors.empty(site.trainer.payload.layout(spec, "sent"))
        for buffer in received.buffers.values():
            buffer.normal_(0, 0.2)
        for key, tensor in received.items():
            if key.startswith(("exp_avg_sq/", "inner_steps/")):
                tensor.square_()  # neither second moments nor steps are below 0
        task = Assignment(
            id=number, client=CLIENT, incarnation=0, task=number, version=0, spec=spec, region=0, num_epochs=1,
            num_steps=None, seed=100 + number, assigned_s=0.0,
        )  # fmt: skip
        update = site.trainer.run(task, received, site.data, TaskContext(process_group=site.process_group))
        tensors = {entry.name: update.tensors[entry.name].clone() for entry in update.tensors.layout.entries}
        found[name] = {"tensors": tensors, "num_steps": update.num_steps, "loss": update.metrics["loss"]}
    return found


def main():
    folder, name = sys.argv[1:]

    def work(make_site):
        torch.save(tasks(make_site("the config")), Path(folder) / "found.pt")
        return 0

    return together(lambda config: site(folder, name), work, CLIENT, lambda text: print(text, file=sys.stderr))


if __name__ == "__main__":
    sys.exit(main())

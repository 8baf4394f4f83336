"""Run by torchrun: the processes of one client train tasks, and the leader writes what they come to."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch

from raafl.algorithms import diloco, fed_raa
from raafl.core.options import FabricOptions
from raafl.core.types import Assignment
from raafl.data import Iid
from raafl.local.context import TaskContext
from raafl.local.malloc import give_back
from raafl.runtime.client.multiprocess import together
from raafl.runtime.client.setup import ClientSetup
from raafl.submodel import FULL, FlatTensors, Spec
from tests.helpers.single_task import WithAdam
from tests.helpers.small_runs import experiment, small_mlp

CLIENT = 2
METHODS = {
    "fed_raa": (fed_raa(), small_mlp),
    "diloco": (diloco(inner_state="kept"), lambda: WithAdam(64, (24,), 10)),
    "diloco, sharded": (diloco(), lambda: WithAdam(64, (24,), 10)),
    "deep": (diloco(), lambda: WithAdam(64, (1024,) * 9, 10)),
    "deep, sharded": (diloco(), lambda: WithAdam(64, (1024,) * 9, 10)),
}
"""Method and model: one with the gradients alone, one whose optimizer goes on from moments that the server sends, one by FSDP2."""
SPECS = (FULL, Spec.select({"layers.1": range(3, 15)}), FULL)

DEEP_SPECS = (Spec.select({f"layers.{number}": range(4) for number in range(1, 18, 2)}), FULL)
"""A small submodel first, so that libraries are loaded when the whole one, of 8.5 million parameters, is measured."""


def site(folder, name):
    algorithm, model = METHODS[name]
    fabric = FabricOptions(gradient_clip_val=1.0, shard=True) if "sharded" in name else FabricOptions()
    run = experiment(
        Path(folder) / "run",
        algorithm,
        model=model,
        clients=4,
        progress="quiet",
        fabric=fabric,
        partition=Iid(test_share=0.2),
    )
    return ClientSetup.build(run, "", CLIENT, own_data=False)


def tasks(site, specs=SPECS):
    """Each task's update by number, of values that a seed decides: a submodel, and the full model twice."""
    found = {}
    for number, spec in enumerate(specs, start=1):
        torch.manual_seed(number)
        received = FlatTensors.empty(site.trainer.payload.layout(spec, "sent"))
        for buffer in received.buffers.values():
            buffer.normal_(0, 0.2)
        for key, tensor in received.items():
            if key.startswith(("exp_avg_sq/", "inner_steps/")):
                tensor.square_()  # neither second moments nor steps are below 0
        task = Assignment(
            id=number,
            client=CLIENT,
            incarnation=0,
            task=number,
            version=0,
            spec=spec,
            region=0,
            num_epochs=1,
            num_steps=None,
            seed=100 + number,
            assigned_s=0.0,
        )
        update = site.trainer.run(task, received, site.data, TaskContext(process_group=site.process_group))
        tensors = {entry.name: update.tensors[entry.name].clone() for entry in update.tensors.layout.entries}
        found[number] = {"tensors": tensors, "num_steps": update.num_steps, "metrics": update.metrics}
    return found


def resident_bytes(name):
    """This process's resident memory as /proc has it: VmRSS, or VmHWM, its peak since `reset`."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{name}:")) * 1024


def measured(run, file):
    """Run tasks, and write by how many bytes the last has made the process's memory grow at its peak."""

    def measured_run(*args):
        give_back(0)  # what the process was forked with, or has freed, would be used before it grows
        Path("/proc/self/clear_refs").write_text("5")
        before = resident_bytes("VmRSS")
        update = run(*args)
        file.write_text(str(resident_bytes("VmHWM") - before))
        return update

    return measured_run


def main():
    folder, name = sys.argv[1:]

    def made(config):
        own = site(folder, name)
        own.trainer.run = measured(own.trainer.run, Path(folder) / f"peak-{os.environ['RANK']}")
        return own

    def work(make_site):
        found = tasks(make_site("the config"), DEEP_SPECS if "deep" in name else SPECS)
        torch.save(found, Path(folder) / "found.pt")
        return 0

    return together(made, work, CLIENT, lambda text: print(text, file=sys.stderr))


if __name__ == "__main__":
    sys.exit(main())

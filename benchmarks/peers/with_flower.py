"""Run FedAvg in Flower's simulation: its Message API on one Ray actor."""

from __future__ import annotations

import functools
import importlib
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from benchmarks.peers.workload import BATCH, LR, Net, Workload, client_samples, main


@functools.cache
def of_process(work: Workload) -> tuple[Net, list[tuple[Tensor, Tensor]]]:
    """Make a model and all clients' samples, once in each process."""
    torch.set_num_threads(1)
    return Net(work), client_samples(work)


def train(work: Workload, message: Any, context: Any) -> Any:
    """Train one client from the arrays of a message, and return the reply; ``context`` says which client it is."""
    app = importlib.import_module("flwr.app")
    net, data = of_process(work)
    net.load_state_dict(message.content["arrays"].to_torch_state_dict())
    inputs, labels = data[int(context.node_config["partition-id"])]
    optimizer = torch.optim.SGD(net.parameters(), LR)
    for rows in torch.randperm(len(labels)).split(BATCH):
        optimizer.zero_grad()
        F.cross_entropy(net(inputs[rows]), labels[rows]).backward()
        optimizer.step()
    content = {
        "arrays": app.ArrayRecord(net.state_dict()),
        "metrics": app.MetricRecord({"num-examples": len(labels)}),
    }
    return app.Message(content=app.RecordDict(content), reply_to=message)


def sync(work: Workload, rounds: int) -> int:
    """Run rounds with uniformly drawn cohorts."""
    app, serverapp, clientapp, strategies, simulation = (
        importlib.import_module(f"flwr.{name}")
        for name in ("app", "serverapp", "clientapp", "serverapp.strategy", "simulation")
    )
    server, client = serverapp.ServerApp(), clientapp.ClientApp()

    @server.main()  # type: ignore[untyped-decorator]
    def run(grid: Any, context: Any) -> None:
        strategy = strategies.FedAvg(
            fraction_train=work.cohort / work.clients, fraction_evaluate=0.0, min_available_nodes=work.clients
        )
        strategy.start(grid, app.ArrayRecord(Net(work).state_dict()), num_rounds=rounds)

    @client.train()  # type: ignore[untyped-decorator]
    def train_client(message: Any, context: Any) -> Any:
        return train(work, message, context)

    actors = {"client_resources": {"num_cpus": 1, "num_gpus": 0.0}, "init_args": {"num_cpus": 1}}
    simulation.run_simulation(server, client, work.clients, backend_config=actors)
    return rounds * work.cohort


if __name__ == "__main__":
    from benchmarks.peers import with_flower  # by this name the actor's process finds the functions, too

    main({"sync": with_flower.sync})

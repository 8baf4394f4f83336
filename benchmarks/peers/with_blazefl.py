"""Run FedAvg in BlazeFL, with the trainer that has no processes or threads."""

from __future__ import annotations

import importlib
from typing import Any

from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.peers.workload import BATCH, LR, Net, Workload, client_samples, main


class Models:
    """BlazeFL's selector of models, which has only the workload's."""

    def __init__(self, work: Workload) -> None:
        """Store the workload."""
        self.work = work

    def select_model(self, model_name: str) -> nn.Module:
        """Return a new model."""
        return Net(self.work)


class Data:
    """BlazeFL's partitioned data set: a `TensorDataset` for each client."""

    def __init__(self, work: Workload) -> None:
        """Give each client its samples."""
        self.clients = [TensorDataset(*pair) for pair in client_samples(work)]

    def get_dataloader(self, type_: str, cid: int, batch_size: int, generator: Any = None) -> DataLoader[Any]:
        """Return a data loader of client ``cid`` in random order; ``type_`` is always the training part."""
        return DataLoader(self.clients[cid], batch_size=batch_size, shuffle=True, generator=generator)


def sync(work: Workload, rounds: int) -> None:
    """Run rounds with uniformly drawn cohorts."""
    fedavg = importlib.import_module("blazefl.contrib.fedavg")
    models, data = Models(work), Data(work)
    server = fedavg.FedAvgBaseServerHandler(
        models, "net", data, rounds, work.clients, work.cohort / work.clients, "cpu", BATCH, 0
    )
    trainer = fedavg.FedAvgBaseClientTrainer(models, "net", data, "cpu", work.clients, 1, BATCH, LR, 0)
    while not server.if_stop():
        trainer.local_process(server.downlink_package(), server.sample_clients())
        for update in trainer.uplink_package():
            server.load(update)


if __name__ == "__main__":
    main({"sync": sync})

"""Run FedAvg and FedAsync in raafl, client by client and in batches, and the same local steps in a bare loop."""

from __future__ import annotations

import functools
import tempfile
from typing import Any

import torch
from lightning import LightningDataModule, LightningModule
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.overhead import flatten
from benchmarks.peers.workload import BATCH, LR, SAMPLES, STEPS, Net, Workload, client_samples, main, samples
from raafl import Experiment, fed_async, fed_avg, simulate
from raafl.core.algorithm import Training
from raafl.data import Iid
from raafl.devices.profiles import Device


class Module(LightningModule):
    """LightningModule of a workload."""

    def __init__(self, work: Workload) -> None:
        """Build the layers."""
        super().__init__()
        self.inner = work.layers()

    def training_step(self, batch: Any, index: int) -> Any:
        """Return the cross-entropy."""
        inputs, labels = batch
        return F.cross_entropy(self.inner(inputs), labels)

    def configure_optimizers(self) -> Any:
        """Return SGD."""
        return torch.optim.SGD(self.parameters(), LR)


class Data(LightningDataModule):
    """Data module with all clients' samples."""

    def __init__(self, work: Workload) -> None:
        """Draw the samples."""
        super().__init__()
        self.batch_size, self.samples = BATCH, TensorDataset(*samples(work))

    def train_dataloader(self) -> DataLoader[Any]:
        """Return all samples."""
        return DataLoader(self.samples, batch_size=BATCH, shuffle=True)

    def test_dataloader(self) -> DataLoader[Any]:
        """Return ten samples, since evaluation is not measured."""
        return DataLoader(TensorDataset(*self.samples[:10]), batch_size=BATCH)


def run(work: Workload, rounds: int, method: str, batch_clients: Any) -> int:
    """Simulate a method on four kinds of devices; ``rounds``: cohorts of updates to merge, ``batch_clients``: 1 or auto."""
    algorithm = {"fed_avg": fed_avg, "fed_async": fed_async}[method](cohort=work.cohort)
    updates = rounds * work.cohort
    with tempfile.TemporaryDirectory() as folder:
        simulate(
            Experiment(
                model=lambda: Module(work),
                data=lambda: Data(work),
                algorithm=algorithm,
                partition=Iid(),
                clients=work.clients,
                train=Training(num_epochs=1, batch_size=BATCH),
                max_updates=updates,
                devices=[Device(f"kind-{k}", flops_per_s=1e9 / k, count=work.clients // 4) for k in (1, 2, 3, 4)],
                eval_every=10**9,
                batch_clients=batch_clients,
                output=folder,
                progress="quiet",
            ),
        )
    return updates


def bare(work: Workload, rounds: int) -> int:
    """Train and average a cohort in each round, with all parameters in one vector and batches by `index_select`."""
    net, data = Net(work), client_samples(work)
    flat = flatten(net)
    theta = flat.clone()
    for _ in range(rounds):
        total = torch.zeros_like(theta)
        for client in torch.randperm(work.clients)[: work.cohort].tolist():
            inputs, labels = data[client]
            flat.copy_(theta)
            optimizer = torch.optim.SGD(net.parameters(), LR)
            for rows in torch.randperm(SAMPLES).split(BATCH):
                optimizer.zero_grad()
                F.cross_entropy(net(inputs[rows]), labels[rows]).backward()
                optimizer.step()
            total += flat
        theta = total / work.cohort
    return Net.steps // STEPS


if __name__ == "__main__":
    main(
        {
            "bare": bare,
            "sync": functools.partial(run, method="fed_avg", batch_clients=1),
            "sync, in batches": functools.partial(run, method="fed_avg", batch_clients="auto"),
            "async": functools.partial(run, method="fed_async", batch_clients=1),
            "async, in batches": functools.partial(run, method="fed_async", batch_clients="auto"),
        }
    )

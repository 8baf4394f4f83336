"""Run FedAvg in Apple's pfl-research, on its simulated backend."""

from __future__ import annotations

import importlib
from typing import Any

import torch
from torch.nn import functional as F

from benchmarks.peers.workload import BATCH, LR, Net, Workload, client_samples, main


class Model(Net):
    """Model with the two methods that pfl's `PyTorchModel` calls."""

    def loss(self, inputs: Any, targets: Any, is_eval: bool = False) -> Any:
        """Compute the cross-entropy of a batch; ``is_eval``: whether pfl evaluates."""
        return F.cross_entropy(self(inputs), targets)

    def metrics(self, inputs: Any, targets: Any, is_eval: bool = False) -> Any:
        """Return no metrics; ``is_eval``: whether pfl evaluates."""
        return {}


def sync(work: Workload, rounds: int) -> None:
    """Run rounds with uniformly drawn cohorts."""
    simulate, averaging, hyper, nets, datasets, federated, base, sampling = (
        importlib.import_module(f"pfl.{name}")
        for name in (
            "aggregate.simulate",
            "algorithm.federated_averaging",
            "hyperparam",
            "model.pytorch",
            "data.dataset",
            "data.federated_dataset",
            "algorithm.base",
            "data.sampling",
        )
    )
    selector = importlib.import_module("pfl.internal.ops.selector")
    selector.set_framework_module(importlib.import_module("pfl.internal.ops.pytorch_ops"))
    data = client_samples(work)
    sampler = sampling.get_user_sampler("random", list(range(work.clients)))
    clients = federated.FederatedDataset(lambda one: datasets.Dataset(data[one], user_id=str(one)), sampler)
    net = Model(work)
    model = nets.PyTorchModel(net, torch.optim.SGD, torch.optim.SGD(net.parameters(), 1.0))
    params = base.NNAlgorithmParams(rounds, 10**9, work.cohort, None)
    train = hyper.NNTrainHyperParams(local_batch_size=BATCH, local_num_epochs=1, local_learning_rate=LR)
    backend = simulate.SimulatedBackend(training_data=clients, val_data=clients)
    averaging.FederatedAveraging().run(params, backend, model, train, None, callbacks=[])


if __name__ == "__main__":
    main({"sync": sync})

"""Run FedAvg in fluke, with all objects in memory and without evaluation."""

from __future__ import annotations

import importlib

from benchmarks.peers.workload import BATCH, LR, Net, Workload, client_samples, main


def sync(work: Workload, rounds: int) -> None:
    """Run rounds with uniformly drawn cohorts; data are in fluke's own fast loaders."""
    fluke, data, fedavg = (importlib.import_module(name) for name in ("fluke", "fluke.data", "fluke.algorithms.fedavg"))
    settings = fluke.FlukeENV()
    settings.set_seed(0)
    settings.set_device("cpu")
    settings.set_inmemory(True)
    settings.set_eval_cfg(pre_fit=False, post_fit=False, locals=False, server=False)
    loaders = [
        data.FastDataLoader(*pair, num_labels=10, batch_size=BATCH, shuffle=True) for pair in client_samples(work)
    ]
    splitter = data.DataSplitter(data.DummyDataContainer(loaders, [None] * work.clients, None, 10))
    settings_of_run = fluke.DDict(
        model=Net(work),
        client={
            "batch_size": BATCH,
            "local_epochs": 1,
            "loss": "CrossEntropyLoss",
            "persistency": False,
            "optimizer": {"name": "SGD", "lr": LR},
            "scheduler": {"name": "StepLR", "gamma": 1, "step_size": 1},
        },
        server={"weighted": True},
    )
    fedavg.FedAVG(work.clients, splitter, settings_of_run).run(rounds, work.cohort / work.clients, finalize=False)


if __name__ == "__main__":
    main({"sync": sync})

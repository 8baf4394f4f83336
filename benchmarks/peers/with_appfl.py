"""Run FedAvg and FedAsync in APPFL on its virtual clock."""

from __future__ import annotations

import importlib
import logging
from pathlib import Path
from typing import Any

from torch.utils.data import TensorDataset

from benchmarks.peers.workload import BATCH, LR, Net, Workload, client_samples, main


def accuracy(labels: Any, logits: Any) -> float:
    """Compute the share of correct predictions, as APPFL's trainer requires."""
    return float((logits.argmax(1) == labels).mean())


def federation(work: Workload, server: dict[str, Any], optimize_memory: bool) -> tuple[Any, list[Any], dict[str, Any]]:
    """Make the server, the clients and their profiles with four kinds of speed.

    `server`: settings of the server. `optimize_memory`: APPFL's setting, with which it collects garbage several times
    in each training.
    """
    appfl, configs, vsim, omega = (
        importlib.import_module(name) for name in ("appfl.agent", "appfl.config", "appfl.vsim", "omegaconf")
    )
    logs = {"logging_output_dirname": str(Path.cwd() / "logs")}
    train = logs | {
        "trainer": "VanillaTrainer",
        "mode": "epoch",
        "num_local_epochs": 1,
        "optim": "SGD",
        "optim_args": {"lr": LR},
        "loss_fn": "CrossEntropyLoss",
        "metric_path": __file__,
        "metric_name": "accuracy",
        "train_batch_size": BATCH,
        "do_validation": False,
        "device": "cpu",
        "optimize_memory": optimize_memory,
    }
    data = client_samples(work)

    class Server(appfl.ServerAgent):  # type: ignore[misc,name-defined]
        def _load_model(self) -> None:
            self.model = Net(work)

    class Client(appfl.ClientAgent):  # type: ignore[misc,name-defined]
        def _load_model(self) -> None:
            self.model = Net(work)

        def _load_data(self) -> None:
            self.train_dataset, self.val_dataset = TensorDataset(*data[int(self.get_id())]), None

    of_server = logs | server | {"optimize_memory": optimize_memory}
    for name in ("scheduler_kwargs", "aggregator_kwargs"):
        of_server[name] = {"optimize_memory": optimize_memory} | server.get(name, {})
    config = omega.OmegaConf.create({"client_configs": {"train_configs": dict(train)}, "server_configs": of_server})
    agent = Server(configs.ServerAgentConfig(**config))
    of_client = [
        omega.OmegaConf.create(
            {"client_id": str(one), "train_configs": dict(train), "optimize_memory": optimize_memory}
        )
        for one in range(work.clients)
    ]
    clients = [Client(one) for one in of_client]
    profiles = {str(one): vsim.ClientProfile(compute_factor=1.0 + one % 4, bandwidth=0) for one in range(work.clients)}
    return agent, clients, profiles


def sync_of(optimize_memory: bool) -> Any:
    """Make a function for the synchronous run with a value of `optimize_memory`."""

    def sync(work: Workload, rounds: int) -> None:
        vsim = importlib.import_module("appfl.vsim")
        settings = {
            "num_clients": work.clients,
            "num_global_epochs": rounds,
            "scheduler": "SyncScheduler",
            "scheduler_kwargs": {"num_clients": work.cohort},
            "aggregator": "FedAvgAggregator",
        }
        server, clients, profiles = federation(work, settings, optimize_memory)
        vsim.SyncSimDriver(
            server, clients, profiles, work.cohort, _quiet(), base_step_time=1e-3, target_rounds=rounds
        ).run()

    return sync


def async_of(optimize_memory: bool) -> Any:
    """Make a function for the run of FedAsync with a value of `optimize_memory`."""

    def asynchronous(work: Workload, rounds: int) -> None:
        vsim = importlib.import_module("appfl.vsim")
        settings = {
            "num_clients": work.clients,
            "num_global_epochs": rounds * work.cohort,
            "scheduler": "AsyncScheduler",
            "aggregator": "FedAsyncAggregator",
            "aggregator_kwargs": {"alpha": 0.6, "staleness_fn": "polynomial", "staleness_fn_kwargs": {"a": 0.5}},
        }
        server, clients, profiles = federation(work, settings, optimize_memory)
        vsim.AsyncSimDriver(server, clients, profiles, work.cohort, _quiet(), base_step_time=1e-3).run()

    return asynchronous


def _quiet() -> logging.Logger:
    logger = logging.getLogger("peers")
    logger.setLevel(logging.ERROR)
    return logger


if __name__ == "__main__":
    main(
        {
            "sync": sync_of(False),
            "async": async_of(False),
            "sync, as installed": sync_of(True),
            "async, as installed": async_of(True),
        }
    )

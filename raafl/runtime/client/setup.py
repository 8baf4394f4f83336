"""Build the model, data and trainer of a client once, for all of its connections."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from raafl.config.experiment import Experiment
from raafl.config.shared import sections
from raafl.core.types import ClientInfo
from raafl.data.federated import ClientData, FederatedData
from raafl.data.partition import Iid
from raafl.devices.gpus import Place
from raafl.errors import BadInput
from raafl.local.client_group import ClientProcesses, num_processes
from raafl.local.numerics import set_numerics
from raafl.local.train import LocalTrainer
from raafl.rules import Rules
from raafl.runtime.client.memory import settle_heap, with_memory
from raafl.runtime.client.worker import Client, ClientExtension, Gate
from raafl.runtime.extensions import extension, named_by_config
from raafl.runtime.setup import client_infos, client_parts, compression_plan, load_data
from raafl.submodel import Submodels
from raafl.transport import Connection

if TYPE_CHECKING:
    from raafl.transport.tcp.credentials import Credentials


@dataclass
class ClientSetup:
    """Model, data and trainer of a client, used by all of its connections."""

    experiment: Experiment
    info: ClientInfo
    submodels: Submodels  # structure of the submodels of the model
    trainer: LocalTrainer
    data: ClientData
    sections: dict[str, str]  # digest of each section of the config that the server compares
    notes: list[str] = field(default_factory=list)  # notes for the user, one line each
    # group of the processes that train this client together; None = one process
    process_group: ClientProcesses | None = None
    gate: Gate = field(default_factory=Gate)  # gate that checks each task against the policy of the client's site
    extensions: list[Callable[[Client], ClientExtension]] = field(default_factory=list)  # such as receipts of updates
    config_yaml: str = ""  # text of the client's config

    @classmethod
    def build(
        cls, experiment: Experiment, config_yaml: str, client: int, *, own_data: bool, data_named: bool = False
    ) -> ClientSetup:
        """Build a client from a config.

        Raises:
            BadInput: the client does not exist, its model or data cannot be built, or its memory is too small.
        """
        replace(experiment, output=None, resume=None).check(needs_end=False)
        if not 1 <= client <= experiment.clients:
            raise BadInput(f"client is {client}: this run has clients 1 to {experiment.clients}")
        alike = sections(config_yaml, own_data=own_data or data_named)
        # under torchrun all ranks belong to this client; otherwise the server of `fit --local` uses a device, too
        server_device = None if "RANK" in os.environ else experiment.server_device
        place = Place.here(server_device, experiment.fabric.device)
        setup = cls.make(experiment, client, place, own_data=own_data, alike=alike, num_processes=num_processes())
        setup.config_yaml = config_yaml
        return setup

    @classmethod
    def make(
        cls,
        experiment: Experiment,
        client: int,
        place: Place,
        *,
        own_data: bool = False,
        alike: dict[str, str] | None = None,
        num_processes: int = 1,
    ) -> ClientSetup:
        """Build a client from an experiment that was checked already.

        `alike`: digest of each config section that must be the same on the server; None = none is compared.
        """
        set_numerics(experiment.threads, experiment.fabric)
        if own_data:
            data = whole(experiment)
            mine = data.make_client(1, copied=True)
            profile = experiment.profiles()[client - 1]
            info = ClientInfo(client, mine.num_samples, profile, own_data=True)
        else:
            data = load_data(experiment)
            mine = data.make_client(client, copied=True)
            info = client_infos(experiment, data)[client - 1]
        submodels, trainer = client_parts(experiment, data, experiment.fabric.at(place))
        info, notes = with_memory(experiment, info, submodels, data, trainer.fabric.device, place, num_processes)
        settle_heap(experiment, info, submodels, data, trainer.fabric.device, num_processes)
        return cls(experiment, info, submodels, trainer, mine, alike or {}, notes)

    def client(
        self,
        pair: Connection,
        *,
        unsent: int | None = None,
        on_welcome: Callable[[], None] = lambda: None,
        credentials: Credentials | None = None,
    ) -> Client:
        """Return the object that receives and trains this client's tasks on a connection; see `Client`.

        `credentials`: what the client's site proves itself by; None = nothing.
        `unsent`: id of a task whose update could not be sent on an earlier connection; None = none.
        """
        named = [extension(name, "client").of(self, credentials) for name in named_by_config(self.experiment)]
        return Client(
            self.info,
            pair,
            self.submodels,
            self.trainer,
            self.data,
            self.experiment.waits,
            config=self.sections or None,
            unsent=unsent,
            on_welcome=on_welcome,
            plan=compression_plan(self.experiment, self.submodels),
            process_group=self.process_group,
            extensions=[*self.extensions, *self.gate.extensions(), *named],
        )


def whole(experiment: Experiment) -> FederatedData:
    """Return all training data of the experiment as the data of one client."""
    partition = Iid(test_share=experiment.partition.test_share)
    return FederatedData(experiment.data(), partition, 1, experiment.seed, Rules(experiment.rules))

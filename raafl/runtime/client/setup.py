"""Build the model, data and trainer of a client once, for all of its connections."""

from __future__ import annotations

import math
import os
import random
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import torch

from raafl.config.experiment import Experiment
from raafl.config.shared import sections
from raafl.core.algorithm import SelectContext
from raafl.core.state import GlobalState
from raafl.core.types import ClientInfo
from raafl.data.federated import ClientData, FederatedData
from raafl.data.loaders import reading
from raafl.data.partition import Iid
from raafl.devices.gpus import Place
from raafl.devices.measure import memory_room
from raafl.errors import BadInput
from raafl.local import malloc
from raafl.local.client_group import ClientProcesses, num_processes, room_bytes
from raafl.local.numerics import set_numerics
from raafl.local.train import LocalTrainer
from raafl.rules import Rules
from raafl.runtime.client.worker import Client, ClientExtension, Gate
from raafl.runtime.extensions import extension, named_by_config
from raafl.runtime.setup import (
    batch_size_of,
    client_infos,
    client_parts,
    compression_plan,
    load_data,
    own_tests,
)
from raafl.submodel import FULL, FlatTensors, Submodels
from raafl.transport import Connection
from raafl.units import size

if TYPE_CHECKING:
    from raafl.transport.tcp.credentials import Credentials


@dataclass
class ClientSetup:
    """Model, data and trainer of a client, used by all of its connections."""

    experiment: Experiment
    info: ClientInfo
    submodels: Submodels  # submodels of the model, without values
    trainer: LocalTrainer
    data: ClientData
    sections: dict[str, str]  # digest of each section of the config that the server compares with its own
    notes: list[str] = field(default_factory=list)  # notes for the user, one line each
    # processes that train this client together; None = one process
    process_group: ClientProcesses | None = None
    gate: Gate = field(default_factory=Gate)  # check of each task against the policy of the client's site
    # for example, for receipts of updates
    extensions: list[Callable[[Client], ClientExtension]] = field(default_factory=list)
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
        # under torchrun all ranks train this client; else the server of `fit --local` may use one of this machine's
        # devices
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
        submodels, trainer = client_parts(experiment, data, experiment.fabric.on(place.gpu))
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
    with reading("the data module", rules := Rules(experiment.rules)):
        module = experiment.data()
    return FederatedData(module, partition, 1, experiment.seed, rules)


_HOLES = 1.5
"""Measured factor between a process's memory and its tensors if freed memory is kept (`benchmarks.submodels`)."""


def with_memory(
    experiment: Experiment,
    info: ClientInfo,
    submodels: Submodels,
    data: FederatedData,
    device: torch.device,
    place: Place,
    num_processes: int = 1,
) -> tuple[ClientInfo, list[str]]:
    """Return the client's description with the memory that is free for a task, and notes for the user.

    Call this after the model and the data are loaded, so that only the memory of a task is still to be allocated.

    Raises:
        BadInput: no submodel of the algorithm fits into the memory.
    """
    notes = []
    if experiment.memory == "measure" and info.profile.memory_bytes == math.inf:
        room = memory_room(device, place.num_sharing(device.index if device.type == "cuda" else None))
        if room.num_bytes < math.inf:
            found = math.floor(room.for_task_bytes)
            info = replace(info, profile=replace(info.profile, memory_bytes=float(found)))
            notes.append(
                f"memory for a task: {size(found)} of {size(room.num_bytes)} left ({room.limit}); to set it, use "
                "memory_bytes of the device or memory: BYTES; memory: none means no limit"
            )
    if experiment.fabric.shard and num_processes > 1 and info.profile.memory_bytes < math.inf:
        shared = room_bytes(info.profile.memory_bytes, num_processes, submodels.layout(part="sent").num_bytes)
        info = replace(info, profile=replace(info.profile, memory_bytes=shared))
        notes.append(f"memory for a task, sharded over {num_processes} processes: {size(shared)}")
    if info.profile.memory_bytes < math.inf:
        try:
            _check(experiment, info, submodels, data)
        # the notes explain numbers in the message that the user has not entered
        except BadInput as error:
            raise BadInput("\n".join([str(error), *notes])) from None
    return info, notes


def settle_heap(
    experiment: Experiment,
    info: ClientInfo,
    submodels: Submodels,
    data: FederatedData,
    device: torch.device,
    num_processes: int = 1,
) -> None:
    """Set whether the allocator keeps freed memory for the next step, or returns it to the system because memory is scarce.

    Main memory is scarce if training the whole model, fragmentation included, would need more than the client has. If
    the model is on another device, such as a GPU, main memory is never scarce. If the model is sharded over processes,
    freed memory is always returned, since fragmentation would cost as much as sharding saves.
    """
    if experiment.fabric.shard and num_processes > 1:
        malloc.free_at_once()
        return
    needs_bytes = 0.0
    if info.profile.memory_bytes < math.inf and device.type == "cpu":
        with suppress(NotImplementedError, RuntimeError):  # raised by torch for tensors without values
            needs_bytes = _HOLES * submodels.cost(FULL, batch_size_of(experiment, data)).peak_bytes
    if needs_bytes > info.profile.memory_bytes:
        malloc.free_at_once()
    else:
        malloc.keep_freed()


def _check(experiment: Experiment, info: ClientInfo, submodels: Submodels, data: FederatedData) -> None:
    """Raise `BadInput` if the algorithm cannot work with this client, unless it needs tensor values to decide that."""
    problems: list[str] = []
    with suppress(NotImplementedError, RuntimeError):  # raised by torch for tensors without values
        state = GlobalState(submodels, FlatTensors.empty(submodels.layout(), "meta"))
        batch_size = batch_size_of(experiment, data)
        algorithm = experiment.algorithm
        free = [replace(profile, memory_bytes=math.inf) for profile in experiment.profiles()]
        clients = {i: ClientInfo(i, 1, profile) for i, profile in enumerate(free, start=1)} | {info.id: info}
        fleet = SelectContext(
            state,
            clients,
            random.Random(0),
            experiment.train,
            batch_size,
            seed=experiment.seed,
            local=algorithm.local,
            plan=compression_plan(experiment, submodels),
            own_tests=own_tests(experiment, data),
            rules=Rules(experiment.rules),
        )
        problems = algorithm.select.check(fleet)
    if problems:
        raise BadInput("\n".join(problems))

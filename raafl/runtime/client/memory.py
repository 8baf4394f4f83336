"""Determine the memory of a client, declared or measured, and tune the process's allocator for it."""

from __future__ import annotations

import math
import random
from contextlib import suppress
from dataclasses import replace

import torch

from raafl.config.experiment import Experiment
from raafl.core.algorithm import SelectContext
from raafl.core.state import GlobalState
from raafl.core.types import ClientInfo
from raafl.data.federated import FederatedData
from raafl.devices.gpus import Place
from raafl.devices.measure import memory_room
from raafl.errors import BadInput
from raafl.local import malloc
from raafl.local.sharded import room_bytes
from raafl.rules import Rules
from raafl.runtime.setup import batch_size_of, compression_plan, own_tests
from raafl.submodel import FULL, FlatTensors, Submodels
from raafl.units import size

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
    if experiment.measures_memory and info.profile.memory_bytes == math.inf:
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
        # no user entered the number that is too small, so the message says where it comes from
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
        with suppress(NotImplementedError, RuntimeError):  # torch's errors for tensors without values
            needs_bytes = _HOLES * submodels.cost(FULL, batch_size_of(experiment, data)).peak_bytes
    if needs_bytes > info.profile.memory_bytes:
        malloc.free_at_once()
    else:
        malloc.keep_freed()


def _check(experiment: Experiment, info: ClientInfo, submodels: Submodels, data: FederatedData) -> None:
    """Ask the algorithm whether this client can take part; skip an algorithm that needs the model's values to decide."""
    problems: list[str] = []
    with suppress(NotImplementedError, RuntimeError):  # torch's errors for tensors without values
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

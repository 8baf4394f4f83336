"""Define a task in progress."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from raafl.core.payload import Bundles
from raafl.core.types import Assignment
from raafl.submodel.flat import FlatTensors

if TYPE_CHECKING:
    from raafl.core.exchange import ClientLink
    from raafl.submodel.submodels import Submodels


@dataclass(slots=True)
class Task:
    """A task in progress on a client: everything that its `Hook`, the object that trains step by step, may use.

    Attributes:
        assignment: assignment of the task.
        submodels: object that cuts submodels from the model.
        module: the small module that trains. It is reused for later tasks, so a hook must undo its changes in `Hook.close`.
        optimizer: the module's own optimizer, from `configure_optimizers`.
        received: values that the client received, by name; read only.
        num_batches: number of batches of the task.
        generator: random generator, seeded by the assignment, that determines the order of the data.
        loss: function ``loss(batch, index)`` that runs `training_step` in the run's precision; it raises `SkippedBatch`
            if `training_step` returns None.
        backward: function ``backward(loss)`` that runs the backward pass.
        down: extra tensors that the client received beside the values, by bundle name; read only.
        up: extra tensors that the client will send beside the values, by bundle name; initially 0, filled by
            `Hook.finish`.
        update: function ``update()`` that applies the proximal term and gradient clipping, if any, makes the
            optimiser's step, and sets gradients to None.
        draws: function ``draws(seed)`` that returns a private random stream as a context, which can be entered
            repeatedly.
        link: connection to the server for methods that exchange messages during a task (`raafl.core.exchange`). None =
            the method has no such exchange, or client and server run in this process.
        receive: function that waits for the task, if it was begun before it arrived; None = it has arrived. See
            `arrived`.
    """

    assignment: Assignment
    submodels: Submodels
    module: torch.nn.Module
    optimizer: torch.optim.Optimizer
    received: FlatTensors
    num_batches: int
    generator: torch.Generator
    loss: Callable[[Any, int], torch.Tensor]
    backward: Callable[[torch.Tensor], None]
    update: Callable[[], None]
    down: Bundles = field(default_factory=dict)
    up: Bundles = field(default_factory=dict)
    draws: Callable[[int], AbstractContextManager[Any]] = nullcontext
    link: ClientLink | None = None
    receive: Callable[[], Assignment] | None = None

    def arrived(self) -> Assignment:
        """Wait until the task has arrived, and return its assignment; only then ``received`` has its values.

        Before, ``received`` and ``down`` are what the client keeps (`Traits.resident`), and ``assignment`` is the expected
        one, whose ``id``, ``version`` and ``extra`` are not the task's.
        """
        return self.assignment if self.receive is None else self.receive()

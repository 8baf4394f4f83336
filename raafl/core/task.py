"""Define a task in progress: its record, its exchange with the server, and its cost where a method does more than a step."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, get_args

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from raafl.core.payload import Bundles, Payload, Way
from raafl.core.types import Assignment, derive_seed
from raafl.errors import USER_ERRORS
from raafl.submodel.cost import Cost, MethodSteps
from raafl.submodel.flat import FlatTensors, Layout
from raafl.submodel.spec import Spec
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
        link: connection to the server for methods that exchange messages during a task (`raafl.core.task`). None =
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


def expected_next(assignment: Assignment) -> Assignment | None:
    """Predict a client's next task, so that it can begin early; ``id``, ``version`` and ``extra`` are not known yet.

    Returns:
        The expected task; None = the client may not begin it early.
    """
    if assignment.next_seed is None:
        return None
    return replace(
        assignment, task=assignment.task + 1, seed=assignment.next_seed, lr_scale=assignment.next_lr_scale, pace_s=0.0
    )


def begins_alike(expected: Assignment, actual: Assignment) -> bool:
    """Check whether the first steps of two tasks of one client are the same, up to `Traits.steps_ahead`."""
    names = ("client", "incarnation", "task", "spec", "num_epochs", "num_steps", "seed", "lr_scale")
    return all(getattr(expected, name) == getattr(actual, name) for name in names)


# Let client and server exchange messages in the middle of a task, for methods that split the model between the two.
#
# A task is one request and one answer: a submodel goes down, an update comes up. A method whose clients need the server in
# between returns an `Exchange` from `Local.exchange`; its tasks have two sides that train at the same time, each its own part
# of the model, both by the hooks of the method's `Local`. A task of several batches::
#
#     client                                             server
#     Hook.loss, on its own data                         Exchange.questions, in the place of data
#         link.ask(meta, tensors, answer)   --------->       link.hear(expect)
#                                           <---------       link.reply(tensors)
#     Hook.finish, and its part goes up     --------->   both parts are joined to one update
#
# A simulation, a replay and a dry plan have no link (`Task.link` is None): the hook computes both sides, to the same bit.
# `Local.cost` predicts what an exchange costs: bytes each way, and round trips (`Cost.num_exchanges`), each of which takes the
# link's latency twice. The server's computation takes no virtual time.


class ClientLink(Protocol):
    """Connection of a client to the server during one task; the client asks questions over it."""

    def ask(self, meta: dict[str, Any], tensors: Mapping[str, Tensor], answer: Layout) -> FlatTensors:
        """Send a question of plain data and tensors to the server, and wait for the reply."""
        ...


class ServerLink(Protocol):
    """Connection of the server to one client during one task; the server answers the client's questions over it."""

    def hear(self, expect: Callable[[Mapping[str, Any]], Layout]) -> FlatTensors:
        """Wait for the client's next question and return its tensors."""
        ...

    def reply(self, tensors: Mapping[str, Tensor]) -> None:
        """Send ``tensors`` to the client as the answer to its last question."""
        ...

    def draws(self, seed: int) -> AbstractContextManager[Any]:
        """Return a context with a private random stream that starts from ``seed``; the global generators stay unchanged."""
        ...


@dataclass(frozen=True, eq=False)
class Exchange(ABC):
    """Protocol by which client and server train one task together, each with a part of the model. One object serves many tasks.

    Attributes:
        client: tensors that the client receives, trains and sends back.
        server: all other tensors, of which the server trains a copy for each client.
    """

    client: Submodels
    server: Submodels

    @abstractmethod
    def questions(self, assignment: Assignment, link: ServerLink) -> Any:
        """Return a data set for the server's training, whose batches are the questions that the client sends.

        A question holds, for example, the activations that the client's part of the model computes. The call waits for
        the first question. When training asks for the next batch, the reply to the last question is sent.

        Returns:
            Object with the attributes of `raafl.data.federated.ClientData` that training needs: ``num_samples``,
            ``test`` (None), ``num_batches()`` of an epoch, and ``batches()``, which yields the input of `Hook.loss`.
        """


def server_seed(seed: int) -> int:
    """Return the seed of the server's side of a task, derived from the task's seed."""
    return derive_seed(seed, "upper")


class Stepwise(Protocol):
    """Protocol of a local part whose tasks can be followed; see `raafl.core.local.Local`."""

    @property
    def rescale(self) -> bool:
        """Whether it multiplies the activations of narrowed layers."""

    @property
    def up(self) -> tuple[str, ...]:
        """Names of the bundles that it sends."""

    def hook(self, task: Task) -> MethodSteps:
        """Return the steps of ``task``."""

    def payload(self, submodels: Submodels) -> Payload:
        """Return the layouts of all tensors that a task sends and receives."""

    def cost_depends_on(self, extra: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the entries of a task's settings that change its cost."""


LATE = 2**30
"""Model version that is assumed for the traced task, so large that terms of a loss which begin at some version count."""


def followed_cost(
    local: Stepwise, submodels: Submodels, spec: Spec, batch_size: int, extra: Mapping[str, Any], estimate: Cost
) -> Cost:
    """Predict the cost of a task from the steps of its own hook."""
    depends = local.cost_depends_on(extra)
    key = (type(local), repr(local), json.dumps(depends, sort_keys=True, default=repr))
    try:
        cost = submodels.method_cost(spec, batch_size, OwnSteps(local, submodels, extra), key)
    except USER_ERRORS:  # for example a hook that reads a missing attribute
        return estimate
    return replace(
        cost, down_bytes=estimate.down_bytes, up_bytes=estimate.up_bytes, num_exchanges=estimate.num_exchanges
    )


class OwnSteps:
    """A method whose tasks can be followed step by step.

    `rescale`: whether it multiplies the activations of narrowed layers.
    """

    def __init__(self, local: Stepwise, submodels: Submodels, extra: Mapping[str, Any]) -> None:
        """Store the method's ``local`` part, and ``extra``, the method's settings of the task."""
        self._local, self._submodels, self._extra = local, submodels, extra
        self.rescale = local.rescale

    def begin(self, spec: Spec, module: nn.Module, loss: Callable[[Any, int], Tensor]) -> _OwnTask:
        """Return a task before its first step, with room for what it receives and sends."""
        return _OwnTask(self._local, self._submodels, spec, self._extra, module, loss)


class _NoServer:
    """Stand-in for the connection to the server: it answers each question with zeros."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def ask(self, meta: dict[str, Any], tensors: Mapping[str, Tensor], answer: Layout) -> FlatTensors:
        """Pack the tensors that the client would send to the server, and return zeros as the server's answer."""
        FlatTensors.from_named(tensors)
        return FlatTensors.zeros(answer, self._device)


class _OwnTask:
    """A task as a method's hook sees it, on tensors without values, for predicting costs.

    `received_and_sent`: tensors that the task has received or will send.
    `answer_bytes`: bytes of the trained values, which are sent together with bundles.
    """

    def __init__(
        self,
        local: Stepwise,
        submodels: Submodels,
        spec: Spec,
        extra: Mapping[str, Any],
        module: nn.Module,
        loss: Callable[[Any, int], Tensor],
    ) -> None:
        self._local, payload = local, local.payload(submodels)
        device = next((p.device for p in module.parameters()), torch.device("cpu"))
        sent, trained = (FlatTensors.zeros(payload.layout(spec, way), device) for way in get_args(Way))
        self.received_and_sent = [*sent.buffers.values(), *trained.buffers.values()]
        (received, down), (values, up) = payload.split(sent, spec, "sent"), payload.split(trained, spec, "trained")
        self.answer_bytes = values.num_bytes if local.up else 0
        assignment = Assignment(
            id=1,
            client=1,
            incarnation=0,
            task=1,
            version=LATE,
            spec=spec,
            region=0,
            num_epochs=None,
            num_steps=2,
            seed=0,
            assigned_s=0.0,
            extra=extra,
        )
        self._task = Task(
            assignment,
            submodels,
            module,
            torch.optim.SGD([torch.zeros(1)], lr=0.0),
            received,
            2,
            torch.Generator(),
            loss=loss,
            backward=lambda loss: None,
            update=lambda: None,
            down=down,
            up=up if local.up else {},
            link=_NoServer(device),
        )

    def steps(
        self, optimizer: Optimizer, backward: Callable[[Tensor], None], update: Callable[[], None]
    ) -> MethodSteps:
        """Return the task's hook; see `MethodTask.steps`."""
        task = self._task
        task.optimizer, task.backward, task.update = optimizer, backward, update
        return self._local.hook(task)

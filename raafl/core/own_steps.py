"""Predict what a task costs where a method does more than the user's own step, by following its hook."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, Protocol, get_args

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from raafl.core.payload import Payload, Way
from raafl.core.task import Task
from raafl.core.types import Assignment
from raafl.errors import USER_ERRORS
from raafl.exact_key import exact_key
from raafl.submodel.cost import Cost
from raafl.submodel.cost.predicted import MethodSteps
from raafl.submodel.flat import FlatTensors, Layout
from raafl.submodel.spec import Spec
from raafl.submodel.submodels import Submodels


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
    depends = dict(sorted(local.cost_depends_on(extra).items()))
    key = exact_key(local), exact_key(depends)
    at, method = submodels.normal(spec).leading, OwnSteps(local, submodels, extra)
    try:
        cost = submodels.cached(
            "method cost",
            (at, batch_size, key),
            lambda: submodels.base_variant(at).predicted_cost(at.without_base, batch_size, method),
        )
    except USER_ERRORS:  # a hook may fail without real values, for example on a missing attribute
        return estimate
    return replace(
        cost, down_bytes=estimate.down_bytes, up_bytes=estimate.up_bytes, num_exchanges=estimate.num_exchanges
    )


class OwnSteps:
    """A method whose tasks can be followed step by step.

    `rescale`: whether it multiplies the activations of narrowed layers.
    """

    def __init__(self, local: Stepwise, submodels: Submodels, extra: Mapping[str, Any]) -> None:
        """Store the method's local part and its settings for the task, from which each step's hook is created."""
        self._local, self._submodels, self._extra = local, submodels, extra
        self.rescale = local.rescale

    def begin(self, spec: Spec, module: nn.Module, loss: Callable[[Any, int], Tensor]) -> _OwnTask:
        """Return a task before its first step, with room for what it receives and sends."""
        return _OwnTask(self._local, self._submodels, spec, self._extra, module, loss)


class _NoServer:
    """Stand-in for the connection to the server, which answers a hook's questions with zeros."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def ask(self, meta: dict[str, Any], tensors: Mapping[str, Tensor], answer: Layout) -> FlatTensors:
        """Return zeros as the server's answer, after packing the client's tensors as for sending."""
        FlatTensors.from_named(tensors)
        return FlatTensors.zeros(answer, self._device)


class _OwnTask:
    """Task without tensor values, on which a method's hook runs so that its costs are predicted."""

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
        """Create the method's hook for this task, with the given optimizer and functions for backward pass and update."""
        task = self._task
        task.optimizer, task.backward, task.update = optimizer, backward, update
        return self._local.hook(task)

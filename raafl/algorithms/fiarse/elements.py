"""Train the elements with the largest magnitudes, and merge what changed (FIARSE); `raafl.algorithms.fiarse` has the equations."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd

from raafl.core.algorithm import Hook, Local, Merge, Select, SelectContext, Task
from raafl.core.local import value_of
from raafl.core.memory import MergeMemory
from raafl.core.state import GlobalState
from raafl.core.types import ClientInfo, Update, Work
from raafl.errors import positive
from raafl.parts.local.differentiable import with_tensors
from raafl.parts.select.rate_select import Rates, RateSelect
from raafl.parts.select.submodels import Full
from raafl.submodel import FlatTensors, Spec


class Important(torch.autograd.Function):
    """Autograd function that sets weights smaller than a threshold to 0.

    The gradient takes into account that the mask itself depends on the weights.
    """

    @staticmethod
    def forward(ctx: Any, weight: Tensor, tau: float) -> Tensor:
        """Return ``weight`` with all elements of a magnitude below tau set to 0.

        Args:
            ctx: context of the autograd function.
            weight: tensor of any shape.
            tau: smallest magnitude that stays.
        """
        ctx.save_for_backward(weight)
        ctx.tau = tau
        return weight * (weight.abs() >= tau)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        """Return the gradient of the weight; the threshold tau has none."""
        (weight,) = ctx.saved_tensors
        size = weight.abs()
        factor = 1 + 2 * ctx.tau * size / (size + ctx.tau).square()
        return gradient * factor * (size >= ctx.tau), None


def maskable(module: nn.Module) -> dict[str, nn.Parameter]:
    """Return the trained parameters of all linear, convolutional and embedding layers, by name."""
    found = {}
    for path, layer in module.named_modules():
        if isinstance(layer, nn.Linear | _ConvNd | nn.Embedding):
            own = layer.named_parameters(path, recurse=False)
            found.update({name: parameter for name, parameter in own if parameter.requires_grad})
    return found


def threshold(parameters: list[Tensor], rate: float) -> float:
    """Return the magnitude that an element must have to be used, so that the share ``rate`` of all are used; 0 = use all.

    Args:
        parameters: tensors whose elements are compared.
        rate: share of the elements to use.
    """
    if rate >= 1:
        return 0.0
    sizes = torch.cat([parameter.detach().abs().flatten() for parameter in parameters])
    return value_of(sizes.topk(max(int(rate * len(sizes)), 1)).values[-1], instead=1.0)


@dataclass(frozen=True)
class ShareOfElements(Select):
    """Rule that sends the whole model to every client, and tells it which share of the elements to train.

    Attributes:
        rates: share of the elements that each client trains; see `RateSelect.rates`.
    """

    rates: Rates = 1.0

    def __post_init__(self) -> None:
        RateSelect(rates=self.rates)

    def __call__(self, client: ClientInfo, fleet: SelectContext) -> Work:
        """Return the whole model as the client's submodel, with the share of the elements that it trains."""
        return Work(extra={"rate": RateSelect(rates=self.rates).rate(client)})

    def check(self, fleet: SelectContext) -> list[str]:
        """Return an error message for each client that has no rate, or too little memory for the whole model."""
        return fleet.problems(lambda client: self(client, fleet)) + Full().check(fleet)

    def __str__(self) -> str:
        return "full, of which " + str(RateSelect(rates=self.rates)).replace("leading units, ", "").replace(
            "of the model", "of the elements"
        )


@dataclass(frozen=True)
class ImportanceAware(Local):
    """Local training that uses only the elements with the largest magnitudes."""

    def hook(self, task: Task) -> Hook:
        """Return the hook that masks all small elements."""
        return _LargestElements(task, float(task.assignment.extra.get("rate", 1.0)))

    def __str__(self) -> str:
        return "SGD on the loss of the largest elements"


class _LargestElements(Hook):
    """Hook that zeroes all small elements in each step; the threshold is set at the start of the task."""

    def __init__(self, task: Task, rate: float) -> None:
        super().__init__(task)
        self.parameters = maskable(task.module)
        self.tau = threshold(list(self.parameters.values()), rate) if self.parameters else 0.0

    def loss(self, batch: object, index: int) -> Tensor:
        """Return the loss of the model without its small elements."""
        if self.tau == 0:
            return self.task.loss(batch, index)
        masked = {name: Important.apply(parameter, self.tau) for name, parameter in self.parameters.items()}
        with with_tensors(self.task.module, masked, keep_buffers=True):
            return self.task.loss(batch, index)


@dataclass
class _ChangedMemory(MergeMemory):
    """Running sums of a merge: the changes, and how many updates changed each element."""

    key = "fiarse"
    sum: FlatTensors
    count: FlatTensors


@dataclass(frozen=True)
class ChangedMean(Merge):
    """Merge that moves each element by the mean over those updates that changed it.

    Attributes:
        server_lr: server learning rate (eta).
    """

    server_lr: float = 1.0
    sends: Literal["values", "delta"] = "delta"

    def __post_init__(self) -> None:
        positive("server_lr", self.server_lr)

    def receive(self, state: GlobalState, update: Update, spec: Spec, staleness: int) -> None:
        """Add the update's changes to the sum, and 1 to the count of each element that it changed."""
        memory, plan = self._memory(state), state.submodels.plan(spec, "trained", "trained")
        changed = FlatTensors.zeros(update.tensors.layout, update.tensors.device)
        for dtype, buffer in changed.buffers.items():
            buffer.copy_(update.tensors.buffers[dtype] != 0)
        plan.add_(memory.sum, update.tensors)
        plan.add_(memory.count, changed)

    def apply(self, state: GlobalState) -> None:
        """Move each element by the mean of its changes, and reset the sums."""
        memory = self._memory(state)
        for name, total in memory.sum.items():
            lr = self.server_lr if name in state.submodels.parameter_names else 1.0
            state.values[name].add_(total / memory.count[name].clamp_min(1), alpha=lr)
        memory.sum.zero_()
        memory.count.zero_()

    def _memory(self, state: GlobalState) -> _ChangedMemory:
        layout, device = state.submodels.layout(part="trained"), state.values.device
        return state.memory.of(
            _ChangedMemory, lambda: _ChangedMemory(FlatTensors.zeros(layout, device), FlatTensors.zeros(layout, device))
        )

    def __str__(self) -> str:
        return f"mean of the deltas that change an element, server lr {self.server_lr:g}"

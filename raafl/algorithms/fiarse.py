"""FIARSE (Wu et al., "FIARSE: Model-Heterogeneous Federated Learning via Importance-Aware Submodel Extraction", NeurIPS 2024).

Client i of size r_i keeps the share r_i of the elements with the largest magnitude, over all layers together (`mask` elements)::

    w_eff = w 1[|w| >= tau],   dL/dw = dL/dw_eff (1 + 2 tau |w| / (|w| + tau)^2) 1[|w| >= tau]

with tau the smallest kept magnitude of the model that the client was sent: the second factor is the gradient of the mask itself,
which is a function of the weight. The server then moves each element by the mean over the clients that changed it::

    theta <- theta + eta sum_i Delta_i / #{i : Delta_i != 0}

**These submodels are not physically smaller**: a client holds, runs, receives and sends the whole model, most of it at 0. With
`mask` units the kept parts are whole units with the largest weights, cut to a small model, as in OAP (`raafl.algorithms.oap`): that
is physically smaller, and is not the paper's, nor has it the mask's gradient.

The equations are those of the authors' code (HarliWu/FIARSE); the paper's text could not be read here.

Choices that are left open, and differences:
- Elements of linear, convolutional and embedding layers are masked, those of norms are not, as in the authors' code.
- At size 1 nothing is masked, and tau is 0; the authors' code takes the smallest magnitude, whose gradient factor is nearly 1.
- An element whose change is exactly 0 does not count, whether it was masked or not, as in the authors' code.
- Running statistics get the same mean without eta.
- Asynchronous runs (`buffer_size`) are no paper's: deltas are buffered as in FedBuff, without a staleness factor.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd

from raafl.algorithm import (
    Algorithm,
    AllReported,
    Buffered,
    ClientInfo,
    Deltas,
    FlatTensors,
    Full,
    GlobalState,
    Hook,
    Local,
    Merge,
    MergeMemory,
    Rates,
    RateSelect,
    Sample,
    Select,
    SelectContext,
    Spec,
    Staleness,
    Task,
    Traits,
    Update,
    Work,
    one_of,
    positive,
)
from raafl.core.local import value_of
from raafl.parts.local.swap_parameters import with_tensors

SIZES = [1.0, 0.25, 0.0625, 0.015625]
"""Shares of the parameters of the paper's four kinds of clients."""

Mask = Literal["elements", "units"]


def fiarse(
    mask: Mask = "elements",
    rates: Rates | None = None,
    server_lr: float = 1.0,
    buffer_size: int | None = None,
    cohort: int | None = None,
    concurrency: int | None = None,
) -> Algorithm:
    """Return FIARSE, whose clients train the weights (or units) with the largest magnitudes.

    Args:
        mask: granularity of the mask: elements (single weights, as in the paper; tensors keep their size) or units (such
            as whole neurons; tensors become smaller).
        rates: share of the parameters that a client trains: one number for all; a list, one number for each of clients
            1, 2, ..., repeating; or a mapping from device name to number. None = the list 1, 1/4, 1/16, 1/64.
        server_lr: server learning rate (eta).
        buffer_size: number of updates in a merge of an asynchronous run; None = synchronous rounds.
        cohort: number of clients in a round, or at work in an asynchronous run, drawn uniformly; None = all.
        concurrency: largest number of clients that work at the same time; None = no limit.
    """
    one_of("mask", mask, Mask)
    shares = list(SIZES) if rates is None else rates
    select: Select = ShareOfElements(shares)
    merge: Merge = ChangedMean(server_lr)
    if mask == "units":
        select, merge = RateSelect("magnitude", shares, "parameters"), Deltas(server_lr, Staleness())
    return Algorithm(
        name="fiarse",
        paper="Wu et al. 2024",
        sample=Sample(cohort, concurrency),
        select=select,
        local=ImportanceAware() if mask == "elements" else Local(),
        trigger=AllReported() if buffer_size is None else Buffered(buffer_size),
        merge=merge,
    )


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
        """Assign the whole model, with the share of its elements that the client trains."""
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

    @property
    def traits(self) -> Traits:
        """What this training can do, needs, and leaves out."""
        return replace(super().traits, exact_zeros=True)

    def hook(self, task: Task) -> Hook:
        """Return the hook that masks all small elements."""
        return _LargestElements(task, float(task.assignment.extra.get("rate", 1.0)))

    def __str__(self) -> str:
        return "SGD on the loss of the largest elements"


class _LargestElements(Hook):
    """Training hook that masks all parameters below a threshold, which it sets once, at the start of the task."""

    def __init__(self, task: Task, rate: float) -> None:
        super().__init__(task)
        self.parameters = maskable(task.module)
        self.tau = threshold(list(self.parameters.values()), rate) if self.parameters else 0.0

    def loss(self, batch: object, index: int) -> Tensor:
        """Return the batch's loss with the parameters below the threshold masked."""
        if self.tau == 0:
            return self.task.loss(batch, index)
        masked = {name: Important.apply(parameter, self.tau) for name, parameter in self.parameters.items()}
        with with_tensors(self.task.module, masked, keep_buffers=True):
            return self.task.loss(batch, index)


@dataclass
class _ChangedMemory(MergeMemory):
    """Merge state: for each element the sum of the clients' changes, and the number of updates that changed it."""

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

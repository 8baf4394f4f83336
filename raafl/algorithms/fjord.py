"""FjORD (Horvath et al., "FjORD: Fair and Accurate Federated Learning under heterogeneous targets with Ordered Dropout").

NeurIPS 2021. Client c can train the leading share p_max of every layer's units. In each local step it draws a width p of the
ladder, uniformly among those up to p_max, and trains the leading share p alone: units are ordered by importance, so that any
width can be cut from the model. With self-distillation the step has two passes, at p_max and at p::

    L = CE(z_{p_max}, y) + CE(z_p, softmax(z_{p_max}))        the second target without a gradient

Each element becomes the mean over the clients that have it, weighted by samples.

The equations are those of Flower's baseline `fjord`, which reproduces the paper; the paper's text could not be read here.

Choices that are left open, and differences:
- A client receives, holds and sends its submodel of width p_max alone. Within it a narrower width is emulated by masks on its
  parameters: the loss and the gradients are those of the narrower model (as axes are proven), the cost is that of p_max.
- The baseline has a batch norm for each width. Here all widths share weight and bias, running statistics are those of p_max, and
  ``submodels: {batch_norm: static}`` measures them anew on the whole model.
- Where a client's memory allows less than p_max, it gets the largest submodel that fits, and draws among the widths that this has.
- Self-distillation needs logits of shape (batch, classes) from the module's own `forward`; other models need ``distil: false``.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor, nn
from torch.nn import functional as F

from raafl.algorithm import (
    Algorithm,
    BadInput,
    Cost,
    FlatTensors,
    Hook,
    Local,
    Rates,
    Sample,
    Select,
    Spec,
    Submodels,
    Task,
    derive_seed,
    fraction,
    leading,
)
from raafl.core.masked_loss import logits_of
from raafl.parts.local.swap_parameters import patched, quiet, with_tensors
from raafl.parts.select.rate_select import by_rate
from raafl.parts.trigger import averaging

LADDER = (0.2, 0.4, 0.6, 0.8, 1.0)
"""Widths p of the paper's experiments."""


def narrower(submodels: Submodels, spec: Spec, width: float) -> Spec | None:
    """Narrow a client's submodel to the first units (such as neurons) of each layer; None if it lacks some of these.

    Args:
        submodels: submodels of the model.
        spec: submodel of the client.
        width: share of each layer's units to keep, counted in the whole model.
    """
    small = leading(submodels.axes, width)
    for axis, units in small.kept:
        own = spec.indices(axis)
        if own is not None and not set(units) <= set(own):
            return None
    for axis, own in spec.kept:
        if small.indices(axis) is None and len(own) < submodels.axes[axis].size:
            return None
    return Spec(small.kept, spec.blocks, spec.trained, spec.exits)


def masks_of(submodels: Submodels, spec: Spec, width: float) -> FlatTensors | None:
    """Return masks that are 1 at those elements of a client's submodel that a narrower submodel uses, too, and 0 elsewhere.

    Return None if the client's submodel does not contain the narrower one.

    Args:
        submodels: submodels of the model.
        spec: submodel of the client.
        width: share of each layer's units in the narrower submodel.
    """
    small = narrower(submodels, spec, width)
    if small is None:
        return None
    whole = FlatTensors.zeros(submodels.layout(part="trained"), "cpu")
    submodels.plan(small, "trained", "trained").cover_(whole)
    return submodels.plan(spec, "trained", "trained").gather(whole)


@dataclass(frozen=True)
class OrderedDropout(Local):
    """Local training in which each step uses a randomly drawn width of the client's submodel.

    Attributes:
        ladder: possible widths p, as shares of the model's units.
        distil: whether the client's whole submodel also trains and teaches the narrower one.
    """

    ladder: tuple[float, ...] = LADDER
    distil: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.ladder:
            raise BadInput("ladder is empty: give a list of widths, shares of each layer above 0 and at most 1")
        for width in self.ladder:
            fraction("a width in ladder", width)

    def prepare(self, module: nn.Module) -> nn.Module:
        """Return the model unchanged; raise `BadInput` for self-distillation of a Trainer's model."""
        if self.distil and hasattr(module, "loss_in_forward"):
            raise BadInput(
                "algorithm.distil is true, but a Trainer's steps do not show the logits of shape (batch, classes) that it "
                "compares: set algorithm.distil to false"
            )
        return module

    def hook(self, task: Task) -> Hook:
        """Return the hook that draws a width for each step."""
        return DrawnWidths(task, self)

    def estimate(self, submodels: Submodels, spec: Spec, batch_size: int, extra: Any) -> Cost:
        """Return the cost of ordinary training; self-distillation doubles the FLOPs."""
        cost = submodels.cost(spec, batch_size)
        return replace(cost, flops_per_sample=2 * cost.flops_per_sample) if self.distil else cost

    def __str__(self) -> str:
        words = ", ".join(f"{width:g}" for width in self.ladder)
        return f"SGD on the loss at widths {words} by draw{', distilled' if self.distil else ''}"


class DrawnWidths(Hook):
    """Hook that trains a randomly drawn width for each batch; with self-distillation, the whole submodel teaches it."""

    def __init__(self, task: Task, local: OrderedDropout) -> None:
        super().__init__(task)
        self.local, spec = local, task.assignment.spec.without_base
        every = {width: self._masks(spec, width) for width in sorted(set(local.ladder))}
        self.masks = [flat for flat in every.values() if flat is not None]
        self.random = random.Random(derive_seed(task.assignment.seed, "fjord"))
        self._logits: Tensor | None = None
        self._handle = task.module.register_forward_hook(self._seen)

    def _masks(self, spec: Spec, width: float) -> FlatTensors | None:
        submodels = self.task.submodels
        if next(self.task.module.parameters()).is_meta:  # on the meta device the task only predicts costs
            is_part = narrower(submodels, spec, width) is not None
            return FlatTensors.empty(submodels.layout(spec, "trained"), "meta") if is_part else None
        return submodels.cached("fjord", (spec, width), lambda: masks_of(submodels, spec, width))

    def _seen(self, module: object, args: object, output: object) -> None:
        self._logits = logits_of(output)

    def loss(self, batch: object, index: int) -> Tensor:
        """Draw a width and return the loss of the submodel at that width.

        With self-distillation, the whole submodel's loss and the divergence between the two are added.
        """
        if not self.masks:
            return self.task.loss(batch, index)
        masks = self.random.choice(self.masks)
        if not self.local.distil:
            with with_tensors(self.task.module, self._masked(masks)):
                return self.task.loss(batch, index)
        loss, teacher = self.task.loss(batch, index), self._logits
        with with_tensors(self.task.module, self._masked(masks)), patched(quiet(self.task.module)):
            self.task.loss(batch, index)
        if teacher is None or self._logits is None:
            raise BadInput(
                "distil is true, but the module's forward gives no logits of shape (batch, classes): set distil to false"
            )
        return loss + F.cross_entropy(self._logits, teacher.detach().softmax(-1))

    def _masked(self, masks: FlatTensors) -> dict[str, Tensor]:
        parameters = {name: p for name, p in self.task.module.named_parameters() if p.requires_grad and name in masks}
        return {name: p * masks[name].to(p.device, p.dtype) for name, p in parameters.items()}

    def close(self) -> None:
        """Restore the module to its full width."""
        self._handle.remove()


def fjord(
    rates: Rates | None = None,
    ladder: list[float] | None = None,
    distil: bool = True,
    by_samples: bool = True,
    alpha: float | None = None,
    cohort: int | None = None,
    concurrency: int | None = None,
    submodel: Select | None = None,
) -> Algorithm:
    """Return FjORD: a client trains the leading units of each layer, at a width that it draws anew for each step.

    Args:
        rates: largest share of each layer's units for a client (p_max): one number for all; a list, one number for each
            of clients 1, 2, ..., repeating; or a mapping from device name to number. None = the list 1/5, 2/5, 3/5,
            4/5, 1.
        ladder: possible widths, as shares of the model's units (p). None = 0.2, 0.4, 0.6, 0.8, 1.
        distil: whether the client's whole submodel also trains and teaches the narrower one (self-distillation).
        by_samples: whether to weight clients by their numbers of samples |D_n|; False = equally.
        alpha: weight of each arriving update in an asynchronous run; None = synchronous rounds.
        cohort: number of clients in a round, drawn uniformly; None = all.
        concurrency: largest number of clients that work at the same time; None = no limit.
        submodel: rule that chooses submodels in place of the leading units, such as `raafl.parts.RateSelect`; leave out
            rates then.
    """
    trigger, mean = averaging(alpha, by_samples)
    return Algorithm(
        name="fjord",
        paper="Horvath et al. 2021",
        sample=Sample(cohort, concurrency),
        select=by_rate(submodel, "leading", rates, LADDER),
        local=OrderedDropout(LADDER if ladder is None else tuple(ladder), distil),
        trigger=trigger,
        merge=mean,
    )

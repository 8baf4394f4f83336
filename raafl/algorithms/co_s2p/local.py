"""Train a client of Co-S2P: either the scores of its mask, or its submodel with self-distillation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch

from raafl.algorithms.co_s2p.as_published import PublishedDistillation, PublishedMaskTraining
from raafl.core.local import Hook, Local, Task, Traits
from raafl.core.types import Assignment
from raafl.errors import fraction, positive
from raafl.module_hooks import OPTIMIZER_HOOKS
from raafl.parts.local.distilled import Distilled, TrainsExits, exit_depths
from raafl.parts.local.mask_training import SCORES, MaskTraining, score_layout
from raafl.parts.select.segments import cuts_of
from raafl.submodel import Cost, FlatTensors, Layout, Spec, Submodels
from raafl.submodel.cost.fused import FusedKernels
from raafl.submodel.cost.ledger import Ledger
from raafl.submodel.isolated_run import loss_of, settle
from raafl.submodel.nested_batch import batch_tensors, meta_batch

_More = tuple[float, int, float, float]
"""Costs that a hook adds: FLOPs per sample, bytes at the peak, moved bytes per sample, FLOPs on padding per sample."""


@dataclass(frozen=True)
class MaskedAndDistilled(TrainsExits):
    """Local training of Co-S2P: a task trains either mask scores (Eq. 2), or the model, with self-distillation (Eq. 3).

    Mask scores decide which units of the model a client keeps. The server decides which kind of task it is.

    Attributes:
        distils: whether exits (output heads after several blocks) learn from the deepest one; False = only the loss of
            the deepest exit is used.
        weight: weight of the distillation (w).
        temperature: temperature of the distillation (T).
        strength: weight of the loss that pulls the masks to the client's width (lambda).
        mask_lr: learning rate of the mask scores.
        segments: number of equal groups into which the neurons of a layer are divided; masks keep or drop a group as a
            whole. Attention has a group for each head.
        published: whether to train as the authors' code does, see `raafl.algorithms.co_s2p.as_published`.
    """

    down: ClassVar[tuple[str, ...]] = (SCORES,)
    up: ClassVar[tuple[str, ...]] = (SCORES,)

    distils: bool = True
    weight: float = 0.2
    temperature: float = 3.0
    strength: float = 1.0
    mask_lr: float = 1e-2
    segments: int = 16
    published: bool = False

    def __post_init__(self) -> None:
        fraction("distil_weight", self.weight, zero=True)
        positive("temperature", self.temperature)
        positive("mask_lr", self.mask_lr)
        if self.strength != 0:
            positive("mask_strength", self.strength)

    @property
    def traits(self) -> Traits:
        """What this training can do, needs, and leaves out."""
        # scores have an optimizer of their own, whose gradients no loss scaler unscales
        return replace(super().traits, uses_gradients=True, leaves_out=frozenset(OPTIMIZER_HOOKS))

    def hook(self, task: Task) -> Hook:
        """Return the task's hook: for training mask scores, for training with distillation, or for ordinary training."""
        if "masks" in task.assignment.extra:
            training = PublishedMaskTraining if self.published else MaskTraining
            return training(task, cuts_of(task.submodels, self.segments), self.mask_lr, self.strength)
        if self.distils:
            distilled = PublishedDistillation if self.published else Distilled
            return distilled(task, self.weight, self.temperature)
        return Hook(task)

    def evaluates_on_client(self, extra: Mapping[str, Any]) -> bool:
        """Return False for a task that trains mask scores, since its result is not a model to evaluate."""
        return "masks" not in extra

    def layout_of(self, submodels: Submodels, bundle: str, spec: Spec | None) -> Layout:
        """Return names and shapes of the mask scores that are sent: all of them if the task trains scores, otherwise none."""
        return score_layout(submodels, self.segments, spec)

    def estimate(self, submodels: Submodels, spec: Spec, batch_size: int, extra: Mapping[str, Any]) -> Cost:
        """Return the cost of ordinary training plus that of training mask scores or of distillation; cached."""
        cost, axes = submodels.cost(spec, batch_size), tuple(extra.get("masks", ()))
        if not axes and (not self.distils or not exit_depths(submodels)):
            return cost
        key = (self, submodels.normal(spec).leading, batch_size, axes)
        more = submodels.cached("co_s2p", key, lambda: self._more(submodels, key[1], batch_size, axes))
        flops, peak_bytes, moved_bytes, padding_flops = more
        return replace(
            cost,
            flops_per_sample=cost.flops_per_sample + flops,
            peak_bytes=cost.peak_bytes + peak_bytes,
            moved_bytes_per_sample=cost.moved_bytes_per_sample + moved_bytes,
            padding_flops_per_sample=cost.padding_flops_per_sample + padding_flops,
        )

    def _more(self, submodels: Submodels, spec: Spec, batch_size: int, axes: Sequence[str]) -> _More:
        """Predict what the hook adds for each sample: FLOPs, bytes at the peak, moved bytes, and FLOPs on padding."""
        if submodels.example_batch is None:
            return 0.0, 0, 0.0, 0.0
        extra = {"masks": axes, "rate": 0.5} if axes else {}
        try:
            plain, own = (_followed(submodels, spec, batch_size, local, extra) for local in (Local(), self))
        except (
            Exception
        ):  # the user's step needs values, which meta tensors lack: the plain cost is the best prediction
            return 0.0, 0, 0.0, 0.0
        samples = max(batch_size, 1)
        return (
            max(own.task_flops - plain.task_flops, 0.0) / samples,
            max(own.peak_bytes - plain.peak_bytes, 0),
            max(own.moved_bytes - plain.moved_bytes, 0) / samples,
            max(own.padding_flops - plain.padding_flops, 0.0) / samples,
        )

    def notes(self, submodels: Submodels) -> list[str]:
        """Return a message for the user if the model has no exits (output heads between blocks), which distillation needs."""
        if not self.distils or exit_depths(submodels):
            return []
        return ["the model has no exits between its blocks, so there is no distillation"]

    def __str__(self) -> str:
        words = f"masks at lambda {self.strength:g}"
        return words + (
            f", distilled with w {self.weight:g}, T {self.temperature:g}" if self.distils else ", SGD on the loss"
        )


def _followed(submodels: Submodels, spec: Spec, batch_size: int, local: Local, extra: Mapping[str, Any]) -> Ledger:
    """Trace one forward and backward pass of a task on the meta device, and return its ledger."""
    module: Any = submodels.shrink(spec, device="meta").module
    batch = meta_batch(submodels.example_batch, batch_size)
    settle(module)
    task = Task(
        Assignment(0, 0, 0, 0, 0, spec, 0, None, None, 0, 0.0, extra=extra),
        submodels,
        module,
        torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.0),
        FlatTensors.empty(Layout(())),
        1,
        torch.Generator(),
        loss=lambda batch, index: loss_of(module, batch),
        backward=lambda loss: torch.autograd.backward(loss) if loss.requires_grad else None,
        update=lambda: None,
    )
    task.down = {
        name: FlatTensors.empty(local.layout_of(submodels, name, spec) or Layout(()), "meta") for name in local.down
    }
    hook = local.hook(task)
    ledger = Ledger([*module.parameters(), *module.buffers(), *batch_tensors(batch)])
    try:
        with torch.device("meta"), ledger, FusedKernels(submodels.rules):
            hook.backward(hook.loss(batch, 0))
    finally:
        hook.close()
    return ledger

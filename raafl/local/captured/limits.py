"""Decide which steps can be captured as CUDA graphs before one is tried, and give optimizers the form that can be."""

from __future__ import annotations

from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.nn.modules.dropout import _DropoutNd
from torch.optim import Optimizer

from raafl.core.local import Local
from raafl.core.options import FabricOptions
from raafl.local.lightning_hooks import reads_index
from raafl.local.trainable import TrainableSubmodel
from raafl.module_hooks import BATCH_HOOKS, TASK_HOOKS, overrides

_FUSED: tuple[type[Optimizer], ...] = (torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW)
_CAPTURABLE: tuple[type[Optimizer], ...] = (
    torch.optim.RMSprop,
    torch.optim.Adadelta,
    torch.optim.Adamax,
    torch.optim.NAdam,
)
_HOOKS = frozenset({"on_fit_start", "on_train_start"})
"""Hooks of Lightning that run once, before a task's first step."""


class NotCapturable(Exception):
    """Raised where a step cannot be captured; the message says why, after which its tasks are trained eagerly."""


def problems(local: Local, options: FabricOptions) -> list[str]:
    """List why no step of a run can be captured; empty = nothing is known before a module is built."""
    found = []
    if type(local).exchange is not Local.exchange:
        found.append("the algorithm exchanges messages during a task")
    elif not local.steps_are_plain and local.traits.captures is None:
        found.append("the algorithm has steps of its own")
    if options.accumulate_grad_batches != 1:
        found.append(f"fabric.accumulate_grad_batches is {options.accumulate_grad_batches}")
    if options.precision == "16-mixed":
        found.append("fabric.precision is 16-mixed, whose scaler is made anew for each task")
    return found


def problems_of_built(built: TrainableSubmodel) -> list[str]:
    """List why the steps of a submodel's module cannot be captured, as far as it is known before one is tried."""
    found = problems_of_module(built.module, frozenset() if built.hooks is None else built.hooks.overridden)
    if any(schedule.monitor is not None for schedule in built.schedulers):
        found.append("a learning rate scheduler goes by a metric")
    return found + problems_of_optimizer(built.optimizer)


def problems_of_module(module: nn.Module, hooks: frozenset[str] | None = None) -> list[str]:
    """List what a module has that no graph can have.

    `hooks`: Lightning's hooks around steps that it overrides and that are called; None = all that it overrides.
    """
    found = []
    called = frozenset(name for name in TASK_HOOKS if overrides(module, name)) if hooks is None else hooks
    if called - _HOOKS:
        found.append(f"the module overrides {min(called - _HOOKS)}")
    if any(overrides(module, name) for name in BATCH_HOOKS):
        found.append("the module overrides hooks that transfer a batch")
    if hasattr(module, "on_step_batches"):
        found.append("the module sees all batches of a step")
    if reads_index(module):
        found.append("training_step uses the index of its batch")
    if any(isinstance(part, nn.Embedding | nn.EmbeddingBag) and part.sparse for part in module.modules()):
        found.append("an embedding has sparse gradients")
    return found


def problems_of_batches(module: nn.Module, masked: bool) -> list[str]:
    """List what keeps steps of batches of clients from being captured where those of one client may be.

    A graph advances one generator on the GPU, but each client has its own.

    `masked`: whether the method masks classes in the loss.
    """
    found = ["a masked loss has masks of each client's classes"] * masked
    parts = module.named_modules()
    drawing = [name for name, part in parts if isinstance(part, _DropoutNd) and part.p > 0 and part.training]
    return found + [f"clients draw random numbers of their own, in '{name}'" for name in drawing[:1]]


def problems_of_optimizer(optimizer: Optimizer) -> list[str]:
    """List why an optimizer's step cannot be captured: it waits for the GPU, or its rates are not raafl's to put into tensors."""
    if (optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks) and optimizer not in _PREPARED:
        return ["the optimizer has hooks around its step"]
    name = type(optimizer).__name__
    if type(optimizer) not in (*_FUSED, *_CAPTURABLE):
        return [f"the optimizer is {name}, which has no form that can be captured"]
    if any(group.get("differentiable") or isinstance(group["lr"], Tensor) for group in optimizer.param_groups):
        return [f"{name} is differentiable, or its learning rate is a tensor"]
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    if not all(p.is_floating_point() and p.device == parameters[0].device for p in parameters):
        return [f"{name} trains parameters that are complex, or on several devices"]
    return []


_PREPARED: WeakSet[Optimizer] = WeakSet()
"""Optimizers that have raafl's settings and hooks."""


class Rates:
    """Learning rates of an optimizer's groups, in tensors that its steps read; schedulers go on with Python numbers.

    Attributes:
        tensors: one rate of each group, float32, on the optimizer's device.
    """

    def __init__(self, device: torch.device) -> None:
        self._device, self.tensors = device, list[Tensor]()
        self._values: list[float | None] = []
        self._outside: list[float] = []

    def prepare(self, optimizer: Optimizer) -> None:
        """Choose the fused or capturable form of a task's optimizer, and let its steps read the tensors."""
        while len(self.tensors) < len(optimizer.param_groups):  # the optimizers of tasks may differ in their groups
            self.tensors.append(torch.zeros((), device=self._device))
            self._values.append(None)
        for group in optimizer.param_groups:
            if type(optimizer) in _FUSED:
                group["fused"], group["foreach"] = True, False
            if "capturable" in group:  # torch requires it within a capture, even of fused optimizers
                group["capturable"] = True
        if optimizer in _PREPARED:
            return
        _PREPARED.add(optimizer)
        optimizer._warned_capturable_if_run_uncaptured = True
        optimizer.register_step_pre_hook(lambda optimizer, args, kwargs: self._enter(optimizer))
        optimizer.register_step_post_hook(lambda optimizer, args, kwargs: self._leave(optimizer))

    def refresh(self, optimizer: Optimizer) -> None:
        """Write the rates of the groups into the tensors, where they have changed; nothing waits for the GPU."""
        for place, group in enumerate(optimizer.param_groups):
            if group["lr"] != self._values[place]:
                self._values[place] = group["lr"]
                self.tensors[place].fill_(group["lr"])

    def _enter(self, optimizer: Optimizer) -> None:
        # a capture would record this write, with the present learning rate
        if not torch.cuda.is_current_stream_capturing():
            self.refresh(optimizer)
        self._outside = [group["lr"] for group in optimizer.param_groups]
        for group, rate in zip(optimizer.param_groups, self.tensors, strict=False):
            group["lr"] = rate

    def _leave(self, optimizer: Optimizer) -> None:
        for group, rate in zip(optimizer.param_groups, self._outside, strict=True):
            group["lr"] = rate

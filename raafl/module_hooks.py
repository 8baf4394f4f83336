"""Name what a LightningModule expects around its steps: its hooks, its optimizers and their schedulers."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Variable, _profiler_enabled  # type: ignore[attr-defined]
from torch.optim import Optimizer
from torch.optim import optimizer as _module
from torch.optim.lr_scheduler import ReduceLROnPlateau

from raafl.errors import BadInput, at_least, briefly, one_of

BATCH_HOOKS = ("on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer")
"""Hooks around moving a batch to the device."""

TASK_HOOKS = (
    "on_fit_start",
    "on_train_start",
    "on_train_epoch_start",
    "on_train_batch_start",
    "on_before_zero_grad",
    "optimizer_zero_grad",
    "on_before_backward",
    "backward",
    "on_after_backward",
    "optimizer_step",
    "on_before_optimizer_step",
    "configure_gradient_clipping",
    "lr_scheduler_step",
    "on_train_batch_end",
    "on_train_epoch_end",
    "on_train_end",
    "on_fit_end",
)
"""Hooks around the steps of a task, in Lightning's order."""

STEP_HOOKS = TASK_HOOKS[4:12]
"""Hooks around the backward pass and the optimizer's step."""

OPTIMIZER_HOOKS = ("on_before_zero_grad", "optimizer_zero_grad", *STEP_HOOKS[5:])
"""Hooks around the optimizer's step alone."""


def overrides(module: object, name: str) -> bool:
    """Check whether ``module`` overrides the hook ``name``, rather than inheriting Lightning's empty one."""
    method = getattr(type(module), name, None)
    return method is not None and not str(getattr(method, "__module__", "")).startswith(
        ("lightning.", "pytorch_lightning.")
    )


def begin(module: Any, batch: Any) -> None:
    """Call the module's overridden hooks that Lightning calls before the first training step."""
    for name in TASK_HOOKS[:3]:
        if overrides(module, name):
            getattr(module, name)()
    if overrides(module, TASK_HOOKS[3]):
        module.on_train_batch_start(batch, 0)


def move_batch(module: Any, batch: Any, device: Any, move: Callable[[Any, Any], Any]) -> object:
    """Move a batch to a device with the module's hooks, as Lightning does.

    `move`: ``move(batch, device)``, used in place of Lightning's own `transfer_batch_to_device`.
    """
    if overrides(module, "on_before_batch_transfer"):
        batch = module.on_before_batch_transfer(batch, 0)
    if overrides(module, "transfer_batch_to_device"):
        batch = module.transfer_batch_to_device(batch, device, 0)
    else:
        batch = move(batch, device)
    return module.on_after_batch_transfer(batch, 0) if overrides(module, "on_after_batch_transfer") else batch


@dataclass(frozen=True)
class Schedule:
    """A learning-rate scheduler and its settings, as in Lightning's ``lr_scheduler`` dict."""

    scheduler: Any  # learning-rate scheduler of torch
    interval: str = "epoch"  # unit of ``frequency``, "step" or "epoch"
    frequency: int = 1  # number of batches, or of epochs, between two steps of the scheduler
    # name of the logged metric that a ReduceLROnPlateau reads; None = the scheduler reads no metric
    monitor: str | None = None

    def is_due(self, interval: str, index: int) -> bool:
        """Check whether the scheduler steps now."""
        return interval == self.interval and (index + 1) % self.frequency == 0


def step_scheduler(scheduler: Any, metric: Any) -> None:
    """Step a learning-rate scheduler, with ``metric`` if it is a ReduceLROnPlateau."""
    scheduler.step() if metric is None else scheduler.step(metric)


def configure(module: nn.Module) -> tuple[Optimizer, list[Schedule]]:
    """Call a module's `configure_optimizers`; return its one optimizer and its learning-rate schedulers.

    Raises:
        BadInput: the module has no optimizer or several, an optimizer whose step needs a closure, or a scheduler with
            settings that Lightning does not know.
    """
    answer: Any = module.configure_optimizers()  # type: ignore[operator]
    owner, monitor = f"{type(module).__name__}.configure_optimizers", None
    if isinstance(answer, list | tuple) and len(answer) == 1:
        answer = answer[0]
    schedulers: list[Any] = []
    if isinstance(answer, dict):
        monitor = answer.get("monitor")
        schedulers = [answer["lr_scheduler"]] if answer.get("lr_scheduler") is not None else []
        answer = answer["optimizer"]
    elif isinstance(answer, tuple | list) and len(answer) == 2 and isinstance(answer[0], list):
        answer, schedulers = answer[0], answer[1] if isinstance(answer[1], list) else [answer[1]]
    several = list(answer) if isinstance(answer, list | tuple) else [answer]
    if len(several) != 1 or not isinstance(several[0], Optimizer):
        found = f"{len(several)} optimizers" if len(several) > 1 else briefly(several[0] if several else None)
        raise BadInput(
            f"{owner} gives {found}, but a federated task runs training_step, backward and the step of one "
            "optimizer: return one, with one parameter group for each set of options"
        )
    if _needs_closure(several[0]):
        raise BadInput(
            f"{owner} gives {type(several[0]).__name__}, whose step needs a closure that computes the loss again, "
            "but a federated task computes each batch once: return an optimizer without a closure, such as "
            "torch.optim.Adam"
        )
    return several[0], [_schedule(owner, scheduler, monitor) for scheduler in schedulers]


def backward(loss: Tensor, strategy: Any) -> None:
    """Compute the gradients of a loss as Fabric's ``strategy`` does.

    For one number in full precision it goes without what `Tensor.backward` checks in Python: 20 us of a small model's step.
    """
    if not _adds_nothing(strategy):
        strategy.backward(loss, None)
        return
    is_number = type(loss) is Tensor and not loss.dim() and loss.requires_grad and not loss.is_complex()
    if not is_number or torch.overrides.has_torch_function_unary(loss):
        loss.backward()  # type: ignore[no-untyped-call]
        return
    Variable._execution_engine.run_backward(
        (loss,), (torch.ones_like(loss),), False, False, (), allow_unreachable=True, accumulate_grad=True
    )


def step(optimizer: Optimizer, strategy: Any) -> None:
    """Make an optimizer step as Fabric's ``strategy`` does, without torch's profiling around it where nobody looks.

    Profiling takes 12 us of a small model's step.
    """
    around = type(optimizer).step
    if not _adds_nothing(strategy):
        strategy.optimizer_step(optimizer)
    elif "step" in vars(optimizer) or not getattr(around, "hooked", False) or _is_watched(optimizer):
        optimizer.step()
    else:
        around.__wrapped__(optimizer)  # type: ignore[attr-defined]


def _adds_nothing(strategy: Any) -> bool:
    """Check whether a Fabric strategy changes nothing in a training step: one device, full precision."""
    kinds: Any = type(strategy), type(strategy.precision)
    return bool(kinds == _plain_kinds())


@cache
def _plain_kinds() -> tuple[type, type]:
    from lightning.fabric.plugins.precision.precision import Precision
    from lightning.fabric.strategies.single_device import SingleDeviceStrategy

    return SingleDeviceStrategy, Precision


def zero_grad(optimizer: Optimizer) -> None:
    """Call ``optimizer.zero_grad()``, without torch's profiling around it where nobody looks."""
    is_own = "zero_grad" in vars(optimizer) or type(optimizer).zero_grad is not Optimizer.zero_grad
    if is_own or _profiler_enabled():
        optimizer.zero_grad()
        return
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad = None


def _is_watched(optimizer: Optimizer) -> bool:
    """Check whether a profiler or a registered hook observes the optimizer's steps."""
    return bool(
        optimizer._optimizer_step_pre_hooks
        or optimizer._optimizer_step_post_hooks
        or _module._global_optimizer_pre_hooks
        or _module._global_optimizer_post_hooks
        or _profiler_enabled()
    )


def _needs_closure(optimizer: Optimizer) -> bool:
    """Check whether ``optimizer.step`` requires a closure, as LBFGS does."""
    try:
        closure = inspect.signature(optimizer.step).parameters.get("closure")
    except (TypeError, ValueError):  # a step written in C has no signature
        return False
    return closure is not None and closure.default is inspect.Parameter.empty


def _schedule(owner: str, given: Any, monitor: str | None) -> Schedule:
    settings = given if isinstance(given, Mapping) else {"scheduler": given, "monitor": monitor}
    if "scheduler" not in settings:
        raise BadInput(f"{owner} gives a lr_scheduler dict without the key 'scheduler': put the scheduler there")
    scheduler, interval = settings["scheduler"], settings.get("interval", "epoch")
    one_of(f"{owner}: interval", interval, ("step", "epoch"))
    frequency = settings.get("frequency", 1)
    at_least(f"{owner}: frequency", frequency, 1)
    if not settings.get("reduce_on_plateau", isinstance(scheduler, ReduceLROnPlateau)):
        return Schedule(scheduler, interval, frequency)
    if settings.get("monitor") is None:
        raise BadInput(
            f"{owner} gives a {type(scheduler).__name__} without monitor: name a metric that training_step logs, as in "
            '{"scheduler": scheduler, "monitor": "train_loss"}'
        )
    return Schedule(scheduler, interval, frequency, settings["monitor"])

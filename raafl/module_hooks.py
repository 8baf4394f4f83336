"""Name the hooks of a LightningModule that raafl calls, and find which of them a module overrides."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

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

"""Call the hooks of Lightning that a module overrides, in Lightning's order and with its arguments.

The order within one batch is that of `lightning.pytorch.loops`: on_train_batch_start, optimizer_step (whose closure calls
training_step, on_before_zero_grad, optimizer_zero_grad, on_before_backward, backward, on_after_backward), on_before_optimizer_step,
configure_gradient_clipping, lr_scheduler_step, on_train_batch_end. What a method does with gradients comes after on_after_backward.
"""

from __future__ import annotations

import dis
import inspect
from collections.abc import Callable, Iterable
from typing import Any, cast

import torch
from torch import nn
from torch.optim import Optimizer

from raafl.errors import BadInput

_SEE_GRADIENTS = {
    "on_before_zero_grad",
    "optimizer_zero_grad",
    "optimizer_step",
    "on_train_batch_end",
    "on_train_epoch_end",
}
"""Hooks that may read gradients after a step, where Lightning still has them."""


def reads_index(module: nn.Module) -> bool:
    """Check whether a training step uses its argument for the batch index; True if that cannot be determined."""
    step: Any = inspect.unwrap(cast(Any, type(module)).training_step)
    if not inspect.isfunction(step) or step.__code__.co_argcount < 3:
        return True
    name = step.__code__.co_varnames[2]
    return any(one.argval == name for one in dis.get_instructions(step))


class TaskHooks:
    """Caller of the Lightning hooks that a module overrides, around the steps of a task.

    `overridden`: names of the hooks that the module overrides.
    `keeps_gradients`: whether gradients are kept until the next backward pass, as in Lightning, since a hook may read
    them.
    """

    def __init__(self, module: nn.Module, overridden: frozenset[str]) -> None:
        """Create a caller of a module's Lightning hooks; ``overridden`` has the names of those that it defines."""
        self._module: Any = module
        self.overridden = overridden
        self.keeps_gradients = not overridden.isdisjoint(_SEE_GRADIENTS)
        self._wrapped: tuple[Optimizer, Any] | None = None

    def call(self, name: str, *args: object) -> Any:
        """Call the hook ``name`` if the module overrides it; return its result, or else None."""
        return getattr(self._module, name)(*args) if name in self.overridden else None

    def zero_grad(self, optimizer: Optimizer, epoch: int, batch_idx: int) -> None:
        """Clear gradients before a backward pass, by the module's own hook if it has one."""
        if not self.keeps_gradients:
            return
        self.call("on_before_zero_grad", optimizer)
        if "optimizer_zero_grad" in self.overridden:
            self._module.optimizer_zero_grad(epoch, batch_idx, optimizer)
        else:
            optimizer.zero_grad()

    def optimizer_step(
        self, optimizer: Optimizer, epoch: int, batch_idx: int, closure: Callable[[], Any], step: Callable[[], None]
    ) -> None:
        """Make an optimizer step by the module's own `optimizer_step`.

        Raises:
            BadInput: the hook does not call the closure.
        """
        was_called = False

        def computed() -> object:
            nonlocal was_called
            was_called = True
            return closure()

        def stepped(closure: Callable[[], Any]) -> object:
            result = closure()
            step()
            return result

        self._module.optimizer_step(epoch, batch_idx, self._lightning(optimizer, stepped), computed)
        if not was_called:
            raise BadInput(
                f"{type(self._module).__name__}.optimizer_step does not call its closure, which computes the loss: "
                "call optimizer.step(closure=optimizer_closure), or optimizer_closure() to skip a step"
            )

    def before_step(
        self, optimizer: Optimizer, clip_val: float | None, clipped: Callable[[], Iterable[nn.Parameter]]
    ) -> None:
        """Call the hooks that run between the backward pass and the optimizer step.

        `clip_val`: largest gradient norm, to which a hook clips; None = no clipping. `clipped`: returns the parameters
        whose gradients are clipped where no hook does.
        """
        self.call("on_before_optimizer_step", optimizer)
        if "configure_gradient_clipping" in self.overridden:
            self._module.configure_gradient_clipping(
                optimizer, gradient_clip_val=clip_val, gradient_clip_algorithm=None
            )
        elif clip_val is not None:
            torch.nn.utils.clip_grad_norm_(clipped(), clip_val)

    def _lightning(self, optimizer: Optimizer, step: Callable[[Callable[[], Any]], Any]) -> object:
        """Return the optimizer as Lightning wraps it, with ``step`` in place of the wrapper's strategy."""
        if self._wrapped is None or self._wrapped[0] is not optimizer:
            from lightning.pytorch.core.optimizer import LightningOptimizer

            self._wrapped = optimizer, LightningOptimizer(optimizer)
        wrapped = self._wrapped[1]
        wrapped._strategy = _Steps(step)
        return wrapped


class _Steps:
    """Stand-in for Lightning's strategy, by which a LightningOptimizer makes a step."""

    def __init__(self, step: Callable[[Callable[[], Any]], Any]) -> None:
        self._step = step

    def optimizer_step(self, optimizer: Optimizer, closure: Callable[[], Any], **kwargs: object) -> object:
        """Call the step function with the optimizer's closure."""
        return self._step(closure)

"""Say what a method's task must offer, so that its steps can be followed to predict their cost."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from torch import Tensor, nn
from torch.optim import Optimizer

from raafl.submodel.spec import Spec


class MethodSteps(Protocol):
    """Protocol of the steps of a method's task; `raafl.core.local.Hook` is the implementation."""

    def loss(self, batch: Any, index: int) -> Tensor:
        """Return the loss of a batch."""

    def backward(self, loss: Tensor) -> None:
        """Compute the gradients of ``loss``."""

    def update(self) -> None:
        """Make one optimiser step."""

    def finish(self) -> object:
        """Do what follows the last step."""

    def close(self) -> None:
        """Undo the changes to the module."""


class MethodTask(Protocol):
    """Protocol of a method's task before its first step."""

    received_and_sent: list[Tensor]  # tensors that it has received or will send, which count elsewhere
    answer_bytes: int  # bytes of a copy of the trained values, in which they are sent beside others; 0 = there is none

    def steps(
        self, optimizer: Optimizer, backward: Callable[[Tensor], None], update: Callable[[], None]
    ) -> MethodSteps:
        """Return the steps of the task."""


class Method(Protocol):
    """Protocol of a method whose tasks do more than the user's own step; see `raafl.core.own_steps.OwnSteps`.

    Attributes:
        rescale: whether it multiplies the activations of narrowed layers, as `Submodels.shrink` does.
    """

    rescale: bool

    def begin(self, spec: Spec, module: nn.Module, loss: Callable[[Any, int], Tensor]) -> MethodTask:
        """Return a task of the method on a small module, before its first step.

        Args:
            spec: submodel that the module is.
            module: small module, on the meta device or with values.
            loss: function that runs the user's own step.
        """

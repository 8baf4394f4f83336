"""State what a submodel costs the client that trains it: operations, bytes moved, memory, bytes on the wire.

`raafl.submodel.cost.predicted` predicts it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from torch import Tensor, nn
from torch.optim import Optimizer

from raafl.submodel.spec import Spec

if TYPE_CHECKING:
    from raafl.submodel.cost.ledger import Launches


@dataclass(frozen=True, slots=True)
class Cost:
    """Predicted cost of training one submodel with one batch size.

    Attributes:
        params: number of parameters in the submodel.
        flops_per_sample: FLOPs of matrix products, convolutions and the like in the forward and backward pass of one
            sample; in a step without any, as in matrix factorisation, FLOPs of elementwise operations.
        peak_bytes: largest memory of a client's tensors during a task: received values, frozen parameters that the
            client has, the module, the batch, activations, gradients, temporaries and the optimiser's state. The
            libraries' own memory is not included.
        down_bytes: number of bytes that a client receives.
        up_bytes: number of bytes that a client sends.
        moved_bytes_per_sample: bytes that all operations of a step read and write, per sample, including the
            optimiser's; each operation's bytes are scaled to its time.
        padding_flops_per_sample: additional FLOPs of convolutions on padded channels, per sample.
        num_exchanges: number of round trips to the server during a task, such as one per batch in split learning.
        kernels_per_sample: number of operations of a step, without views, per sample. The optimiser counts one
            operation of each kind, since on a GPU it updates all parameters at once; an operation within torch's own
            loop over positions counts as a part of one.
        guessed: description of what is only estimated, and why the step could not be traced; "" = nothing.
        launches: launches of a step on a GPU, per sample; None = the step could not be traced.
        pool_bytes: largest memory of what a step allocates and frees again: activations, gradients and temporaries.
    """

    params: int
    flops_per_sample: float
    peak_bytes: int
    down_bytes: int
    up_bytes: int
    moved_bytes_per_sample: float = 0.0
    padding_flops_per_sample: float = 0.0
    num_exchanges: int = 0
    kernels_per_sample: float = 0.0
    guessed: str = ""
    launches: Launches | None = None
    pool_bytes: int = 0


class MethodSteps(Protocol):
    """Protocol of the steps of a method's task; `raafl.core.local.Hook` is the implementation."""

    def loss(self, batch: Any, index: int) -> Tensor:
        """Return the loss of a batch."""

    def backward(self, loss: Tensor) -> None:
        """Compute the gradients of ``loss``."""

    def update(self) -> None:
        """Make one optimiser step."""

    def stepped(self) -> None:
        """Do what belongs on Python's side of a step."""

    def finish(self) -> object:
        """Do what follows the last step."""

    def close(self) -> None:
        """Undo the changes to the module."""


class MethodTask(Protocol):
    """Protocol of a method's task before its first step."""

    # tensors that the task has received or will send, which the costs of the transfers include already
    received_and_sent: list[Tensor]
    # an update with tensors beside the trained values sends a copy of these: its size in bytes; 0 = no copy
    answer_bytes: int

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

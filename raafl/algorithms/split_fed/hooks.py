"""Run the steps of a task in two halves, either connected by a wire or both on one machine.

The client's half draws random numbers from the global generators like any task; the server's has its own RNG stream, so that its
draws do not depend on where it runs. Each batch is one question: the client sends the activation and the parts of the batch that
the server needs, and receives the gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten

from raafl.algorithms.split_fed.cut import Outline, Shapes, shapes_of
from raafl.algorithms.split_fed.half import Half, activation_in, run_to_cut, with_received_activation
from raafl.core.algorithm import Hook, Task
from raafl.core.exchange import server_seed
from raafl.core.local import SkippedBatch
from raafl.errors import BadInput
from raafl.submodel import Layout
from raafl.submodel.flat import DTYPES

NAMES = {dtype: name for name, dtype in DTYPES.items()}


@contextmanager
def _no_skips() -> Iterator[None]:
    """Raise `BadInput` if a training step returns None, since the other side waits for its half of the batch."""
    try:
        yield
    except SkippedBatch:
        raise BadInput(
            "training_step returns None to skip a batch, which split_fed does not support: return a loss"
        ) from None


@dataclass(frozen=True, slots=True)
class Received:
    """A batch as the server's half of the model receives it from the client.

    Attributes:
        outline: shapes of what the client's half outputs.
        activation: output of the client's half; its gradient is sent back.
        batch: the batch: tensors that the client has sent, and zeros in place of all others.
    """

    is_transferred: ClassVar[bool] = True  # the client's hooks have moved the batch already

    outline: Outline
    activation: Tensor
    batch: object

    def loss(self, task: Task, index: int) -> Tensor:
        """Compute the loss of the server's half; its backward pass ends at the activation."""
        # a copy: autograd forbids layers above to change a leaf tensor in place
        with _no_skips(), with_received_activation(task.module, self.outline, self.activation.clone()):
            return task.loss(self.batch, index)

    @property
    def gradient(self) -> Tensor:
        """Gradient of the activation after the backward pass; zeros if the loss does not depend on it."""
        return torch.zeros_like(self.activation) if self.activation.grad is None else self.activation.grad


def receive(
    half: Half,
    shapes: Shapes,
    activation: Tensor,
    leaves: Sequence[Tensor],
    draws: Callable[[int], AbstractContextManager[Any]],
) -> Received:
    """Build the batch on which the server's half trains.

    Args:
        half: the server's half.
        shapes: shape of each tensor in the batch.
        activation: activation that the client has sent.
        leaves: tensors of the batch that the client has sent, such as labels, in the order of `Cut.leaves`.
        draws: function that maps a seed to a context with a random stream of its own.
    """
    batch = half.batch_from(shapes, leaves, activation.device)
    return Received(half.outline(shapes, draws), activation.detach().requires_grad_(), batch)


class LowerHook(Hook):
    """Hook of the client's half, which asks the server for gradients.

    It returns the loss 0, since only the server knows the loss.
    """

    def __init__(self, task: Task, half: Half) -> None:
        super().__init__(task)
        self._half = half
        self._sent = self._gradient = torch.empty(0)

    def loss(self, batch: object, index: int) -> Tensor:
        """Compute the activation at the cut, send it to the server, and wait for its gradient.

        Raises:
            BadInput: the batch contains other things than tensors.
        """
        flat, cut = tree_flatten(batch)[0], self._half.cut
        if not all(isinstance(item, Tensor) for item in flat):
            raise BadInput("a batch contains something other than tensors: split_fed needs batches of tensors")
        with _no_skips():
            self._sent = activation_in(run_to_cut(self.task.module, cut.path, lambda: self.task.loss(batch, index)))
        return self._rest(index, self._sent.detach().contiguous(), shapes_of(flat), [flat[i] for i in cut.leaves])

    def _rest(self, index: int, activation: Tensor, shapes: Shapes, leaves: list[Tensor]) -> Tensor:
        assert self.task.link is not None
        dtype = NAMES.get(activation.dtype, str(activation.dtype))
        meta = {"batch": index, "shapes": [list(shape) for shape in shapes], "dtype": dtype}
        named = {f"batch.{i}": leaf for i, leaf in zip(self._half.cut.leaves, leaves, strict=True)}
        layout = Layout.pack([("gradient", activation.shape, activation.dtype)])
        self._gradient = self.task.link.ask(meta, {"activation": activation, **named}, layout)["gradient"]
        return torch.zeros(())

    def backward(self, loss: Tensor) -> None:
        """Run the backward pass of the client's half from the gradient that the server has sent."""
        torch.autograd.backward(self._sent, self._gradient)
        self._sent = self._gradient = torch.empty(0)


class UpperHook(Hook):
    """Hook of the server's half: it trains on the activations that the client has sent."""

    def loss(self, batch: Received, index: int) -> Tensor:
        """Return the loss that the server's half computes from the received activation."""
        return batch.loss(self.task, index)


class BothHook(LowerHook):
    """Hook that trains both halves in one process, in a simulation, with the same results, bit for bit, as in two."""

    _received: Received

    def __init__(self, task: Task, half: Half) -> None:
        """Create the server's RNG stream; ``half`` is the server's."""
        super().__init__(task, half)
        self._draws = task.draws(server_seed(task.assignment.seed))

    def _rest(self, index: int, activation: Tensor, shapes: Shapes, leaves: list[Tensor]) -> Tensor:
        self._received = receive(self._half, shapes, activation, leaves, self.task.draws)
        with self._draws:
            return self._received.loss(self.task, index)

    def backward(self, loss: Tensor) -> None:
        """Compute the gradients of the server's half, then those of the client's half."""
        with self._draws:
            self.task.backward(loss)
        self._gradient = self._received.gradient
        super().backward(loss)

"""The steps of a task in two halves: each half on its own with a wire between them, or both on one machine.

The client's half draws from the generators as any task does; the server's has a stream of its own, so that it draws the
same wherever it runs. Each batch is one question: the activation and what else the server needs of the batch go up, the
gradient comes down.
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
from raafl.algorithms.split_fed.half import Half, activation_in, replaced, run_to_cut
from raafl.core.algorithm import Hook, Task
from raafl.core.exchange import server_seed
from raafl.core.local import SkippedBatch
from raafl.errors import BadInput
from raafl.submodel import Layout
from raafl.submodel.flat import DTYPES

NAMES = {dtype: name for name, dtype in DTYPES.items()}


@contextmanager
def _no_skips() -> Iterator[None]:
    """Raise for a training step that returns None, since the other side waits for its half of the batch."""
    try:
        yield
    except SkippedBatch:
        raise BadInput(
            "training_step returns None, to skip a batch, but a model in two halves cannot: return a loss"
        ) from None


@dataclass(frozen=True, slots=True)
class Received:
    """Batch as the server's half receives it.

    Attributes:
        outline: what stands for the client's half.
        activation: as received; its gradient is to go back.
        batch: with what was sent of it, and blanks elsewhere.
    """

    is_transferred: ClassVar[bool] = True  # by the client's hooks around the batch's way to the device

    outline: Outline
    activation: Tensor
    batch: Any

    def loss(self, task: Task, index: int) -> Tensor:
        """Return the loss of the server's half; a backward pass ends at the activation."""
        # a copy: layers above may work in place, which a leaf does not let them
        with _no_skips(), replaced(task.module, self.outline, self.activation.clone()):
            return task.loss(self.batch, index)

    @property
    def gradient(self) -> Tensor:
        """Return the activation's gradient after the backward pass; zeros if the loss does not depend on it."""
        return torch.zeros_like(self.activation) if self.activation.grad is None else self.activation.grad


def receive(
    half: Half, shapes: Shapes, activation: Tensor, leaves: Sequence[Tensor],
    draws: Callable[[int], AbstractContextManager[Any]],
) -> Received:  # fmt: skip
    """Return a batch as ``half``, the server's, gets it."""
    batch = half.received(shapes, leaves, activation.device)
    return Received(half.outline(shapes, draws), activation.detach().requires_grad_(), batch)


class LowerHook(Hook):
    """Hook of the client's half; its loss is 0, since only the server knows the loss."""

    def __init__(self, task: Task, half: Half) -> None:
        super().__init__(task)
        self._half = half
        self._sent = self._gradient = torch.empty(0)

    def loss(self, batch: Any, index: int) -> Tensor:
        """Compute up to the cut and send the activation to the server.

        Raises:
            BadInput: the batch holds other things than tensors.
        """
        flat, cut = tree_flatten(batch)[0], self._half.cut
        if not all(isinstance(item, Tensor) for item in flat):
            raise BadInput("a batch holds other things than tensors: a model in two halves needs batches of tensors")
        with _no_skips():
            self._sent = activation_in(run_to_cut(self.task.module, cut.path, lambda: self.task.loss(batch, index)))
        return self._rest(
            index, self._sent.detach().contiguous(), shapes_of(flat), [flat[place] for place in cut.leaves]
        )

    def _rest(self, index: int, activation: Tensor, shapes: Shapes, leaves: list[Tensor]) -> Tensor:
        assert self.task.link is not None
        dtype = NAMES.get(activation.dtype, str(activation.dtype))
        meta = {"batch": index, "shapes": [list(shape) for shape in shapes], "dtype": dtype}
        named = {f"batch.{place}": leaf for place, leaf in zip(self._half.cut.leaves, leaves, strict=True)}
        layout = Layout.pack([("gradient", activation.shape, activation.dtype)])
        self._gradient = self.task.link.ask(meta, {"activation": activation, **named}, layout)["gradient"]
        return torch.zeros(())

    def backward(self, loss: Tensor) -> None:
        """Continue the backward pass from the received gradient."""
        torch.autograd.backward(self._sent, self._gradient)
        self._sent = self._gradient = torch.empty(0)


class UpperHook(Hook):
    """Hook of the server's half; its batches are `Received`."""

    def loss(self, batch: Received, index: int) -> Tensor:
        """Return the loss computed from the activation."""
        return batch.loss(self.task, index)


class BothHook(LowerHook):
    """Hook that runs both halves on one machine, bit for bit as with a connection between them."""

    _received: Received

    def __init__(self, task: Task, half: Half) -> None:
        """Start both RNG streams; ``half`` is the server's."""
        super().__init__(task, half)
        self._draws = task.draws(server_seed(task.assignment.seed))

    def _rest(self, index: int, activation: Tensor, shapes: Shapes, leaves: list[Tensor]) -> Tensor:
        self._received = receive(self._half, shapes, activation, leaves, self.task.draws)
        with self._draws:
            return self._received.loss(self.task, index)

    def backward(self, loss: Tensor) -> None:
        """Compute the gradients of the upper half, then of the lower."""
        with self._draws:
            self.task.backward(loss)
        self._gradient = self._received.gradient
        super().backward(loss)

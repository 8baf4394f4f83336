"""How a task runs in two halves: on one machine, or each half on its own with a wire between them.

The client's half draws from the generators as any task does; the server's has a stream of its own, so that it draws the
same wherever it runs. Each batch is one exchange: the activation and what else the server needs of the batch go up, the
gradient comes down.
"""

from __future__ import annotations

import random
import threading
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten

from raafl.core.algorithm import Hook, Local, Task
from raafl.core.types import derive_seed
from raafl.errors import BadInput
from raafl.local.train import seed_everything
from raafl.parts.split_cut import Frame, Shapes
from raafl.parts.split_half import Frames, Half, activation_in, halves, replaced, run_to_cut


def upper_seed(seed: int) -> int:
    """Return the seed of the server's half of a task, from the task's."""
    return derive_seed(seed, "upper")


class Draws:
    """A stream of the global generators: within it, everything that draws draws from here; outside, nothing has changed.

    The generators are the whole process's, so one stream is in use at a time, whatever the thread; others wait.
    """

    _in_use = threading.Lock()

    def __init__(self, device: torch.device, seed: int = 0) -> None:
        """Begin a stream."""
        self._device = device
        self._own: tuple[Any, ...] | None = None
        self._outer: tuple[Any, ...] = ()
        with self:
            seed_everything(seed, device)

    def __enter__(self) -> None:
        """Draw from this stream."""
        self._in_use.acquire()
        try:
            self._outer = self._states()
            if self._own is not None:
                self._set(self._own)
        except BaseException:  # of a device that has failed: others are not to wait for ever
            self._in_use.release()
            raise

    def __exit__(self, *_: object) -> None:
        """Go on with what was drawn from before."""
        try:
            self._own = self._states()
            self._set(self._outer)
        finally:
            self._in_use.release()

    def _states(self) -> tuple[Any, ...]:
        cuda = torch.cuda.get_rng_state(self._device) if self._device.type == "cuda" else None
        return random.getstate(), np.random.get_state(), torch.default_generator.get_state(), cuda

    def _set(self, states: tuple[Any, ...]) -> None:
        random.setstate(states[0])
        np.random.set_state(states[1])
        torch.default_generator.set_state(states[2])
        if states[3] is not None:
            torch.cuda.set_rng_state(states[3], self._device)


class Exchange(Protocol):
    """What the client's half talks to the server's by."""

    def __call__(self, index: int, activation: Tensor, shapes: Shapes, leaves: list[Tensor]) -> Tensor:
        """Send batch ``index`` and return the gradient of its activation."""
        ...


@dataclass(slots=True)
class Received:
    """A batch as the server's half gets it.

    Attributes:
        frame: what stands for the client's half.
        activation: as received; its gradient is to go back.
        batch: with what was sent of it, and blanks elsewhere.
        gradient: of the activation, once there.
    """

    frame: Frame
    activation: Tensor
    batch: Any
    gradient: Tensor | None = field(default=None)


def upper_loss(task: Task, received: Received, index: int) -> Tensor:
    """Return the loss of the server's half; a backward pass ends at ``received.activation``."""
    # a copy: layers above may work in place, which a leaf does not let them
    with replaced(task.module, received.frame, received.activation.clone()):
        return task.loss(received.batch, index)


def shapes_of(batch: Any) -> tuple[Shapes, list[Tensor]]:
    """Return the shapes of a batch's tensors, and the tensors.

    Raises:
        BadInput: it holds other things than tensors.
    """
    flat = tree_flatten(batch)[0]
    if not all(isinstance(item, Tensor) for item in flat):
        raise BadInput("a batch holds other things than tensors: a model in two halves needs batches of tensors")
    return tuple(tuple(item.shape) for item in flat), flat


class LowerHook(Hook):
    """The client's half; the other is at the end of `Half.exchange`.

    The loss is the server's to know: here it is 0.
    """

    def __init__(self, task: Task, half: Half) -> None:
        """Begin."""
        super().__init__(task)
        self._half, self._sent, self._gradient = half, torch.empty(0), torch.empty(0)

    def loss(self, batch: Any, index: int) -> Tensor:
        """Compute up to the cut and have the server do the rest."""
        shapes, flat = shapes_of(batch)
        self._sent = lower_activation(self.task, self._half.cut.path, batch, index)
        leaves = [flat[place] for place in self._half.cut.leaves]
        self._gradient = self._half.exchange(index, self._sent.detach(), shapes, leaves)
        return torch.zeros(())

    def backward(self, loss: Tensor) -> None:
        """Go on from the gradient that the server has sent."""
        torch.autograd.backward(self._sent, self._gradient)
        self._sent = self._gradient = torch.empty(0)


def lower_activation(task: Task, path: str, batch: Any, index: int) -> Tensor:
    """Run the client's half on a batch; return its activation with its graph.

    Raises:
        BadInput: the run's precision scales losses, which takes one backward pass.
    """
    fabric: Any = getattr(task.module, "_fabric", None)
    if fabric is not None and getattr(fabric.strategy.precision, "scaler", None) is not None:
        raise BadInput(
            "fabric.precision is 16-mixed: a model in two halves needs one without a loss scaler, bf16-mixed"
        )
    return activation_in(run_to_cut(task.module, path, lambda: task.loss(batch, index)))


class UpperHook(Hook):
    """The server's half; its batches are what it `Received`."""

    def loss(self, batch: Received, index: int) -> Tensor:
        """Return the loss, from the activation on."""
        self._batch = batch
        return upper_loss(self.task, batch, index)

    def backward(self, loss: Tensor) -> None:
        """Compute the gradients of the upper part and of the activation."""
        self.task.backward(loss)
        activation = self._batch.activation
        self._batch.gradient = torch.zeros_like(activation) if activation.grad is None else activation.grad


class UpperLocal(Local):
    """What the server does with its half."""

    def hook(self, task: Task) -> Hook:
        """Return the hook that runs it."""
        return UpperHook(task)


class BothHook(Hook):
    """Both halves of a task on one machine: they compute what they would with a wire between them, bit for bit."""

    def __init__(self, task: Task, path: str) -> None:
        """Begin both streams."""
        super().__init__(task)
        self._path = path
        device = next(task.module.parameters()).device
        self._draws = Draws(device, upper_seed(task.assignment.seed))
        self._frames = task.submodels.cached("frames", path, lambda: halves(task.submodels, path)["upper"].frames)
        self._cut = self._frames.cut
        self._sent = self._leaf = torch.empty(0)

    def loss(self, batch: Any, index: int) -> Tensor:
        """Return the loss, with a graph that begins at the cut."""
        shapes, flat = shapes_of(batch)
        self._sent = lower_activation(self.task, self._path, batch, index)
        self._leaf = self._sent.detach().contiguous().requires_grad_()
        leaves = [flat[place] for place in self._cut.leaves]
        received = receive(self._frames, shapes, self._leaf, leaves)
        with self._draws:
            return upper_loss(self.task, received, index)

    def backward(self, loss: Tensor) -> None:
        """Compute the gradients of the upper half, then of the lower."""
        with self._draws:
            self.task.backward(loss)
        gradient = torch.zeros_like(self._leaf) if self._leaf.grad is None else self._leaf.grad
        torch.autograd.backward(self._sent, gradient)
        self._sent = self._leaf = torch.empty(0)


def frame_for(frames: Frames, shapes: Shapes, device: torch.device) -> Frame:
    """Return the frame for a batch; following a step may draw, which nobody is to notice."""
    if shapes in frames:
        return frames.of(shapes)
    with Draws(device):
        return frames.of(shapes)


def receive(frames: Frames, shapes: Shapes, activation: Tensor, leaves: list[Tensor]) -> Received:
    """Return a batch as the server's half gets it."""
    frame = frame_for(frames, shapes, activation.device)
    return Received(frame, activation, frames.batch(shapes, leaves, activation.device))

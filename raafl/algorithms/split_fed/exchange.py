"""Run the steps of a task in two halves, either connected by a wire or both on one machine.

The client's half draws random numbers from the global generators like any task; the server's has its own RNG stream, so that its
draws do not depend on where it runs. Each batch is one question: the client sends the activation and the parts of the batch that
the server needs, and receives the gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten

from raafl.algorithm import Assignment, BadInput, Hook, Layout, Submodels, Task
from raafl.algorithms.split_fed.cut import (
    Half,
    Outline,
    Shapes,
    activation_in,
    cuts_of,
    run_to_cut,
    shapes_of,
    with_received_activation,
)
from raafl.core.exchange import Exchange, ServerLink, server_seed
from raafl.core.local import SkippedBatch
from raafl.errors import InvalidPayload
from raafl.submodel import SpecError
from raafl.submodel.flat import DTYPE_NAMES


@contextmanager
def _no_skips() -> Iterator[None]:
    """Return a context that raises `BadInput` if the training step skips a batch, for which the server would wait forever."""
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

    is_transferred: ClassVar[bool] = True  # the client's batch transfer hooks have run already

    outline: Outline
    activation: Tensor
    batch: object

    def loss(self, task: Task, index: int) -> Tensor:
        """Compute the loss of the server's half; its backward pass ends at the activation."""
        # clone: the next layer may change its input in place, which autograd forbids for a leaf tensor
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
        dtype = DTYPE_NAMES.get(activation.dtype, str(activation.dtype))
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
        """Create the random stream of the server's half; ``half`` is the server's half of the model."""
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


KEY = "split"
"""Key in `Work.extra` of the cut and of the numbers and sizes of the batches that are exchanged."""

MAX_SIZE, MAX_TIMES = 4096, 16
"""Limit on sizes that only the client knows, absolute and as a multiple of the example batch's, whichever is larger: the server
traces a step of that size, which may loop over it."""


@dataclass(frozen=True, eq=False)
class Halves(Exchange):
    """Both halves of a model, and the messages between them during a task.

    For each batch, the client sends the activation at the cut, and the server answers with its gradient.
    """

    client: Half
    server: Half

    def questions(self, assignment: Assignment, link: ServerLink) -> Batches:
        """Return an iterable over the batches that the client sends during a task; the first one has arrived on return."""
        return Batches(self.server, assignment, link)


def halves(submodels: Submodels, path: str) -> Halves:
    """Return both halves of a model that is cut after the module at ``path``; cached.

    Raises:
        SpecError: the model cannot be cut at that module.
    """
    cuts, reason = cuts_of(submodels)
    cut = next((cut for cut in cuts if cut.path == path), None)
    if cut is None:
        raise SpecError(
            f"the model cannot be cut after '{path}': {reason or 'use one of ' + ', '.join(c.path for c in cuts)}"
        )
    return submodels.cached(
        "halves", path, lambda: Halves(Half(submodels, cut, "lower"), Half(submodels, cut, "upper"))
    )


class Batches:
    """Batches that a client sends, used in place of a data loader.

    The assignment determines how many batches come and how large they are. Any other batch is refused before a layer
    sees it.
    """

    test = None

    def __init__(self, half: Half, assignment: Assignment, link: ServerLink) -> None:
        """Read the exchange's settings from the assignment, and receive its first batch; ``half`` is the server's half."""
        terms = assignment.extra[KEY]
        self.num_samples: int = terms["num_samples"]
        self._batch_size: int = terms["batch_size"]
        self._per_epoch: int = terms["per_epoch"]
        self._total: int = terms["batches"]
        self._sends: str = terms.get("sends", "values")
        self._half, self._link = half, link
        self._index = 0
        self._shapes: Shapes = ()
        self._received = self._receive()

    def num_batches(self, batch_size: int | None = None) -> int:
        """Return the number of batches in one epoch."""
        return self._per_epoch

    @property
    def _due(self) -> int:
        """Number of samples that the next batch must have: the last batch of an epoch can be smaller."""
        return min(self._batch_size, self.num_samples - self._index % self._per_epoch * self._batch_size)

    def batches(self, *_: object, **__: object) -> Iterator[tuple[Received, int]]:
        """Yield each received batch with its number of samples.

        The gradient of a batch is sent back when the next batch is requested.
        """
        while True:
            yield self._received, self._due
            self._link.reply({"gradient": self._received.gradient.contiguous()})
            self._index += 1
            if self._index == self._total:
                return
            self._received = self._receive()

    def _receive(self) -> Received:
        tensors = self._link.hear(self._expect)
        leaves = [tensors[f"batch.{i}"] for i in self._half.cut.leaves]
        return receive(self._half, self._shapes, tensors["activation"], leaves, self._link.draws)

    def _expect(self, meta: Mapping[str, Any]) -> Layout:
        """Check a client's description of its next batch; return the layout, or raise `InvalidPayload` for another batch."""
        if meta.get("batch") != self._index:
            raise InvalidPayload("bad-json", f"expected batch {self._index}, got {str(meta.get('batch'))[:40]}")
        if meta["sends"] != self._sends:
            raise InvalidPayload("bad-json", f"the client sends {meta['sends']}, but the server merges {self._sends}")
        shapes = self._checked_shapes(meta.get("shapes"))
        try:
            outline = self._half.outline(shapes, self._link.draws).activation
        except ValueError as error:
            raise InvalidPayload("wrong-shape", str(error)) from None
        allowed = {DTYPE_NAMES[outline.dtype]: outline.dtype}
        if meta["precision"] == "bf16-mixed":
            allowed["bfloat16"] = torch.bfloat16
        dtype = allowed.get(str(meta.get("dtype")))
        if dtype is None:
            received = str(meta.get("dtype"))[:40]
            raise InvalidPayload("wrong-shape", f"the activation has dtype {received}: expected {', '.join(allowed)}")
        self._shapes = shapes
        flat = tree_flatten(self._half.example_batch)[0]
        sent = [(f"batch.{i}", shapes[i], flat[i].dtype) for i in self._half.cut.leaves]
        return Layout.pack([("activation", outline.shape, dtype), *sent])

    def _checked_shapes(self, described: object) -> Shapes:
        """Check the tensor shapes that a client describes for its next batch; raise `InvalidPayload` if they are impossible."""
        examples = shapes_of(self._half.example_batch)
        samples, due = examples[0][0] if examples[0] else 1, self._due
        if not isinstance(described, list) or len(described) != len(examples):
            raise InvalidPayload(
                "wrong-shape", f"the batch has shapes {str(described)[:80]}: expected those of {len(examples)} tensors"
            )
        for shape, example in zip(described, examples, strict=True):
            good = isinstance(shape, list) and len(shape) == len(example)
            good = good and all(type(size) is int and 0 < size < 2**31 for size in shape)
            if not good or (example and example[0] == samples and shape[0] != due):
                raise InvalidPayload(
                    "wrong-shape", f"a tensor has shape {str(shape)[:80]}: expected {[due, *example[1:]]}"
                )
            if any(n > max(MAX_SIZE, MAX_TIMES * size) for n, size in zip(shape[1:], example[1:], strict=True)):
                raise InvalidPayload(
                    "too-large", f"a tensor has shape {str(shape)[:80]}: expected about {[due, *example[1:]]}"
                )
        return tuple(tuple(shape) for shape in described)

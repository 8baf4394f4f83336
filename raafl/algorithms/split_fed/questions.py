"""Exchange activations and gradients during a task: the pair of halves, and the server's side of the exchange."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._pytree import tree_flatten

from raafl.algorithms.split_fed.cut import Shapes, cuts_of, shapes_of
from raafl.algorithms.split_fed.half import Half
from raafl.algorithms.split_fed.hooks import NAMES, Received, receive
from raafl.core.exchange import Exchange, ServerLink
from raafl.core.types import Assignment
from raafl.errors import InvalidPayload
from raafl.submodel import Layout, SpecError, Submodels

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
        """Wait for the first batch of the assignment; ``half`` is the server's."""
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
        """The number of samples in the expected batch."""
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
        """Return the layout of the expected batch; raises `InvalidPayload` if the batch's description deviates."""
        if meta.get("batch") != self._index:
            raise InvalidPayload("bad-json", f"expected batch {self._index}, got {str(meta.get('batch'))[:40]}")
        if meta["sends"] != self._sends:
            raise InvalidPayload("bad-json", f"the client sends {meta['sends']}, but the server merges {self._sends}")
        shapes = self._checked_shapes(meta.get("shapes"))
        try:
            outline = self._half.outline(shapes, self._link.draws).activation
        except ValueError as error:
            raise InvalidPayload("wrong-shape", str(error)) from None
        allowed = {NAMES[outline.dtype]: outline.dtype}
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
        """Return the shapes of the batch's tensors; raises `InvalidPayload` if they cannot be those of the expected batch."""
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

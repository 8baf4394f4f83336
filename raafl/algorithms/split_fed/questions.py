"""Exchange activations and gradients in mid-task: who has which part, and how the server answers a client's batches."""

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
"""Of `Work.extra`: the cut, and what decides how many samples of which batches come over the wire."""

MAX_SIZE, MAX_TIMES = 4096, 16
"""Largest size that only the client knows, or times the example batch's where that is more: a step may loop over it, which is
followed."""


@dataclass(frozen=True, eq=False)
class Halves(Exchange):
    """Both halves of a model: the client asks, batch by batch, for the gradient of what leaves the cut."""

    client: Half
    server: Half

    def questions(self, assignment: Assignment, link: ServerLink) -> Batches:
        """Wait for the first batch of a task, and return it and all to come."""
        return Batches(self.server, assignment, link)


def halves(submodels: Submodels, path: str) -> Halves:
    """Return both halves of a model that is cut after the module at ``path``; remembered.

    Raises:
        SpecError: it cannot be cut there.
    """
    found, reason = cuts_of(submodels)
    cut = next((cut for cut in found if cut.path == path), None)
    if cut is None:
        raise SpecError(
            f"the model cannot be cut after '{path}': {reason or 'use one of ' + ', '.join(c.path for c in found)}"
        )
    return submodels.cached(
        "halves", path, lambda: Halves(Half(submodels, cut, "lower"), Half(submodels, cut, "upper"))
    )


class Batches:
    """A client's batches as they come in, in the place of its data.

    It is known beforehand which must come, of how many samples. What is not as it must be is refused before it gets to a layer.
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
        """Return the number of samples of the next batch."""
        return min(self._batch_size, self.num_samples - self._index % self._per_epoch * self._batch_size)

    def batches(self, *_: object, **__: object) -> Iterator[tuple[Received, int]]:
        """Yield each batch as it comes, with its number of samples; when the next is asked for, send the last one's gradient."""
        while True:
            yield self._received, self._due
            self._link.reply({"gradient": self._received.gradient.contiguous()})
            self._index += 1
            if self._index == self._total:
                return
            self._received = self._receive()

    def _receive(self) -> Received:
        tensors = self._link.hear(self._expect)
        leaves = [tensors[f"batch.{place}"] for place in self._half.cut.leaves]
        return receive(self._half, self._shapes, tensors["activation"], leaves, self._link.draws)

    def _expect(self, meta: Mapping[str, Any]) -> Layout:
        """Return the layout of a batch as it must be, or refuse it."""
        if meta.get("batch") != self._index:
            raise InvalidPayload("bad-json", f"expected batch {self._index}, got {str(meta.get('batch'))[:40]}")
        if meta["sends"] != self._sends:
            raise InvalidPayload("bad-json", f"sends {meta['sends']}: the merge takes {self._sends}")
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
            found = str(meta.get("dtype"))[:40]
            raise InvalidPayload("wrong-shape", f"the activation has dtype {found}: expected {', '.join(allowed)}")
        self._shapes = shapes
        flat = tree_flatten(self._half.example_batch)[0]
        sent = [(f"batch.{place}", shapes[place], flat[place].dtype) for place in self._half.cut.leaves]
        return Layout.pack([("activation", outline.shape, dtype), *sent])

    def _checked_shapes(self, given: object) -> Shapes:
        """Return the shapes of the batch's tensors, if they may be those of the batch that is due."""
        examples = shapes_of(self._half.example_batch)
        samples, due = examples[0][0] if examples[0] else 1, self._due
        if not isinstance(given, list) or len(given) != len(examples):
            raise InvalidPayload("wrong-shape", f"shapes of {len(examples)} tensors expected, got {str(given)[:80]}")
        for shape, example in zip(given, examples, strict=True):
            good = isinstance(shape, list) and len(shape) == len(example)
            good = good and all(type(size) is int and 0 < size < 2**31 for size in shape)
            if not good or (example and example[0] == samples and shape[0] != due):
                raise InvalidPayload("wrong-shape", f"{str(shape)[:80]} in the place of {[due, *example[1:]]}")
            if any(n > max(MAX_SIZE, MAX_TIMES * size) for n, size in zip(shape[1:], example[1:], strict=True)):
                raise InvalidPayload("too-large", f"{str(shape)[:80]} in the place of {[due, *example[1:]]}")
        return tuple(tuple(shape) for shape in given)

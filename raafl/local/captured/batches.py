"""Capture the steps of batches of clients as CUDA graphs: one launch for a step of all clients.

A graph belongs to a number of clients of one submodel: their values, the optimizer's state and all sums lie at addresses that the
next batch of as many clients uses again. Steps in which clients have batches of different shapes, or some have ended, are eager
in between.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from raafl.local.captured import graphs as bounds
from raafl.local.captured.graphs import PROOFS, Graphs, Owner, Step, Watch, form_of, options_of, waits_refused
from raafl.local.captured.limits import NotCapturable, Rates, problems_of_batches, problems_of_built
from raafl.local.trainable import TrainableSubmodel

if TYPE_CHECKING:
    from raafl.local.stacked.mode import Batch


class BatchGraphs(Graphs):
    """Graphs of the steps of a number of clients in one submodel's module, and the memory at fixed addresses that they share.

    `steps` of its methods is a `raafl.local.stacked.steps.Steps`.

    Attributes:
        built: module of the submodel.
        reason: why the steps are not captured; None = they may be.
        rates: learning rates of the optimizer.
        apart: each tensor of all clients, by name.
        sums: sums of logged values, by name.
        used: steps whose graphs the present batch of clients has used.
        num_eager: number of steps that were made without a graph, to try products, to warm up, or between others.
    """

    def __init__(self, owner: Owner, built: TrainableSubmodel, num: int, masked: bool) -> None:
        super().__init__(owner)
        self.built, self._num = built, num
        found = problems_of_built(built) + problems_of_batches(built.module, masked)
        self.reason: str | None = found[0] if found else None
        self.rates = Rates(owner.device)
        self.apart: dict[str, Tensor] = {}
        self.sums: dict[str, Tensor] = {}
        self.used: dict[Step, None] = {}
        self.num_eager = 0
        self._fixed: list[Tensor] = []
        self._optimizer: Optimizer | None = None
        self._warm_ups: dict[Hashable, int] = {}  # number of eager steps so far, by shape of a batch

    def fixed(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Copy tensors to where the graphs read them, the same number each time; return these copies."""
        self._fixed = self._fixed or [torch.empty_like(one) for one in tensors]
        return [own.copy_(one) for own, one in zip(self._fixed, tensors, strict=True)]

    def own(self, optimizer: Optimizer) -> Optimizer:
        """Return the optimizer of the graphs in place of one for a new batch of clients, with its options.

        One for fewer clients, since others have ended, is returned as it is.
        """
        if any(len(p) != self._num for group in optimizer.param_groups for p in group["params"][:1]):
            return optimizer
        if self._optimizer is None:
            self._optimizer = optimizer
        for group, fresh in zip(self._optimizer.param_groups, optimizer.param_groups, strict=True):
            group.update({name: value for name, value in fresh.items() if name != "params"})
        self._optimizer.state.clear()
        self._is_bound = False
        self.used.clear()
        return self._optimizer

    def run(self, steps: Any, optimizer: Optimizer, batch: Batch, index: int) -> None:
        """Make one step of all clients: eagerly at first, then by its graph."""
        if batch.num != self._num or len(batch.kinds) > 1:
            self._eager(steps, optimizer, batch, index)
            return
        columns, form = batch.stacked(range(batch.num))
        shape = batch.sizes[0], repr(form), form_of(columns)
        key = shape, bool(optimizer.state), options_of(optimizer)
        given = [x for x in columns if isinstance(x, Tensor)]
        step = self._step_of(key, shape, given, lambda fixed: FixedBatch(batch, columns, form, fixed))
        if step.graph is None:
            warm_ups = self._warm_ups.get(shape, -1)
            if warm_ups < bounds.WARM_UPS:
                self._warm_ups[shape] = warm_ups + 1
                self._warm_up(steps, optimizer, step, index, tries=warm_ups < 0)
                return
            self._capture(steps, optimizer, step, index)
        for kind, clients in batch.kinds.items():
            steps.seen[kind].update(clients)
        self._replay(steps, optimizer, step)

    def _eager(self, steps: Any, optimizer: Optimizer, batch: Any, index: int) -> None:
        steps.make_step(optimizer, batch, index)
        self._is_bound = False
        self.num_eager += 1

    def _warm_up(self, steps: Any, optimizer: Optimizer, step: Step, index: int, *, tries: bool) -> None:
        """Make a step eagerly; raise if it waits for the GPU, as only the first step of a shape may (``tries``)."""
        with self._owner.beside(), ExitStack() as checks:
            if not tries:
                checks.enter_context(waits_refused())
                checks.enter_context(Watch())
            self._eager(steps, optimizer, step.batch, index)
        step.said = steps.logged.said
        if any(isinstance(state, Tensor) for state in steps.states):
            raise NotCapturable("clients draw random numbers of their own")

    def _capture(self, steps: Any, optimizer: Optimizer, step: Step, index: int) -> None:
        """Record a step as a CUDA graph, which computes nothing, and undo the changes that this made to Python counters."""
        self._count_capture()
        self._bind(optimizer)
        logged, graph, is_first = steps.logged, torch.cuda.CUDAGraph(), not optimizer.state
        logged.begin(step.said)
        counts = logged.counts()
        with self._recording(graph):
            steps.make_step(optimizer, step.batch, index)
            step.state = self._state.keep(optimizer)
        if logged.said != step.said:
            raise NotCapturable("training_step logs other values than before")
        step.graph = graph
        logged.restore(counts)
        if is_first:
            optimizer.state.clear()
        self._is_bound = False

    def _bind(self, optimizer: Optimizer) -> None:
        if not self._is_bound:
            self._state.bind(optimizer)
            self._is_bound = True

    def _replay(self, steps: Any, optimizer: Optimizer, step: Step) -> None:
        """Make a step by replaying its CUDA graph, and update the Python counters that a graph cannot change."""
        self.rates.refresh(optimizer)
        self._bind(optimizer)
        steps.logged.begin(step.said)
        steps.logged.count(range(self._num), step.said)
        self._launch(step, optimizer)
        self.used[step] = None

    @property
    def unproven(self) -> list[Step]:
        """Steps of the present batch of clients whose graphs are to be compared with eager ones once more."""
        return [step for step in self.used if step.proofs < PROOFS]

    def forget(self, reason: str) -> None:
        """Train eagerly from now on, and release the graphs and their memory."""
        self.reason, self._optimizer = reason, None
        for memory in (
            self._steps,
            self._batches,
            self._warm_ups,
            self.apart,
            self.sums,
            self.used,
            self._state.tensors,
        ):
            memory.clear()
        self._fixed.clear()


class FixedBatch:
    """The batches of all clients in a step, as tensors at addresses that stay; stands in for a `Batch`."""

    def __init__(self, like: Batch, columns: list[Any], form: Any, fixed: list[Tensor]) -> None:
        """Store a batch like another, of whose ``columns`` those with tensors are the ``fixed`` ones."""
        self.kinds, self.num, self.sizes, self._form, left = like.kinds, like.num, like.sizes, form, iter(fixed)
        self._columns = [next(left) if isinstance(x, Tensor) else x for x in columns]

    def stacked(self, clients: Iterable[int]) -> tuple[list[Any], Any]:
        """Return the stacked tensors of all clients, and the structure that rebuilds a batch from them."""
        return self._columns, self._form

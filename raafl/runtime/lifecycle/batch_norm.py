"""Compute the running statistics of static batch norm before a model is evaluated or saved (HeteroFL's sBN)."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from raafl.core.coordinator import Coordinator
from raafl.core.hooks import HookList, RunHooks
from raafl.core.types import derive_seed
from raafl.data.federated import FederatedData
from raafl.local.explain import explained
from raafl.local.record import Recorder
from raafl.local.trainable import to_device
from raafl.module_hooks import begin, move_batch
from raafl.rng import seed_everything
from raafl.runtime.lifecycle.checkpointer import AsItIs
from raafl.submodel import FULL, FlatTensors, Submodels, collect_statistics
from raafl.submodel.batch_norm import Pooling
from raafl.submodel.module_state import ModuleState
from raafl.trainer_stand_in import stage


class StaticStatistics(AsItIs):
    """Computes the running statistics of batch norm layers from the server's training data.

    The global model does not contain these statistics, so a run can be replayed and resumed without them. The samples
    are drawn with the run's seed, so the statistics of a model depend only on its parameters.
    """

    def __init__(
        self,
        submodels: Submodels,
        data: FederatedData,
        num_batches: int,
        batch_size: int,
        seed: int,
        device: torch.device | str = "cpu",
    ) -> None:
        """Draw the samples, and build the module with which their statistics are collected, if batch norm is static."""
        self._norms = Pooling(submodels.module)
        if submodels.batch_norm != "static":
            self._norms.pairs = []
        self.is_on = bool(self._norms.pairs)
        if not self.is_on:
            return
        self._lock = threading.Lock()  # evaluations may run in another thread
        self._latest: list[Tensor] | None = None
        self._of_thread = threading.local()
        self._data, self._device = data, torch.device(device)
        self._seed = derive_seed(seed, "statistics")
        rows = torch.cat([data.indices(client) for client in range(1, data.num_clients + 1)])
        order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(self._seed))
        batches = torch.split(rows[order[: num_batches * batch_size]], batch_size)
        self._rows = [batch for batch in batches if len(batch) == len(batches[0])]
        shrunk = submodels.shrink(FULL, device=device)
        self._module, self._present = shrunk.module, shrunk.present
        Recorder().attach(self._module)  # discards logged values
        self._state = ModuleState(self._module, submodels)

    def fill_(self, values: FlatTensors) -> None:
        """Compute the running statistics of a model's batch norm layers and write them into its values, in place."""
        if not self.is_on:
            return
        with self._lock:
            self._state.restore()
            self._present.copy_(values)
            seed_everything(self._seed, self._device)
            collect_statistics(self._module, enumerate(self._rows), self._run)
            self._latest = [tensor.clone() for tensor in self._statistics(self._present)]
            self._of_thread.latest = self._latest
            self._put(values, self._latest)

    @contextmanager
    def filled(self, values: FlatTensors, *, anew: bool) -> Iterator[None]:
        """Return a context in which a model's values contain the running statistics of its batch norm layers."""
        with self.untouched(values):
            if anew or (self.is_on and self._latest is None):
                self.fill_(values)
            elif self.is_on:
                self._put(values, self._latest)
            yield

    @contextmanager
    def measured(self, values: FlatTensors) -> Iterator[None]:
        """Return a context in which an evaluated model's values contain the batch norm statistics used in its evaluation.

        They are the statistics that this thread computed last, since another thread may evaluate another model.
        """
        with self.untouched(values):
            if self.is_on:
                self._put(values, self._of_thread.latest)
            yield

    def untouched(self, values: FlatTensors) -> AbstractContextManager[None]:
        """Return a context that restores the running statistics of batch norm in ``values`` when it ends.

        It does nothing unless these statistics are computed on the server (``batch_norm: static``).
        """
        return self._norms.untouched(values)

    def hooks(self, *hooks: RunHooks) -> HookList:
        """Return the observers as one, which get models with these statistics."""
        return StatisticsHookList(self, *hooks)

    def _run(self, module: nn.Module, numbered: tuple[int, Tensor]) -> None:
        index, rows = numbered
        stage(module, "training")
        batch = move_batch(module, self._data.fetch(rows), self._device, to_device)
        with explained(module, "training_step without gradients, to collect static batch norm,", batch):
            if index == 0:
                begin(module, batch)
            module.training_step(batch, index)  # type: ignore[operator]

    def _statistics(self, values: FlatTensors) -> list[Tensor]:
        means, variances = self._norms.statistics_in(values)
        return [*means, *variances]

    def _put(self, values: FlatTensors, latest: list[Tensor] | None) -> None:
        for tensor, found in zip(self._statistics(values), latest or [], strict=True):
            tensor.copy_(found)


class StatisticsHookList(HookList):
    """List of observers that get models with the running statistics of batch norm, so that they save complete models."""

    def __init__(self, statistics: StaticStatistics, *hooks: RunHooks) -> None:
        """Create a hook that calls all ``hooks`` in order, with models whose batch norm statistics it has filled in."""
        super().__init__(*hooks)
        self._filler = statistics

    def on_values(self, version: int, metrics: Mapping[str, float], values: FlatTensors) -> None:
        """Call each observer with values that contain the batch norm statistics of this model; see `RunHooks.on_values`."""
        with self._filler.measured(values):
            super().on_values(version, metrics, values)

    def on_checkpoint(self, coordinator: Coordinator, version: int, clock: dict[str, Any]) -> None:
        """Call each observer for a checkpoint, which contains batch norm statistics; see `RunHooks.on_checkpoint`.

        At the end of a run the statistics are computed for the final model; earlier checkpoints contain the statistics of
        the last evaluated model.
        """
        with self._filler.filled(coordinator.state.values, anew=coordinator.finished is not None):
            super().on_checkpoint(coordinator, version, clock)

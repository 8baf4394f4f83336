"""Static batch norm on the server: running statistics collected for models that are measured or saved (HeteroFL's sBN)."""

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
from raafl.local.record import Recorder
from raafl.local.rng import seed_everything
from raafl.local.trial import explained
from raafl.module_hooks import begin, transferred
from raafl.submodel import FULL, FlatTensors, Submodels, collect_statistics
from raafl.submodel.batch_norm import Pooling
from raafl.submodel.module_state import ModuleState
from raafl.submodel.nested_batch import to_device
from raafl.trainer_stand_in import stage


class StaticStatistics:
    """Collects running statistics from the server's own view of the training data; see docs/submodels.md.

    The global state never has them, so that a run replays and resumes the same whatever was measured. Always the same
    samples are drawn, from the run's seed; a model's statistics depend on its values alone.
    """

    def __init__(
        self, submodels: Submodels, data: FederatedData, num_batches: int, batch_size: int, seed: int,
        device: torch.device | str = "cpu",
    ) -> None:  # fmt: skip
        """Build the module that collects, if batch norm is static and there is any; else do nothing ever.

        ``num_batches`` is the most that are drawn: there are no more than one epoch has.
        """
        self._norms = Pooling(submodels.module)
        if submodels.batch_norm != "static":
            self._norms.pairs = []
        self.is_on = bool(self._norms.pairs)
        if not self.is_on:
            return
        self._lock = threading.Lock()  # evaluations may have a thread of their own
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
        Recorder().attach(self._module)  # what is logged goes nowhere
        self._state = ModuleState(self._module, submodels)

    def fill_(self, values: FlatTensors) -> None:
        """Set the running statistics in ``values``, of the whole model, to those that its parameters have."""
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
        """Within this context ``values`` has running statistics: ``anew`` its own, else those last collected, at no cost."""
        with self.untouched(values):
            if anew or (self.is_on and self._latest is None):
                self.fill_(values)
            elif self.is_on:
                self._put(values, self._latest)
            yield

    @contextmanager
    def measured(self, values: FlatTensors) -> Iterator[None]:
        """Within this context ``values``, which this thread has just measured, has the statistics collected for that.

        The last collected by any thread may be others: at the end the server collects the final model's while the thread of
        evaluations measures an earlier one.
        """
        with self.untouched(values):
            if self.is_on:
                self._put(values, self._of_thread.latest)
            yield

    def untouched(self, values: FlatTensors) -> AbstractContextManager[None]:
        """Return a context after which ``values`` has the running statistics that it had before, if they are static."""
        return self._norms.untouched(values)

    def _run(self, module: nn.Module, numbered: tuple[int, Tensor]) -> None:
        index, rows = numbered
        stage(module, "training")
        batch = transferred(module, self._data.fetch(rows), self._device, to_device)
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
    """Hooks that are given models with static running statistics when they save them."""

    def __init__(self, statistics: StaticStatistics, *hooks: RunHooks) -> None:
        """Pass on to ``hooks``."""
        super().__init__(*hooks)
        self._filler = statistics

    def on_values(self, version: int, metrics: Mapping[str, float], values: FlatTensors) -> None:
        """Pass it on with the statistics that were collected to measure these values."""
        with self._filler.measured(values):
            super().on_values(version, metrics, values)

    def on_checkpoint(self, coordinator: Coordinator, version: int, clock: dict[str, Any]) -> None:
        """Pass it on, with the final model's own statistics; until then with the last model's that was measured."""
        with self._filler.filled(coordinator.state.values, anew=coordinator.finished is not None):
            super().on_checkpoint(coordinator, version, clock)

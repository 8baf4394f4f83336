"""Fill a run's module with values of the global model, so that it can save itself as it would in a Trainer."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from raafl.core.hooks import HookList, RunHooks
from raafl.local.evaluate import LivingMetrics
from raafl.runfolder import checkpoints as checkpoint
from raafl.submodel import FlatTensors
from raafl.submodel.cut.layers import persistent_buffers


class AsItIs:
    """The global model's values as they are, for evaluations and files: nothing has to be computed for these."""

    def fill_(self, values: FlatTensors) -> None:
        """Leave the values as they are."""

    def filled(self, values: FlatTensors, *, anew: bool) -> AbstractContextManager[None]:
        """Return a context that changes nothing."""
        return nullcontext()

    def untouched(self, values: FlatTensors) -> AbstractContextManager[None]:
        """Return a context that changes nothing."""
        return nullcontext()

    def hooks(self, *hooks: RunHooks) -> HookList:
        """Return the observers as one."""
        return HookList(*hooks)


States = Mapping[str, Mapping[str, Any]]


class SavedForm:
    """Source of what a checkpoint holds of a module: its own `state_dict` and `on_save_checkpoint`, with given values.

    The module itself stays as it was at the start, since submodels are cut from it.
    """

    def __init__(self, module: nn.Module, living: Callable[[], States] = dict) -> None:
        """Wrap the run's module, which decides the form in which values are saved; ``living``: states of its metrics."""
        self.module, self.living = module, living
        self._tensors: dict[str, Tensor] = {**dict(module.named_parameters()), **persistent_buffers(module)}
        self._metrics = LivingMetrics(module)
        self._lock = threading.Lock()  # the best model may be saved in the thread of evaluations

    def contents(
        self,
        version: int,
        values: FlatTensors,
        raafl: Mapping[str, Any] | None = None,
        left_out: Callable[[str], None] | None = None,
    ) -> dict[str, Any]:
        """Return the contents of a checkpoint file; see `raafl.runfolder.checkpoints.contents`.

        `left_out`: function that is called with a sentence about each part that cannot be saved; None = log it once.
        """
        values = values.to("cpu")
        with self.filled(values):
            return checkpoint.contents(
                version,
                self.module.state_dict(),
                module=self.module,
                raafl=raafl,
                values=dict(values.items()),
                left_out=left_out,
            )

    @contextmanager
    def filled(self, values: FlatTensors) -> Iterator[nn.Module]:
        """Return a context in which the module has these values, without copies, and the present states of its metrics."""
        with self._lock:
            own = [(self._tensors[name], self._tensors[name].data, value) for name, value in values.items()]
            before = {path: dict(vars(self.module.get_submodule(path))) for path in self.living()}
            try:
                self._metrics.load(self.living())
                for tensor, _, value in own:
                    tensor.data = value
                with torch.no_grad():
                    yield self.module
            finally:
                for tensor, data, _ in own:
                    tensor.data = data
                for path, attributes in before.items():
                    vars(self.module.get_submodule(path)).update(attributes)

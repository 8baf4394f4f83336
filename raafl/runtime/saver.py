"""Checkpoints of a run, written from snapshots while it goes on."""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from torch import nn

from raafl.core import saving
from raafl.core.coordinator import Coordinator
from raafl.runtime import checkpoint
from raafl.runtime.hooks import Hooks
from raafl.runtime.record import RunRecord
from raafl.submodel import FlatTensors


class Saver(Hooks):
    """Writes checkpoints from snapshots, in a thread of its own."""

    def __init__(self, folder: Path, module: nn.Module, keep: int, runtime: str, record: RunRecord) -> None:
        """Write to ``folder``/checkpoints; ``module`` is asked for its hyper-parameters only."""
        self._folder, self._module, self._keep = folder, module, keep
        self._runtime, self._record = runtime, record
        self._writer = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint")
        self._last: Future[Path] | None = None

    def on_checkpoint(self, coordinator: Coordinator, version: int, clock: dict[str, Any]) -> None:
        """Copy the state and write it; waits for the one before, so that at most one copy is held."""
        self.wait()
        values = coordinator.state.values.clone()
        section = {
            "runtime": self._runtime,
            "finished": coordinator.finished,
            "coordinator": saving.save(coordinator),
            "record": self._record.save(),
            "clock": clock,
        }
        self._last = self._writer.submit(self._write, version, values, section)

    def _write(self, version: int, values: FlatTensors, section: dict[str, Any]) -> Path:
        named = with_ties(self._module, values)
        return checkpoint.save(self._folder, version, named, module=self._module, raafl=section, keep_last=self._keep)

    def wait(self) -> Path | None:
        """Return the path of the last checkpoint once it is written."""
        return self._last.result() if self._last is not None else None

    def close(self) -> None:
        """Finish writing."""
        try:
            self.wait()
        finally:
            self._writer.shutdown()


def with_ties(module: nn.Module, values: FlatTensors) -> dict[str, torch.Tensor]:
    """Return ``values`` under every name of the module's state dict; tied parameters appear under each of theirs."""
    owners: dict[int, str] = {}
    named: dict[str, torch.Tensor] = {}
    flat = dict(values.items())
    for name, tensor in [
        *module.named_parameters(remove_duplicate=False),
        *module.named_buffers(remove_duplicate=False),
    ]:
        owner = owners.setdefault(id(tensor), name)
        if owner in flat:
            named[name] = flat[owner]
    return named

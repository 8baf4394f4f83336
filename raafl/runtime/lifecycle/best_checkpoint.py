"""Keep the checkpoint of the model with the best value of a metric, in addition to the checkpoints for resuming."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

from raafl.config.options import Direction, ranking
from raafl.core.hooks import RunHooks
from raafl.errors import BadInput
from raafl.runfolder import checkpoints as checkpoint
from raafl.runfolder.schema import CHECKPOINTS
from raafl.runtime.lifecycle.checkpointer import cause
from raafl.runtime.lifecycle.saved_form import SavedForm
from raafl.submodel import FlatTensors

NAME: Final = "best.ckpt"
_log = logging.getLogger(__name__)


class BestCheckpoint(RunHooks):
    """Observer that writes `checkpoints/best.ckpt` whenever an evaluated model is better than all earlier ones.

    `best`: version, metric and value of the stored model, for the summary; None = no model is stored yet.
    """

    def __init__(
        self, folder: Path, form: SavedForm, metric: str | None, warn: Callable[[str], None] = _log.warning
    ) -> None:
        """Continue from the checkpoint in the folder, if a run is resumed.

        `metric`: METRIC, METRIC:min or METRIC:max; without min or max as the name says. None = keep none.
        """
        self._folder, self._form, self._warn = folder, form, warn
        self._metric: str | None = None
        self._mode: Direction | None = None
        if metric is not None:
            self._metric, self._mode = ranking(metric)
        self.best: dict[str, Any] | None = self._found() if metric is not None else None
        self._warned = False

    def on_values(self, version: int, metrics: Mapping[str, float], values: FlatTensors) -> None:
        """Store the model if it is better than the stored one; see `RunHooks.on_values`."""
        value = metrics.get(self._metric, math.nan) if self._metric is not None else math.nan
        if not math.isfinite(value) or not self._is_better(value):
            return
        found = {"version": version, "metric": self._metric, "value": value}
        try:
            own = FlatTensors.empty(values.layout).copy_(values)  # hooks of the module may change what they get
            checkpoint.write(self._folder, self._form.contents(version, own, {"best": found}), name=NAME)
        except Exception as error:  # torch.save wraps what the disk says in errors of its own
            if not self._warned:
                self._warned = True
                self._warn(
                    f"the best checkpoint, of version {version}, cannot be written: {cause(error)}; the one before stays"
                )
            return
        self.best = found

    def _is_better(self, value: float) -> bool:
        if self.best is None:
            return True
        before = float(self.best["value"])
        return value < before if self._mode == "min" else value > before

    def _found(self) -> dict[str, Any] | None:
        path = self._folder / CHECKPOINTS / NAME
        if not path.is_file():
            return None
        try:
            found = checkpoint.load(path).raafl["best"]
            kept = {"version": int(found["version"]), "metric": str(found["metric"]), "value": float(found["value"])}
        except (BadInput, KeyError, TypeError, ValueError):  # damaged: the next that is measured takes its place
            return None
        return kept if kept["metric"] == self._metric else None

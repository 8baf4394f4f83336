"""Keep the checkpoint of the model with the best value of a metric, in addition to the checkpoints for resuming."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

from raafl.config.targets import ranking
from raafl.core.hooks import RunHooks
from raafl.errors import BadInput
from raafl.runfolder import checkpoint_reader
from raafl.runfolder import checkpoints as checkpoint
from raafl.runfolder.schema import CHECKPOINTS
from raafl.runtime.lifecycle.checkpointer import cause
from raafl.submodel import FlatTensors

if TYPE_CHECKING:
    from raafl.runtime.run import Run

NAME: Final = "best.ckpt"


class BestCheckpoint(RunHooks):
    """Observer that writes `checkpoints/best.ckpt` whenever an evaluated model is better than all earlier ones.

    `best`: version, metric and value of the stored model, for the summary; None = no model is stored yet.
    """

    def __init__(self, run: Run) -> None:
        """Read metric and direction from the setting ``keep_best``: METRIC (whose name decides), METRIC:min or METRIC:max."""
        self._run, self._warned = run, False
        self._metric, self._mode = ranking(str(run.parts.experiment.keep_best))
        self.best: dict[str, Any] | None = None

    def opened(self) -> None:
        """Continue from the checkpoint in the folder, if the run is resumed."""
        self.best = self._found()

    def on_values(self, version: int, metrics: Mapping[str, float], values: FlatTensors) -> None:
        """Store the model if it is better than the stored one; see `RunHooks.on_values`."""
        value = metrics.get(self._metric, math.nan)
        if not math.isfinite(value) or not self._is_better(value):
            return
        found = {"version": version, "metric": self._metric, "value": value}
        try:
            # write a copy, since the module's hooks may change the values
            own = FlatTensors.empty(values.layout).copy_(values)
            checkpoint.write(self._run.folder, self._run.saved_form.contents(version, own, {"best": found}), name=NAME)
        except Exception as error:  # torch.save may wrap disk errors in other exceptions
            if not self._warned:
                self._warned = True
                self._run.progress.warn(
                    f"the best checkpoint, of version {version}, cannot be written: {cause(error)}; the one before stays"
                )
            return
        self.best = found

    def end(self, summary: dict[str, Any]) -> None:
        """Add version, metric and value of the stored model to the summary."""
        summary["best"] = self.best

    def _is_better(self, value: float) -> bool:
        if self.best is None:
            return True
        before = float(self.best["value"])
        return value < before if self._mode == "min" else value > before

    def _found(self) -> dict[str, Any] | None:
        path = self._run.folder / CHECKPOINTS / NAME
        if not path.is_file():
            return None
        try:
            found = checkpoint_reader.load(path).raafl["best"]
            kept = {"version": int(found["version"]), "metric": str(found["metric"]), "value": float(found["value"])}
        except (BadInput, KeyError, TypeError, ValueError):  # a damaged file, which the next evaluated model replaces
            return None
        return kept if kept["metric"] == self._metric else None

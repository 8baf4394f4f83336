"""Keep the checkpoint of the model with the best value of a metric, in addition to the checkpoints for resuming."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from pathlib import Path
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
ROLLED_BACK: Final = "rolled_back"


class BestCheckpoint(RunHooks):
    """Observer that writes `checkpoints/best.ckpt` whenever an evaluated model is better than all earlier ones.

    A resumed run on the wall clock has undone the merges after its checkpoint, a simulation that goes on from before its end
    the merge of the rest at that end. A stored model of one of these stays, since no other is as good, but its file and the
    summary say that it was rolled back: its version may name another model now.

    `best`: version, metric and value of the stored model, for the summary; None = no model is stored yet.
    """

    def __init__(self, run: Run) -> None:
        """Read metric and direction from the setting ``keep_best``: METRIC (whose name decides), METRIC:min or METRIC:max."""
        self._run, self._warned = run, False
        self._metric, self._mode = ranking(str(run.parts.experiment.keep_best))
        self.best: dict[str, Any] | None = None
        self._newest = math.inf  # last version that a stored model may have, unless it was rolled back
        self._repeats = False  # whether the run comes to most of its rolled back versions again

    def begin(self, run: Run, saved: Any = None) -> None:
        """Store from which version the run goes on, if it may not come to the same later versions again."""
        if saved is not None and (saved.restarts or saved.undone is not None):
            self._newest = saved.section["coordinator"]["version"]
            self._repeats = not saved.restarts

    def opened(self) -> None:
        """Continue from the checkpoint in the folder, if the run is resumed."""
        self.best = self._found()
        if self.best is not None and self.best["version"] > self._newest and not self.best.get(ROLLED_BACK):
            self.best[ROLLED_BACK] = True
            if not self._repeats:
                self._run.progress.warn(
                    f"{CHECKPOINTS}/{NAME} is of version {self.best['version']}, which was rolled back: it stays until the "
                    f"{self._metric} of a later one is as good"
                )
            content = checkpoint_reader.load_plain(self._path)
            content["raafl"]["state"]["best"] = self.best
            self._write(self.best["version"], lambda: content)

    def on_values(self, version: int, metrics: Mapping[str, float], values: FlatTensors) -> None:
        """Store the model if it is better than the stored one; see `RunHooks.on_values`."""
        value = metrics.get(self._metric, math.nan)
        if not math.isfinite(value) or not self._is_better(value):
            return
        found = {"version": version, "metric": self._metric, "value": value}

        def contents() -> dict[str, Any]:
            # of a copy, since the module's hooks may change the values
            own = FlatTensors.empty(values.layout).copy_(values)
            return self._run.saved_form.contents(version, own, {"best": found})

        if self._write(version, contents):
            self.best = found

    def _write(self, version: int, contents: Callable[[], dict[str, Any]]) -> bool:
        """Write the stored model; return whether that worked, and warn of the first time that it did not."""
        try:
            checkpoint.write(self._run.folder, contents(), name=NAME)
        except Exception as error:  # torch.save may wrap disk errors in other exceptions
            if not self._warned:
                self._warned = True
                self._run.progress.warn(
                    f"the best checkpoint, of version {version}, cannot be written: {cause(error)}; the one before stays"
                )
            return False
        return True

    def end(self, summary: dict[str, Any]) -> None:
        """Add version, metric and value of the stored model to the summary."""
        summary["best"] = self.best

    def _is_better(self, value: float) -> bool:
        if self.best is None:
            return True
        before = float(self.best["value"])
        if value == before:
            return ROLLED_BACK in self.best
        return value < before if self._mode == "min" else value > before

    @property
    def _path(self) -> Path:
        folder: Path = self._run.folder
        return folder / CHECKPOINTS / NAME

    def _found(self) -> dict[str, Any] | None:
        if not self._path.is_file():
            return None
        try:
            found = checkpoint_reader.load(self._path).raafl["best"]
            kept = {"version": int(found["version"]), "metric": str(found["metric"]), "value": float(found["value"])}
            kept |= {ROLLED_BACK: True} if found.get(ROLLED_BACK) is True else {}
        # a damaged file, which the next evaluated model replaces
        except (BadInput, KeyError, TypeError, ValueError, AttributeError):
            return None
        return kept if kept["metric"] == self._metric else None

"""Write checkpoints of a run in the background, in the form in which its module would save itself in a Trainer."""

from __future__ import annotations

import logging
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from raafl.core import saving
from raafl.core.coordinator import Coordinator
from raafl.core.hooks import HookList, RunHooks
from raafl.errors import USER_ERRORS, BadInput
from raafl.local.evaluate import LivingMetrics
from raafl.runfolder import checkpoints as checkpoint
from raafl.runfolder.record import RunRecord
from raafl.runfolder.schema import Sealed
from raafl.submodel import FlatTensors
from raafl.submodel.cut.layers import persistent_buffers
from raafl.units import size


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


_log = logging.getLogger(__name__)


class Checkpointer(RunHooks):
    """Observer that writes checkpoints on a thread of its own.

    If writing fails, the run goes on: the error is reported, the previous checkpoint stays, and later ones are tried.

    `num_failed`: number of failed checkpoints since the last one that succeeded.
    """

    def __init__(
        self,
        folder: Path,
        form: SavedForm,
        keep: int,
        runtime: str,
        record: RunRecord,
        *,
        every_s: float | None = None,
        warn: Callable[[str], None] = _log.warning,
        clock: Callable[[], float] = time.monotonic,
        written: Callable[[], None] = lambda: None,
    ) -> None:
        """Start the thread that writes checkpoints into ``folder``/checkpoints.

        `every_s`: seconds of ``clock`` from a written checkpoint until the next is due; None = never due.
        """
        self._written = written
        self._folder, self._form, self._keep = folder, form, keep
        self._runtime, self._record, self._warn = runtime, record, warn
        self._every_s, self._clock, self._saved_s = every_s, clock, clock()
        self._writer = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint")
        self._last: Future[Path | None] | None = None
        self._warned = False
        self.num_failed = 0

    def checkpoint_due(self) -> bool:
        """Check whether it is time for a checkpoint: the last one is written, and the interval since then has passed."""
        if self._every_s is None or self._clock() - self._saved_s < self._every_s:
            return False
        return self._last is None or self._last.done()

    def on_checkpoint(self, coordinator: Coordinator, version: int, clock: dict[str, Any]) -> None:
        """Copy the state of the run and write it in the background; see `RunHooks.on_checkpoint`.

        The method waits until the previous checkpoint is written, so that memory holds at most one copy.
        """
        self.wait()
        self._saved_s = self._clock()
        books = None if self._record.folder is None else self._record.folder.sealed()
        try:
            # copy everything here, in the thread that changes it in place; the writing thread gets only the copies
            values = FlatTensors.empty(coordinator.state.values.layout).copy_(coordinator.state.values)
            section = {
                "runtime": self._runtime,
                "finished": coordinator.finished,
                "coordinator": saving.save(coordinator),
                "record": self._record.save(),
                "clock": clock,
                "metrics": {path: dict(states) for path, states in self._form.living().items()},
            }
            content = self._form.contents(version, values, section)
        except USER_ERRORS as error:
            self._failed(version, error)
            self._last = None
            return
        self._last = self._writer.submit(self._write, version, content, books)

    def _failed(self, version: int, error: BaseException) -> None:
        self.num_failed += 1
        if not self._warned:
            self._warned = True
            self._warn(
                f"the checkpoint of version {version} in {self._folder / 'checkpoints'} cannot be written: "
                f"{cause(error)}; the run goes on, and tries again at the next"
            )

    def _write(self, version: int, content: dict[str, Any], books: Sealed | None) -> Path | None:
        try:
            if books is not None:
                from raafl.runfolder.seals import sync

                sync(self._folder)  # first: after a power failure no checkpoint is newer than the journal
            path = checkpoint.write(self._folder, content, keep_last=self._keep)
        except Exception as error:  # torch.save may wrap disk errors in other exceptions
            self._failed(version, error)
            return None
        self.num_failed = 0
        if books is not None and self._record.folder is not None:
            self._record.folder.seal(books, version, [str(path.relative_to(self._folder))])
        self._written()
        return path

    def wait(self) -> Path | None:
        """Wait until the last checkpoint is written; return its path, or None if there is none or writing failed."""
        return self._last.result() if self._last is not None else None

    def close(self) -> None:
        """Finish writing the last checkpoint, and end the thread that writes."""
        self.wait()
        self._writer.shutdown()


def check_space(folder: Path, num_bytes: int, keep: int) -> None:
    """Raise `BadInput` if a disk has too little space for the checkpoints and the model of a run."""
    place = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())
    needed, free = (keep + 2) * num_bytes, shutil.disk_usage(place).free
    if free < needed:
        raise BadInput(
            f"output is '{folder}', which has {size(free)} free, but the run will write {size(needed)} or more "
            f"({keep} + 1 checkpoints and the model, {size(num_bytes)} each): free some space, name another folder, "
            "or lower keep_checkpoints"
        )


def cause(error: BaseException) -> str:
    """Describe in words the operating system's error that caused ``error``; without one, describe ``error`` itself."""
    seen: BaseException | None = error
    while seen is not None:
        if isinstance(seen, OSError) and seen.strerror:
            return seen.strerror
        seen = seen.__cause__ or seen.__context__
    return f"{type(error).__name__}: {' '.join(str(error).split())}"

"""The final model of a run, in the form in which its own library loads it.

A module with a method `save_pretrained(folder)` is written to `RUN/model` by it, and the data module's tokenizer beside it:
`transformers.AutoModel...from_pretrained("RUN/model")` reads both. Of any other module the last checkpoint is the final
model: `LightningModule.load_from_checkpoint` reads it as it is.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from raafl.core.state import GlobalState
from raafl.data.federated import FederatedData
from raafl.data.tokens import WORDS, Tokenizer, load_tokenizer
from raafl.runfolder import checkpoints as checkpoint_files
from raafl.runtime.lifecycle.checkpointer import cause, with_ties
from raafl.watch.progress import Progress

if TYPE_CHECKING:
    from lightning import LightningModule

FOLDER: Final = "model"


def save_model(
    run_folder: Path,
    checkpoint: Path | None,
    module: LightningModule,
    state: GlobalState,
    data: FederatedData,
    progress: Progress,
) -> str | None:
    """Save the final model and return where it is, relative to the run's folder; None if it is nowhere.

    A model that cannot be written (disk full, read-only) ends no run: it is reported, a folder of an earlier attempt stays
    as it was, and the last checkpoint is what there is.

    ``checkpoint`` is the last that was written, if any; ``module`` a real instance, into which the final values are
    copied. The data module's ``tokenizer`` is saved too, if it has one that transformers made.
    """
    found = None
    if callable(getattr(module, "save_pretrained", None)):
        try:
            state.submodels.load_(module, state.values)
            found = _save_pretrained(module, tokenizer_of(data.datamodule), run_folder / FOLDER)
        except Exception as error:  # libraries wrap what the disk says in errors of their own
            progress.warn(
                f"the final model cannot be written to {run_folder / FOLDER}: {cause(error)}; take it from the last "
                f"checkpoint: {type(module).__name__}.load_from_checkpoint(...).save_pretrained(...)"
            )
    if found is None and checkpoint is not None and checkpoint.stem == f"version-{state.version:06d}":
        found = checkpoint
    if found is None:
        return None
    return str(found.relative_to(run_folder))


def save_copy(run_folder: Path, module: LightningModule, state: GlobalState, progress: Progress) -> str | None:
    """Save a model that its run folder has no room for in the system's temporary folder; return its path, None if neither has.

    The training may have taken days, and the disk of the temporary folder is often another one.

    Args:
        run_folder: whose model could not be saved.
        module: asked for its hyper-parameters and the names of its tensors only.
        state: of the server at the end.
        progress: told where the copy is.
    """
    folder: Path | None = None
    try:
        folder = Path(tempfile.mkdtemp(prefix=f"{run_folder.name}-"))
        values = with_ties(module, state.values)
        path = checkpoint_files.save(folder, state.version, values, module=module)
    except Exception as error:  # as in `save_model`
        if folder is not None:
            shutil.rmtree(folder, ignore_errors=True)
        progress.warn(
            f"the final model cannot be saved in {run_folder}, nor in {tempfile.gettempdir()} ({cause(error)}): it is lost"
        )
        return None
    progress.warn(
        f"the final model cannot be saved in {run_folder}: a copy is in {path}, move it before it is cleaned up"
    )
    return str(path)


def _save_pretrained(module: Any, tokenizer: Any, target: Path) -> Path:
    with _whole(target) as folder:
        module.save_pretrained(str(folder))
        if tokenizer is not None:
            tokenizer.save_pretrained(str(folder))
    return target


def tokenizer_of(datamodule: Any) -> Any:
    """Return the data module's tokenizer if it can be saved for transformers, else None.

    That is its attribute ``tokenizer``: one of transformers', or one of raafl's that stands for one.
    """
    tokenizer = getattr(datamodule, "tokenizer", None)
    if hasattr(tokenizer, "save_pretrained"):
        return tokenizer
    if not isinstance(tokenizer, Tokenizer) or tokenizer.name == WORDS:
        return None
    return load_tokenizer(tokenizer.name)


@contextmanager
def _whole(target: Path) -> Iterator[Path]:
    """Give a folder to write to, which takes the place of ``target`` only when the block ends well.

    Raises:
        OSError: it cannot be made or written; what was at ``target`` is as it was.
    """
    for left in target.parent.glob(f".{target.name}.*.tmp"):  # by a process that was killed
        shutil.rmtree(left, ignore_errors=True)
    new, old = (target.with_name(f".{target.name}.{word}-{os.getpid()}.tmp") for word in ("new", "old"))
    try:
        new.mkdir(parents=True)
        yield new
        for file in filter(Path.is_file, new.rglob("*")):
            with file.open("rb+") as written:
                os.fsync(written.fileno())  # some file systems find out only now
        with suppress(FileNotFoundError):
            target.rename(old)
        try:
            new.rename(target)
        except OSError:
            with suppress(OSError):
                old.rename(target)
            raise
    finally:
        shutil.rmtree(new, ignore_errors=True)
        shutil.rmtree(old, ignore_errors=True)

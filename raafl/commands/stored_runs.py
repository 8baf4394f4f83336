"""Find the run folder that the user means: a path, a URL in an object store, or the last run for `--resume auto`."""

from __future__ import annotations

import atexit
import os
import shutil
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from raafl.config.argv import values, without
from raafl.errors import BadInput
from raafl.object_store import ObjectStore
from raafl.runfolder.journal import FolderLock, default_run_folder
from raafl.runfolder.schema import CHECKPOINTS, MODEL
from raafl.sanitize import is_url

AUTO = "auto"
_RESUMES = "--resume"


def run_folder(text: str) -> Path:
    """Return the local path of a run folder; a run at a URL is first copied to a temporary folder.

    Raises:
        BadInput: there is no run at the URL, or the store does not answer.
    """
    return _copied(text, tables_only=False) if is_url(text) else Path(text)


def run_tables(text: str) -> Path:
    """Return the local path of a run folder; a run at a URL is first copied, without its checkpoints and model."""
    return _copied(text, tables_only=True) if is_url(text) else Path(text)


def _copied(url: str, *, tables_only: bool) -> Path:
    large = (f"{CHECKPOINTS}/", f"{MODEL}/")
    scratch = Path(tempfile.mkdtemp(prefix="raafl-"))
    atexit.register(shutil.rmtree, scratch, ignore_errors=True)
    folder = scratch / _name(url)
    with ObjectStore.answering(url, "run") as store:
        if not store.fetch(folder, lambda name: not (tables_only and name.startswith(large))):
            raise BadInput(f"run is '{url}', but there is no run: give the URL of a run's folder")
    return folder


def with_local_resume(argv: Sequence[str]) -> list[str]:
    """Return a command's arguments with `--resume URL` or `--resume auto` replaced by `--resume FOLDER`.

    A run at a URL is copied to a new folder in `runs`, where it continues.

    `--resume auto` means the run in the folder that `--output` names. If that folder has no checkpoint, it is renamed,
    with the time as a suffix, and the run starts anew; `--resume` is then left out.

    Raises:
        BadInput: there is no run at the URL, the store does not answer, another process is writing the run that is to
            be renamed, or `--resume auto` is used without `--config` or `--output`.
    """
    named = values(argv, _RESUMES)
    if not named or not (named[-1] == AUTO or is_url(named[-1])):
        return list(argv)
    rest = without(argv, _RESUMES)
    if os.environ.get("RANK", "0") != "0":  # only rank 0 has a run folder
        return rest
    if is_url(named[-1]):
        folder = _downloaded(named[-1], _RESUMES.removeprefix("--"))
        if folder is None:
            raise BadInput(
                f"resume is '{named[-1]}', but there is no run with a checkpoint: give the URL of a run's folder"
            )
        output = [] if values(rest, "--output") else ["--output", named[-1]]
        return [*rest, _RESUMES, str(folder), *output]
    outputs = values(rest, "--output")
    if not outputs or not values(rest, "--config"):
        raise BadInput("resume is auto, which may have to start a new run: give --config and --output too")
    folder = _downloaded(outputs[-1], "output") if is_url(outputs[-1]) else _present(Path(outputs[-1]))
    return rest if folder is None else [*rest, _RESUMES, str(folder)]


def _downloaded(url: str, field: str) -> Path | None:
    """Download a stored run into the folder `runs` and return its path; None if it has no checkpoint.

    If a new run needs the name of a stored run without checkpoint, that one is renamed in the store.
    """
    with ObjectStore.answering(url, field) as store:
        names = store.names()
        if any(name.startswith(f"{CHECKPOINTS}/version-") for name in names):
            folder = default_run_folder(_name(url))
            store.fetch(folder)
            return folder
        if names and field == "output":
            store.rename(f"-{time.strftime('%Y%m%d-%H%M%S')}")
    return None


def _present(folder: Path) -> Path | None:
    if any((folder / CHECKPOINTS).glob("version-*.ckpt")):
        return folder
    if folder.is_dir() and any(folder.iterdir()):
        # raises an error if a run uses the folder, even one without a checkpoint yet
        with FolderLock(folder, "output"):
            folder.rename(folder.with_name(f"{folder.name}-{time.strftime('%Y%m%d-%H%M%S')}"))
    return None


def _name(url: str) -> str:
    """Derive a valid folder name from the last part of a URL."""
    name = url.rstrip("/").rpartition("/")[2]
    return "".join(letter if letter.isalnum() or letter in "._-" else "_" for letter in name).lstrip(".") or "run"

"""Read and write checkpoints of the global model, which `LightningModule.load_from_checkpoint` can read, too.

A file holds what Lightning looks for (`state_dict`, `hyper_parameters`, `pytorch-lightning_version`) and a section
`raafl` of plain data and tensors, from which a run resumes. It is read with `torch.load(weights_only=True)`: nothing in
it is executed.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import version as installed_version
from pathlib import Path
from typing import Any, Final

import torch
from torch import nn

from raafl.atomic_file import atomic_file
from raafl.errors import BadInput
from raafl.log import warn_once
from raafl.runfolder.schema import CHECKPOINTS

_FORMAT: Final = 1
_log = logging.getLogger(__name__)
_NAME: Final = re.compile(r"version-(\d{6,})\.ckpt")
_PLAIN: Final = (str, int, float, bool, type(None), torch.Tensor, nn.Parameter)


@dataclass(frozen=True, slots=True)
class SavedCheckpoint:
    """Content of a checkpoint file.

    ``state_dict`` is on the CPU; ``hyper_parameters`` has the module's arguments; ``raafl`` has everything else that is
    needed to resume the run.
    """

    path: Path
    version: int
    state_dict: dict[str, torch.Tensor]
    hyper_parameters: dict[str, Any]
    raafl: dict[str, Any]


def save(
    run_folder: str | os.PathLike[str],
    version: int,
    state_dict: Mapping[str, torch.Tensor] | Iterable[tuple[str, torch.Tensor]],
    *,
    module: nn.Module | None = None,
    raafl: Mapping[str, Any] | None = None,
    keep_last: int | None = None,
    name: str | None = None,
) -> Path:
    """Write `RUN_FOLDER/checkpoints/version-000123.ckpt` and return its path.

    Args:
        run_folder: folder of the run; its subfolder `checkpoints/` is created if missing.
        version: version of the global model; a checkpoint of the same version is replaced.
        state_dict: tensors of the global model by name.
        module: LightningModule whose `hparams` are stored; a value that is not plain data is left out with a warning.
        raafl: plain data (strings, numbers, None, tensors, and dicts, lists and tuples of them) for resuming.
        keep_last: number of checkpoints to keep, including this one; None = all.
        name: file name in place of the usual one, such as best.ckpt; runs are never resumed from such a file.

    Raises:
        OSError, RuntimeError: the checkpoint cannot be written; existing files stay as they were.
        TypeError: `raafl` has a value that is not plain data.
    """
    section = dict(raafl or {})
    for where, value in _not_plain(section, "raafl"):
        raise TypeError(
            f"{where} is a {type(value).__name__}, which cannot be saved in a checkpoint; convert it to plain data"
        )
    content: dict[str, Any] = {
        "pytorch-lightning_version": installed_version("lightning"),
        "epoch": 0,
        "global_step": version,
        "loops": {},
        "state_dict": {name: tensor.detach() for name, tensor in dict(state_dict).items()},
        **_hyper_parameters(module),
        "raafl": {"format": _FORMAT, "version": version, "state": section},
    }
    folder = Path(run_folder) / CHECKPOINTS
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / (name or f"version-{version:06d}.ckpt")
    with atomic_file(path) as file:
        torch.save(content, file)
    if keep_last is not None:
        _keep(folder, path, keep_last)
    return path


def load(path: str | os.PathLike[str]) -> SavedCheckpoint:
    """Read a checkpoint; `path` is a checkpoint file, or a run folder, of which the newest checkpoint is read.

    Raises:
        BadInput: there is no checkpoint at `path`, or the file cannot be read or was not written by raafl.
    """
    found = newest(path) if Path(path).is_dir() else Path(path)
    if found is None or not found.is_file():
        raise BadInput(
            f"checkpoint is {str(path)!r}, but there is none: give a version-*.ckpt file or a run folder with one"
        )
    try:
        content = torch.load(found, map_location="cpu", weights_only=True)
        section = content["raafl"]
        if (format_ := section["format"]) != _FORMAT:
            raise BadInput(
                f"checkpoint is {found} of format {format_}, but this version reads format {_FORMAT}: use the "
                "version that wrote it"
            )
        return SavedCheckpoint(
            found, section["version"], content["state_dict"], content.get("hyper_parameters", {}), section["state"]
        )
    except BadInput:
        raise
    except Exception as error:  # torch.load and a stranger's content raise errors of many types
        what = f"{type(error).__name__}: {error}".splitlines()[0]
        if type(error).__name__ == "UnpicklingError":  # torch's own words advise to run it
            what = "it holds more than tensors and plain values"
        raise BadInput(
            f"checkpoint is {found}, which is damaged or not one of raafl's ({what}): give an earlier one"
        ) from error


def newest(run_folder: str | os.PathLike[str]) -> Path | None:
    """Return the newest checkpoint of a run folder; None if there is none."""
    files = _versions(Path(run_folder) / CHECKPOINTS)
    return files[-1] if files else None


def _versions(folder: Path) -> list[Path]:
    """Return the checkpoints in `folder`, lowest version first."""
    matches = ((_NAME.fullmatch(file.name), file) for file in folder.glob("version-*.ckpt"))
    return [file for _, file in sorted((int(match[1]), file) for match, file in matches if match)]


def _keep(folder: Path, new: Path, keep_last: int) -> None:
    # The new one is kept whatever its number: after a resume, later versions of the earlier attempt may lie here.
    others = [file for file in _versions(folder) if file != new]
    for file in others[: max(0, len(others) + 1 - keep_last)]:
        with suppress(OSError):
            file.unlink()


def _hyper_parameters(module: nn.Module | None) -> dict[str, Any]:
    """Return the keys from which Lightning constructs the module."""
    hparams = dict(getattr(module, "hparams", None) or {})
    kept = {}
    for name, value in hparams.items():
        if hasattr(value, "item") and not isinstance(value, torch.Tensor):  # numpy scalars
            value = value.item()
        problems = list(_not_plain(value, name))
        if not problems:
            kept[name] = value
            continue
        warn_once(
            _log,
            f"hyper-parameter {problems[0][0]} is a {type(problems[0][1]).__name__} and is left out of the checkpoint; "
            f"pass it to load_from_checkpoint({name}=...), or call save_hyperparameters(ignore=[{name!r}])",
        )
    name = getattr(module, "_hparams_name", None)
    return {"hyper_parameters": kept} | ({"hparams_name": name} if isinstance(name, str) else {})


def _not_plain(value: Any, where: str) -> Iterable[tuple[str, Any]]:
    """Yield each place in `value` whose content `torch.load(weights_only=True)` would refuse."""
    if type(value) is dict:
        for key, item in value.items():
            yield from _not_plain(item, f"{where}.{key}") if isinstance(key, str | int) else [(f"{where}.{key}", key)]
    elif type(value) in (list, tuple):
        for index, item in enumerate(value):
            yield from _not_plain(item, f"{where}[{index}]")
    elif type(value) not in _PLAIN:
        yield where, value

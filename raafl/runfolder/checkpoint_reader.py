"""Read the checkpoints that `raafl.runfolder.checkpoints` writes.

Files may come from other people: they are read with `torch.load(weights_only=True)`, and nothing in them is executed.
"""

from __future__ import annotations

import os
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from raafl.errors import BadInput
from raafl.runfolder.checkpoints import FORMAT, newest


@dataclass(frozen=True, slots=True)
class SavedCheckpoint:
    """Content of a checkpoint file."""

    path: Path  # path of the file
    version: int  # version of the global model
    state_dict: dict[str, Any]  # as the module saves it, with tensors on the CPU
    hyper_parameters: dict[str, Any]  # arguments from which the module is constructed
    raafl: dict[str, Any]  # all else from which the run is resumed
    values: dict[str, torch.Tensor]  # global model's tensors by name


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
        content = load_plain(found)
        section = content["raafl"]
        if (format_ := section["format"]) != FORMAT:
            raise BadInput(
                f"checkpoint is {found} of format {format_}, but this version reads format {FORMAT}: use the "
                "version that wrote it"
            )
        # checkpoints of earlier versions have no section of values
        state, more = content["state_dict"], section.get("values", {})
        values = {**{name: value for name, value in state.items() if isinstance(value, torch.Tensor)}, **more}
        hyper_parameters = content.get("hyper_parameters", {})
        return SavedCheckpoint(found, section["version"], state, hyper_parameters, section["state"], values)
    except BadInput:
        raise
    except Exception as error:  # torch.load and untrusted content raise many types of error
        what = f"{type(error).__name__}: {error}".splitlines()[0]
        # torch's own message recommends loading untrusted code
        if type(error).__name__ == "UnpicklingError":
            what = "it holds more than tensors and plain values"
        raise BadInput(
            f"checkpoint is {found}, which is damaged or not one of raafl's ({what}): give an earlier one"
        ) from error


def load_plain(path: Path) -> Any:
    """Read tensors and plain values from a file of `torch.save` that somebody else may have written; nothing is executed.

    A file that would unpack to more than its own length is refused, as is the format before torch 1.6.

    Raises:
        Exception: the file is damaged, or holds anything else; torch.load raises errors of many types.
    """
    with zipfile.ZipFile(path) as archive:
        entries = archive.infolist()
        # torch.save never compresses, so another program wrote this, perhaps to fill the memory
        if any(entry.compress_type != zipfile.ZIP_STORED for entry in entries):
            raise ValueError("it is compressed")
        if sum(entry.file_size for entry in entries) > path.stat().st_size:
            raise ValueError("it unpacks to more than its own length")
    return torch.load(path, map_location="cpu", weights_only=True)

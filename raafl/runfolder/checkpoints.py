"""Write checkpoints of the global model, which `LightningModule.load_from_checkpoint` can read, too.

A file holds what Lightning looks for (`state_dict`, `hyper_parameters`, `pytorch-lightning_version`, and what the module's
`on_save_checkpoint` adds) and a section `raafl` of plain data and tensors, from which a run resumes.
"""

from __future__ import annotations

import logging
import os
import re
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from importlib.metadata import version as installed_version
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from torch import nn

from raafl.atomic_file import atomic_file
from raafl.log import warn_once
from raafl.module_hooks import overrides
from raafl.runfolder.schema import CHECKPOINTS

FORMAT: Final = 1
_log = logging.getLogger(__name__)
_NAME: Final = re.compile(r"version-(\d{6,})\.ckpt")
_PLAIN: Final = (str, int, float, bool, type(None), torch.Tensor, nn.Parameter)
_READABLE: Final = (*_PLAIN, complex, bytes, bytearray, torch.Size, torch.dtype, torch.device, torch.layout)
"""Types of single values that `torch.load(weights_only=True)` reads."""


def contents(
    version: int,
    state_dict: Mapping[str, Any] | Iterable[tuple[str, torch.Tensor]],
    *,
    module: nn.Module | None = None,
    raafl: Mapping[str, Any] | None = None,
    values: Mapping[str, torch.Tensor] | None = None,
    left_out: Callable[[str], None] | None = None,
) -> dict[str, Any]:
    """Return the contents of a checkpoint file: the module as Lightning's Trainer saves it, and raafl's own state.

    `raafl`: plain data (strings, numbers, None, tensors, and dicts, lists and tuples of them) for resuming.
    `left_out`: function that is called with a sentence about each part that is not plain data, and so is left out;
    None = log it once.

    Raises:
        TypeError: `raafl` has a value that is not plain data.
    """
    section = dict(raafl or {})
    for where, value in _not_plain(section, "raafl"):
        raise TypeError(
            f"{where} is a {type(value).__name__}, which cannot be saved in a checkpoint; convert it to plain data"
        )
    report = left_out or (lambda line: warn_once(_log, line))
    named = state_dict if isinstance(state_dict, Mapping) else dict(state_dict)
    content: dict[str, Any] = {
        "pytorch-lightning_version": installed_version("lightning"),
        "epoch": 0,
        "global_step": version,
        "loops": {},
        "state_dict": _without_graph(named),
        **_hyper_parameters(module),
    }
    if module is not None and overrides(module, "on_save_checkpoint"):
        module.on_save_checkpoint(content)  # type: ignore[operator]
    saved = _plain_state(content.pop("state_dict"), report)
    content = {name: value for name, value in content.items() if _is_kept(name, value, report)}
    content["state_dict"] = saved
    missing = {name: value for name, value in (values or {}).items() if not _is_same(saved.get(name), value)}
    content["raafl"] = {"format": FORMAT, "version": version, "state": section, "values": missing}
    return content


def write(
    run_folder: str | os.PathLike[str],
    content: Mapping[str, Any],
    *,
    keep_last: int | None = None,
    name: str | None = None,
) -> Path:
    """Write the result of `contents` to `RUN_FOLDER/checkpoints/version-000123.ckpt` and return its path.

    `keep_last`: number of checkpoints to keep, including this one; None = all.

    Raises:
        OSError, RuntimeError: the checkpoint cannot be written; existing files stay as they were.
    """
    folder = Path(run_folder) / CHECKPOINTS
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / (name or f"version-{content['raafl']['version']:06d}.ckpt")
    with atomic_file(path) as file:
        torch.save(dict(content), file)
    if keep_last is not None:
        _keep(Path(run_folder), path, keep_last)
    return path


def newest(run_folder: str | os.PathLike[str]) -> Path | None:
    """Return the newest checkpoint of a run folder; None if there is none."""
    files = versions(run_folder)
    return files[-1] if files else None


def versions(run_folder: str | os.PathLike[str]) -> list[Path]:
    """List the checkpoints of a run folder by ascending version."""
    folder = Path(run_folder) / CHECKPOINTS
    matches = ((_NAME.fullmatch(file.name), file) for file in folder.glob("version-*.ckpt"))
    return [file for _, file in sorted((int(match[1]), file) for match, file in matches if match)]


def _keep(run_folder: Path, new: Path, keep_last: int) -> None:
    # the new one stays whatever its number: the attempt before a resume may have left later versions
    others = [file for file in versions(run_folder) if file != new]
    for file in others[: max(0, len(others) + 1 - keep_last)]:
        with suppress(OSError):
            file.unlink()


def _hyper_parameters(module: nn.Module | None) -> dict[str, Any]:
    """Collect the arguments from which Lightning constructs the module, without those that are no plain values."""
    hparams = dict(getattr(module, "hparams", None) or {})
    kept = {}
    for name, value in hparams.items():
        value = value.item() if isinstance(value, np.generic) else value
        problems = list(_not_plain(value, name, _READABLE))
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


def _without_graph(state: Mapping[str, Any]) -> Mapping[str, Any]:
    """Detach a state dict's tensors from autograd, and keep the module versions that torch stores beside them."""
    found = OrderedDict(
        (name, value.detach() if isinstance(value, torch.Tensor) else value) for name, value in state.items()
    )
    if (versions := getattr(state, "_metadata", None)) is not None:
        found._metadata = versions  # type: ignore[attr-defined]
    return found


def _plain_state(state: Any, report: Callable[[str], None]) -> OrderedDict[str, Any]:
    """Copy a state dict without the entries that a checkpoint cannot store; ``report`` is called with a sentence for each."""
    found: OrderedDict[str, Any] = OrderedDict()
    for name, value in state.items():
        problems = list(_not_plain(value, str(name), _READABLE))
        if not problems:
            found[name] = value
            continue
        report(
            f"{problems[0][0]} in the state dict is a {type(problems[0][1]).__name__} and is left out of checkpoints: save plain "
            "data and tensors (get_extra_state), or give load_from_checkpoint strict=False"
        )
    versions = getattr(state, "_metadata", None)
    if versions is not None and not list(_not_plain(versions, "_metadata")):
        found._metadata = versions  # type: ignore[attr-defined]
    return found


def _is_kept(name: Any, value: Any, report: Callable[[str], None]) -> bool:
    """Check whether a checkpoint can store an entry that the module's `on_save_checkpoint` has added; report it if not."""
    problems = list(_not_plain(value, str(name), _READABLE))
    if problems:
        report(
            f"on_save_checkpoint adds {problems[0][0]}, a {type(problems[0][1]).__name__}, which is left out of checkpoints: add "
            "plain data and tensors"
        )
    return not problems and name != "raafl"


def _is_same(saved: Any, value: torch.Tensor) -> bool:
    """Check whether a state dict's tensor is the global model's own: same memory, shape, strides and dtype."""
    return (
        isinstance(saved, torch.Tensor)
        and (saved.data_ptr(), saved.dtype, saved.shape, saved.stride())
        == (value.data_ptr(), value.dtype, value.shape, value.stride())
        and saved.device == value.device
    )


def _not_plain(value: Any, where: str, types: tuple[type, ...] = _PLAIN) -> Iterable[tuple[str, Any]]:
    """Yield path and value of everything within ``value`` that `torch.load(weights_only=True)` would refuse."""
    if type(value) in (dict, OrderedDict):
        for key, item in value.items():
            yield from (
                _not_plain(item, f"{where}.{key}", types) if isinstance(key, str | int) else [(f"{where}.{key}", key)]
            )
    elif type(value) in (list, tuple):
        for index, item in enumerate(value):
            yield from _not_plain(item, f"{where}[{index}]", types)
    elif type(value) not in types:
        yield where, value

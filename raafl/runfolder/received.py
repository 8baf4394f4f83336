"""Keep the tensors that a run has received from another run, in the folder ``received/``, and read them for a replay.

These are models from a server above, and updates of clients that are federations: only the other run could compute them again.
The folder grows by a file a task, each as large as the model or what was trained of it. Only a replay reads the files, so they
may be removed at any time by whoever needs no replay; their digests stay in the journal.
"""

from __future__ import annotations

import logging
import shutil
from pathlib import Path
from typing import Final

import torch

from raafl.atomic_file import atomic_file
from raafl.errors import BadInput, cause
from raafl.log import warn_once
from raafl.runfolder.checkpoint_reader import load_plain
from raafl.runfolder.schema import RECEIVED
from raafl.submodel import FlatTensors, Layout
from raafl.units import size

_LEAVES: Final = 8
"""Space that stays free on the disk, in sizes of the tensors: a run ends well without a replay, but not without checkpoints."""
_log = logging.getLogger(__name__)


def keep_received(folder: Path, fingerprint: str, values: FlatTensors) -> None:
    """Write tensors that a run has received, and that its replay reads again; equal ones are written once."""
    path = folder / RECEIVED / f"{fingerprint}.pt"
    try:
        path.parent.mkdir(exist_ok=True)
        if path.exists():
            return
        if shutil.disk_usage(folder).free < _LEAVES * values.num_bytes:
            warn_once(
                _log,
                f"{folder / RECEIVED} gets no further files, since the disk has less than {size(_LEAVES * values.num_bytes)} left: "
                "the run goes on, but cannot be replayed",
            )
            return
        with atomic_file(path) as file:
            torch.save(dict(values.items()), file)
    except (OSError, RuntimeError) as error:
        _log.warning(f"{path} cannot be written: {error}; the run goes on, but cannot be replayed")


def load_received(folder: Path, fingerprint: str, layout: Layout) -> FlatTensors:
    """Read what `keep_received` has written.

    Raises:
        BadInput: the file is missing or damaged, or holds other tensors.
    """
    path = folder / RECEIVED / f"{fingerprint}.pt"
    if not path.exists():
        raise BadInput(
            f"'{path}' is missing, which a replay needs: it was removed, or not written for lack of space; check the records "
            "alone by `raafl audit --books_only`"
        )
    try:
        found = FlatTensors.from_named(load_plain(path), layout)
    except Exception as error:
        raise BadInput(
            f"'{path}' cannot be read ({cause(error)}): replay an unchanged copy of the run's folder"
        ) from None
    if found.fingerprint() != fingerprint:
        raise BadInput(f"'{path}' was changed: replay an unchanged copy of the run's folder")
    return found

"""Write a checkpoint in one call; in a run, one thread collects its content and another writes the file."""

from pathlib import Path
from typing import Any

from raafl.runfolder import checkpoints


def save_checkpoint(
    folder: Any, version: int, state_dict: Any, *, keep_last: int | None = None, name: str | None = None, **more: Any
) -> Path:
    """Write a checkpoint to a run folder; return its path."""
    content = checkpoints.contents(version, state_dict, **more)
    return checkpoints.write(folder, content, keep_last=keep_last, name=name)

"""Locate this user's state folder, where raafl keeps notes that outlive a run."""

from __future__ import annotations

import os
from pathlib import Path


def state_folder() -> Path:
    """Return `$XDG_STATE_HOME/raafl`, or its default in the home folder; it need not exist yet.

    Raises:
        RuntimeError: the user has no home folder.
    """
    return Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state") / "raafl"

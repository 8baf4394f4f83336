"""Find programs that other packages install."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path


def tool(name: str) -> str | None:
    """Return the path of a program beside this Python or on PATH; None if there is none.

    `make test` runs the environment's Python by its path, so its folder is not on PATH.
    """
    return shutil.which(name, path=os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")]))

"""Remember which configs this user has run, so that commands on these runs trust them without `--trust_config`.

A config may name classes of the folder in which a command runs. Whoever has run that exact text there has already run those
classes; another person's config, or one altered since, has another digest. The notes lie in the user's state folder
(`$XDG_STATE_HOME/raafl/runs`), which no run folder reaches.
"""

from __future__ import annotations

import hashlib
import json
from contextlib import suppress
from pathlib import Path

from raafl.state_folder import state_folder

_MOST = 1000
"""Notes that are kept; the oldest go first."""


def remember(config_yaml: str, run_folder: Path) -> None:
    """Record that this user has run a config in this working folder; do nothing if the record cannot be written."""
    with suppress(OSError, RuntimeError):  # read-only, or a user without a home
        note = _note(config_yaml)
        note.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        note.write_text(json.dumps({"run": str(run_folder.absolute()), "working_folder": str(Path.cwd())}) + "\n")
        notes = sorted(note.parent.glob("*.json"), key=lambda file: file.stat().st_mtime)
        for old in notes[:-_MOST]:
            old.unlink(missing_ok=True)


def is_own(config_yaml: str) -> bool:
    """Check whether this user has run exactly this config in this working folder."""
    with suppress(OSError, RuntimeError):
        return _note(config_yaml).is_file()
    return False


def _note(config_yaml: str) -> Path:
    digest = hashlib.sha256(f"{Path.cwd()}\0{config_yaml}".encode()).hexdigest()
    return state_folder() / "runs" / f"{digest[:32]}.json"

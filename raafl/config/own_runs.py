"""Remember which configs this user has run, so that commands on those runs trust them without `--trust_config`.

A config may name classes of the current folder. Whoever has run exactly this text there has already run these classes; a
changed or foreign config has another digest. The digests are stored outside all run folders, in the user's state folder
(`$XDG_STATE_HOME/raafl/runs`).
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

from raafl.atomic_file import state_folder
from raafl.plain_yaml import load_untrusted_yaml
from raafl.sanitize import is_url

_OWN: Final = re.compile(r"(raafl|raafl\.data|model_zoo)\.\w+")
"""Names that a config may have without being trusted (`raafl.config.trust`)."""
_KEPT: Final = 1000
"""Largest number of remembered configs; the oldest are deleted first."""


def remember(config_yaml: str, run_folder: Path) -> None:
    """Record that this user has run a config, so that `raafl.config.trust.is_trusted` accepts it later.

    Nothing is recorded for a config that needs no trust: one that names only classes of raafl, has no logger, and writes to
    no URL.
    """
    try:
        tree = load_untrusted_yaml(config_yaml)
        sends = is_url(tree.get("output")) or tree.get("push_to_hub") is not None
        # a logger may be a class of the user, named without class_path
        named = sends or bool(tree.get("logger")) or not all(_OWN.fullmatch(str(name)) for name in _class_paths(tree))
    except ValueError:
        named = True
    if named:
        record_run(config_yaml, run_folder)


def _class_paths(value: Any) -> Iterator[Any]:
    """Yield the value of each `class_path` field in a config, at any depth."""
    if isinstance(value, dict):
        for name, inner in value.items():
            yield from (inner,) if name == "class_path" else _class_paths(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from _class_paths(inner)


def record_run(config_yaml: str, run_folder: Path) -> None:
    """Record that this user has run a config in this working folder; do nothing if the record cannot be written."""
    with suppress(OSError, RuntimeError):  # the folder may be read-only, or the user may have no home folder
        note = _note(config_yaml)
        note.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        note.write_text(json.dumps({"run": str(run_folder.absolute()), "working_folder": str(Path.cwd())}) + "\n")
        notes = sorted(note.parent.glob("*.json"), key=lambda file: file.stat().st_mtime)
        for old in notes[:-_KEPT]:
            old.unlink(missing_ok=True)


def is_own(config_yaml: str) -> bool:
    """Check whether this user has run exactly this config in this working folder."""
    with suppress(OSError, RuntimeError):
        return _note(config_yaml).is_file()
    return False


def _note(config_yaml: str) -> Path:
    digest = hashlib.sha256(f"{Path.cwd()}\0{config_yaml}".encode()).hexdigest()
    return state_folder() / "runs" / f"{digest[:32]}.json"

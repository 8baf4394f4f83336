"""Create secret files readable by their owner alone, never overwrite them, and bind a run's secret to one run.

A secret made by `raafl key` contains a name of its own, and every client's key is derived from all of it. The first run that is
served with it records its folder's name; serving another run with it is refused. So a client's key is valid for one run,
including when that run is resumed.
"""

from __future__ import annotations

import hashlib
import os
import secrets
from contextlib import suppress
from pathlib import Path

from raafl.errors import BadInput
from raafl.state_folder import state_folder
from raafl.transport.tcp.handshake import RUN_SECRET, Secret

_NOTE = ".run"


def new_secret() -> str:
    """Return a new secret for a run, in the form of its file."""
    return f"{RUN_SECRET}{secrets.token_hex(4)}:{secrets.token_hex(32)}"


def write_new(path: str, text: str) -> None:
    """Write a secret to a new file with mode 600.

    Raises:
        BadInput: the file exists, or cannot be written.
    """
    try:
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        raise BadInput(
            f"output is '{path}', which is there already: a secret is never overwritten: name another file"
        ) from None
    except OSError as error:
        raise BadInput(f"output is '{path}', which cannot be made: {error.strerror}") from None
    with os.fdopen(file, "w", encoding="ascii") as out:
        os.fchmod(file, 0o600)
        out.write(text + "\n")


def check_run(secret: Secret, folder: Path | None) -> None:
    """Raise `BadInput` if the secret is bound to another run than the one in ``folder``; None = a new run."""
    owner = _owner(secret)
    if owner is not None and (folder is None or owner.resolve() != folder.resolve()):
        raise BadInput(
            f"secret_file is '{secret.path or 'RAAFL_SECRET'}', which is the secret of the run in '{owner}', and its clients' "
            "keys are good for that run alone: make one for this run with `raafl key --output FILE`, or go on with that run "
            "with --resume"
        )


def bind(secret: Secret, folder: Path) -> None:
    """Bind a secret to the run in ``folder``.

    Raises:
        BadInput: it is bound to another run, or the record cannot be written.
    """
    check_run(secret, folder)
    if not secret.key.startswith(RUN_SECRET.encode()):
        return
    _remember(secret, folder)
    note = _note(secret)
    if note is None or note.is_file():
        return
    try:
        note.touch(0o600)  # who can write there could have the secret serve another run
        note.write_text(f"{folder.absolute()}\n", encoding="utf-8")
    except OSError as error:
        raise BadInput(
            f"secret_file is '{secret.path}', but '{note}', which says of which run it is, cannot be written: {error.strerror}"
        ) from None


def _note(secret: Secret) -> Path | None:
    is_of_run = secret.path is not None and secret.key.startswith(RUN_SECRET.encode())
    return Path(f"{secret.path}{_NOTE}") if is_of_run else None


def _owner(secret: Secret) -> Path | None:
    """Return the run that a secret was served with, by the note beside its file, or by this user's own note of its digest."""
    if not secret.key.startswith(RUN_SECRET.encode()):
        return None
    for note in (_note(secret), _own_note(secret)):
        with suppress(OSError, RuntimeError):
            if note is not None and note.is_file():
                return Path(note.read_text(encoding="utf-8").strip())
    return None


def _remember(secret: Secret, folder: Path) -> None:
    """Note the run in the user's state folder, too: a copy of the file has no note beside it, a variable none at all."""
    with suppress(OSError, RuntimeError):  # read-only, or a user without a home
        note = _own_note(secret)
        note.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        note.write_text(f"{folder.absolute()}\n", encoding="utf-8")


def _own_note(secret: Secret) -> Path:
    return state_folder() / "secrets" / hashlib.sha256(b"raafl run\0" + secret.key).hexdigest()[:32]

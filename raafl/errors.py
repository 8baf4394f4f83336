"""The errors raafl raises for bad input, each naming the field, the value and the remedy."""

from __future__ import annotations

import difflib
import os
import sysconfig
import traceback
from collections.abc import Callable, Iterable
from dataclasses import fields
from pathlib import Path
from typing import Any, get_args

_MOST_NAMES = 24
_CLOSE = 0.6
"""Share of characters in common from which a name is a guess worth making: `init_args` and `target` have 0.53."""

_NOT_THE_USERS = (f"{Path(__file__).resolve().parent}{os.sep}", "<", f"{sysconfig.get_path('stdlib')}{os.sep}")
LONGEST = 200
"""Largest number of characters shown of an error's own message."""

USER_ERRORS = (Exception, SystemExit)
"""Errors that the user's code may raise; a `sys.exit` there would end the process without a summary."""


class BadInput(ValueError):
    """Raised for wrong input before training starts; its message is one line, meant for the user.

    Attributes:
        field: name of the config field at fault; the message then gets the line of the config file that sets the field.
            Empty = no line is added.
    """

    field: str | None = None


class RunFailed(RuntimeError):
    """Raised if a run cannot go on; its message is one line, meant for the user."""


class Replaced(RunFailed):
    """Raised in a client when another process has joined with the same id; the client must not be restarted."""


class CodeFailed(RunFailed):
    """Raised if the user's code fails in the middle of a run; its message is one line."""

    def __init__(self, text: str, traceback: str) -> None:
        super().__init__(text)
        self.traceback = traceback


class TaskFailed(CodeFailed):
    """Raised if the user's code fails in a client's task.

    `client`: id of the client whose task failed.
    `where`: description in words of the task, its submodel and the batch.
    `error`: kind, message and source line of the error, as one line.
    """

    def __init__(self, client: int, where: str, error: str, traceback: str) -> None:
        super().__init__(f"client {client}, {where}: {error}", traceback)
        self.client, self.where, self.error = client, where, error

    @property
    def kind(self) -> tuple[int, str, str]:
        """Key for counting equal failures: client, type of the error, and line of the code; the batch does not matter."""
        return self.client, self.error.partition(":")[0], self.error.rpartition("(")[2]


class GpuLost(TaskFailed):
    """Raised after an error of the GPU itself, which this process can no longer use; other processes may go on."""


class WrongReturn(RunFailed):
    """Raised if a hook of a user's own part returns a value of another type than raafl uses; its message names the hook."""


class InvalidPayload(ValueError):
    """Raised for received data that cannot be used; the sender learns of it and may go on."""

    def __init__(self, reason: str, detail: str = "") -> None:
        super().__init__(f"{reason}: {detail}" if detail else reason)
        self.reason, self.detail = reason, detail


def format_error(error: BaseException) -> str:
    """Format an error as one line: its type, its message, and the line of the user's code that raised it."""
    message = one_line(error.msg if isinstance(error, SyntaxError) else str(error))
    return f"{type(error).__name__}{': ' if message else ''}{message}{user_frame(error)}"


def cause(error: BaseException) -> str:
    """Describe an error in one line: type (left out for a `BadInput`), message, and the line of the user's code that raised it."""
    return f"{' '.join(str(error).split())}{user_frame(error)}" if isinstance(error, BadInput) else format_error(error)


def raises(call: Callable[[], object]) -> bool:
    """Check whether a call raises an exception."""
    try:
        call()
    except Exception:
        return True
    return False


def one_line(text: str, longest: int = LONGEST) -> str:
    """Return a text as one line of at most ``longest`` printable characters."""
    text = "".join(letter if letter.isprintable() else " " for letter in text[: 4 * longest])
    text = " ".join(text.split())
    return text if len(text) <= longest else text[: longest - 3] + "..."


def user_frame(error: BaseException) -> str:
    """Return the innermost file and line of the user's code in an error's traceback, as `` (FILE:LINE)``; empty if unknown."""
    places = [(frame.filename, frame.lineno) for frame in traceback.extract_tb(error.__traceback__)]
    if isinstance(error, SyntaxError) and error.filename is not None:  # a file that cannot run has no frame
        places.append((error.filename, error.lineno))
    own = [one for one in places if "site-packages" not in one[0] and not one[0].startswith(_NOT_THE_USERS)]
    if not own:
        return ""
    file, line = own[-1]
    path = Path(file)
    shown = path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path
    return f" ({shown}:{line})"


def no_utf8(error: UnicodeDecodeError) -> str:
    """Return words to put after a file's name in an error message: "is not text in UTF-8 (...)", and the remedy."""
    at = f"byte 0x{error.object[error.start]:02x} at position {error.start}"
    return f"is not text in UTF-8 ({at}): save it as UTF-8, from a spreadsheet as CSV UTF-8"


def installing(extra: str) -> str:
    """Return the pip command that installs an optional extra of raafl, such as "vision"."""
    return f"pip install '.[{extra}]' in the checkout of raafl"


def briefly(value: object) -> str:
    """Describe a value in one line for a message: a short value is printed, a long one is described by its class."""
    if isinstance(value, type):
        return f"the class {value.__name__}"
    text = repr(value)
    plain = len(text) <= 60 and "\n" not in text and " at 0x" not in text
    return text if plain else getattr(value, "__name__", "") or f"an object of {type(value).__name__}"


def nearest(name: str, known: Iterable[str], none: str = "known: ", home: str = "") -> str:
    """Return ``"did you mean 'x'?"`` for the known name closest to ``name``; without a close one, list up to 24 known names."""
    known = sorted(known)
    if not known:
        return none
    close = difflib.get_close_matches(name, known, n=1, cutoff=_CLOSE)
    if close:
        return f"did you mean '{home}{close[0]}'?"
    more = f" and {len(known) - _MOST_NAMES} more" if len(known) > _MOST_NAMES else ""
    return f"known: {', '.join(home + name for name in known[:_MOST_NAMES])}{more}"


def one_of(field: str, value: object, known: Any) -> None:
    """Raise `BadInput` unless a value is among the known names.

    Args:
        field: the field's name, for the message.
        value: the value to check.
        known: allowed names, or a `Literal` of them.
    """
    names = get_args(known) or known
    if value not in names:
        raise BadInput(f"{field} is '{value}': {nearest(str(value), names)}")


def at_least(field: str, value: float | None, least: float, *, optional: bool = False) -> None:
    """Raise `BadInput` unless a value is large enough.

    Args:
        field: the field's name, for the message.
        value: the value to check.
        least: smallest allowed value.
        optional: whether None is allowed, too.
    """
    if value is None and optional:
        return
    if value is None or not value >= least:
        raise BadInput(f"{field} is {value}: give {least} or more")


def positive(field: str, value: float | None, *, optional: bool = False) -> None:
    """Raise `BadInput` unless a value is a number above zero.

    Args:
        field: the field's name, for the message.
        value: the value to check.
        optional: whether None is allowed, too.
    """
    if value is None and optional:
        return
    if value is None or not value > 0:
        raise BadInput(f"{field} is {value}: give a number above 0")


def refuse_unused(reason: str, remedy: str = "", /, **given: tuple[object, object]) -> None:
    """Raise `BadInput` for each argument that the user has set although it has no effect."""
    unused = [f"{name} is {value}" for name, (value, default) in given.items() if value != default]
    if unused:
        names = " and ".join(text.partition(" is ")[0] for text in unused)
        other = f"{remedy}, or " if remedy else ""
        raise BadInput(f"{', '.join(unused)}, but {reason}: {other}leave out {names}, which would have no effect")


def refuse_unused_fields(section: str, options: Any, names: Iterable[str], reason: str, remedy: str) -> None:
    """Raise `BadInput` for each field of a record of options that is not at its default although it has no effect."""
    default = {f.name: f.default for f in fields(options)}
    remedy += "".join(
        f", or set {section}.{n} to {'null' if default[n] is None else default[n]}"
        for n in names
        if getattr(options, n) != default[n]
    )
    given = {f"{section}.{name}": (getattr(options, name), default[name]) for name in names}
    refuse_unused(reason, remedy, **given)


def fraction(field: str, value: float, *, zero: bool = False) -> None:
    """Raise `BadInput` unless a value is above 0 and at most 1.

    Args:
        field: the field's name, for the message.
        value: the value to check.
        zero: whether 0 is allowed, too.
    """
    if not (0 <= value <= 1) or (value == 0 and not zero):
        raise BadInput(f"{field} is {value}: give a number {'from 0 to 1' if zero else 'above 0, at most 1'}")


def parse_address(text: str) -> tuple[str, int]:
    """Split ``HOST:PORT`` into host and port; an IPv6 address is written in brackets, and port 0 means any free port.

    Raises:
        BadInput: the text has another form.
    """
    host, colon, port = text.strip().rpartition(":")
    if not colon or not host:
        raise BadInput(
            f"address is '{text}': give HOST:PORT, e.g. 127.0.0.1:29500 for this machine only or 0.0.0.0:29500 for all "
            f"of its interfaces"
        )
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    elif ":" in host:
        raise BadInput(f"address is '{text}': put an IPv6 address in brackets, e.g. [::1]:29500")
    if not (port.isascii() and port.isdigit() and int(port) < 65536):
        raise BadInput(f"address is '{text}', whose port is '{port}': give 0 to 65535")
    return host, int(port)

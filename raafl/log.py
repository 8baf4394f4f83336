"""Print the records of the logger "raafl" on the console, as long as nobody has given that logger a handler of their own.

Modules of raafl log through `logging.getLogger(__name__)`, so that whoever embeds raafl can route or silence its words with the
tools of `logging`. Two attributes of a record, given as `extra`, say how the console shows it:

- `show`: a function without arguments that prints the record itself, such as a line above a live table.
- `prefix`: begins each line on standard error; "raafl: " where it is missing.

With ``--log json``, or the environment variable `VARIABLE`, each record is a line of JSON on standard error instead.
"""

from __future__ import annotations

import json
import logging
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from functools import lru_cache
from typing import Final, Literal, get_args

LogFormat = Literal["text", "json"]
FORMATS: Final[tuple[LogFormat, ...]] = get_args(LogFormat)
VARIABLE: Final = "RAAFL_LOG"
"""Environment variable of the format, for the processes that a command starts."""


class Console(logging.Handler):
    """Logging handler that prints records on standard error; a record with a `show` function is printed by that function."""

    def emit(self, record: logging.LogRecord) -> None:
        """Print one record; do nothing if standard error is closed."""
        show = getattr(record, "show", None)
        if show is not None:
            show()
            return
        prefix = getattr(record, "prefix", "raafl: ")
        with suppress(OSError, ValueError, AttributeError):
            sys.stderr.write("".join(f"{prefix}{line}\n" for line in self.format(record).splitlines()))
            sys.stderr.flush()


class _JsonConsole(logging.Handler):
    """Logging handler that prints each record on standard error as one line of JSON in ASCII.

    Fields: time (ISO 8601, UTC), level, logger, message; also rank under torchrun, client if a client logged the
    record, and exception if there was one.
    """

    def emit(self, record: logging.LogRecord) -> None:
        """Print one record; do nothing if standard error is closed."""
        row = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        optional = {
            "rank": os.environ.get("RANK"),
            "client": getattr(record, "client", None),
            "exception": record.exc_info and logging.Formatter().formatException(record.exc_info),
        }
        row |= {name: str(value) for name, value in optional.items() if value}
        with suppress(OSError, ValueError, AttributeError):
            sys.stderr.write(json.dumps(row) + "\n")
            sys.stderr.flush()


@contextmanager
def console(kind: LogFormat = "text") -> Iterator[None]:
    """In a `with` block, print the records of the logger "raafl" on standard error, unless that logger has a handler.

    Records of level INFO and above are printed, unless the logger has its own level. Handlers of the root logger get
    the records, too.
    """
    logger = logging.getLogger("raafl")
    if logger.handlers:
        yield
        return
    handler, level = Console() if kind == "text" else _JsonConsole(), logger.level
    logger.addHandler(handler)
    logger.setLevel(level or logging.INFO)
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)


@lru_cache(1000)
def warn_once(logger: logging.Logger, text: str, private: bool = False) -> None:
    """Log a warning, unless this process has logged the same one before."""
    logger.warning(text, extra={"private": private})


def is_printed() -> bool:
    """Check whether raafl's log records are printed on the console, and not sent to other handlers or turned off."""
    logger = logging.getLogger("raafl")
    return logger.isEnabledFor(logging.INFO) and any(isinstance(handler, Console) for handler in logger.handlers)


def reports_for_all() -> bool:
    """Check whether this process reports what all ranks of torchrun find: rank 0 does, in the first attempt.

    Another attempt goes on in the run folder of the first.
    """
    return os.environ.get("RANK", "0") == "0" and os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0"


def in_notebook() -> bool:
    """Check whether this process runs a Jupyter notebook."""
    shell = sys.modules["IPython"].get_ipython() if "IPython" in sys.modules else None
    return shell is not None and hasattr(shell, "kernel")

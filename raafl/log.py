"""Print the records of the logger "raafl" on the console, as long as nobody has given that logger a handler of their own.

Modules of raafl log through `logging.getLogger(__name__)`, so that whoever embeds raafl can route or silence its words with the
tools of `logging`. Two attributes of a record, given as `extra`, say how the console shows it:

- `show`: a function without arguments that prints the record itself, such as a line above a live table.
- `prefix`: begins each line on standard error; "raafl: " where it is missing.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, Final


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


@contextmanager
def console(handler: logging.Handler | None = None) -> Iterator[None]:
    """In a `with` block, print the records of the logger "raafl" on standard error, unless that logger has a handler.

    Records of level INFO and above are printed, unless the logger has its own level. Handlers of the root logger get
    the records, too.
    """
    logger = logging.getLogger("raafl")
    if logger.handlers:
        yield
        return
    handler, level = handler or Console(), logger.level
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


def reports_for_all() -> bool:
    """Check whether this process reports what all ranks of torchrun find: rank 0 does, in the first attempt.

    Another attempt goes on in the run folder of the first.
    """
    return os.environ.get("RANK", "0") == "0" and os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0"


def in_notebook() -> bool:
    """Check whether this process runs a Jupyter notebook."""
    shell = sys.modules["IPython"].get_ipython() if "IPython" in sys.modules else None
    return shell is not None and hasattr(shell, "kernel")


_MAX_WARNINGS: Final = 100
_run_log = logging.getLogger("raafl.run")


class Notices:
    """Log what a run says, and keep its warnings; on the terminal only warnings are printed. `raafl.watch` shows more.

    `warnings`: texts of the warnings logged so far, in order.
    `stamped`: whether each line of a display begins with date and time.
    """

    stamped = False

    def __init__(self) -> None:
        self.warnings: list[str] = []

    def follow(self, writer: Any, folder: Path | None = None) -> None:
        """Show the rows that a run's ``writer`` writes from now on, after those of ``folder`` if it is given."""

    def show_executor(self, executor: Any) -> None:
        """Let ``executor`` say how it trains."""
        executor.note, executor.warn = self.note, self.warn

    def start(self, title: str) -> None:
        """Log the name of the run."""
        self._say(title, lambda: None)

    def update(self, snapshot: Any = None, evaluated: bool = False) -> None:
        """Show how far the run is."""

    def note(self, text: str) -> None:
        """Log a line of text."""
        self._say(text, lambda: None)

    def warn(self, text: str) -> None:
        """Log a warning, unless it was logged before, and keep it; callable from any thread."""
        if text in self.warnings or len(self.warnings) >= _MAX_WARNINGS:
            return
        self.warnings.append(text)
        self._say(text, partial(self._print_warning, text), logging.WARNING)

    def _print_warning(self, text: str) -> None:
        with suppress(OSError, ValueError, AttributeError):
            sys.stderr.write(f"raafl: warning: {text}\n")
            sys.stderr.flush()

    def _say(self, text: str, show: Callable[[], None], level: int = logging.INFO) -> None:
        """Log ``text``; the console calls ``show``, which prints it, in place of writing the text itself."""
        _run_log.log(level, text, extra={"show": show})

    def abandon(self) -> None:
        """Leave the terminal as it was, just before the process exits."""

    def stop(self) -> None:
        """End the display; a second call does nothing."""

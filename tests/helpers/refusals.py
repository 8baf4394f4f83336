"""Make a test of what a function refuses from a table of arguments and messages; refuse locks as some file systems do."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from typing import Any

import pytest

from raafl.errors import BadInput


def cannot_lock(*_: object) -> None:
    """Raise what `fcntl.flock` raises on a file system without locks."""
    raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))


def refuses(
    function: Callable[..., Any], *rows: tuple[dict[str, Any], str], error: type[Exception] = BadInput
) -> Callable[..., None]:
    """Return a test that ``function`` raises ``error`` for each row's keyword arguments, with a message that matches the row's."""

    @pytest.mark.parametrize(("arguments", "message"), rows)
    def test(arguments: dict[str, Any], message: str) -> None:
        with pytest.raises(error, match=message):
            function(**arguments)

    return test

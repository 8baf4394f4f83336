"""Make a test of what a function refuses, from a table of arguments and messages."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from raafl.errors import BadInput


def refuses(
    function: Callable[..., Any], *rows: tuple[dict[str, Any], str], error: type[Exception] = BadInput
) -> Callable[..., None]:
    """Return a test that each row's arguments raise an error with the row's message.

    Args:
        function: is called with the arguments by keyword.
        rows: arguments, and a regular expression that the message matches.
        error: that is raised.
    """

    @pytest.mark.parametrize(("arguments", "message"), rows)
    def test(arguments: dict[str, Any], message: str) -> None:
        with pytest.raises(error, match=message):
            function(**arguments)

    return test

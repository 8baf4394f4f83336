"""Define the base class of an algorithm's parts, which rejects misspelt overrides; they would never be called."""

from __future__ import annotations

import difflib

from raafl.errors import BadInput

_CLOSE = 0.8
"""Share of characters in common from which a name is taken for a misspelt hook: weight and weigh have 0.91."""


class Part:
    """Base class of an algorithm's five parts.

    The runtime calls only the public methods that a part's base class defines. To define another public method with
    nearly the same name as one of these is an error, since it is probably a misspelt override.
    """

    __slots__ = ()

    def __init_subclass__(cls, **more: object) -> None:
        """Raise `BadInput` for a public method whose name is almost that of a hook, and of none."""
        super().__init_subclass__(**more)
        bases = [base for base in cls.__mro__[1:] if issubclass(base, Part) and base is not Part]
        known = {name for base in bases for name in vars(base) if not name.startswith("_")}
        for name, value in vars(cls).items():
            is_method = callable(value) or isinstance(value, property | classmethod | staticmethod)
            if name.startswith("_") or name in known or not is_method:
                continue
            if close := difflib.get_close_matches(name, known, n=1, cutoff=_CLOSE):
                raise BadInput(
                    f"{cls.__name__} has a method '{name}', which nothing calls: {bases[0].__name__} has no "
                    f"'{name}', did you mean '{close[0]}'? A helper method needs another name, such as '_{name}'"
                )

"""Plain attributes of a module's parts, such as a flag that weights are rescaled for inference, as they were."""

from __future__ import annotations

from typing import Any

from torch import nn

_PLAIN = (bool, int, float, str, type(None))


class PlainAttributes:
    """The numbers, flags and texts that a module's parts have as attributes, but for ``training``.

    A model that changes its own weights for inference (RWKV divides some by powers of two) has a flag that says so: values
    that are filled in anew are right with the flag as it was when they were taken.
    """

    def __init__(self, module: nn.Module) -> None:
        """Remember those of ``module``."""
        self._before = [(part, _plain(part)) for part in module.modules()]

    def restore(self) -> None:
        """Set them again where they are other values now; what is new stays."""
        for part, before in self._before:
            now = vars(part)
            for name, value in before.items():
                if name not in now or now[name] is not value:
                    now[name] = value


def _plain(part: nn.Module) -> dict[str, Any]:
    return {name: value for name, value in vars(part).items() if type(value) in _PLAIN and name != "training"}

"""What a module's code keeps in the module beside parameters and buffers: where it changes, tasks and batches must go in turn."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from raafl.local.stacked.stacks import Unstackable

_OWN = frozenset(
    ("_parameters", "_buffers", "_modules", "_flat_weights", "_flat_weight_refs", "log", "log_dict", "training")
)


class Attributes:
    """The attributes of a module and its parts as they are now."""

    def __init__(self, module: nn.Module, but: Callable[[nn.Module], bool] = lambda part: False) -> None:
        """Note them, but for those of some parts."""
        self._module, self._but, self._before = module, but, _noted(module, but)

    def check(self) -> None:
        """Raise `Unstackable` where one of them is not what it was, or has got other members."""
        after = _noted(self._module, self._but)
        changed = {
            key for key in after.keys() | self._before.keys() if not _alike(after.get(key), self._before.get(key))
        }
        if changed:
            path, name = min(changed)
            raise Unstackable(f"the training step changes the attribute {path}{'.' * bool(path)}{name}")


def _noted(module: nn.Module, but: Callable[[nn.Module], bool]) -> dict[tuple[str, str], Any]:
    return {
        (path, name): _members(value)
        for path, part in module.named_modules()
        if not but(part)
        for name, value in vars(part).items()
        if name not in _OWN
    }


def _members(value: Any) -> Any:
    if isinstance(value, list | tuple | set | frozenset):
        return type(value), *value
    return (dict, *value, *value.values()) if isinstance(value, dict) else (value,)


def _alike(one: Any, other: Any) -> bool:
    return one is not None and other is not None and len(one) == len(other) and all(map(_is, one, other))


def _is(one: Any, other: Any) -> bool:
    return one is other

"""What a module's code keeps in the module beside parameters and buffers: where it changes, clients must be trained in turn."""

from __future__ import annotations

from typing import Any

from torch import nn

from raafl.local.stacked.stacks import Unstackable

_OWN = frozenset(
    ("_parameters", "_buffers", "_modules", "_flat_weights", "_flat_weight_refs", "log", "log_dict", "training")
)


class Attributes:
    """The attributes of a module and its parts as they are now."""

    def __init__(self, module: nn.Module) -> None:
        """Note them."""
        self._module, self._before = module, _noted(module)

    def check(self) -> None:
        """Raise `Unstackable` where one of them is not what it was, or has got other members."""
        after = _noted(self._module)
        changed = {
            key for key in after.keys() | self._before.keys() if not _alike(after.get(key), self._before.get(key))
        }
        if changed:
            path, name = min(changed)
            raise Unstackable(f"the training step changes the attribute {path}{'.' * bool(path)}{name}")


def _noted(module: nn.Module) -> dict[tuple[str, str], Any]:
    return {
        (path, name): _members(value)
        for path, part in module.named_modules()
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

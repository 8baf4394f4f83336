"""Explain where the code of a user's module fails: the layer, the shapes and the line."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from raafl.errors import USER_ERRORS, BadInput, user_frame
from raafl.submodel.nested_batch import batch_tensors


@contextmanager
def explained(module: nn.Module, method: str, batch: object = None) -> Iterator[None]:
    """Return a context that turns errors of the user's code into a `BadInput` with the layer, the shapes and the line of code.

    `batch`: batch that the method receives; None = unknown.
    """
    entered: list[tuple[str, nn.Module, Any]] = []
    handles = [handle for name, layer in module.named_modules() for handle in _watch(name, layer, entered)]
    try:
        yield
    except BadInput:
        raise
    except USER_ERRORS as error:
        raise BadInput(_line(module, method, batch, entered, error)) from error
    finally:
        for handle in handles:
            handle.remove()


def _watch(name: str, layer: nn.Module, entered: list[tuple[str, nn.Module, Any]]) -> Iterator[Any]:
    """Register hooks that keep in ``entered`` the stack of layers whose forward runs, the innermost last; yield their handles."""

    def begin(layer: nn.Module, args: object) -> None:
        entered.append((name, layer, args))

    def end(layer: nn.Module, args: object, output: object) -> None:
        entered.pop()

    yield layer.register_forward_pre_hook(begin)
    yield layer.register_forward_hook(end)


def _line(
    module: nn.Module, method: str, batch: object, entered: list[tuple[str, nn.Module, Any]], error: BaseException
) -> str:
    text = f"{type(module).__name__}.{method} fails"
    if batch is not None:
        text += f" on a batch of {shapes(batch)}"
    if entered and entered[-1][1] is not module:
        name, layer, args = entered[-1]
        text += f", where {name}, {' '.join(repr(layer).split())[:120]}, is given {shapes(args)}"
    reason = (str(error).splitlines() or [""])[0]
    text += f": {type(error).__name__}: {reason}{user_frame(error)}"
    return text + (": make the model's arguments and the data fit" if batch is not None else "")


def shapes(value: object) -> str:
    """Return the types and shapes of the tensors in ``value``, as in ``float32 (2, 64), int64 (2,)``."""
    return ", ".join(_tensors(value)) or shown(value)


def _tensors(value: object) -> Iterator[str]:
    if isinstance(value, Tensor):
        yield f"{str(value.dtype).removeprefix('torch.')} {tuple(value.shape)}"
    elif isinstance(value, Mapping):
        yield from (f"{key} {text}" for key, item in value.items() for text in _tensors(item))
    elif isinstance(value, list | tuple):
        yield from (text for item in value for text in _tensors(item))
    else:
        yield from (text for x in batch_tensors(value) for text in _tensors(x))


def shown(value: object) -> str:
    """Describe what a step has returned, for an error."""
    if isinstance(value, Tensor):
        return f"{'' if value.requires_grad else 'detached '}{shapes(value)}"
    return "nothing" if value is None else type(value).__name__

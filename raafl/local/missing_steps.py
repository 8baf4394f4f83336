"""Give a module the steps that it lacks, from those that it has."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import nn

from raafl.module_hooks import overrides

_GIVEN = "_raafl_given"


def with_methods(module: nn.Module, **methods: Any) -> object:
    """Replace methods of one module, but not of its class; `given_class` still returns the class that it had."""
    kind = type(module)
    own = {"__module__": kind.__module__, _GIVEN: given_class(module), **methods}
    module.__class__ = type(kind.__name__, (kind,), own)
    return module


def given_class(module: nn.Module) -> Any:
    """Return the original class of a module that `with_methods` may have changed."""
    return getattr(type(module), _GIVEN, type(module))


def _without_index(module: object, name: str) -> Callable[[Any, Any, int], Any]:
    step = getattr(type(module), name)
    return lambda self, batch, batch_idx: step(self, batch)


def _as_test(module: object) -> dict[str, Any]:
    """Map the validation hooks, which evaluations call, to the module's test hooks."""
    kind = type(module)
    hooks = [f"on_test_{when}" for when in ("start", "epoch_start", "batch_start", "batch_end", "epoch_end", "end")]
    found = {name: getattr(kind, name) for name in ("test_step", *hooks) if overrides(module, name)}
    return {name.replace("test", "validation"): hook for name, hook in found.items()}


def _training_loss(self: Any, batch: Any, batch_idx: int) -> dict[str, Any]:
    answer = self.training_step(batch, batch_idx)
    answer = answer["loss"] if isinstance(answer, Mapping) else answer
    return {} if answer is None else {"loss": answer}


def complete(module: Any, without: Sequence[str]) -> None:
    """Wrap the steps that take no ``batch_idx``, and let `test_step`, or else the training loss, stand in for `validation_step`.

    `without`: names of the steps without that argument.
    """
    if without:
        with_methods(module, **{name: _without_index(module, name) for name in without})
    if not overrides(module, "validation_step"):
        how = _as_test(module) if overrides(module, "test_step") else {"validation_step": _training_loss}
        with_methods(module, **how)

"""Prepare a user's module as a Trainer would: build its layers, add steps that it lacks, undo compilation."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from torch import nn

from raafl.errors import BadInput
from raafl.local.preparation.model_checks import check_tensors
from raafl.local.preparation.trial import explained
from raafl.module_hooks import overrides
from raafl.submodel.cut.copying import persistent_buffers
from raafl.trainer_stand_in import attach

STEPS = ("training_step", "validation_step", "test_step")
_GIVEN = "_raafl_given"


def prepare(module: Any) -> Any:
    """Prepare a LightningModule for training, as a Trainer would, and return it.

    Layers that the module builds in `setup` or `configure_model` are built. Steps without the argument ``batch_idx``
    are wrapped. `torch.compile` is undone, since submodels have other shapes. A module without a `validation_step` is
    evaluated by its `test_step`, or else by its training loss.

    Raises:
        BadInput: the module has no training_step, steps its optimisers itself, has a hook that fails or a parameter
            without elements, or cannot be copied and sent (`check_tensors`).
    """
    module = uncompiled(module)
    _uncompile_parts(module)
    kind = type(module).__name__
    if not overrides(module, "training_step"):
        raise BadInput(f"{kind} has no training_step: define one that returns the loss")
    if not getattr(module, "automatic_optimization", True):
        raise BadInput(
            f"{kind}.automatic_optimization is False, but raafl calls backward and the optimizer's step itself: leave it True, "
            "return the loss from training_step, and give one optimizer"
        )
    without = {name: _without_index(module, name) for name in STEPS if not _takes_index(module, name)}
    if without:
        with_methods(module, **without)
    if not overrides(module, "validation_step"):
        how = _as_test(module) if overrides(module, "test_step") else {"validation_step": _training_loss}
        with_methods(module, **how)
    attach(module)
    for hook, args in (("setup", ("fit",)), ("configure_model", ())):  # in the Trainer's order
        if overrides(module, hook):
            with explained(module, hook):
                getattr(module, hook)(*args)
    _uncompile_parts(module)  # some compile in `setup`
    check_tensors(module)
    for name, parameter in module.named_parameters():
        owner = module.get_submodule(name.rpartition(".")[0])
        # a model of one's own may have no register tokens, say
        if parameter.numel() == 0 and type(owner).__module__.startswith("torch.nn."):
            raise BadInput(
                f"{kind}.{name} is empty, {tuple(parameter.shape)}: give {repr(owner)[:80]} sizes of 1 or more"
            )
    for name, buffer in persistent_buffers(module).items():
        if (
            0 in buffer.stride() and not buffer.is_meta
        ):  # one element in several places, as of `expand`: none can be written
            path, _, own = name.rpartition(".")
            module.get_submodule(path)._buffers[own] = buffer.contiguous()
    return module


def _uncompile_parts(module: nn.Module) -> None:
    for part in module.modules():
        for name, child in part._modules.items():
            part._modules[name] = uncompiled(child)


def uncompiled(module: object) -> Any:
    """Return the original module if ``module`` was made by `torch.compile`; return other modules unchanged."""
    inner = getattr(module, "_orig_mod", None)
    return inner if isinstance(inner, nn.Module) else module


def with_methods(module: nn.Module, **methods: Any) -> object:
    """Replace methods of one module, but not of its class; `given_class` still returns the class that it had."""
    kind = type(module)
    own = {"__module__": kind.__module__, _GIVEN: given_class(module), **methods}
    module.__class__ = type(kind.__name__, (kind,), own)
    return module


def given_class(module: nn.Module) -> Any:
    """Return the original class of a module that `with_methods` may have changed."""
    return getattr(type(module), _GIVEN, type(module))


def _takes_index(module: object, name: str) -> bool:
    """Check as Lightning does whether a step takes ``batch_idx``: a second argument, of any name."""
    if not overrides(module, name):
        return True
    step = getattr(module, name)
    spec = inspect.getfullargspec(getattr(step, "__wrapped__", step))
    return "batch_idx" in spec.args or spec.varargs is not None or len(spec.args) > 2


def _without_index(module: object, name: str) -> Callable[[Any, Any, int], Any]:
    step = getattr(type(module), name)
    return lambda self, batch, batch_idx: step(self, batch)


def _as_test(module: object) -> dict[str, Any]:
    """Return the hooks of a test, by the names under which a module is measured."""
    kind = type(module)
    hooks = [f"on_test_{when}" for when in ("start", "epoch_start", "batch_start", "batch_end", "epoch_end", "end")]
    found = {name: getattr(kind, name) for name in ("test_step", *hooks) if overrides(module, name)}
    return {name.replace("test", "validation"): hook for name, hook in found.items()}


def _training_loss(self: Any, batch: Any, batch_idx: int) -> dict[str, Any]:
    answer = self.training_step(batch, batch_idx)
    answer = answer["loss"] if isinstance(answer, Mapping) else answer
    return {} if answer is None else {"loss": answer}

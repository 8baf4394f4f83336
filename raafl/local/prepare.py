"""Prepare a user's module as a Trainer would: build its layers, add steps that it lacks, undo compilation."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from raafl.errors import USER_ERRORS, BadInput
from raafl.module_hooks import overrides
from raafl.rng import seeded, undisturbed
from raafl.submodel.cut.layers import computed_by, copy_structure, persistent_buffers
from raafl.submodel.flat import is_finite

STEPS = ("training_step", "validation_step", "test_step")


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
    without = [name for name in STEPS if not _takes_index(module, name)]
    if without or not overrides(module, "validation_step"):
        from raafl.local.missing_steps import complete

        complete(module, without)
    from raafl.trainer_stand_in import attach

    attach(module)
    for hook, args in (("setup", ("fit",)), ("configure_model", ())):  # in the order of Lightning's Trainer
        if overrides(module, hook):
            from raafl.local.explain import explained

            with explained(module, hook):
                getattr(module, hook)(*args)
    _uncompile_parts(module)  # a model may compile parts of itself in `setup`
    check_tensors(module)
    for name, parameter in module.named_parameters():
        owner = module.get_submodule(name.rpartition(".")[0])
        # only torch's own layers must not be empty: a user's module may have parameters such as those of no register
        # tokens
        if parameter.numel() == 0 and type(owner).__module__.startswith("torch.nn."):
            raise BadInput(
                f"{kind}.{name} is empty, {tuple(parameter.shape)}: give {repr(owner)[:80]} sizes of 1 or more"
            )
    for name, buffer in persistent_buffers(module).items():
        # elements of an expanded buffer share memory, and cannot be written one by one
        if 0 in buffer.stride() and not buffer.is_meta:
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


def _takes_index(module: object, name: str) -> bool:
    """Check whether a step takes ``batch_idx``; by Lightning's rule it does if it has any second argument."""
    if not overrides(module, name):
        return True
    step = getattr(module, name)
    spec = inspect.getfullargspec(getattr(step, "__wrapped__", step))
    return "batch_idx" in spec.args or spec.varargs is not None or len(spec.args) > 2


def check_tensors(module: nn.Module) -> None:
    """Raise `BadInput` if a part of a model cannot be copied, cut or sent.

    Such parts are: a module made by `torch.jit`; a tensor that is not dense, has no fixed size, or was made in inference
    mode; a parameter that overlaps itself or another in memory; an attribute with a tensor that was computed from
    parameters.
    """
    problem = next(_problems(module), None)
    if problem is not None:
        raise BadInput(f"the model cannot be copied, cut and sent: {type(module).__name__}{problem}")


def _problems(module: nn.Module) -> Iterator[str]:
    for path, part in module.named_modules():
        if isinstance(part, torch.jit.ScriptModule):
            place = f".{path} is" if path else " is"
            yield f"{place} made by torch.jit, which has no smaller copies: give the module from which it was made"
            return
    state: Mapping[str, Tensor] = dict(module.named_parameters()) | persistent_buffers(module)
    for name, tensor in state.items():
        if isinstance(tensor, nn.UninitializedParameter | nn.UninitializedBuffer):
            layer = repr(module.get_submodule(name.rpartition(".")[0]))[:80]
            yield f".{name} has no size before a first batch: give {layer} the size of its input"
        elif tensor.layout != torch.strided or tensor.is_quantized:
            kind = "quantised" if tensor.is_quantized else str(tensor.layout).removeprefix("torch.")
            is_parameter = isinstance(tensor, nn.Parameter)
            remedy = "make it dense" + ("" if is_parameter else ", or register it with persistent=False")
            yield f".{name} is {kind}, but all sent tensors must be dense: {remedy}"
        elif tensor.is_inference():
            yield f".{name} was made in torch.inference_mode, where no gradients are recorded: make it outside, or clone it there"
        elif isinstance(tensor, nn.Parameter) and _overlaps_itself(tensor):
            yield (
                f".{name} is expanded, {tuple(tensor.shape)} with several elements in one place of memory, so no step can write "
                "it: give nn.Parameter a .clone(), or expand it in forward"
            )
    yield from _shared(module, state)
    yield from _computed(module)


def _overlaps_itself(tensor: Tensor) -> bool:
    """Check whether elements of a tensor share memory, as after `expand`."""
    span = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return 0 < span < tensor.numel()


def _shared(module: nn.Module, state: Mapping[str, Tensor]) -> Iterator[str]:
    """Yield an error for each trained parameter that shares memory with another tensor, since copies would not."""
    first: dict[int, str] = {}
    known = {name: tensor for name, tensor in state.items() if tensor.layout == torch.strided}
    for name, tensor in (*known.items(), *_attributes(module)):
        if not tensor.numel() or not tensor.data_ptr():  # a tensor without values has no memory
            continue
        other = first.setdefault(tensor.data_ptr(), name)
        if other == name or known.get(name) is known[other]:
            continue
        if known[other].requires_grad or (name in known and tensor.requires_grad):
            yield (
                f".{name} shares memory with '{other}', but copies of the model have two separate tensors: assign "
                "the parameter itself, as in self.b.weight = self.a.weight, or compute one from the other in "
                "forward"
            )


def _attributes(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield tensors that modules have as plain attributes, without those that a forward pre-hook computes."""
    for path, part in module.named_modules():
        hooked = {computed_by(hook) for hook in part._forward_pre_hooks.values()}
        for name, value in vars(part).items():
            if isinstance(value, Tensor) and name not in hooked:
                yield f"{path}.{name}".removeprefix("."), value


def _computed(module: nn.Module) -> Iterator[str]:
    for name, tensor in _attributes(module):
        if not tensor.is_leaf:
            yield (
                f".{name} was computed from parameters, but copies of the model do not update it: compute it in "
                "forward, or give a function that makes the model"
            )


# Keep the mode (train or eval) of each part as the model's author left it. As with Lightning's Trainer, each part
# trains in the mode that it has once the model is built. Copies get these modes, and
# `raafl.submodel.module_state.ModuleState` restores them before each task, evaluation and trial.

T = TypeVar("T", bound=nn.Module)


def call_own_train(module: nn.Module) -> None:
    """Let parts with a method `train` of their own set their modes, as one that keeps a frozen backbone in eval mode.

    What is in eval mode stays so.
    """
    for part in module.modules():
        if type(part).train is not nn.Module.train:
            in_eval = [inner for inner in part.modules() if not inner.training]
            part.train(part.training)
            for inner in in_eval:
                inner.training = False


def start_observers(module: nn.Module, example_batch: Callable[[int], Any], build: Callable[[], nn.Module]) -> None:
    """Run a first step where persistent buffers are empty or infinite, and begin with the sizes and values that it gives them.

    Ranges of torch.ao's observers are such buffers; an infinite one could not be averaged. Nothing changes where the step fails,
    or where sizes depend on the number of samples: the trial says so.

    `example_batch`: returns a batch with the given number of samples.
    `build`: returns the same module with values, if ``module`` has none.
    """
    if all(buffer.numel() and is_finite(buffer) for buffer in persistent_buffers(module).values()):
        return
    with undisturbed(), suppress(*USER_ERRORS):
        whole = build() if any(p.is_meta for p in module.parameters()) else module
        started, other = (_after_a_step(whole, example_batch(num)) for num in (2, 3))
        if any(buffer.shape != other[name].shape for name, buffer in started.items()):
            return
        for name, buffer in persistent_buffers(module).items():
            if buffer.shape != started[name].shape or (not is_finite(buffer) and is_finite(started[name])):
                path, _, own = name.rpartition(".")
                module.get_submodule(path)._buffers[own] = started[name]


def _after_a_step(module: nn.Module, batch: object) -> dict[str, Tensor]:
    """Return the persistent buffers of a copy of the module after a training step on ``batch``."""
    from raafl.submodel.isolated_run import loss_of, settle

    copy = copy_structure(module, {})
    settle(copy)
    seeded(0)
    loss_of(copy, batch)
    return {name: buffer.detach() for name, buffer in persistent_buffers(copy).items()}

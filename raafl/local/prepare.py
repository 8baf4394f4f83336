"""Prepare a user's module as a Trainer would: build its layers, add steps that it lacks, undo compilation."""

from __future__ import annotations

import inspect
import math
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from raafl.core.options import Training
from raafl.core.types import Warn
from raafl.data.federated import FederatedData
from raafl.errors import USER_ERRORS, BadInput, user_frame
from raafl.local.record import Recorder
from raafl.module_hooks import Schedule, TrainerStandIn, attach, begin, configure, move_batch, overrides
from raafl.rng import seeded, undisturbed
from raafl.submodel.cut.layers import computed_by, copy_structure, persistent_buffers
from raafl.submodel.flat import is_finite
from raafl.submodel.isolated_run import loss_of, settle
from raafl.submodel.nested_batch import batch_tensors, to_device

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
    for hook, args in (("setup", ("fit",)), ("configure_model", ())):  # in the order of Lightning's Trainer
        if overrides(module, hook):
            with explained(module, hook):
                getattr(module, hook)(*args)
    _uncompile_parts(module)  # some models compile parts of themselves in `setup`
    check_tensors(module)
    for name, parameter in module.named_parameters():
        owner = module.get_submodule(name.rpartition(".")[0])
        # allowed in a user's own module, which may for example have no register tokens
        if parameter.numel() == 0 and type(owner).__module__.startswith("torch.nn."):
            raise BadInput(
                f"{kind}.{name} is empty, {tuple(parameter.shape)}: give {repr(owner)[:80]} sizes of 1 or more"
            )
    for name, buffer in persistent_buffers(module).items():
        # an expanded buffer, whose elements share memory and cannot be written one by one
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
    """Return whether a step takes ``batch_idx``, by Lightning's rule: as a second argument of any name."""
    if not overrides(module, name):
        return True
    step = getattr(module, name)
    spec = inspect.getfullargspec(getattr(step, "__wrapped__", step))
    return "batch_idx" in spec.args or spec.varargs is not None or len(spec.args) > 2


def _without_index(module: object, name: str) -> Callable[[Any, Any, int], Any]:
    step = getattr(type(module), name)
    return lambda self, batch, batch_idx: step(self, batch)


def _as_test(module: object) -> dict[str, Any]:
    """Return the module's test hooks under the names of the validation hooks, by which it is evaluated."""
    kind = type(module)
    hooks = [f"on_test_{when}" for when in ("start", "epoch_start", "batch_start", "batch_end", "epoch_end", "end")]
    found = {name: getattr(kind, name) for name in ("test_step", *hooks) if overrides(module, name)}
    return {name.replace("test", "validation"): hook for name, hook in found.items()}


def _training_loss(self: Any, batch: Any, batch_idx: int) -> dict[str, Any]:
    answer = self.training_step(batch, batch_idx)
    answer = answer["loss"] if isinstance(answer, Mapping) else answer
    return {} if answer is None else {"loss": answer}


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
    """Return whether a tensor has more elements than memory locations, as after `expand`."""
    span = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return 0 < span < tensor.numel()


def _shared(module: nn.Module, state: Mapping[str, Tensor]) -> Iterator[str]:
    """Yield an error text for each trained parameter that shares memory with another tensor, as copies of the model would not."""
    first: dict[int, str] = {}
    known = {name: tensor for name, tensor in state.items() if tensor.layout == torch.strided}
    for name, tensor in (*known.items(), *_attributes(module)):
        if not tensor.numel() or not tensor.data_ptr():  # tensors without values have no memory to share
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
    """Yield tensors that are plain attributes of modules, except those that a hook computes before each forward."""
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

_TRAINING = "_raafl_modes"
_SHOWN = 3
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


def eval_mode_note(module: nn.Module) -> list[str]:
    """Return a line for the start of a run on the parts of its model that are in eval mode; none if there are none.

    A model that is in eval mode as a whole is a warning.
    """
    parts = list(module.named_modules())
    in_eval = [path for path, part in parts if not part.training]
    kind = type(module).__name__
    if not in_eval:
        return []
    if not module.training:
        return [
            Warn(
                f"{kind} is in eval mode, with {len(in_eval)} of its {len(parts)} layers, and trains so (no dropout, no batch "
                "statistics): call .train() on it before the run"
            )
        ]
    tops = [path for path in in_eval if path.rpartition(".")[0] not in in_eval]
    named = ", ".join(tops[:_SHOWN]) + (", ..." if len(tops) > _SHOWN else "")
    return [
        f"{len(in_eval)} of {len(parts)} layers of {kind} are in eval mode, as it was built, and train so ({named}): call .train() "
        "on them for train mode"
    ]


def in_eval_mode(module: T) -> T:
    """Put a trained module into eval mode for its user, and remember the modes in which it was trained.

    `with_modes_of_training` restores these if the user trains it again.
    """
    module.__dict__[_TRAINING] = [part.training for part in module.modules()]
    return module.eval()


def with_modes_of_training(module: T) -> T:
    """Undo `in_eval_mode` in a module that is still in eval mode as a whole; leave any other as its user left it."""
    before, parts = module.__dict__.pop(_TRAINING, []), list(module.modules())
    if len(before) == len(parts) and not any(part.training for part in parts):
        for part, training in zip(parts, before, strict=True):
            part.training = training
    return module


_NO_INPUT_GRADIENT = "None of the inputs have requires_grad=True"
"""Prefix of torch's warning about reentrant checkpointing."""


class Tried(NamedTuple):
    """Result of a training step that was tried before the run."""

    logged: list[str]  # names of the values that the training step logs
    warnings: list[str]  # warnings for the user, one line each
    optimizer: Optimizer  # optimizer that `configure_optimizers` returned


def try_training(
    module: nn.Module,
    batch: object,
    device: torch.device | str = "cpu",
    more: Callable[[], Any] | None = None,
    *,
    may_skip: bool = False,
) -> Tried:
    """Try the training step, backward pass and `configure_optimizers` of ``module`` once, to find errors before the run.

    Parameters and random state stay unchanged, but buffers may change, so pass a copy of the module.

    `more`: function that returns another batch, which is tried if the step skips ``batch`` by returning None.

    Raises:
        BadInput: a step fails, or returns no scalar loss that depends on the parameters.
    """
    kind, recorder, trainer = type(module).__name__, Recorder(), attach(module)
    trainer.measure(recorder.latest.metrics)
    devices = [torch.device(device)] if torch.device(device).type == "cuda" else []
    logs = [(part, name, vars(part).get(name)) for part in module.modules() for name in ("log", "log_dict")]
    recorder.attach(module)
    try:
        with torch.random.fork_rng(devices):
            with explained(module, "configure_optimizers"):
                optimizer, schedules = configure(module)
                trainer.begin(optimizer, schedules)
            before = _forms(module)
            with _reentrant_warnings() as unseen:
                batch, answer = _first_answer(module, _tries(batch, more), torch.device(device))
            tried = Tried(recorder.names, _warnings(kind, trainer, recorder, schedules), optimizer)
            if answer is None and may_skip:
                return tried
            with explained(module, "training_step, backward", batch):
                _checked_loss(kind, answer, is_cut_off=bool(unseen)).backward()  # type: ignore[no-untyped-call]
            if unseen:
                _check_reached(module)
            _check_buffers(module, before)
            return tried
    finally:
        module.zero_grad(set_to_none=True)
        for part, name, value in logs:
            if value is not None:
                setattr(part, name, value)
            else:
                vars(part).pop(name, None)


def _first_answer(module: nn.Module, tries: Iterable[tuple[object, int]], device: torch.device) -> tuple[object, Any]:
    """Run training steps until one returns a loss; return the batch on the device and the result, None if there was none."""
    batch = answer = None
    for given, index in tries:
        with explained(module, "hooks before training_step", given):
            batch = move_batch(module, given, device, to_device)
            begin(module, batch)
        with explained(module, "training_step", batch):
            answer = module.training_step(batch, index)  # type: ignore[operator]
        if answer is not None:
            break
    return batch, answer


def _tries(batch: object, more: Callable[[], Any] | None) -> Iterator[tuple[Any, int]]:
    yield batch, 0
    yield batch, 1
    if more is not None:
        yield more(), 1


def _warnings(name: str, trainer: TrainerStandIn, recorder: Recorder, schedules: Sequence[Schedule]) -> list[str]:
    found, logged = [], recorder.latest.metrics()
    for schedule in schedules:
        if schedule.monitor is not None and schedule.monitor not in logged:
            found.append(
                f"{name}: {type(schedule.scheduler).__name__} monitors '{schedule.monitor}', which training_step does not log, "
                f"so that it never changes the learning rate: monitor one of {', '.join(logged) or 'what it logs'}"
            )
    if trainer.asked & {"logger", "loggers"}:
        found.append(f"{name} uses self.logger, which records nothing during a task: use self.log for numbers")
    return found


@contextmanager
def _reentrant_warnings() -> Iterator[list[str]]:
    """Collect torch's warnings about checkpointed parts whose input requires no gradient; show all other warnings."""
    found: list[str] = []
    with warnings.catch_warnings(record=True) as given:
        warnings.simplefilter("always")
        yield found
    for warning in given:
        if _NO_INPUT_GRADIENT in str(warning.message):
            found.append(str(warning.message))
        else:
            warnings.warn_explicit(warning.message, warning.category, warning.filename, warning.lineno)


def _check_reached(module: nn.Module) -> None:
    """Raise `BadInput` if checkpointing cut trained parameters off, so that they get no gradient."""
    without = [name for name, p in module.named_parameters() if p.requires_grad and p.grad is None]
    if without:
        shown = ", ".join(without[:3]) + (f" and {len(without) - 3} more" if len(without) > 3 else "")
        raise BadInput(_cut_off(type(module).__name__, f"{shown} get none and would not train"))


def _cut_off(kind: str, what: str) -> str:
    return (
        f"{kind}.training_step checkpoints layers (use_reentrant=True) whose input needs no gradient, so that {what}: "
        "give use_reentrant=False, or let the input require a gradient (enable_input_require_grads() in transformers)"
    )


def _checked_loss(kind: str, answer: object, *, is_cut_off: bool = False) -> Tensor:
    loss, given = answer, _shown(answer)
    if isinstance(answer, Mapping):
        loss = answer.get("loss")
        keys = ", ".join(repr(key) for key in answer) or "nothing"
        given = f"{_shown(loss)} as 'loss'" if "loss" in answer else f"a dict with {keys} and without 'loss'"
    if is_cut_off and isinstance(loss, Tensor) and not loss.requires_grad:
        raise BadInput(_cut_off(kind, "the loss has none"))
    if not isinstance(loss, Tensor) or loss.numel() != 1 or not loss.requires_grad:
        raise BadInput(
            f"{kind}.training_step gives {given}: return the loss, one number that depends on the parameters, or a dict "
            "with it under 'loss'"
        )
    return loss


def _forms(module: nn.Module) -> dict[str, tuple[tuple[int, ...], bool]]:
    """Return the shape of each buffer that is sent, and whether its values are finite."""
    return {name: (tuple(buffer.shape), is_finite(buffer)) for name, buffer in persistent_buffers(module).items()}


def _check_buffers(module: nn.Module, before: Mapping[str, tuple[tuple[int, ...], bool]]) -> None:
    """Raise `BadInput` for a buffer that the server could not merge after a training step.

    The layout has no place for a changed shape. A buffer that stays non-finite, such as a mask of -inf, would make
    every update refused; one that the step makes finite, such as an observer's range, is accepted.
    """
    kind = type(module).__name__
    for name, (shape, finite) in _forms(module).items():
        shape_before, finite_before = before.get(name, (shape, finite))
        if shape != shape_before:
            raise BadInput(
                f"{kind}.training_step changes the shape of buffer '{name}' from {shape_before} to {shape}: give it its size in "
                "__init__, if need be by a forward pass there, or register it with persistent=False"
            )
        if not (finite or finite_before):
            raise BadInput(
                f"buffer '{name}' of {kind} has infinities or NaN, but all buffers are sent and must be finite: "
                "register it with persistent=False"
            )


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
    """Return the persistent buffers of a copy of the module after one training step."""
    copy = copy_structure(module, {})
    settle(copy)
    seeded(0)
    loss_of(copy, batch)
    return {name: buffer.detach() for name, buffer in persistent_buffers(copy).items()}


def try_single_samples(
    module: nn.Module, data: FederatedData, training: Training, device: torch.device | str = "cpu"
) -> None:
    """Try a training step on a single sample, if the last batch of some client's epoch has only one.

    Raises:
        BadInput: the step fails. Batch norm fails, for example, since one value per channel has no variance.
    """
    size = training.batch_size or data.batch_size or 1
    clients = [
        client for client, num in enumerate(data.sizes, start=1) if _has_single(num, size, data.drop_last, training)
    ]
    if not clients:
        return
    try:
        try_training(module, data.example_batch(1), device, may_skip=True)
    except BadInput as failed:
        num, more = data.sizes[clients[0] - 1], f" ({len(clients) - 1} more clients too)" if len(clients) > 1 else ""
        remedy = "set drop_last=True in the training DataLoader, or another train.batch_size"
        remedy = remedy if 1 < size < num else "give a larger train.batch_size" if num > 1 else "use fewer clients"
        raise BadInput(
            f"client {clients[0]}{more} has a batch of one sample, its {num} samples in batches of {size}: {remedy}. {failed}"
        ) from failed


def _has_single(num_samples: int, batch_size: int, drop_last: bool, training: Training) -> bool:
    """Return whether a task of the run's length includes a batch of one sample."""
    num_batches = math.ceil(num_samples / batch_size)
    if training.num_steps is not None and training.num_steps < num_batches and batch_size > 1:
        return False
    is_last_single = num_samples % batch_size == 1 and not (drop_last and num_batches > 1)
    return num_samples == 1 or batch_size == 1 or is_last_single


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
    """Yield hooks that keep in ``entered`` the layers whose forward is running, innermost last."""

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
    return ", ".join(_tensors(value)) or _shown(value)


def _tensors(value: object) -> Iterator[str]:
    if isinstance(value, Tensor):
        yield f"{str(value.dtype).removeprefix('torch.')} {tuple(value.shape)}"
    elif isinstance(value, Mapping):
        yield from (f"{key} {text}" for key, item in value.items() for text in _tensors(item))
    elif isinstance(value, list | tuple):
        yield from (text for item in value for text in _tensors(item))
    else:
        yield from (text for x in batch_tensors(value) for text in _tensors(x))


def _shown(value: object) -> str:
    if isinstance(value, Tensor):
        return f"{'' if value.requires_grad else 'detached '}{shapes(value)}"
    return "nothing" if value is None else type(value).__name__

"""Try a user's model on its data before a run: measure it, train a step, and collect what is to be said at the start."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from raafl.config.experiment import Experiment
from raafl.config.targets import ranking
from raafl.core.options import Training
from raafl.core.types import Warn
from raafl.data.federated import FederatedData
from raafl.errors import BadInput
from raafl.local.evaluate import MAX_LOGGED, Evaluator
from raafl.local.explain import explained, shown
from raafl.local.record import Recorder
from raafl.local.trainable import check_optimizer, to_device
from raafl.module_hooks import TASK_HOOKS, Schedule, begin, configure, move_batch, overrides
from raafl.runfolder.schema import CLIENT
from raafl.runtime.lifecycle.checkpointer import SavedForm
from raafl.runtime.setup import ServerSetup, data_notes
from raafl.submodel import FULL
from raafl.submodel.cut.layers import persistent_buffers
from raafl.submodel.flat import is_finite
from raafl.trainer_stand_in import TrainerStandIn, attach


@dataclass(frozen=True)
class FirstLook:
    """Findings about the initial model."""

    metrics: dict[str, float]  # metrics of the initial model
    logged: list[str]  # names of the values that a training step logs
    warnings: list[str]  # warnings raised in a training step
    restarted: list[str]  # attributes that a training step changes, and that each task resets


def first_look(parts: ServerSetup, evaluator: Evaluator, recorded: Mapping[str, float]) -> FirstLook:
    """Measure the initial model and try a step; finds at once a wrong metric, or a model that does not fit the data.

    `recorded`: metrics of a resumed run, which count instead of those that the model has now.
    """
    module, data, values = evaluator.module, parts.data, parts.coordinator.state.values
    experiment, size = parts.experiment, parts.coordinator.fleet.batch_size
    local = experiment.algorithm.local
    evaluator.fill(values)
    with local.trial(module):
        tried = try_training(module, data.example_batch(2), values.device, lambda: data.example_batch(size))
    changed = evaluator.restarted(values)
    check_optimizer(tried.optimizer, local, experiment.fabric.gradient_clip_val)
    rates = [group.get("lr") for group in tried.optimizer.param_groups]
    if experiment.train.lr_schedule != "constant" and not all(isinstance(rate, int | float | Tensor) for rate in rates):
        raise BadInput(
            f"train.lr_schedule is {experiment.train.lr_schedule}, but {type(tried.optimizer).__name__} has no learning rate "
            "to scale (lr=None): leave train.lr_schedule out"
        )
    try_single_samples(module, data, experiment.train, values.device)
    evaluator.fill(values)
    configure(module)
    configured = evaluator.restarted(values)  # attributes that configure_optimizers sets, which is called in each task
    restarted = [name for name in changed if name not in configured]
    if restarted and local.exchange(parts.submodels) is not None:
        raise BadInput(
            f"'{restarted[0]}' changes in training_step, but split_fed runs training_step on two copies "
            "of the module: keep no state in the module, or use a method that trains the whole model"
        )
    with explained(module, "validation_step", next(data.test_batches())[0]):
        metrics = evaluator(values, 0)
    if not metrics:
        raise BadInput(f"{type(module).__name__}.validation_step gives no metrics: return them in a dict, or log them")
    return FirstLook({**metrics, **recorded}, tried.logged, tried.warnings, restarted)


def notes_before(
    parts: ServerSetup, look: FirstLook, form: SavedForm, metrics: dict[str, float], *, is_new: bool
) -> tuple[list[str], dict[str, dict[str, float]]]:
    """Collect the notes of the start, and by rate the shares of parameters and FLOPs that it leaves.

    Raises:
        BadInput: there is a warning, and the run is strict.
    """
    coordinator, submodels = parts.coordinator, parts.submodels
    # no client has joined, but all are known
    fleet, algorithm = coordinator.fleet.of(parts.clients), coordinator.algorithm
    notes = [*data_notes(parts), *algorithm.notes(fleet, len(parts.clients))]
    notes += met_at_once(parts.experiment, metrics if is_new else {})
    notes += _saved_notes(parts, form)
    left_out = uncalled(parts.module, algorithm.local.traits.leaves_out, algorithm.name)
    notes += [Warn(line) for line in (*look.warnings, *left_out)]
    notes += eval_mode_note(parts.module)
    unseen = getattr(parts.module, "restarts_unseen", ())
    restarted = [name for name in look.restarted if name.rpartition(".")[2] not in unseen]
    notes += [_restart_note(restarted)] if restarted else []
    refuted = submodels.refuted
    notes += [Warn(f"axis '{name}' stays whole, {reason}") for name, reason in list(refuted.items())[:10]]
    notes += [Warn(f"{len(refuted) - 10} more axes stay whole: see kept_whole")] if len(refuted) > 10 else []
    if len(look.logged) > MAX_LOGGED:
        notes.append(Warn(f"training_step logs {len(look.logged)} metrics: only the first {MAX_LOGGED} are recorded"))
    guessed = submodels.cost(FULL, fleet.batch_size).guessed
    notes += [Warn(f"predicted times and memory are a guess: {guessed}")] if guessed else []
    remaining: dict[str, dict[str, float]] = {}
    if algorithm.select.cuts and submodels.axes:
        from raafl.parts.select.axis_report import HALF_AND_QUARTER, remaining_shares, sentence_of

        remaining = remaining_shares(submodels.axes, HALF_AND_QUARTER, fleet.cost)
        notes.append(sentence_of(remaining))
    warnings = [note for note in notes if isinstance(note, Warn)]
    if warnings and parts.experiment.strict:
        raise BadInput("\n".join([f"{warning} (an error, since strict is true)" for warning in warnings]))
    return notes, remaining


def _saved_notes(parts: ServerSetup, form: SavedForm) -> list[Warn]:
    """Return a warning for each entry of the module's state dict that a checkpoint cannot store."""
    found: list[str] = []
    values = parts.coordinator.state.values.clone()
    with explained(parts.module, "state_dict, as a checkpoint calls it,"):
        form.contents(0, values, left_out=found.append)
    return list(map(Warn, found))


def _restart_note(names: list[str]) -> str:
    shown = ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
    return f"attributes that start again in each task: {shown}; use a floating-point buffer for state that should carry over"


def check_goals(experiment: Experiment, metrics: Mapping[str, float], *, has_client_tests: bool) -> None:
    """Raise `BadInput` if a target or `keep_best` names an unknown metric, or one of which no direction is known."""
    known = [*metrics, *(CLIENT + name for name in metrics if has_client_tests)]
    for target in experiment.targets():
        name, value = target.metric, f"{target.value:g}"
        if name not in known:
            raise BadInput(
                f"target is '{target}', but validation_step gives no '{name}': use one of {', '.join(known)}"
            )
        if not target.is_clear:
            raise BadInput(
                f"target is '{target}', and the name '{name}' does not say which values are better: give '{name}<={value}' "
                f"or '{name}>={value}'"
            )
    if experiment.keep_best is None:
        return
    best, mode = ranking(experiment.keep_best)
    if best not in metrics:
        raise BadInput(
            f"keep_best is '{best}', but validation_step gives no '{best}': use one of {', '.join(metrics)}, or null"
        )
    if mode is None:
        raise BadInput(
            f"keep_best is '{best}', and this name does not say which values are better: give '{best}:min' or '{best}:max'"
        )


def met_at_once(experiment: Experiment, metrics: Mapping[str, float]) -> list[Warn]:
    """Return a warning if the initial model meets all targets, so that the run will end before it trains."""
    targets = experiment.targets()
    if not targets or not all(target.met(metrics) for target in targets):
        return []
    shown = " and ".join(f"'{target}'" for target in targets)
    values = ", ".join(f"{target.metric} is {metrics[target.metric]:g}" for target in targets)
    return [
        Warn(
            f"target is {shown}, which the initial model meets ({values}), so nothing will be trained: give a value that is "
            "harder to reach, or the direction (METRIC<=VALUE or METRIC>=VALUE)"
        )
    ]


_SHOWN = 3


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


_NO_INPUT_GRADIENT = "None of the inputs have requires_grad=True"
"""Prefix of torch's warning about reentrant checkpointing."""


class Tried(NamedTuple):
    """Result of a training step that was tried before the run."""

    logged: list[str]  # names of the values that the training step logs
    warnings: list[str]  # warnings for the user, one line each
    optimizer: Optimizer  # optimizer from `configure_optimizers`


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
    """Run training steps until one returns a loss; return its batch on the device, and the loss (None if none did)."""
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
    """Collect torch's warnings that a checkpointed block has no input with gradient; show all other warnings."""
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
    """Raise `BadInput` if gradient checkpointing has cut off trained parameters from the loss."""
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
    loss, given = answer, shown(answer)
    if isinstance(answer, Mapping):
        loss = answer.get("loss")
        keys = ", ".join(repr(key) for key in answer) or "nothing"
        given = f"{shown(loss)} as 'loss'" if "loss" in answer else f"a dict with {keys} and without 'loss'"
    if is_cut_off and isinstance(loss, Tensor) and not loss.requires_grad:
        raise BadInput(_cut_off(kind, "the loss has none"))
    if not isinstance(loss, Tensor) or loss.numel() != 1 or not loss.requires_grad:
        raise BadInput(
            f"{kind}.training_step gives {given}: return the loss, one number that depends on the parameters, or a dict "
            "with it under 'loss'"
        )
    return loss


def _forms(module: nn.Module) -> dict[str, tuple[tuple[int, ...], bool]]:
    """Return the shape of each persistent buffer by name, and whether its values are finite."""
    return {name: (tuple(buffer.shape), is_finite(buffer)) for name, buffer in persistent_buffers(module).items()}


def _check_buffers(module: nn.Module, before: Mapping[str, tuple[tuple[int, ...], bool]]) -> None:
    """Raise `BadInput` for a buffer to which a training step has given another shape, or which it left non-finite."""
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
    """Check whether a task with these settings has a batch of a single sample."""
    num_batches = math.ceil(num_samples / batch_size)
    if training.num_steps is not None and training.num_steps < num_batches and batch_size > 1:
        return False
    is_last_single = num_samples % batch_size == 1 and not (drop_last and num_batches > 1)
    return num_samples == 1 or batch_size == 1 or is_last_single


_NEVER = {
    "configure_callbacks": "give raafl's own callbacks to the run",
    "on_save_checkpoint": "keep what must be saved in buffers",
    "on_load_checkpoint": "keep what must be saved in buffers",
    "on_validation_model_zero_grad": "measuring has no gradients",
    "on_validation_model_eval": "the model is measured in eval mode",
    "on_validation_model_train": "the model is measured in eval mode",
    "teardown": "undo in on_fit_end what a task must not leave behind",
    "prepare_data": "let the data module fetch the data",
}


def uncalled(module: nn.Module, left_out: frozenset[str], method: str) -> list[str]:
    """List the Lightning hooks that a module overrides but raafl never calls, one line of text each."""
    kind = type(module).__name__
    lines = [
        f"{kind}.{name} is not called in a federated task: {remedy}"
        for name, remedy in _NEVER.items()
        if overrides(module, name)
    ]
    own = [name for name in TASK_HOOKS if name in left_out and overrides(module, name)]
    return lines + [
        f"{kind}.{name} is not called by {method}, which makes its steps in a way of its own" for name in own
    ]

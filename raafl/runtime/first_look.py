"""Try a user's model on its data before a run: measure it, train a step, and collect what is to be said at the start."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from raafl.config.experiment import Experiment
from raafl.config.options import ranking
from raafl.core.types import Warn
from raafl.errors import BadInput
from raafl.local.evaluate import MAX_LOGGED, Evaluator
from raafl.local.gradients import check_optimizer
from raafl.local.lightning_hooks import uncalled
from raafl.local.prepare import eval_mode_note, explained, try_single_samples, try_training
from raafl.module_hooks import configure
from raafl.runfolder.schema import CLIENT
from raafl.runtime.lifecycle.saved_form import SavedForm
from raafl.runtime.setup import ServerSetup, data_notes
from raafl.submodel import FULL


@dataclass(frozen=True)
class FirstLook:
    """Findings about the initial model."""

    metrics: dict[str, float]  # metrics of the initial model
    logged: list[str]  # names of what its training step logs
    warnings: list[str]  # warnings raised by a training step
    restarted: list[str]  # attributes that a training step changes and that are reset for each task


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
    try_single_samples(module, data, experiment.train, values.device)
    evaluator.fill(values)
    configure(module)
    configured = evaluator.restarted(values)  # attributes that configure_optimizers sets are set again in each task
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
    # no client has joined yet, but all are known
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
    """Try out what checkpoints save of the module; return a warning for each entry that they cannot hold."""
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

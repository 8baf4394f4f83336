"""Check the metrics that a run's targets and `keep_best` name, once the initial model is measured."""

from __future__ import annotations

from collections.abc import Mapping

from raafl.config.experiment import Experiment
from raafl.config.options import ranking
from raafl.core.types import Warn
from raafl.errors import BadInput
from raafl.runfolder.schema import CLIENT


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

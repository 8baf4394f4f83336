"""Search the settings of one config: by an Optuna study or a grid, as a comparison of one row, or by a sweep of W&B's."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from raafl.config.targets import Target
from raafl.errors import BadInput, at_least, nearest
from raafl.lab.compare.compared import ComparisonResult, run_comparison
from raafl.lab.compare.comparison import (
    SAMPLERS,
    Comparison,
    Options,
    Range,
    Search,
    check_fields,
    folder_of,
    mapping,
    read_mapping,
    seeds_of,
    with_direction,
    words,
)
from raafl.log import console

_WANDB_METHODS = {"tpe": "bayes", "gp": "bayes", "random": "random", "grid": "grid"}


@dataclass(frozen=True)
class Sweep:
    """Content of a sweep's file.

    Attributes:
        config: the config that is tuned: a path, or the name of one of raafl's own.
        fields: a list of values or a range (low, high, log) for each field that is searched.
        trials: number of settings that are tried; with a grid None is all of them.
        options: options that all runs have.
        sampler: tpe, random or gp of Optuna's; grid = the combinations of lists.
        pruner: halving or median, by the score after a quarter and half of the budget; None = whole trials.
        storage: where Optuna's study is: a URL or a path; None = in the sweep's folder.
        metric: metric by which trials are compared.
        maximize: whether a larger value is better.
        target: value of the metric; with it trials are compared by the virtual time until they reach it.
        trial_seeds: seeds of each trial.
        seeds: seeds of the runs with the settings that were found, which are measured on the test set.
        validation_share: share of the training set that scores trials, and that no client has.
        eval_every: distance between evaluations, in virtual seconds or samples.
        name: name of the sweep and of its folder.
    """

    config: str
    fields: Mapping[str, Any]
    trials: int | None = None
    options: Options = ()
    sampler: str = "tpe"
    pruner: str | None = None
    storage: str | None = None
    metric: str = "accuracy"
    maximize: bool = True
    target: float | None = None
    trial_seeds: tuple[int, ...] = (1000,)
    seeds: tuple[int, ...] = (0,)
    validation_share: float = 0.1
    eval_every: str | None = None
    name: str = "sweep"

    def __post_init__(self) -> None:
        if self.sampler not in (*SAMPLERS, "grid"):
            raise BadInput(f"sampler is '{self.sampler}': {nearest(self.sampler, (*SAMPLERS, 'grid'))}")
        if not self.fields:
            raise BadInput("fields is empty: give each field that is searched a list of values or a range")

    def comparison(self) -> Comparison:
        """Return the comparison of one row that searches these settings, and then runs the best; raise `BadInput`."""
        stops = () if self.target is None else ("--target", self._target)
        try:
            return Comparison(
                name=self.name,
                config=self.config,
                rows={self.name: ()},
                seeds=self.seeds,
                options=self.options,
                search=Search(
                    grid={f"--{name.removeprefix('--')}": values for name, values in self.fields.items()},
                    seeds=self.trial_seeds,
                    trials=self.trials,
                    options=stops,
                    validation_share=self.validation_share,
                    sampler=None if self.sampler == "grid" else self.sampler,
                    pruner=self.pruner,
                    storage=self.storage,
                    target=self.target,
                ),
                metric=self.metric,
                maximize=self.maximize,
                targets=() if self.target is None else (self.target,),
                eval_every=self.eval_every,
            )
        except BadInput as error:  # rename the comparison's fields in the message to those of the sweep's file
            said = str(error).replace("search.grid.--", "fields.").replace("search.seeds", "trial_seeds")
            raise BadInput(said.replace("search.", "")) from None

    @property
    def _target(self) -> str:
        return str(Target.of(self.metric, self.target or 0.0, "max" if self.maximize else "min"))

    def wandb(self) -> dict[str, Any]:
        """Return the sweep as W&B has it, whose agents start `raafl simulate`."""
        search = self.comparison().search
        assert search is not None
        every = () if self.eval_every is None else ("--eval_every", self.eval_every)
        fixed = [*self.options, *every, *search.trial_options, "--seed", str(search.seeds[0])]
        fixed += ["--logger", "wandb", "--progress", "plain"]
        by_time = {"name": f"time_to/{self._target}", "goal": "minimize"}
        by_value = {"name": self.metric, "goal": "maximize" if self.maximize else "minimize"}
        return {
            "name": self.name,
            "program": "raafl",
            "method": _WANDB_METHODS[self.sampler],
            **({} if self.trials is None else {"run_cap": self.trials}),
            "metric": by_value if self.target is None else by_time,
            "parameters": {name.removeprefix("--"): _parameter(name, values) for name, values in self.fields.items()},
            "command": [
                *("${env}", "${interpreter}", "-m", "raafl", "simulate"),
                *("--config", self.config, *fixed, "${args}"),
            ],
        }


def _parameter(name: str, values: Any) -> dict[str, Any]:
    if isinstance(values, list):
        return {"values": values}
    space = Range.of(name, values)
    if space.whole:
        kind = {"distribution": "q_log_uniform_values", "q": 1} if space.log else {"distribution": "int_uniform"}
    else:
        kind = {"distribution": "log_uniform_values" if space.log else "uniform"}
    return {**kind, "min": space.low, "max": space.high}


def read_sweep(given: Path | Mapping[str, Any]) -> Sweep:
    """Read a sweep's file, or its fields.

    Raises:
        BadInput: the file is missing or not YAML, or a field is unknown, missing, of another type or out of range.
    """
    raw = {"name": "sweep", **given} if isinstance(given, Mapping) else {"name": given.stem, **_file(given)}
    found = with_direction(check_fields(raw, Sweep, ""), Sweep.metric)
    for needed in ("config", "fields"):
        if needed not in found:
            raise BadInput(f"{needed} is missing: a sweep needs config, fields and trials")
    found["fields"] = {str(name): values for name, values in mapping("fields", found["fields"]).items()}
    found["options"] = words("options", found.get("options"))
    for name in ("seeds", "trial_seeds"):
        if name in found:
            found[name] = seeds_of(name, found[name])
    return Sweep(**found)


def _file(path: Path) -> dict[str, Any]:
    return read_mapping(path, f"sweep '{path}'", "give config, fields and trials")


def sweep(
    spec: str | Path | Mapping[str, Any], *, output: str | Path | None = None, jobs: int = 1, draws: bool = False
) -> ComparisonResult:
    """Search the settings of one config and run the best, as `raafl sweep` does; called again after a kill, it continues.

    Args:
        spec: file of a sweep, or its fields: config, fields, trials and what docs/compare.md lists.
        output: folder of the sweep; None = sweeps/NAME.
        jobs: number of runs at a time, each in a process of its own.
        draws: whether to write index.html and curves.svg, which need plotly and matplotlib.

    Returns:
        The result of a comparison with one row, whose `searched` has all trials and the best settings.

    Raises:
        BadInput: a field is wrong; raised before any run starts.
        RunFailed: all trials failed, or a run was interrupted from outside.
        KeyboardInterrupt: Ctrl-C was pressed; the same call continues.
    """
    at_least("jobs", jobs, 1)
    found = read_sweep(spec if isinstance(spec, Mapping) else Path(spec)).comparison()
    with console():
        return run_comparison(found, folder_of(found.name, output, "sweeps"), jobs=jobs, draws=draws)


def best_of(result: Mapping[str, Any]) -> str:
    """Say which settings a sweep has found, by how many trials, and how to run them."""
    row = result["rows"][0]
    searched = row["searched"]
    trials = searched["trials"]
    cut = sum("cut_after" in trial for trial in trials)
    early = f", {cut} of them ended early" if cut else ""
    return (
        f"best of {len(trials)} trials{early}: {' '.join(searched['settings'])}\nits run: {row['runs'][0]['command']}"
    )

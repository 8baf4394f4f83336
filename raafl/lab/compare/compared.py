"""Run a comparison, or the search of one config's settings as a comparison of one row, and return what it found."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from raafl.config.targets import Target
from raafl.errors import BadInput, at_least, nearest
from raafl.lab.compare import report
from raafl.lab.compare.comparison import (
    SAMPLERS,
    Comparison,
    Options,
    Range,
    Search,
    check_fields,
    folder_of,
    mapping,
    of_fields,
    read,
    read_mapping,
    seeds_of,
    with_direction,
    words,
)
from raafl.lab.compare.runs import Run, Runner, check_distinct, resolve
from raafl.lab.compare.search import Trial, check_space, run_studies, run_trials, trials_of
from raafl.log import console
from raafl.units import quantity

if TYPE_CHECKING:
    from raafl.lab.compare.processes import Cluster


_log = logging.getLogger(__name__)
_WANDB_METHODS = {"tpe": "bayes", "gp": "bayes", "random": "random", "grid": "grid"}


@dataclass(frozen=True, repr=False)
class ComparisonResult:
    """Result of a comparison; it prints as a table with sentences about its differences, in a notebook with curves, too.

    Attributes:
        result: content of result.json.
        folder: folder of the comparison.
        files: files that were written.
    """

    result: Mapping[str, Any]
    folder: Path
    files: Sequence[Path] = ()

    @property
    def rows(self) -> dict[str, dict[str, Any]]:
        """Rows of the comparison by label: `final`, `difference`, `time_to`, `runs` and more."""
        return {row["row"]: row for row in self.result["rows"]}

    @property
    def failed(self) -> list[dict[str, Any]]:
        """Runs that failed, each with its `error`."""
        return [run for row in self.result["rows"] for run in row["runs"] if "error" in run]

    @property
    def num_runs(self) -> int:
        """Number of reported runs."""
        return sum(len(row["runs"]) for row in self.result["rows"])

    def __repr__(self) -> str:
        return "\n".join([report.text(report.cells(self.result)), "", *self._sentences()])

    def _sentences(self) -> list[str]:
        found = self.result
        return report.warnings(found) + report.sentences(found["rows"], found["reference"], found["metric"])

    def _repr_html_(self) -> str:
        from raafl.lab.report.notebook import curve_svg, fragment, rows_html

        table = report.cells(self.result)
        drawn = curve_svg(report.groups_of(self.result, self.folder), self.result["metric"])
        title = f"{self.result['name']}: {quantity(len(self.result['rows']), 'row')} in {self.folder}"
        return fragment(title, rows_html("", table[0], table[1:]), drawn, notes=self._sentences())


def compare(
    comparison: str | Path | Mapping[str, Any],
    *,
    variant: str | None = None,
    output: str | Path | None = None,
    jobs: int = 1,
    draws: bool = False,
) -> ComparisonResult:
    """Run the rows of a comparison over its seeds, as `raafl compare` does; finished runs are reused.

    Args:
        comparison: file of a comparison, or its fields: config, rows, seeds and what docs/compare.md lists.
        variant: name of one of the file's variants; None = the file as it is.
        output: folder of the comparison; None = comparisons/NAME.
        jobs: number of runs at a time, each in a process of its own.
        draws: whether to write index.html, and with matplotlib curves.svg.

    Returns:
        The result, which shows itself in a notebook.

    Raises:
        BadInput: a field is wrong; raised before any run starts.
        RunFailed: all trials of a row failed, or a run was interrupted from outside.
        KeyboardInterrupt: Ctrl-C was pressed; the same call continues.
    """
    at_least("jobs", jobs, 1)
    if isinstance(comparison, Mapping):
        given = of_fields(dict(comparison), "comparison", "the comparison", variant)
    elif isinstance(comparison, str | Path):
        given = read(Path(comparison), variant)
    else:
        raise BadInput(f"comparison is {comparison!r:.80}: give a file, or a mapping with config, rows and seeds")
    with console():
        return run_comparison(given, folder_of(given.name, output), jobs=jobs, draws=draws)


def _tell(line: str) -> None:
    _log.info(line, extra={"prefix": ""})


def run_comparison(
    comparison: Comparison,
    folder: Path,
    *,
    jobs: int = 1,
    ranks: int = 1,
    any_code: bool = False,
    draws: bool = True,
    not_run: Sequence[str] = (),
    cluster: Cluster | None = None,
) -> ComparisonResult:
    """Search where the comparison asks for it, run all rows, and write the result.

    `jobs`, `ranks`, `any_code`, `cluster`: as for `raafl.lab.compare.runs.Runner`.
    `draws`: whether to write a page and a figure.
    `not_run`: labels of rows that were left out.

    Raises:
        BadInput: an option is wrong; raised before any run starts.
        RunFailed: all trials of a row failed, or a run was interrupted from outside.
    """
    if draws and (missing := report.missing_drawing()):
        _tell(missing)
    search = comparison.search
    # an invalid option of the search is reported here, before any run starts
    studies = search is not None and search.sampler is not None
    trials = {} if search is None or studies else trials_of(comparison, search)
    if search is not None and studies:
        check_space(comparison, search)

    def reported(settings: Mapping[str, Options]) -> dict[str, list[Run]]:
        return {
            label: resolve(
                comparison.config, label, comparison.options_of(label, settings.get(label, ())), comparison.seeds
            )
            for label in comparison.rows
        }

    runs = reported({label: some[0].settings for label, some in trials.items()})
    # before the searches: two rows may find equal settings, but must not start equal
    check_distinct(runs)
    runner = Runner(folder / "runs", jobs, any_code, _tell, ranks, cluster)
    best: dict[str, Trial] = {}
    if search is not None and studies:
        trials, best = run_studies(comparison, search, runner, folder, jobs)
    elif search is not None:
        best = run_trials(trials, comparison, search, runner)
    if best:
        runs = reported({label: trial.settings for label, trial in best.items()})
    # so that all rows have runs with the first seed before any row has one with the second
    by_seed = [run for some in zip(*runs.values(), strict=True) for run in some]
    outcomes = runner.run_all(by_seed, comparison.metric)
    found = report.result(comparison, outcomes, trials, best, folder) | {"not_run": list(not_run)}
    return ComparisonResult(found, folder, report.write(found, folder, draws=draws))


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
            said = str(error).replace("search.grid.--", "fields.").replace("search.grid", "fields")
            said = said.replace("search.seeds", "trial_seeds")
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
        draws: whether to write index.html, and with matplotlib curves.svg.

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

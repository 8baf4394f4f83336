"""Run a comparison, from the command line or from Python, and show its result as text or in a notebook."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from raafl.errors import BadInput, at_least
from raafl.lab.compare import report
from raafl.lab.compare.comparison import Comparison, Options, folder_of, of_fields, read
from raafl.lab.compare.runs import Run, Runner, check_distinct, resolve
from raafl.lab.compare.search import Trial, check_space, run_studies, run_trials, trials_of
from raafl.log import console
from raafl.units import quantity

if TYPE_CHECKING:
    from raafl.lab.compare.processes import Cluster

_log = logging.getLogger(__name__)


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
        draws: whether to write index.html and curves.svg, which need plotly and matplotlib.

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
    tell: Callable[[str], None] = _tell,
    cluster: Cluster | None = None,
) -> ComparisonResult:
    """Search where the comparison asks for it, run all rows, and write the result.

    `jobs`, `ranks`, `any_code`, `tell`, `cluster`: as for `raafl.lab.compare.runs.Runner`.
    `draws`: whether to write a page and a figure.
    `not_run`: labels of rows that were left out.

    Raises:
        BadInput: an option is wrong; raised before any run starts.
        RunFailed: all trials of a row failed, or a run was interrupted from outside.
    """
    if draws:
        report.check_drawing()
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
    runner = Runner(folder / "runs", jobs, any_code, tell, ranks, cluster)
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

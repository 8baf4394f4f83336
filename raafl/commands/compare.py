"""Run, continue or verify a comparison of methods (`raafl compare FILE.yaml`)."""

from __future__ import annotations

import json
import logging
from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from raafl.config.argv import options_of
from raafl.errors import BadInput, RunFailed, at_least
from raafl.lab.compare.comparison import Comparison, folder_of, read
from raafl.lab.compare.grid import Grid, is_grid, read_grid
from raafl.units import quantity

if TYPE_CHECKING:
    from raafl.lab.compare.processes import Cluster

_log = logging.getLogger(__name__)


def compare(argv: Sequence[str]) -> str:
    """Run the comparison that a file describes and return its table of results; with `--verify`, replay some of its runs.

    Raises:
        BadInput: an option or the file is wrong; raised before any run starts. A metric that runs do not measure is found
            at the first evaluation of the first run.
        RunFailed: some runs failed, or a replay gave another result.
        KeyboardInterrupt: the user ended it; the same command continues it.
    """
    options = options_in(parser(), argv)
    if is_grid(options.file):
        return run_file(options)
    return run(read(options.file, options.variant), options)


def run(comparison: Comparison, options: Namespace) -> str:
    """Run, plan or verify a comparison; return the text to print.

    It raises the same errors as `compare`.
    """
    left_out: list[str] = []
    if options.rows:
        left_out = [label for label in comparison.rows if label not in options.rows]
        comparison = comparison.only(options.rows)
    folder = folder_of(comparison.name, options.output)
    if options.plan:
        return _forecast(comparison, as_json=options.json)
    if options.verify is not None:
        return _verify(folder, options.verify, options.jobs, as_json=options.json)
    from raafl.lab.compare.compared import run_comparison

    found = run_comparison(
        comparison,
        folder,
        jobs=options.jobs,
        ranks=options.ranks,
        any_code=options.any_code,
        draws=not options.no_page,
        not_run=left_out,
        cluster=_cluster(options),
    )
    shown = f"{found}\n\n" + "\n".join(f"wrote {path}" for path in found.files)
    failed = found.failed
    if failed:
        _tell(shown)
        raise RunFailed(f"{len(failed)} of {found.num_runs} runs failed; the first: {failed[0]['error']}")
    return json.dumps(found.result) if options.json else shown


def _cluster(options: Namespace) -> Cluster | None:
    """Build the Slurm, Ray or local cluster that the options name for the runs; None = they start on this machine."""
    if options.engine == "processes":
        if options.engine_options:
            raise BadInput(
                f"engine_options is {options.engine_options}, but runs of this machine take none: give --engine"
            )
        return None
    if options.ranks > 1:
        raise BadInput(f"ranks is {options.ranks}, but on a cluster each run has one process: leave it out")
    from raafl.lab.compare.processes import Cluster

    return Cluster.of(options.engine, options.engine_options)


def _tell(line: str) -> None:
    _log.info(line, extra={"prefix": ""})


def parser() -> ArgumentParser:
    """Return a parser for the options of `raafl compare`."""
    found = ArgumentParser(
        prog="raafl compare",
        exit_on_error=False,
        description="Run rows of settings over several seeds on the virtual clock, and say what they show. Runs that have "
        "ended are taken as they are, those that were cut off go on: the same command continues.",
    )
    found.add_argument(
        "file", type=Path, metavar="FILE.yaml", help="the comparison: config, rows, seeds, ...; or a grid"
    )
    found.add_argument("--variant", metavar="NAME", help="one of the file's variants; default: the file as it is")
    found.add_argument(
        "--add", nargs="+", type=Path, default=[], metavar="FILE", help="of a grid: files of further methods and fleets"
    )
    found.add_argument(
        "--beside", type=Path, metavar="RESULT", help="of a grid: show the rows of another result that it has in common"
    )
    found.add_argument(
        "--finished_only",
        action="store_true",
        help="of a grid: start nothing; write the result of the runs that have ended",
    )
    return with_common(found)


def with_common(parser: ArgumentParser, *, of_one_row: bool = False) -> ArgumentParser:
    """Add the options shared by all commands that run comparisons; return the parser."""
    where = "sweeps" if of_one_row else "comparisons"
    parser.add_argument("--output", type=Path, metavar="DIR", help=f"its folder; default: {where}/NAME")
    if not of_one_row:
        parser.add_argument(
            "--rows", nargs="+", metavar="LABEL", help="run these rows alone; the result names the others"
        )
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="runs at a time, each in a process of its own")
    parser.add_argument(
        "--ranks", type=int, default=1, metavar="N", help="processes that share the tasks of each run, on GPUs too"
    )
    parser.add_argument(
        "--engine",
        choices=("processes", "ray", "slurm", "local"),
        default="processes",
        help="where runs run: processes of this machine, a Ray cluster, or jobs of Slurm (local: its stand-in here)",
    )
    parser.add_argument(
        "--engine_options",
        nargs="+",
        default=[],
        metavar="KEY=VALUE",
        help="for slurm as submitit has them (timeout_min=120 slurm_partition=gpu); for ray address, num_cpus, num_gpus",
    )
    parser.add_argument("--plan", action="store_true", help="run nothing; say what each row takes on this machine")
    parser.add_argument(
        "--any_code", action="store_true", help="take finished runs of other versions of raafl's code too"
    )
    parser.add_argument(
        "--verify", type=float, nargs="?", const=0.2, metavar="SHARE", help="replay that share of its runs"
    )
    parser.add_argument("--no_page", action="store_true", help="write no figure and no HTML page")
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
    return parser


def options_in(parser: ArgumentParser, argv: Sequence[str]) -> Namespace:
    """Parse the options of a command that runs comparisons.

    Raises:
        BadInput: an option is wrong.
    """
    options = options_of(parser, argv)
    at_least("jobs", options.jobs, 1)
    at_least("ranks", options.ranks, 1)
    if options.ranks > 1 and (options.plan or options.verify is not None):
        raise BadInput(f"ranks is {options.ranks}, but --plan and --verify use one process for each run: leave it out")
    if options.verify is not None and not 0 < options.verify <= 1:
        raise BadInput(f"verify is {options.verify}: give a share of the runs above 0 and at most 1, such as 0.2")
    return options


def _forecast(comparison: Comparison, *, as_json: bool) -> str:
    from raafl.lab.compare import report

    rows = report.forecast(comparison)
    return json.dumps(report.as_json(rows)) if as_json else report.text(report.as_table(rows))


def _verify(folder: Path, share: float, jobs: int, *, as_json: bool) -> str:
    from raafl.lab.compare.processes import chosen, verify
    from raafl.lab.compare.report import load

    verdicts = []
    for verdict in verify(chosen(load(folder), share), folder, jobs):
        verdicts.append(verdict)
        outcome = "equal, to the last bit" if verdict["equal"] else f"NOT equal: {verdict['why']}"
        _tell(f"{verdict['row']}, seed {verdict['seed']}: {outcome}")
    differing = [verdict for verdict in verdicts if not verdict["equal"]]
    if differing:
        raise RunFailed(
            f"{len(differing)} of {len(verdicts)} replayed runs gave another result than {folder / 'result.json'} says: "
            "do not rely on it, and run the comparison again in a new folder"
        )
    if as_json:
        return json.dumps({"replayed": len(verdicts), "equal": True})
    return f"{quantity(len(verdicts), 'run')} replayed, each equal to what the result says, to the last bit"


def run_file(options: Namespace) -> str:
    """Run a grid (a comparison for each pair of a task and a set of devices), and return its tables as text.

    With `--verify`, instead repeat some runs of the grid and check that the results are the same.

    Raises:
        BadInput: an option or a file of the grid is wrong; raised before any run starts.
        RunFailed: some runs failed, or a repeated run gave another result.
    """
    from raafl.lab.compare.grid import GridRuns, root_of, run_grid
    from raafl.lab.compare.grid_result import cell_table, grid_result, write_grid
    from raafl.lab.compare.report import text, warnings
    from raafl.lab.compare.runs import Runner

    grid = read_grid(options.file, options.add)
    if options.variant or options.plan:
        raise BadInput(
            f"'{options.file}' describes a grid of comparisons, for which --variant and --plan do not exist: leave them out"
        )
    if options.rows:
        grid = grid.only(options.rows)
    folder = folder_of(grid.name, options.output)
    if options.verify is not None:
        return _verify_grid(grid, folder, options)
    runner = Runner(root_of(folder), options.jobs, options.any_code, _tell, options.ranks, _cluster(options))

    def write(runs: GridRuns) -> dict[str, Any]:
        found = grid_result(grid, runs, folder)
        write_grid(found, folder)
        return found

    runs = run_grid(grid, runner, options.jobs, _tell, write, finished_only=options.finished_only)
    found = write(runs)
    if options.beside is not None:
        from raafl.lab.compare.grid_result import add_rows

        found = add_rows(found, options.beside)
    shown = [
        "\n".join([f"{cell['task']} on {cell['fleet']}", text(cell_table(cell)), *warnings(cell)])
        for cell in found["cells"]
        if cell["rows"]
    ]
    refused = [
        f"{cell['task']} on {cell['fleet']}: {row['row']}"
        for cell in found["cells"]
        for row in cell["rows"]
        if row["accepted"] is False
    ]
    if refused:
        raise RunFailed(
            f"{len(refused)} rows are marked as not accepted in {folder / 'result.json'}, since replaying one of their runs "
            f"gave another model; the first: {refused[0]}"
        )
    return json.dumps(found) if options.json else "\n\n".join([*shown, f"wrote {folder / 'result.json'}"])


def _verify_grid(grid: Grid, folder: Path, options: Namespace) -> str:
    from raafl.lab.compare.grid_result import verify_grid

    path = options.beside or folder / "result.json"
    verdicts = []
    for verdict in verify_grid(grid, path, options.verify, folder, options.jobs):
        verdicts.append(verdict)
        _tell(
            f"{verdict['cell']}, {verdict['row']}, seed {verdict['seed']}: {verdict['why'] or 'equal, to the last bit'}"
        )
    differing = [verdict for verdict in verdicts if verdict["why"]]
    if differing:
        raise RunFailed(
            f"{len(differing)} of {len(verdicts)} repeated runs gave another result than {path} says: do not rely on it"
        )
    if options.json:
        return json.dumps({"verified": len(verdicts), "equal": True})
    return f"{quantity(len(verdicts), 'run')} made again and replayed, each equal to what {path} says, to the last bit"

"""Run or verify a grid, which is a set of comparisons (`raafl compare GRID.yaml`)."""

from __future__ import annotations

import json
import logging
from argparse import Namespace
from pathlib import Path
from typing import Any

from raafl.errors import BadInput, RunFailed
from raafl.lab.compare.grid import Grid, read_grid
from raafl.units import quantity

_log = logging.getLogger(__name__)


def run_file(options: Namespace) -> str:
    """Run a grid (a comparison for each pair of a task and a set of devices), and return its tables as text.

    With `--verify`, instead repeat some runs of the grid and check that the results are the same.

    Raises:
        BadInput: an option or a file of the grid is wrong; raised before any run starts.
        RunFailed: some runs failed, or a repeated run gave another result.
    """
    from raafl.lab.compare.grid_result import cell_table, grid_result, write_grid
    from raafl.lab.compare.grid_runs import GridRuns, root_of, run_grid
    from raafl.lab.compare.runs import Runner
    from raafl.lab.compare.tables import text, warnings

    grid = read_grid(options.file, options.add)
    if options.variant or options.plan:
        raise BadInput(
            f"'{options.file}' describes a grid of comparisons, for which --variant and --plan do not exist: leave them out"
        )
    if options.rows:
        grid = grid.only(options.rows)
    folder: Path = options.output or Path("comparisons") / grid.name
    if options.verify is not None:
        return _verify(grid, folder, options)
    runner = Runner(root_of(folder), options.jobs, options.any_code, _tell, options.ranks)

    def write(runs: GridRuns) -> dict[str, Any]:
        found = grid_result(grid, runs, folder)
        write_grid(found, folder)
        return found

    runs = run_grid(grid, runner, options.jobs, _tell, write, finished_only=options.finished_only)
    found = write(runs)
    if options.beside is not None:
        from raafl.lab.compare.grid_verify import add_rows

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


def _verify(grid: Grid, folder: Path, options: Namespace) -> str:
    from raafl.lab.compare.grid_verify import verify_grid

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


def _tell(line: str) -> None:
    _log.info(line, extra={"prefix": ""})

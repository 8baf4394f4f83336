"""Methods beside each other on one config: the comparisons of the papers, over several seeds.

A comparison is a file in benchmarks/comparisons: a config, seeds, options of all runs, and rows, each with the options by
which it differs from them. With a ``search`` (an option, its values, seeds of its own, options of these runs) each row has the
value with which its search runs end at the highest mean accuracy; values and seeds are the same for all rows. Of each row: mean and
standard deviation over the seeds of the final metrics, of the best accuracy on the way, of what the run cost, and of the lead
of the first row: how many times as long this one takes to its best accuracy as the first does to as much, over those seeds
(`lead_seeds`) where the first gets there. With `smooth` in the file the lead is of curves whose points are the mean of so
many evaluations; with `levels`, too, `time_to_LEVEL_s` on such a curve, over those seeds (`time_to_LEVEL_s_seeds`) that get
there. All rows of a seed run before the next seed. On standard error: each run as it ends.

    python -m benchmarks.methods NAME [--seeds 0 1] [--rows "RAM-Fed L-Arb" FedAvg] [--jobs 2] [--folder DIR] [-- OPTION ...]
    (--json prints one JSON object; --out FILE saves it; options after -- go to every run, such as --max_updates 100; with
    --folder the runs are kept there: one that has ended is taken as it is, one that was cut off goes on)
"""

from __future__ import annotations

import argparse
import csv
import json
import multiprocessing as mp
import os
import re
import shlex
import shutil
import statistics
import sys
import tempfile
from collections.abc import Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml

from benchmarks.common import Row, main

HERE = Path(__file__).parent
METRIC = "accuracy"


@dataclass(frozen=True)
class Setting:
    """One run.

    Attributes:
        label: of its row.
        config: path.
        options: of `raafl simulate`.
        seed: of the run.
        found: what was searched for, if anything was.
    """

    label: str
    config: Path
    options: tuple[str, ...]
    seed: int
    found: str | None = None

    @property
    def name(self) -> str:
        """A name for its folder."""
        return re.sub(r"\W+", "-", f"{self.label.lower()}-seed-{self.seed}")

    def text(self) -> str:
        """Return what it is, to know it again by."""
        config = str(self.config.relative_to(HERE.parent))
        return json.dumps({"config": config, "options": self.options, "seed": self.seed}, indent=1)


def read(name: str) -> tuple[list[Setting], dict[str, Any]]:
    """Return the runs of a comparison, seed by seed with rows in the file's order, and the file.

    Raises:
        SystemExit: there is no such comparison.
    """
    path = HERE / "comparisons" / f"{name}.yaml"
    if not path.is_file():
        known = ", ".join(sorted(p.stem for p in path.parent.glob("*.yaml")))
        raise SystemExit(f"there is no comparison '{name}': give one of {known}")
    found = yaml.safe_load(path.read_text())
    config = HERE.parent / found["config"]
    common = found.get("options", "")
    rows = [(label, tuple(shlex.split(f"{common} {options or ''}"))) for label, options in found["rows"].items()]
    return [Setting(label, config, options, seed) for seed in found["seeds"] for label, options in rows], found


def searched(settings: Sequence[Setting], search: dict[str, Any], jobs: int, keep: Path | None = None) -> list[Setting]:
    """Return the settings with the value of ``search["option"]`` that their row does best with, which runs it with all of them."""
    first = list({setting.label: setting for setting in settings}.values())
    tries = [
        Setting(
            f"{one.label}, {search['option'].lstrip('-')} {value}", one.config,
            (*one.options, *shlex.split(search.get("options", "")), search["option"], str(value)), seed,
        )
        for one in first
        for value in search["values"]
        for seed in search["seeds"]
    ]  # fmt: skip
    reached = iter([row.get(METRIC, 0.0) for row in run_all(tries, jobs, keep)])
    best = {}
    for one in first:
        mine = {value: statistics.mean(next(reached) for _ in search["seeds"]) for value in search["values"]}
        best[one.label] = str(max(mine, key=lambda value: (mine[value], -search["values"].index(value))))
    return [
        replace(one, options=(*one.options, search["option"], best[one.label]), found=best[one.label])
        for one in settings
    ]


def parsed(setting: Setting) -> Any:
    """Read what is to be simulated; raises `BadInput` where an option is wrong."""
    from raafl.config.parse import parse

    given = ["--config", str(setting.config), *setting.options, "--seed", str(setting.seed), "--progress", "quiet"]
    return parse("simulate", given)


def kept(setting: Setting, folder: Path) -> dict[str, Any] | None:
    """Return the summary of the run that has ended in ``folder``, if one has.

    Raises:
        SystemExit: the folder holds another run.
    """
    note = folder.with_suffix(".json")
    if note.is_file() and note.read_text() != setting.text():
        raise SystemExit(f"{folder} holds a run with other options ({note.name} says which): give another --folder")
    if not note.is_file() or not (folder / "summary.json").is_file():
        return None
    summary: dict[str, Any] = json.loads((folder / "summary.json").read_text())
    return None if summary["finished"] == "interrupted" else summary


def simulated(setting: Setting, folder: Path) -> dict[str, Any]:
    """Simulate in ``folder``, or go on where a run was cut off there; return the summary."""
    from raafl import simulate
    from raafl.runfolder.checkpoints import newest

    folder.parent.mkdir(parents=True, exist_ok=True)
    folder.with_suffix(".json").write_text(setting.text())
    made = parsed(setting)
    made.experiment.output = str(folder)
    if newest(folder) is not None:
        made.experiment.resume = str(folder)
    elif folder.exists():
        shutil.rmtree(folder)  # cut off before there was a checkpoint
    summary: dict[str, Any] = simulate(made.experiment, made.config_yaml)[0]
    return summary


def run(setting: Setting, keep: Path | None = None) -> Row:
    """Return what came of a run: of one in the folder ``keep``, or simulated now, in this process."""
    with tempfile.TemporaryDirectory() as scratch:
        folder = (keep or Path(scratch)) / setting.name
        summary = kept(setting, folder) or simulated(setting, folder)
        curve = curve_of(folder / "metrics.csv")
    best = max((value for _, value in curve), default=None)
    share = statistics.fmean(summary["participation"].values()) / max(summary["versions"], 1)
    return {
        "method": setting.label, "seed": setting.seed, "found": setting.found, **summary["final"], f"best_{METRIC}": best,
        "versions": summary["versions"], "updates": summary["updates_merged"], "time_s": summary["time_s"],
        "utilisation": summary["utilisation"], "participation": share,
        "time_to": next(iter(summary["time_to"].values()), None),
        "megabytes": (summary["bytes_up"] + summary["bytes_down"]) / 1e6, "wall_s": summary["wall_s"], "curve": curve,
    }  # fmt: skip


def curve_of(path: Path) -> list[tuple[float, float]]:
    """Return time and accuracy of each evaluation in a run's metrics.csv."""
    with path.open(newline="") as file:
        return [(float(row["time_s"]), float(row[METRIC])) for row in csv.DictReader(file) if row.get(METRIC)]


def smoothed(curve: Sequence[tuple[float, float]], num: int) -> list[tuple[float, float]]:
    """Return the mean of each ``num`` evaluations in a row, at the time of the last; of all where there are fewer."""
    num = min(num, len(curve))
    windows = (curve[end - num : end] for end in range(num, len(curve) + 1)) if num else ()
    return [(window[-1][0], statistics.fmean(value for _, value in window)) for window in windows]


def lead(ours: Sequence[tuple[float, float]], theirs: Sequence[tuple[float, float]]) -> float | None:
    """Return how many times as long ``theirs`` takes to its best as ``ours`` to as much; None where ours never gets there."""
    best = max(value for _, value in theirs)
    reached = [next((time_s for time_s, value in curve if value >= best), None) for curve in (ours, theirs)]
    return None if reached[0] is None or not reached[1] else reached[1] / reached[0]


def rows(
    settings: Iterable[Setting], jobs: int, keep: Path | None = None, smooth: int = 1, levels: Sequence[float] = ()
) -> list[Row]:
    """Run all, so many at a time, and return a row for each method: mean and, as ``..._sd``, standard deviation."""
    wanted = list(settings)
    found = run_all(wanted, jobs, keep)
    for row in found:
        row["curve"] = smoothed(row["curve"], smooth)
        for level in levels:
            row[f"time_to_{level:g}_s"] = next((time_s for time_s, value in row["curve"] if value >= level), None)
    labels = list(dict.fromkeys(setting.label for setting in wanted))
    first = {row["seed"]: row["curve"] for row in found if row["method"] == labels[0]}
    for row in found:
        row["lead"] = lead(first[row["seed"]], row.pop("curve"))
        print(f"{row['method']}, seed {row['seed']}: lead {row['lead']}", file=sys.stderr, flush=True)
    return [_summary([row for row in found if row["method"] == label]) for label in labels]


def run_all(wanted: Sequence[Setting], jobs: int, keep: Path | None = None) -> list[Row]:
    """Run all, so many at a time, and return what came of each; said on standard error as it ends."""
    for setting in {setting.label: setting for setting in wanted}.values():
        parsed(setting)  # a wrong option ends it now, not after hours
    with ProcessPoolExecutor(jobs, mp_context=mp.get_context("spawn"), initializer=_quiet) as pool:
        found = []
        for row in pool.map(run, wanted, [keep] * len(wanted)):
            shown = {name: round(v, 4) if isinstance(v, float) else v for name, v in row.items() if name != "curve"}
            print(shown, file=sys.stderr, flush=True)
            found.append(row)
    return found


def _summary(runs: Sequence[Row]) -> Row:
    summary: Row = {"method": runs[0]["method"], "seeds": len(runs)}
    if runs[0]["found"] is not None:
        summary["found"] = runs[0]["found"]
    for name in runs[0]:
        values = [row[name] for row in runs if isinstance(row.get(name), int | float) and name != "seed"]
        if name == "lead" or name.startswith("time_to_"):
            summary |= {name: statistics.fmean(values) if values else None, f"{name}_seeds": len(values)}
        elif len(values) == len(runs):
            summary[name] = statistics.fmean(values)
            if len(values) > 1 and name in (METRIC, f"best_{METRIC}", "loss", "time_s", "time_to"):
                summary[f"{name}_sd"] = statistics.stdev(values)
    return summary


def _quiet() -> None:
    os.environ.setdefault("OMP_NUM_THREADS", "1")


if __name__ == "__main__":
    argv, more = sys.argv[1:], []
    if "--" in argv:
        argv, more = argv[: argv.index("--")], argv[argv.index("--") + 1 :]
    parser = argparse.ArgumentParser(prog="python -m benchmarks.methods", add_help=False)
    parser.add_argument("name")
    parser.add_argument("--seeds", type=int, nargs="+")
    parser.add_argument("--rows", nargs="+")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--folder", type=Path)
    given, left = parser.parse_known_args(argv)
    chosen, file = read(given.name)
    if given.seeds:
        chosen = [replace(setting, seed=seed) for seed in given.seeds for setting in chosen[: len(file["rows"])]]
    if given.rows:
        unknown = [label for label in given.rows if label not in file["rows"]]
        if unknown:
            raise SystemExit(f"no row '{unknown[0]}' in {given.name}: give some of {', '.join(file['rows'])}")
        chosen = [setting for setting in chosen if setting.label in given.rows]
    chosen = [replace(setting, options=(*setting.options, *more)) for setting in chosen]

    def _all_rows() -> list[Row]:
        search = file.get("search")
        found = searched(chosen, search, given.jobs, given.folder) if search else chosen
        return rows(found, given.jobs, given.folder, file.get("smooth", 1), file.get("levels", []))

    main("methods", _all_rows, left)

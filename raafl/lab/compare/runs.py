"""Run the runs of a comparison: finished ones are reused, interrupted ones resumed, the others started."""

from __future__ import annotations

import contextlib
import csv
import datetime
import hashlib
import importlib.util
import json
import platform
import re
import shlex
import shutil
import statistics
import subprocess
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cache
from importlib import metadata
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

import raafl
from raafl.atomic_file import atomic_file
from raafl.config.argv import with_paths
from raafl.config.check import OF_TRAINER
from raafl.config.shared import config_digest
from raafl.config.targets import Goals
from raafl.devices import fleets
from raafl.errors import BadInput, nearest
from raafl.lab.compare.comparison import Options
from raafl.lab.compare.processes import check_free, in_processes, ranks_log, start
from raafl.lab.report.groups import of_experiment
from raafl.runfolder.checkpoints import newest
from raafl.runfolder.events import is_ended, read_summary
from raafl.runfolder.schema import CLIENT, JOURNAL, METRICS, TRAIN, Summary, is_metric
from raafl.runfolder.seals import file_digest
from raafl.runtime.lifecycle.environment import processor
from raafl.units import duration, quantity

if TYPE_CHECKING:
    from raafl.config.parse import Parsed
    from raafl.lab.compare.processes import Cluster

_FAILED = 1  # exit code of a run that failed by itself, for example because it diverged
_OF_RAAFL = ("raafl", "model_zoo")  # packages whose files are part of the code's digest
_TOLD_S = 30.0
"""Seconds until the first line of progress while no run ends; each further one takes twice as long."""


@dataclass(frozen=True)
class Run:
    """One run of a comparison: a row and a seed.

    Attributes:
        label: label of the row.
        config: name or path of the base config.
        options: options of `raafl simulate`, without config and seed.
        seed: seed of the run.
        digest: digest of the config, without fields that do not affect the result.
        limits: pair (number of merged updates, virtual seconds) after which the run ends; None = no such limit.
        fields_digest: digest of all fields of the config except the seed.
    """

    label: str
    config: str
    options: Options
    seed: int
    digest: str
    limits: tuple[int | None, float | None]
    fields_digest: str

    @property
    def argv(self) -> list[str]:
        """Arguments of `raafl simulate` for this run."""
        return ["--config", self.config, *self.options, "--seed", str(self.seed)]

    @property
    def command(self) -> str:
        """Command line of this run, as a user would type it."""
        return "raafl simulate " + shlex.join(self.argv)

    def folder(self, root: Path, code: str) -> Path:
        """Return the folder of this run.

        Args:
            root: folder that contains all run folders.
            code: digest of the code; each version of the code gets folders of its own.
        """
        slug = re.sub(r"\W+", "-", self.label.lower()).strip("-")[:40]
        return root / f"{slug}-seed-{self.seed}-{config_digest([self.label, self.digest])[:10]}-{code[:8]}"

    def part(self, fraction: float) -> Run:
        """Return a shorter run with the same options, which ends after ``fraction`` of this run's limits."""
        if fraction == 1:
            return self
        updates, time_s = self.limits
        options = [] if updates is None else ["--max_updates", str(max(1, round(updates * fraction)))]
        options += [] if time_s is None else ["--max_time", repr(time_s * fraction)]
        return replace(self, options=(*self.options, *options), digest=config_digest([self.digest, fraction]))


def resolve(config: str, label: str, options: Options, seeds: Sequence[int]) -> list[Run]:
    """Parse the options of a row; return its run for each seed.

    Raises:
        BadInput: an option is wrong; the message names the row.
    """
    from raafl.config.options import seconds

    row = parsed(config, label, options, seeds[0])
    fields = yaml.safe_load(row.config_yaml)
    experiment = of_experiment(fields)
    experiment["contents"] = {
        path.name if path == fleets.FILE else str(path): file_digest(path) for path in _named_files(fields)
    }
    limits = (row.experiment.max_updates, seconds("max_time", row.experiment.max_time))
    of_fields = config_digest({**fields, "seed": None})
    return [
        Run(label, config, options, seed, config_digest({**experiment, "seed": seed}), limits, of_fields)
        for seed in seeds
    ]


def check_distinct(rows: Mapping[str, Sequence[Run]]) -> None:
    """Raise `BadInput` if two rows would be the same runs, as where an option of the base config holds for both."""
    labels: dict[str, str] = {}
    for label, runs in rows.items():
        first = labels.setdefault(runs[0].fields_digest, label)
        if first != label:
            raise BadInput(
                f"rows has '{first}' and '{label}', which are the same runs: give one of them another option, or leave it out. "
                "An algorithm of a row keeps the options of the algorithm before it that it has, too"
            )


def parsed(config: str, label: str, options: Options, seed: int) -> Parsed:
    """Parse the options of one run of a row, and check them without starting the run.

    Raises:
        BadInput: an option is wrong; the message names the row.
    """
    from raafl.config.parse import parse

    try:
        row = parse(
            "simulate", [*with_paths(["--config", config]), *options, "--seed", str(seed), "--progress", "quiet"]
        )
        row.experiment.check()
        for name in _class_paths(yaml.safe_load(row.config_yaml)):
            if name.startswith("__main__."):
                raise BadInput(
                    f"{name} is a class of this notebook or script, but each run of a comparison is a process of its own: "
                    "write the class into a file (in a notebook with %%writefile my_model.py), and name it "
                    f"my_model.{name.rpartition('.')[2]}"
                )
    except BadInput as error:
        raise BadInput(f"row '{label}': {error}") from None
    return row


def _named_files(fields: Mapping[str, Any]) -> list[Path]:
    """List the files, besides the config, on whose contents a run's result depends.

    They are the device file, recordings of device speeds, and the modules with the user's classes, without what these
    import.
    """
    from raafl.devices.files import load_devices

    devices = fields.get("devices")
    found = set()
    if isinstance(devices, str) and fleets.is_fleet(devices):
        found |= set(fleets.files(devices))
    elif isinstance(devices, str) and Path(devices).is_file():
        found.add(Path(devices))
        devices = [{"recorded": device.recorded} for device in load_devices(devices)]
    if isinstance(devices, list):
        found |= {Path(row["recorded"]) for row in devices if isinstance(row, dict) and row.get("recorded")}
    for name in _class_paths(fields):
        if name.partition(".")[0] not in _OF_RAAFL:
            found |= _file_with(name.rpartition(".")[0])
    return sorted(found)


def _file_with(name: str) -> set[Path]:
    """Return the file of a module, or of the module that has a class of that name; none for what has no file."""
    if not name:
        return set()
    try:
        spec = importlib.util.find_spec(name)
    except ModuleNotFoundError:  # the name of a class, in which another class is
        return _file_with(name.rpartition(".")[0])
    return {Path(spec.origin)} if spec is not None and spec.origin and Path(spec.origin).is_file() else set()


def _class_paths(value: object) -> Iterator[str]:
    """Yield the import paths of classes and functions that a config names, that of a Trainer's function among them."""
    if isinstance(value, Mapping):
        if isinstance(name := value.get("class_path"), str):
            yield name
            if name.startswith(OF_TRAINER):
                yield value["init_args"]["trainer"]
        value = value.values()
    if isinstance(value, Iterable) and not isinstance(value, str):
        for part in value:
            yield from _class_paths(part)


@dataclass(frozen=True)
class Outcome:
    """Outcome of a run: its summary, or the reason why it failed."""

    run: Run  # run that has ended
    folder: Path  # folder of the run
    summary: Summary | None  # figures of a finished run; None = it failed
    code: str  # digest of the code that ran it
    error: str = ""  # last line of a failed run's log
    # whether the run would fail again, for example because it diverged; False = it was ended from outside
    by_itself: bool = False


class Runner:
    """Runs simulations, ``jobs`` at a time, each in processes of its own, here or on a cluster."""

    def __init__(
        self,
        root: Path,
        jobs: int,
        any_code: bool,
        tell: Callable[[str], None],
        num_ranks: int = 1,
        cluster: Cluster | None = None,
    ) -> None:
        self._root, self._jobs, self._any_code, self._tell = root, jobs, any_code, tell
        self._num_ranks, self._cluster = num_ranks, cluster
        self._seconds: list[float] = []  # wall time in seconds of each run that this process has finished
        self._told_s, self._silence_s = time.monotonic(), _TOLD_S
        root.mkdir(parents=True, exist_ok=True)

    def find(self, run: Run) -> Outcome | None:
        """Return the outcome of a finished run from its folder; None if the run has not finished.

        Raises:
            BadInput: somebody has resumed the run with another goal.
        """
        names = [run.folder(self._root, code_digest())]
        if self._any_code:
            pattern = re.sub(r"[0-9a-f]{8}$", "*", names[0].name)
            names += sorted(path for path in self._root.glob(pattern) if path.is_dir() and path != names[0])
        for folder in names:
            note, summary = _note(folder), read_summary(folder)
            if summary is not None and is_ended(summary) and note.get("digest") == run.digest:
                _check_goals(run, folder)
                return Outcome(run, folder, summary, str(note.get("code", "")))
        return None

    def run_all(self, runs: Sequence[Run], metric: str | None = None) -> list[Outcome]:
        """Run all runs that have not finished, and return the outcome of each run, in order.

        `metric`: metric that each run must measure; None = any.

        Raises:
            KeyboardInterrupt: Ctrl-C or SIGTERM was received; runs in progress were interrupted, and the next call
                continues them.
            BadInput: another process is working on one of the runs, or a run does not measure the metric; runs in
                progress were interrupted.
        """
        found = {run: outcome for run in runs if (outcome := self.find(run)) is not None}
        queue = [run for run in dict.fromkeys(runs) if run not in found]
        begun_s: dict[Run, float] = {}
        for outcome in found.values():
            _check_metric(metric, outcome.run, outcome.folder, ended=True)

        def start_run(run: Run) -> BaseProcess:
            begun_s[run] = time.monotonic()
            return self._start(run)

        def wait_on(num: int) -> None:
            busy = {run: begin for run, begin in begun_s.items() if run not in found}
            for run in busy:
                _check_metric(metric, run, run.folder(self._root, code_digest()), ended=False)
            self._tell_sometimes(num, busy)

        with contextlib.closing(in_processes(queue, self._jobs, start_run, wait_on)) as processes:
            for run, process, left in processes:
                outcome = self._outcome(run, process)
                _check_metric(metric, run, outcome.folder, ended=outcome.summary is not None)
                found[run] = outcome
                others = ranks_log(run.folder(self._root, code_digest()).with_suffix(".log"))
                if self._num_ranks > 1 and others.stat().st_size:
                    self._tell(f"{run.label}, seed {run.seed}: some of its ranks did not end well: see {others}")
                self._seconds.append(time.monotonic() - begun_s[run])
                self._silence_s = _TOLD_S
                self._say_left(left, f"{run.label}, seed {run.seed}: {_sentence(outcome)}")
        return [found[run] for run in runs]

    def _start(self, run: Run) -> BaseProcess:
        folder = run.folder(self._root, code_digest())
        log = folder.with_suffix(".log")
        # first, since another process may be in this run before its first checkpoint, and the folder is deleted below
        check_free(log)
        if newest(folder) is not None:
            _check_goals(run, folder)
            argv = ["--resume", str(folder)]
        else:
            if folder.exists():
                shutil.rmtree(folder)  # interrupted before its first checkpoint, so there is nothing to resume
            argv = [*run.argv, "--output", str(folder)]
        note = {
            "label": run.label,
            "command": run.command,
            "digest": run.digest,
            "seed": run.seed,
            "code": code_digest(),
            "provenance": provenance(),
        }
        with atomic_file(_note_path(folder)) as file:
            file.write(json.dumps(note, indent=1).encode())
        return start(["simulate", *argv, "--progress", "quiet"], log, self._num_ranks, self._cluster)

    def _outcome(self, run: Run, process: BaseProcess) -> Outcome:
        """Return the outcome of a run whose process has ended."""
        outcome = self.find(run)
        if outcome is not None:
            return outcome
        folder = run.folder(self._root, code_digest())
        lines, summary = _last_lines(folder.with_suffix(".log")), read_summary(folder)
        return Outcome(
            run,
            folder,
            None,
            code_digest(),
            lines[-1] if lines else f"exit code {process.exitcode}",
            by_itself=process.exitcode == _FAILED and summary is not None and summary.get("finished") is not None,
        )

    def _tell_sometimes(self, num: int, begun_s: Mapping[Run, float]) -> None:
        """Say which runs are under way, after ever longer silences, so that the log of a long run stays short."""
        now = time.monotonic()
        if now - self._told_s > self._silence_s:
            self._silence_s *= 2
            busy = (f"{run.label}, seed {run.seed}: for {duration(now - begun)}" for run, begun in begun_s.items())
            self._say_left(num, ", ".join(sorted(busy)))

    def _say_left(self, num: int, line: str = "") -> None:
        """Print ``line``, how many runs of this step remain, and about how long they will take."""
        left = f"{quantity(num, 'run')} left in this step"
        if self._seconds and num:
            left += f", about {duration(statistics.fmean(self._seconds) * num / self._jobs)}"
        self._tell(f"{line}  ({left})" if line else left)
        self._told_s = time.monotonic()


def _check_metric(metric: str | None, run: Run, folder: Path, *, ended: bool) -> None:
    """Raise `BadInput` if a run does not measure the comparison's metric; before its first evaluation nothing is known."""
    try:
        with (folder / METRICS).open(newline="") as file:
            columns = next(csv.reader(file), [])
    except OSError:
        return
    # metrics of clients and of training appear only after a task, so they may still come
    later = not ended and metric is not None and metric.startswith((CLIENT, TRAIN.rstrip("/")))
    if metric is None or metric in columns or later or not columns:
        return
    raise BadInput(
        f"metric is '{metric}', which the runs of row '{run.label}' do not measure: "
        f"{nearest(metric, filter(is_metric, columns))}"
    )


def _check_goals(run: Run, folder: Path) -> None:
    """Raise `BadInput` for a run that was resumed with another goal than it began with, and so than its rivals have."""
    try:
        with (folder / JOURNAL).open("rb") as file:
            # few of many rows are parsed: the first, and those by which the run went on
            rows = [json.loads(line) for number, line in enumerate(file) if number == 0 or b'"event":"resumed"' in line]
        first, *later = [Goals.from_json(row.get("goals")) for row in rows]
    except (OSError, ValueError, AttributeError):  # a run without its journal still has its summary
        return
    for goals in later:
        for name in (field.name for field in fields(Goals) if getattr(goals, field.name) != getattr(first, field.name)):
            row_has, run_has = (_goal(getattr(one, name)) for one in (first, goals))
            raise BadInput(
                f"row '{run.label}', seed {run.seed}: its run in {folder} was resumed with {name} {run_has}, but the row has "
                f"{row_has}: move that folder elsewhere or delete it, and the same command makes the run anew"
            )


def _goal(value: Any) -> str:
    return (
        ", ".join(map(str, value)) or "none" if isinstance(value, tuple) else "none" if value is None else f"{value:g}"
    )


def made_by(folder: Path) -> dict[str, Any]:
    """Return the date and commit of the process that started a run; empty if they were not recorded."""
    noted = _note(folder).get("provenance") or {}
    return {name: noted[name] for name in ("date", "commit") if name in noted}


def _note_path(folder: Path) -> Path:
    return folder.with_suffix(".json")


def _note(folder: Path) -> dict[str, Any]:
    try:
        note = json.loads(_note_path(folder).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return note if isinstance(note, dict) else {}


def _last_lines(path: Path) -> list[str]:
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return []
    return [line.strip() for line in text.splitlines() if line.strip()]


def _sentence(outcome: Outcome) -> str:
    if outcome.summary is None:
        return f"failed: {outcome.error}"
    # a summary, like all JSON, has null in place of NaN and infinity
    final = "  ".join(
        f"{name} {'not finite' if value is None else format(value, '.4g')}"
        for name, value in outcome.summary["final"].items()
    )
    return f"{final}  in {outcome.summary['wall_s']:.0f} s"


# Record when, on which machine and with which code a result was made. ¶ This part imports no torch, so that commands
# that need nothing else start fast.

_PACKAGES = ("torch", "lightning", "numpy")
_GPUS = Path("/proc/driver/nvidia/gpus")


def provenance() -> dict[str, Any]:
    """Return the date, hardware, versions and commit of this process, to be stored with a result."""
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "commit": _commit(),
        "code_digest": code_digest(),
        "hardware": {
            "processor": processor(),
            "gpus": gpus(),
            "system": platform.system(),
            "machine": platform.machine(),
        },
        "versions": {"python": platform.python_version(), "raafl": raafl.__version__}
        | {name: metadata.version(name) for name in _PACKAGES},
    }


def gpus(folder: Path = _GPUS) -> list[str]:
    """Return the model names of this machine's NVIDIA GPUs, which the driver keeps in files below a folder."""
    found = []
    for path in sorted(folder.glob("*/information")):
        with contextlib.suppress(OSError):
            lines = path.read_text(encoding="utf-8").splitlines()
            found += [line.partition(":")[2].strip() for line in lines if line.startswith("Model:")]
    return found


def machine_name(hardware: Mapping[str, Any]) -> str:
    """Return the processor and the GPUs of a result's machine in words, as "Intel(R) Xeon(R) Processor, NVIDIA H200"."""
    return ", ".join([hardware["processor"], *hardware.get("gpus", [])])


@cache
def _commit() -> str | None:
    """Return the git commit of raafl's checkout, with `+` if files have changed since; None outside a checkout."""
    git = ["git", "-C", str(Path(raafl.__file__).parent)]
    try:
        commit = subprocess.run([*git, "rev-parse", "HEAD"], capture_output=True, text=True, check=True).stdout.strip()
        changed = subprocess.run(
            [*git, "status", "--porcelain", "."], capture_output=True, text=True, check=True
        ).stdout
    except (OSError, subprocess.CalledProcessError):
        return None
    return commit + ("+" if changed.strip() else "")


@cache
def code_digest() -> str:
    """Return a digest of the source files of raafl and, if installed, of its model zoo (the package `model_zoo`)."""
    package = Path(raafl.__file__).parent
    digest = hashlib.sha256()
    for folder in (package, package.parent / "model_zoo"):
        for path in sorted(folder.rglob("*.py")):
            digest.update(path.relative_to(folder.parent).as_posix().encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()

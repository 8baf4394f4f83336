"""Run the runs of a comparison on a cluster: as jobs of Slurm (by submitit), or as tasks of Ray.

Each run keeps a small process here, which submits it, waits for it, and ends with its exit code; so runs are found, resumed,
interrupted and listed as those of this machine are. The run's folder must be on a file system that the cluster shares.
"""

from __future__ import annotations

import logging
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

from raafl.errors import BadInput, installing
from raafl.runfolder.checkpoints import newest
from raafl.sanitize import sanitize_text

_log = logging.getLogger(__name__)

Name = Literal["ray", "slurm", "local"]
_LOOK_S = 2.0
_FAILED = 1


@dataclass(frozen=True)
class Cluster:
    """Where the runs of a comparison run.

    Attributes:
        name: ray; slurm; or local, which is submitit's stand-in for Slurm on this machine.
        options: for Slurm, parameters of submitit such as ``timeout_min`` or ``slurm_partition``; for Ray ``address``,
            ``num_cpus`` and ``num_gpus`` of each run.
    """

    name: Name
    options: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, name: Name, given: Sequence[str]) -> Cluster:
        """Read options of the form KEY=VALUE, and check that what the cluster needs is installed.

        Raises:
            BadInput: an option has another form, or a package is missing.
        """
        options: dict[str, Any] = {}
        for text in given:
            key, equals, value = text.partition("=")
            if not (key and equals):
                raise BadInput(f"engine_options has {text!r}: give KEY=VALUE, such as timeout_min=120")
            options[key] = _number(value)
        _check_installed(name)
        return cls(name, options)

    def run(self, argv: Sequence[str], log: Path) -> int:
        """Run a command of raafl on the cluster, with its output in the file ``log``; return its exit code.

        SIGINT ends the run there as it would here, with a checkpoint.
        """
        job = _Job(tuple(argv), str(log))
        try:
            return self._on_ray(job) if self.name == "ray" else self._by_submitit(job)
        except (ValueError, TypeError, RuntimeError, ConnectionError) as error:
            _log.error(f"engine is '{self.name}', which has not run the job: {sanitize_text(error, 400)}")
            return _FAILED

    def _by_submitit(self, job: _Job) -> int:
        import submitit

        executor = submitit.AutoExecutor(folder=Path(job.log).parent / "jobs", cluster=self.name)
        executor.update_parameters(**{"name": "raafl", **self.options})
        submitted = executor.submit(job)
        try:
            while not submitted.done():
                time.sleep(_LOOK_S / 4 if self.name == "local" else _LOOK_S)
        except KeyboardInterrupt:
            submitted.cancel()
            while not submitted.done():
                time.sleep(_LOOK_S / 4)
            return 130
        error = submitted.exception()
        if error is not None:
            _log.error(f"job {submitted.job_id} has failed: {sanitize_text(error, 400)}")
            return _FAILED
        return int(submitted.result())

    def _on_ray(self, job: _Job) -> int:
        import ray

        shares = dict(self.options)
        ray.init(address=shares.pop("address", "auto"), logging_level=logging.ERROR, log_to_driver=False)
        # the run is resumed where its worker died
        submitted = ray.remote(_Job.__call__).options(max_retries=-1, name="raafl run", **shares).remote(job)
        try:
            while not ray.wait([submitted], timeout=_LOOK_S)[0]:
                pass
        except KeyboardInterrupt:
            ray.cancel(submitted)
            ray.wait([submitted], timeout=None)
            return 130
        return int(ray.get(submitted))


@dataclass(frozen=True)
class _Job:
    """A command to be run on another machine, which is resumed from its last checkpoint where it begins again."""

    argv: tuple[str, ...]
    log: str

    def __call__(self) -> int:
        """Run the command here, and return its exit code."""
        argv = self.argv
        if "--output" in argv and newest(folder := Path(argv[argv.index("--output") + 1])) is not None:
            argv = (argv[0], "--resume", str(folder), "--progress", "quiet")
        with Path(self.log).open("ab") as log:
            process = subprocess.Popen([sys.executable, "-m", "raafl", *argv], stdout=log, stderr=log)
            try:
                return process.wait()
            except BaseException:  # the job is cancelled: the run saves its state first
                process.send_signal(signal.SIGINT)
                process.wait()
                raise

    def checkpoint(self) -> Any:
        """Return the job to be queued again where Slurm takes its node away (called by submitit)."""
        from submitit.helpers import DelayedSubmission

        return DelayedSubmission(self)


def _check_installed(name: Name) -> None:
    package, extra = ("ray", "ray") if name == "ray" else ("submitit", "slurm")
    if find_spec(package) is None:
        raise BadInput(f"engine is '{name}', which needs {package}: {installing(extra)}")


def _number(text: str) -> int | float | str:
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text

"""Fit device profiles to the tasks of a real run, and compare real runs with the virtual clock.

A task's seconds are those between its assignment and its arrival, both on the server's clock: the transfers, the training and
what the server does between them. They are fitted by ``slowdown x predicted computation + overhead x round trips + predicted
transfers``; a task has one round trip, and one more for each exchange with the server in mid-task.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from raafl.config.experiment import Experiment
from raafl.core.algorithm import SelectContext
from raafl.core.restoring import assignment_from_json, client_from_json
from raafl.core.types import Assignment, ClientInfo, Work
from raafl.devices.checks import LEAST_FACTOR, MOST_FACTOR
from raafl.devices.profiles import Device, Profile
from raafl.errors import BadInput
from raafl.lab.plan.dry import World, predict
from raafl.runfolder.events import read_run
from raafl.runfolder.schema import JournalRow

MOST_FITTED = 20
"""Largest number of tasks of a client to which its profile is fitted; the others are held out."""
_SPREAD = 1.25
"""The computation per round trip of a client's tasks must differ by this factor before an overhead can be told from a slower
device."""
_OUTLIER = 5.0
"""A task that takes this many times what the fit says is left out of it: the machine slept, or was swapped out."""
_ROUNDING_S = 1e-4
_GIVE_BASE = "give --base FILE, a file that `raafl plan --measure FILE` wrote"

Numbers = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class TimedTask:
    """One finished task of a real run, with its real and predicted times."""

    client: int  # id of the client
    incarnation: int  # number of times that the client had joined before
    assigned_s: float  # when the task was assigned, in seconds on the run's clock
    arrived_s: float
    compute_s: float  # predicted seconds of computation, by the device profile before calibration
    link_s: float  # predicted seconds of transfers, by the same profile
    pace_s: float = 0.0  # minimum seconds that emulation of a device imposed on the task; 0 = none
    round_trips: int = 1  # the task and its update, and each exchange with the server between them

    @property
    def seconds(self) -> float:
        """Real duration of the task in seconds."""
        return self.arrived_s - self.assigned_s


@dataclass(frozen=True, slots=True)
class Fit:
    """Correction of a device profile for one client, fitted to the durations of its tasks."""

    client: int  # id of the client
    slowdown: float  # factor on predicted computation time
    # seconds that every round trip to the server takes in addition: one of each task, and its exchanges
    overhead_s: float
    jitter: float  # standard deviation of the logarithm of a task's speed
    num_fitted: int  # number of tasks used for the fit
    num_held_out: int = 0  # number of further tasks on which the fit was checked
    # median relative error of predicted durations over those tasks; None = there are none
    task_error: float | None = None
    # relative error of the predicted sum of these durations; None = there are none
    sum_error: float | None = None
    warm_up_s: float | None = None  # seconds by which the first task took longer than fitted; None = unknown

    def expected_s(self, task: TimedTask) -> float:
        """Return the predicted duration of a task in seconds, including the average effect of jitter."""
        compute_s = self.slowdown * task.compute_s * math.exp(self.jitter**2 / 2)
        return compute_s + self.overhead_s * task.round_trips + task.link_s

    def profile(self, base: Profile) -> Profile:
        """Return a device profile with the fitted speeds; its recorded changes of speed are dropped, since jitter covers them."""
        slower = self.slowdown
        traffic = None if base.bytes_per_s is None else base.bytes_per_s / slower
        return replace(
            base,
            name=f"client-{self.client}",
            flops_per_s=base.flops_per_s / slower,
            bytes_per_s=traffic,
            launch_s=base.launch_s * slower,
            host_op_s=base.host_op_s * slower,
            host_product_s=base.host_product_s * slower,
            bandwidth_bytes_per_s=base.bandwidth_bytes_per_s / slower,
            latency_s=base.latency_s + self.overhead_s / 2,
            speed_jitter=self.jitter,
            speed_changes=None,
            link_changes=None,
            repeat_s=None,
            speed_drift=0.0,
            link_drift=0.0,
            link_jitter=0.0,
            drift_s=None,
        )

    def slowed(self, declared: Profile) -> Profile:
        """Return a device profile that shows methods the declared speeds, while tasks take as long as the fit predicts.

        So a simulation repeats a real run in which methods chose tasks by the declared speeds.

        Raises:
            BadInput: the declared speed is too far from the real one for a profile to say so.
        """
        if not LEAST_FACTOR <= 1 / self.slowdown <= MOST_FACTOR:
            raise BadInput(
                f"the profile of client {self.client} says {self.slowdown:.3g} times its real speed: {_GIVE_BASE}"
            )
        return replace(
            declared,
            latency_s=declared.latency_s + self.overhead_s / 2,
            speed_jitter=self.jitter,
            speed_changes=((0.0, 1 / self.slowdown),),
            link_changes=None,
            repeat_s=None,
            speed_drift=0.0,
            link_drift=0.0,
            link_jitter=0.0,
            drift_s=None,
        )


@dataclass(frozen=True, slots=True)
class Check:
    """Comparison of a real run with its simulation on the virtual clock, using fitted device profiles.

    Attributes:
        run: folder of the run.
        updates: number of merged updates of the real run.
        predicted_s, real_s: seconds from the first assignment to the last update's arrival.
        predicted_update_s, real_update_s: the same seconds, per merged update.
        error: relative error of the predicted duration of the run.
        task_error: median relative error of a task's predicted duration.
        problem: reason why the run cannot be simulated; predictions are then missing.
    """

    run: str
    updates: int
    real_s: float
    real_update_s: float
    predicted_s: float | None = None
    predicted_update_s: float | None = None
    error: float | None = None
    task_error: float | None = None
    problem: str | None = None


@dataclass(frozen=True, slots=True)
class RealRun:
    """A run on the wall clock: the times of its tasks, and its clients as they joined."""

    folder: Path
    experiment: Experiment
    world: World
    clients: Mapping[int, ClientInfo]
    tasks: Sequence[TimedTask]
    num_merged: int

    @property
    def num_paced(self) -> int:
        """Number of tasks that were slowed down to emulate a device, so that they say nothing about this machine."""
        return sum(task.pace_s > 0.5 * task.seconds for task in self.tasks)


def read_real(folder: Path, experiment: Experiment, base: Profile | None = None) -> RealRun:
    """Read the tasks of a run folder, and predict the duration of each from its client's device profile.

    `base`: device profile for the predictions; None = the profile with which each client joined.

    Raises:
        BadInput: the folder has no run on the wall clock, or no task of the run arrived.
    """
    journal, summary = read_run(folder)
    world = World(experiment)
    fleet = world.fleet(experiment.algorithm)
    clients: dict[int, ClientInfo] = {}
    out: dict[int, Assignment] = {}
    tasks = []
    for row in journal:
        match row.get("event"):
            case "run" if row.get("runtime") == "simulated":
                raise BadInput(f"'{folder}' is a simulated run: give a real run, by raafl fit or raafl serve")
            case "joined":
                info = client_from_json(row)
                clients[info.id] = info if base is None else replace(info, profile=base)
            case "assigned":
                plain = {name: value for name, value in row.items() if name not in ("event", "time_s")}
                out[row["id"]] = assignment_from_json(plain)
            case "arrived" if _answers(row, out.get(row["assignment"])):
                task = out.pop(row["assignment"])
                tasks.append(_timed(task, row["time_s"], clients[task.client], fleet))
    if not tasks:
        raise BadInput(f"'{folder}' has no finished task: give a run in which each client has finished a few")
    merged = len(tasks) if summary is None else summary.get("updates_merged", len(tasks))
    return RealRun(folder, experiment, world, clients, tasks, merged)


def _answers(row: JournalRow, task: Assignment | None) -> bool:
    """Check whether an update in the journal answers ``task``: same client, and same incarnation of it."""
    return task is not None and (task.client, task.incarnation) == (row["client"], row["incarnation"])


def _timed(task: Assignment, arrived_s: float, client: ClientInfo, fleet: SelectContext) -> TimedTask:
    work = Work(task.spec, task.region, task.num_epochs, task.num_steps, task.extra)
    time = fleet.task_time(client, work)
    return TimedTask(
        task.client,
        task.incarnation,
        task.assigned_s,
        arrived_s,
        time.compute_s,
        time.down_s + time.up_s,
        task.pace_s,
        1 + fleet.cost(task.spec, task.extra).num_exchanges,
    )


def calibrate(run: RealRun, most: int = MOST_FITTED) -> dict[int, Fit]:
    """Fit the device profile of each client to its tasks in a real run; return the fits by client id.

    A client's first task is left out if there are others. At least half of the others are used to check the fit.

    Raises:
        BadInput: a client's profile has no speed, so that its computation time cannot be predicted.
    """
    by_client = sorted(run.tasks, key=lambda task: (task.client, task.assigned_s))
    return {client: _fit(client, list(tasks), most) for client, tasks in groupby(by_client, lambda task: task.client)}


def _fit(client: int, tasks: Sequence[TimedTask], most: int) -> Fit:
    firsts = [next(group) for _, group in groupby(tasks, lambda task: task.incarnation)]
    warm = [task for task in tasks if task not in firsts] or list(tasks)
    seen = warm[: min(most, (len(warm) + 1) // 2)]
    held = warm[len(seen) :]
    fit = fit_tasks(client, seen)
    first_s = firsts[0].seconds - fit.expected_s(firsts[0]) if len(tasks) > len(firsts) else None
    if not held:
        return replace(fit, warm_up_s=first_s)
    expected, real = np.array([fit.expected_s(task) for task in held]), np.array([task.seconds for task in held])
    return replace(
        fit,
        num_held_out=len(held),
        task_error=float(np.median(np.abs(expected / real - 1))),
        sum_error=float(expected.sum() / real.sum() - 1),
        warm_up_s=first_s,
    )


def fit_tasks(client: int, tasks: Sequence[TimedTask]) -> Fit:
    """Fit the slowdown, overhead and jitter of one client to its tasks, by least squares of relative errors.

    An overhead is fitted only if the tasks differ enough in their computation per round trip; otherwise the whole
    difference counts as slower computation.

    Raises:
        BadInput: a task has no predicted computation time.
    """
    compute, trips = np.array([(task.compute_s, float(task.round_trips)) for task in tasks]).T
    real = np.array([max(task.seconds - task.link_s, _ROUNDING_S) for task in tasks])
    if not (compute > 0).all():
        raise BadInput(f"the profile of client {client} has no flops_per_s: {_GIVE_BASE}")
    slowdown, overhead_s = _line(compute, trips, real)
    sound = real <= _OUTLIER * (slowdown * compute + overhead_s * trips)
    if sound.any() and not sound.all():
        compute, trips, real = compute[sound], trips[sound], real[sound]
        slowdown, overhead_s = _line(compute, trips, real)
    logs = np.log(np.maximum(real - overhead_s * trips, _ROUNDING_S) / (slowdown * compute))
    jitter = float(np.std(logs)) if len(logs) > 2 else 0.0
    jitter = 0.0 if jitter < 1e-3 else min(jitter, 2.0)
    # the model divides computation by a lognormal factor; the mean of its inverse is exp(jitter^2 / 2)
    return Fit(client, slowdown / math.exp(jitter**2 / 2), overhead_s, jitter, len(tasks))


def _line(compute: Numbers, trips: Numbers, real: Numbers) -> tuple[float, float]:
    """Fit real seconds by predicted ones of computation and by round trips, by least squares of relative errors.

    Returns the seconds of a predicted second and of a round trip, both at least 0; the second is 0 if the computation per
    round trip hardly differs.
    """
    alone = float((real / compute).mean()), 0.0
    if (compute / trips).max() < _SPREAD * (compute / trips).min():
        return alone
    columns = np.stack([compute / real, trips / real], axis=1)
    slope, overhead_s = map(float, np.linalg.lstsq(columns, np.ones(len(real)), rcond=None)[0])
    return (slope, overhead_s) if slope > 0 and overhead_s > 0 else alone


def profiles_of(run: RealRun, fits: Mapping[int, Fit]) -> dict[int, Profile]:
    """Return a profile for each client of a run, in order: that of the run, corrected where there is a fit.

    A device file gives its entries to clients by their place, so no client may be left out.
    """
    found = {}
    for info in run.world.clients:
        declared = run.clients.get(info.id, info).profile
        fit = fits.get(info.id)
        found[info.id] = replace(declared, name=f"client-{info.id}") if fit is None else fit.profile(declared)
    return found


def check(run: RealRun, fits: Mapping[int, Fit]) -> Check:
    """Simulate a real run on the virtual clock, without training, and compare the times.

    Methods see the same device profiles as in the real run, so that each client gets the same tasks. The profiles corrected by
    ``fits`` determine how long these take.
    """
    last, real_s = (
        run.num_merged,
        max(task.arrived_s for task in run.tasks) - min(task.assigned_s for task in run.tasks),
    )
    declared = [run.clients.get(info.id, info).profile for info in run.world.clients]
    known = [fits[i].slowed(own) if i in fits else own for i, own in enumerate(declared, start=1)]
    experiment = replace(run.experiment, devices=devices_of(known))
    timed = [(fits[task.client].expected_s(task), task.seconds) for task in run.tasks if task.client in fits]
    errors = [abs(expected / real - 1) for expected, real in timed]
    found = Check(
        str(run.folder), last, real_s, real_s / max(last, 1), task_error=float(np.median(errors)) if errors else None
    )
    predicted = predict(World(experiment), experiment.algorithm, "", last)
    if predicted.problem is not None or predicted.update_s is None:
        return replace(found, problem=predicted.problem)
    return replace(
        found, predicted_s=predicted.time_s, predicted_update_s=predicted.update_s, error=predicted.time_s / real_s - 1
    )


def devices_of(profiles: Iterable[Profile]) -> list[Device]:
    """Convert profiles to entries of the config section `devices`, with all fields given."""
    return [Device(**{one.name: getattr(profile, one.name) for one in fields(Profile)}) for profile in profiles]


def device_rows(profiles: Iterable[Profile]) -> list[dict[str, Any]]:
    """Convert profiles to rows of a device file, without fields that have their default."""
    default = Profile()
    rows = []
    for profile in profiles:
        said = {name: value for name, value in asdict(profile).items() if value != getattr(default, name)}
        rows.append(
            {"name": profile.name, "flops_per_s": profile.flops_per_s}
            | {
                name: [list(pair) for pair in value] if isinstance(value, tuple) else value
                for name, value in said.items()
            }
        )
    return rows

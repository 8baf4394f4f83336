"""Predict times, memory and bytes of an experiment before it runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from raafl.algorithms import ALGORITHMS
from raafl.config.experiment import Experiment
from raafl.core.types import ClientInfo
from raafl.devices.profiles import Profile
from raafl.errors import USER_ERRORS, BadInput, nearest
from raafl.lab.plan.dry import Prediction, World, predict
from raafl.lab.plan.tasks import Advice, DeviceRow, SubmodelRow, advise, device_rows, submodel_rows
from raafl.local.numerics import device_type
from raafl.local.stacked import refusal_of, refusal_of_optimizer
from raafl.optimizers import configure
from raafl.parts.select.axis_report import RATES, facts
from raafl.runfolder.append_file import finite
from raafl.submodel import FULL, Submodels
from raafl.submodel.find.trace import MOST_VALUES
from raafl.submodel.prove.narrow import num_values


@dataclass(frozen=True, slots=True)
class Plan:
    """Predicted time, memory and bytes of a run."""

    name: str
    num_clients: int
    batch_size: int
    params: int
    submodels: list[SubmodelRow]
    devices: list[DeviceRow]
    advice: Advice
    algorithms: list[Prediction]  # predictions for each algorithm, the config's own first
    axes: dict[str, Any]  # findings about the axes (dimensions that shrink together) of the model
    # reason why clients cannot be trained together as one batch; None = they can, as far as is known
    by_the_loop: str | None = None
    guessed: str = ""  # part of the model's cost that could only be guessed, with the reason; "" = none
    # explanation of why raafl has chosen the algorithm; None = the user has chosen it
    chosen: Mapping[str, Any] | None = None

    def to_json(self) -> dict[str, Any]:
        """Convert the plan to plain data; infinite values become None."""
        data = asdict(replace(self, submodels=[], devices=[]))
        data["submodels"] = [{**_without_spec(row), "spec": str(row.spec)} for row in self.submodels]
        names = [row.name for row in self.submodels]
        data["devices"] = [
            {**asdict(row), "seconds": dict(zip(names, row.seconds, strict=True))} for row in self.devices
        ]
        found: dict[str, Any] = finite(data)
        return found


def make_plan(
    experiment: Experiment,
    algorithms: Sequence[str] | None = None,
    max_updates: int | None = None,
    more: Sequence[Profile] = (),
) -> Plan:
    """Predict times, memory and bytes of an experiment, without training; its data are loaded and divided among clients.

    `algorithms`: names of further algorithms to predict; ["all"] = all. None = all for a model of up to `MOST_VALUES`
    parameters, none for a larger one.
    `max_updates`: number of merged updates of each dry run; None = see `raafl.lab.plan.dry.predict`.

    Raises:
        BadInput: the experiment is invalid, or an algorithm is unknown.
    """
    experiment.check()
    every = tuple(algorithms or ()) == ("all",)
    for name in () if every else algorithms or ():
        if name not in ALGORITHMS:
            raise BadInput(f"algorithms has '{name}': {nearest(name, ALGORITHMS)}")
    world = World(experiment)
    own = experiment.algorithm
    submodels = world.submodels(own)
    fleet = world.fleet(own)
    rows = submodel_rows(fleet, own.select)
    advice = advise(fleet, world.clients)
    samples = sorted(client.num_samples for client in world.clients)[(len(world.clients) - 1) // 2]
    others = [ClientInfo(-i, samples, profile) for i, profile in enumerate(more, start=1)]
    devices = device_rows(fleet, world.clients, rows) + [device_rows(fleet, [one], rows)[0] for one in others]
    found = [predict(world, own, f"{own.name} (as configured)", max_updates)]
    every |= algorithms is None and num_values(submodels) <= MOST_VALUES
    for name in ALGORITHMS if every else algorithms or ():
        found += _others(world, name, advice, max_updates)
    cost = submodels.cost(FULL, world.batch_size)
    axes = facts(world.cut_submodels(), RATES, world.batch_size)
    loop = _by_the_loop(experiment, submodels)
    return Plan(
        experiment.name,
        len(world.clients),
        world.batch_size,
        cost.params,
        rows,
        devices,
        advice,
        found,
        axes,
        loop,
        cost.guessed,
        own.chosen,
    )


def _by_the_loop(experiment: Experiment, submodels: Submodels) -> str | None:
    """Return why a simulated run trains clients one after another, as far as known before training."""
    local = experiment.algorithm.local
    reason = refusal_of(local, local.payload(submodels), experiment.fabric, device_type(experiment.fabric))
    if reason is not None:
        return reason
    try:
        return refusal_of_optimizer(configure(submodels.module)[0])
    except USER_ERRORS:  # of the user's code, which may want parameters that have values
        return None


def _others(world: World, name: str, advice: Advice, max_updates: int | None) -> list[Prediction]:
    """Predict an algorithm with its defaults, or with the settings that the plan advises for it."""
    choices: dict[str, dict[str, Any]] = {
        "fed_raa": {"fragments": advice.fragments} if advice.fragments else {},
        "fed_buff": {"buffer_size": advice.buffer_size},
        "timely_fl": {"participation": round(advice.participation, 4)},
    }
    chosen = choices.get(name, {})
    shown = name + "".join(f" ({key} {value})" for key, value in chosen.items())
    try:
        algorithm = ALGORITHMS[name](**chosen)
    except (BadInput, TypeError) as error:  # of the method's own demands
        return [Prediction(shown, problem=" ".join(str(error).split()))]
    return [predict(world, algorithm, shown, max_updates)]


def _without_spec(row: SubmodelRow) -> dict[str, Any]:
    names = ("name", "params", "peak_bytes", "down_bytes", "up_bytes", "flops_per_sample")
    return {name: getattr(row, name) for name in names} | ({"peaks": row.peaks} if row.peaks else {})

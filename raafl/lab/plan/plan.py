"""Predict times, memory and bytes of an experiment before it runs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from fractions import Fraction
from statistics import median_low
from typing import Any

from raafl.algorithms import ALGORITHMS
from raafl.config.experiment import Experiment
from raafl.core.algorithm import SelectContext
from raafl.core.types import ClientInfo, Work
from raafl.devices.profiles import Device, Profile
from raafl.devices.variation import description
from raafl.errors import USER_ERRORS, BadInput, nearest
from raafl.lab.plan.dry import Prediction, World, predict
from raafl.local.captured.limits import problems, problems_of_batches, problems_of_module, problems_of_optimizer
from raafl.local.numerics import device_type
from raafl.local.stacked import refusal_of, refusal_of_optimizer
from raafl.module_hooks import configure
from raafl.parts.select.axis_report import RATES as AXIS_RATES
from raafl.parts.select.axis_report import facts
from raafl.parts.select.submodels import TABLE_4, OneOf, fragment_specs
from raafl.parts.select.units import leading
from raafl.runfolder.append_file import finite
from raafl.submodel import FULL, Spec, Submodels
from raafl.submodel.find.trace import MOST_VALUES
from raafl.submodel.nested_batch import batch_tensors, meta_batch
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
    algorithms: list[Prediction]  # predictions by algorithm, that of the config first
    axes: dict[str, Any]  # what was found out about the axes of the model (dimensions that shrink together)
    # why clients cannot be trained as one batch; None = no reason is known
    by_the_loop: str | None = None
    # why training steps cannot be captured as CUDA graphs; empty = no reason is known; None = no GPU
    captured: list[str] | None = None
    # why steps of batches of clients cannot be, though those of one client can
    batches_captured: list[str] | None = None
    gpu: GpuSteps | None = None  # predicted training steps on a GPU; None = the run has none
    guessed: str = ""  # which part of the model's cost is a guess, and why; "" = none
    # why raafl has chosen the algorithm; None = the user has
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
    on_gpu: bool = False,
) -> Plan:
    """Predict times, memory and bytes of an experiment, without training; its data are loaded and divided among clients.

    `algorithms`: names of further algorithms to predict; ["all"] = all. None = all for a model of up to `MOST_VALUES`
    parameters, none for a larger one.
    `max_updates`: number of merged updates of each dry run; None = see `raafl.lab.plan.dry.predict`.
    `on_gpu`: whether the run is planned for a GPU, whatever `fabric.accelerator` says.

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
    on_gpu = on_gpu or device_type(experiment.fabric) == "cuda"
    axes = facts(world.cut_submodels(), AXIS_RATES, world.batch_size)
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
        _not_captured(experiment, submodels) if on_gpu else None,
        problems_of_batches(submodels.module, own.local.masked) if on_gpu else None,
        gpu_steps(fleet, rows, [*more, *(client.profile for client in world.clients)]) if on_gpu else None,
        cost.guessed,
        own.chosen,
    )


def _by_the_loop(experiment: Experiment, submodels: Submodels) -> str | None:
    """Find a reason why a simulation must train clients one by one; None if none is known before training."""
    local = experiment.algorithm.local
    reason = refusal_of(local, local.payload(submodels), experiment.fabric, device_type(experiment.fabric))
    if reason is not None:
        return reason
    try:
        return refusal_of_optimizer(configure(submodels.module)[0])
    except USER_ERRORS:  # the user's code needs parameters with values, which a plan has not
        return None


def _not_captured(experiment: Experiment, submodels: Submodels) -> list[str]:
    """List the known reasons why training steps cannot be captured as CUDA graphs."""
    if experiment.fabric.capture == "off":
        return ["fabric.capture is off"]
    found = problems(experiment.algorithm.local, experiment.fabric) + problems_of_module(submodels.module)
    try:
        return found + problems_of_optimizer(configure(submodels.module)[0])
    except USER_ERRORS:  # the user's code needs parameters with values, which a plan has not
        return found


def _others(world: World, name: str, advice: Advice, max_updates: int | None) -> list[Prediction]:
    """Predict a run of the algorithm ``name``, with the settings that the plan advises for it, else with its defaults."""
    choices: dict[str, dict[str, Any]] = {
        "fed_raa": {"fragments": advice.fragments} if advice.fragments else {},
        "fed_buff": {"buffer_size": advice.buffer_size},
        "timely_fl": {"participation": round(advice.participation, 4)},
    }
    chosen = choices.get(name, {})
    shown = name + "".join(f" ({key} {value})" for key, value in chosen.items())
    try:
        algorithm = ALGORITHMS[name](**chosen)
    except (BadInput, TypeError) as error:  # the method does not accept the advised settings
        return [Prediction(shown, problem=" ".join(str(error).split()))]
    return [predict(world, algorithm, shown, max_updates)]


def _without_spec(row: SubmodelRow) -> dict[str, Any]:
    names = ("name", "params", "peak_bytes", "down_bytes", "up_bytes", "flops_per_sample")
    return {name: getattr(row, name) for name in names} | ({"peaks": row.peaks} if row.peaks else {})


RATES = (1.0, 1 / 2, 1 / 4, 1 / 8, 1 / 16)
STRAGGLER = 2.0
"""A client is a straggler when the whole model takes it more than so many times the median, or does not fit its memory."""


@dataclass(frozen=True, slots=True)
class SubmodelRow:
    """Cost of a task with one submodel: bytes sent (after compression), FLOPs per sample, memory.

    If clients may store frozen parameters in several precisions, ``peaks`` has the peak memory with each of them; it is
    empty otherwise.
    """

    name: str
    spec: Spec = field(repr=False)
    params: int
    peak_bytes: int
    down_bytes: int
    up_bytes: int
    flops_per_sample: float
    peaks: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class DeviceRow:
    """Clients with one kind of device, and the times of their tasks."""

    name: str  # name of the device
    clients: list[int]  # ids of the clients with this device
    num_samples: int  # training samples of the median client
    flops_per_s: float  # FLOP/s of the median client
    memory_bytes: float
    # seconds of the median client's task with each submodel; None = it does not fit the memory
    seconds: list[float | None]
    # least and most seconds of a client's task with the whole model, even if that does not fit
    seconds_range: tuple[float, float]
    stragglers: list[int]  # ids of the clients that are much slower than the median; see `Advice`
    # how the device's speed varies, which predicted times leave out; "" = it is constant
    varies: str


@dataclass(frozen=True, slots=True)
class Advice:
    """Settings recommended for a fleet of devices; each can be derived by hand from the table of task times.

    Attributes:
        stragglers: ids of clients for which the whole model is too large, or takes more than `STRAGGLER` times the
            median.
        median_s: median seconds over the clients of a task with the whole model.
        slowest_s: seconds of such a task on the slowest client.
        fragments: recommended number M of fragments (disjoint pieces of the model) in Fed-RAA: the smallest for which
            the smallest fragment fits every client and takes the slowest client no longer than the whole model takes
            the median client.
        fragment_s: seconds of a task with such a fragment on the slowest client.
        buffer_size: number K of clients that are not stragglers, as a buffer size: a merge then never waits for a
            straggler.
        deadline_s: seconds of a task on the slowest client that is not a straggler.
        participation: share of the clients that are not stragglers, for TimelyFL.
    """

    stragglers: list[int]
    median_s: float
    slowest_s: float
    fragments: int | None
    fragment_s: float | None
    buffer_size: int
    deadline_s: float
    participation: float


@dataclass(frozen=True, slots=True)
class GpuSteps:
    """Training steps on a GPU, by submodel, and the memory of their graphs.

    Attributes:
        device: name of the device profile.
        rows: seconds of a step of each submodel.
        pool_bytes: memory that all graphs share: what the largest step allocates and frees again.
        fixed_bytes: memory outside it, of the values, optimizer state and batches of all submodels; their graphs have
            copies of a batch, and of a last, smaller one, at addresses of their own.
    """

    device: str
    rows: list[GpuStep]
    pool_bytes: int
    fixed_bytes: int


@dataclass(frozen=True, slots=True)
class GpuStep:
    """Predicted seconds of one training step on a GPU: the host's launches, the device's kernels, and the longer of both."""

    name: str  # name of the submodel
    host_s: float
    device_s: float
    eager_s: float
    captured_s: float  # seconds of a step captured as a CUDA graph
    pool_bytes: int  # most memory that a step allocates and frees


USUAL_GPU = "h200"
"""Device of the catalogue by which steps on a GPU are predicted where no device of a run is a GPU whose host is known."""


def gpu_steps(fleet: SelectContext, submodels: Sequence[SubmodelRow], profiles: Sequence[Profile]) -> GpuSteps | None:
    """Predict steps on the first of the ``profiles`` that has times of a host; None = no submodel's step can be followed."""
    profile = next((one for one in profiles if one.host_op_s), Device(USUAL_GPU).profile)
    eager, found, fixed_bytes = replace(fleet, captured=False), list[GpuStep](), 0
    example, size = fleet.state.submodels.example_batch, fleet.batch_size
    batch_bytes = 0 if example is None else sum(x.nbytes for x in batch_tensors(meta_batch(example, size)))
    for row in submodels:
        cost = eager.cost(row.spec)
        if cost.launches is None:
            continue
        launches = cost.launches.times(max(fleet.batch_size, 1))
        host_s, device_s = profile.host_s(*launches[:4]), profile.device_s(launches.kernels)
        captured_s = profile.gpu_s(*launches.captured())
        found.append(GpuStep(row.name, host_s, device_s, max(host_s, device_s), captured_s, cost.pool_bytes))
        fixed_bytes += cost.peak_bytes - cost.pool_bytes + 2 * batch_bytes
    return GpuSteps(profile.name, found, max(row.pool_bytes for row in found), fixed_bytes) if found else None


def submodel_rows(fleet: SelectContext, select: object = None) -> list[SubmodelRow]:
    """Compute the costs of the model at each rate (share of its width), and of each submodel that ``select`` can choose."""
    axes = fleet.state.submodels.axes
    named: dict[Spec, str] = {FULL: "1"}
    for rate in RATES[1:] if axes else ():
        named.setdefault(leading(axes, rate), str(Fraction(rate)))
    if isinstance(select, OneOf):
        pieces = select.specs(fleet)
        for j, spec in enumerate(pieces if len(pieces) > 1 else (), start=1):
            named.setdefault(spec, f"piece {j}")
    rows = []
    bases: tuple[str | None, ...] = fleet.state.submodels.bases.names or (None,)
    for spec, name in named.items():
        costs = {base: fleet.cost(replace(spec, base=base)) for base in bases}
        cost, peaks = costs[bases[0]], {base: one.peak_bytes for base, one in costs.items() if base is not None}
        rows.append(
            SubmodelRow(
                name, spec, cost.params, cost.peak_bytes, cost.down_bytes, cost.up_bytes, cost.flops_per_sample, peaks
            )
        )
    return rows


def device_rows(
    fleet: SelectContext, clients: Iterable[ClientInfo], submodels: Sequence[SubmodelRow]
) -> list[DeviceRow]:
    """Compute the task times of each kind of device, in the order of the clients."""
    kinds: dict[str, list[ClientInfo]] = {}
    everyone = list(clients)
    for client in everyone:
        kinds.setdefault(client.profile.name, []).append(client)
    slow = set(stragglers(fleet, everyone))
    rows = []
    for name, members in kinds.items():
        ranked = sorted(members, key=lambda client: _cost_s(fleet, client))
        middle = ranked[(len(ranked) - 1) // 2]
        seconds = [_cost_s(fleet, middle, s.spec) if fleet.fits(middle, s.spec) else None for s in submodels]
        ends = (_cost_s(fleet, ranked[0]), _cost_s(fleet, ranked[-1]))
        rows.append(
            DeviceRow(
                name,
                [client.id for client in members],
                middle.num_samples,
                middle.profile.flops_per_s,
                middle.profile.memory_bytes,
                seconds,
                ends,
                [c.id for c in members if c.id in slow],
                description(middle.profile),
            )
        )
    return rows


def stragglers(fleet: SelectContext, clients: Sequence[ClientInfo]) -> list[int]:
    """Return the ids of the clients that are much slower than the median; see `STRAGGLER`."""
    limit_s = STRAGGLER * median_low(_cost_s(fleet, client) for client in clients)
    return [c.id for c in clients if _cost_s(fleet, c) > limit_s * (1 + 1e-9) or not fleet.fits(c, FULL)]


def advise(fleet: SelectContext, clients: Sequence[ClientInfo]) -> Advice:
    """Recommend settings for a fleet of devices, from the times of tasks."""
    slow = set(stragglers(fleet, clients))
    whole_s = {client.id: _cost_s(fleet, client) for client in clients}
    quick_s = [seconds for client, seconds in whole_s.items() if client not in slow] or [max(whole_s.values())]
    median_s, buffer_size = median_low(whole_s.values()), max(len(clients) - len(slow), 1)
    found: dict[int, float] = {}
    if (submodels := fleet.state.submodels).axes:
        for number, ratios in TABLE_4.items():
            smallest = min(fragment_specs(submodels, ratios), key=lambda spec: submodels.layout(spec).num_bytes)
            if all(fleet.fits(client, smallest) for client in clients):
                found[number] = max(_cost_s(fleet, client, smallest) for client in clients)
    within = [number for number, seconds in found.items() if seconds <= median_s * (1 + 1e-9)]
    chosen = min(within) if within else min(found, key=lambda number: found[number], default=None)
    return Advice(
        sorted(slow),
        median_s,
        max(whole_s.values()),
        chosen,
        None if chosen is None else found[chosen],
        buffer_size,
        max(quick_s),
        buffer_size / len(clients),
    )


def _cost_s(fleet: SelectContext, client: ClientInfo, spec: Spec = FULL) -> float:
    """Predict the seconds of a client's task on the submodel ``spec``, with transfers during the task."""
    return fleet.cost_s(client, Work(spec, extra=fleet.task_options(client)))

"""Build the parts of a run from its config, each part once: data, model, submodels, coordinator, trainers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Literal, cast

import torch
from torch import nn

from raafl.config.experiment import Experiment
from raafl.config.options import Distance, SubmodelOptions, distance, seconds
from raafl.core.algorithm import Algorithm, OwnTests, Select
from raafl.core.coordinator import Coordinator
from raafl.core.local import Local
from raafl.core.options import FabricOptions
from raafl.core.state import GlobalState
from raafl.core.types import ClientInfo, Limits, derive_seed
from raafl.data.federated import ClientData, FederatedData
from raafl.data.loaders import reading
from raafl.errors import USER_ERRORS, BadInput, format_error
from raafl.local.numerics import set_numerics
from raafl.local.prepare import call_own_train, prepare, start_observers
from raafl.local.train import MAX_BUILT, LocalTrainer
from raafl.parts.protect.assembly import sound, with_options
from raafl.rng import generators, same_generators, seeded
from raafl.rules import Rules
from raafl.submodel import Submodels, skeleton

if TYPE_CHECKING:
    from lightning import LightningModule

    from raafl.compression.plan import CompressionPlan
    from raafl.runtime.executors import Executor


@dataclass
class ServerSetup:
    """Parts of a run that the server needs, built and checked."""

    experiment: Experiment
    data: FederatedData
    module: LightningModule
    submodels: Submodels
    coordinator: Coordinator
    clients: list[ClientInfo]


def load_data(experiment: Experiment) -> FederatedData:
    """Load the data of an experiment and divide them among the clients."""
    with reading("the data module", rules := Rules(experiment.rules)):
        module = experiment.data()
    return FederatedData(module, experiment.partition, experiment.clients, experiment.seed, rules)


def evaluation_seed(experiment: Experiment) -> int | None:
    """Return the seed of a run's evaluations; None = they draw from the global generators, as those of older runs did."""
    return experiment.seed if Rules(experiment.rules).seeds_evaluation else None


def user_model(experiment: Experiment) -> LightningModule:
    """Build the user's model, ready for training, with the early exits that ``submodels.exits`` asks for.

    Its parts are in the modes (train or eval) in which all tasks train them.

    Raises:
        BadInput: the model cannot have these exits, or cannot be trained.
    """
    module: LightningModule = prepare(experiment.model())
    if experiment.submodels.exits:
        from raafl.submodel.depth import give_exits

        give_exits(module, experiment.submodels.exits)
    if Rules(experiment.rules).keeps_modes:
        call_own_train(module)
    else:
        module.train()
    return module


def make_model(experiment: Experiment) -> LightningModule:
    """Build the model with initial weights from the run's seed, in the form in which the algorithm trains it."""
    seed = derive_seed(experiment.seed, "model")
    seeded(seed)
    torch.manual_seed(seed)  # also seeds GPUs
    return _prepared(experiment)


def _prepared(experiment: Experiment) -> LightningModule:
    """Build the user's model in the form in which the algorithm trains it; raise `BadInput` for errors of its code."""
    try:
        module = user_model(experiment)
    except BadInput:
        raise
    # the user's code or its library has raised this error; `BadInput` explains itself
    except USER_ERRORS as error:
        from raafl.local.failure import misfit

        if isinstance(error, TypeError) and (reason := misfit(error)):
            raise BadInput(reason) from error
        is_plain = isinstance(error, ValueError | TypeError)
        why = " ".join(str(error).split())[:400] if is_plain else format_error(error)
        raise BadInput(f"the model cannot be constructed: {why}") from error
    return cast("LightningModule", experiment.algorithm.local.prepare(module))


def submodels_of(
    options: SubmodelOptions, module: nn.Module, example_batch: object = None, rules: Rules | None = None
) -> Submodels:
    """Find which parts of a module can be cut; return its submodels. Server and clients must get equal results.

    `example_batch`: batch of the model's data; None = no batch is available.
    """
    return Submodels(
        module, example_batch, residual_width=options.residual_width, batch_norm=options.batch_norm, rules=rules
    )


def proven_submodels(
    options: SubmodelOptions,
    module: nn.Module,
    batch: object,
    select: Select,
    plain: Callable[[], nn.Module] | None = None,
    rules: Rules | None = None,
) -> Submodels:
    """Return the submodels of a module; they cut only axes for which a training step has shown that cutting is safe.

    An axis is a set of tensor dimensions that shrink together. Only the server needs this check. It is skipped if
    ``select`` gives every client the whole model.

    `plain`: function that builds the user's original model, to be checked in place of ``module``; None = check
    ``module``.
    """
    rules = rules or Rules()
    submodels = submodels_of(options, module, batch, rules)
    if select.cuts:
        from raafl.submodel.prove.proof import refuted

        made = module if plain is None else plain()
        checked = submodels if plain is None else submodels_of(options, made, batch, rules)
        found = refuted(checked, made, batch, measures_rounding=rules.measures_rounding)
        submodels.exclude_axis({name: reason for name, reason in found.items() if name in submodels.axes})
    return submodels


def _start_buffers(
    experiment: Experiment, module: LightningModule, data: FederatedData, build: Callable[[Experiment], LightningModule]
) -> None:
    """Initialise buffers that get size or values in a first step, such as ranges of quantisation observers."""
    if Rules(experiment.rules).starts_observers:
        start_observers(module, data.example_batch, partial(build, experiment))


def proven(experiment: Experiment, module: LightningModule, data: FederatedData) -> Submodels:
    """Find which parts of a run's model can be cut, and check by a training step on its data that this is safe.

    Return the submodels of the model, in which only the axes (sets of tensor dimensions that shrink together) that
    passed the check are cut.
    """

    def plain() -> LightningModule:
        with skeleton():
            module = user_model(experiment)
        _start_buffers(experiment, module, data, user_model)
        return module

    _start_buffers(experiment, module, data, make_model)
    own = None if experiment.algorithm.local.traits.proven_as_trained else plain
    return proven_submodels(
        experiment.submodels, module, data.example_batch(2), experiment.algorithm.select, own, Rules(experiment.rules)
    )


def client_infos(experiment: Experiment, data: FederatedData) -> list[ClientInfo]:
    """Return descriptions of clients 1 to N, as far as they are known before the clients join."""
    try:
        profiles = experiment.profiles()
    except ValueError as error:  # the config of a run folder was not validated as a whole
        raise BadInput(str(error)) from None
    pairs = zip(data.sizes, profiles, strict=True)
    clients = [ClientInfo(i, size, profile) for i, (size, profile) in enumerate(pairs, start=1)]
    if experiment.subfederations.size is None:
        return clients
    from raafl.core.subfederation import members

    return members(experiment.subfederations, clients)


def build(
    experiment: Experiment, *, pace: bool, min_clients: int | None = None, count_lost: bool = True
) -> ServerSetup:
    """Build and check all parts of a run that the server needs.

    `min_clients`: number of clients that must have joined before the run starts; None = all that are available at the
    start.

    Raises:
        BadInput: the data do not fit the clients, or a client has too little memory for every submodel.
    """
    if experiment.overlap and pace:
        raise BadInput(
            "overlap is true, but emulate delays each task as a whole, so that nothing overlaps: set emulate to false"
        )
    if experiment.subfederations.number is not None:
        from raafl.core.subfederation import below

        experiment = below(experiment, experiment.subfederations.number)
    set_numerics(experiment.threads, experiment.fabric)
    data = load_data(experiment)
    module = make_model(experiment)
    submodels = proven(experiment, module, data)
    values = submodels.state(module).to(experiment.server_device)
    submodels.attach_base(values)
    return assemble(experiment, data, module, GlobalState(submodels, values), pace, min_clients, count_lost)


def assemble(
    experiment: Experiment,
    data: FederatedData,
    module: LightningModule,
    state: GlobalState,
    pace: bool = False,
    min_clients: int | None = None,
    count_lost: bool = True,
) -> ServerSetup:
    """Build and check the coordinator of a run, on data and a model that are built already; see `build`."""
    submodels, clients = state.submodels, client_infos(experiment, data)
    if min_clients is None:
        min_clients = max(sum(client.profile.available(0.0) for client in clients), 1)
    algorithm = _assemble(experiment, submodels)
    limits = limits_of(experiment, min_clients, count_lost)
    coordinator = coordinator_of(experiment, data, algorithm, state, limits, pace=pace)
    fleet = coordinator.fleet.of(clients)
    problems = list(dict.fromkeys(algorithm.merge.check(state) + algorithm.select.check(fleet)))
    is_below, most_below = experiment.subfederation.is_on, experiment.guard.max_below
    size = None if is_below else experiment.subfederations.size
    if most_below is not None or is_below or size is not None:
        from raafl.core.subfederation import SIMULATED, config_problems

        hides = [name for name in ("privacy", "secure_aggregation") if getattr(experiment, name).is_on]
        takes = {"guard.max_below": most_below, SIMULATED: size}
        problems += config_problems(experiment.algorithm, algorithm.merge, takes, is_below, hides)
    if problems:
        raise BadInput(
            "\n".join(problems[:10] + ([f"... and {len(problems) - 10} more clients"] if len(problems) > 10 else []))
        )
    return ServerSetup(experiment, data, module, submodels, coordinator, clients)


def _assemble(experiment: Experiment, submodels: Submodels) -> Algorithm:
    """Wrap the algorithm's merge in the run's options, such as guard, privacy and precision; done once, on the server.

    From the inside: the method's own merge; the guard; privacy, which must see what the guard accepts; pooled batch
    norm statistics; conversion of half precision to float32; and the limit on an update's norm, which is checked first.
    Secure aggregation leaves the last three out, since it merges sums alone. Raises BadInput if an option does not work
    with the algorithm.
    """
    options = experiment.rounds, experiment.guard, experiment.privacy, experiment.num_members
    algorithm = with_options(experiment.algorithm, *options, experiment.seed)
    if experiment.secure_aggregation.is_on:
        return experiment.secured(algorithm)
    return sound(algorithm, submodels, max_norm_ratio(experiment))


def max_norm_ratio(experiment: Experiment) -> float | None:
    """Return the multiple of the usual norm above which an update is refused; None = no such limit."""
    is_off = experiment.privacy.is_on or experiment.secure_aggregation.is_on
    return None if is_off else experiment.guard.max_norm_ratio


def limits_of(experiment: Experiment, min_clients: int, count_lost: bool = True) -> Limits:
    """Return the limits of the run that the coordinator observes, such as its number of updates."""
    trigger, clients = experiment.algorithm.trigger, experiment.num_members
    about_n = 1 if trigger.restart == "merge" else max(1, clients // int(getattr(trigger, "size", 1)))
    every = distance("eval_every", experiment.eval_every) or Distance(about_n, "versions")
    return Limits(
        min_clients=min_clients,
        count_lost=count_lost,
        num_clients=clients,
        max_weight=experiment.guard.max_weight,
        max_updates=experiment.max_updates,
        max_time_s=seconds("max_time", experiment.max_time),
        eval_every=every.size,
        eval_unit=every.unit,
        checkpoint_every=experiment.checkpoint_every,
        suspends_by_time=Rules(experiment.rules).suspends_by_time,
        subfederation=experiment.subfederation if experiment.subfederation.is_on else None,
    )


def sends_of(experiment: Experiment) -> Literal["values", "delta"]:
    """Return "values" if clients send parameter values, or "delta" if they send the difference from the received values.

    Secure aggregation needs "delta".
    """
    return "delta" if experiment.secure_aggregation.is_on else experiment.algorithm.merge.sends


def compression_plan(experiment: Experiment, submodels: Submodels) -> CompressionPlan | None:
    """Plan how transfers are compressed; server and clients get equal plans. None = no compression."""
    local, compress = experiment.algorithm.local, experiment.compress
    is_plain = (compress.down, compress.up, local.traits.up_as) == ("none", "none", None)
    if is_plain and type(local).exchange is Local.exchange and not local.payload(submodels).has_bundles:
        return None
    from raafl.compression.plan import CompressionPlan

    return CompressionPlan.of(submodels, compress, sends_of(experiment), local)


def data_notes(parts: ServerSetup) -> list[str]:
    """Return warnings to show before a run: about the data used for evaluation, and about clients smaller than a batch."""
    size, sizes = parts.coordinator.fleet.batch_size, parts.data.sizes
    small = [n for n in sizes if n < size]
    found = list(parts.data.notes)
    if small:
        least_to_most = f"{min(small)}" if min(small) == max(small) else f"{min(small)} to {max(small)}"
        found.append(
            f"batches of {size} are more than {len(small)} of {len(sizes)} clients have, so each of these trains on "
            f"all of its {least_to_most} samples in one step: give a smaller train.batch_size for more steps"
        )
    return found


def coordinator_of(
    experiment: Experiment,
    data: FederatedData,
    algorithm: Algorithm,
    state: GlobalState,
    limits: Limits,
    *,
    pace: bool = False,
) -> Coordinator:
    """Build the coordinator of a run."""
    coordinator = Coordinator(
        algorithm,
        state,
        limits,
        training=experiment.train,
        batch_size=batch_size_of(experiment, data),
        seed=experiment.seed,
        pace=pace,
        plan=compression_plan(experiment, state.submodels),
        own_tests=own_tests(experiment, data),
        drop_last=data.drop_last,
        overlap=experiment.overlap,
        rules=Rules(experiment.rules),
    )
    if _captures(experiment):
        coordinator.change(fleet=replace(coordinator.fleet, captured=True))
    return coordinator


def _captures(experiment: Experiment) -> bool:
    """Check by the config alone whether steps are captured as CUDA graphs, so that replays elsewhere predict equal times."""
    if experiment.fabric.accelerator != "cuda" or experiment.fabric.capture == "off":
        return False
    from raafl.local.captured.limits import problems

    return not problems(experiment.algorithm.local, experiment.fabric)


def batch_size_of(experiment: Experiment, data: FederatedData) -> int:
    """Return the batch size of clients: the setting of the run, or else of the datamodule."""
    return experiment.train.batch_size or data.batch_size or 1


def own_tests(experiment: Experiment, data: FederatedData) -> OwnTests:
    """Return the number of test samples of each client."""
    return OwnTests(dict(enumerate(data.test_sizes, start=1)), experiment.partition.test_share)


def _make_trainer(experiment: Experiment, submodels: Submodels, options: FabricOptions, max_built: int) -> LocalTrainer:
    """Build the trainer for the tasks of an experiment."""
    algorithm = experiment.algorithm
    from raafl.config.problems import device_problem

    if (problem := device_problem(options)) is not None:
        raise BadInput(problem)
    if not Rules(experiment.rules).captures_steps:
        options = replace(options, capture="off")
    try:
        trainer = LocalTrainer(
            submodels, algorithm.local, sends_of(experiment), experiment.train, options, max_built=max_built, pools=True
        )
    except (ValueError, RuntimeError, ImportError) as error:  # raised by Fabric for what this machine does not support
        raise BadInput(
            f"fabric.accelerator is '{options.accelerator}' and fabric.precision '{options.precision}', which cannot "
            f"be used here: {' '.join(str(error).split())}"
        ) from error
    if trainer.fabric.device.type == "cuda":
        from raafl.local.device_data import Feed

        trainer.feed = Feed(trainer.fabric.device, options.data_on_device)
        if options.capture != "off":
            from raafl.local.captured import Capture

            trainer.capture = Capture(trainer)
    return trainer


def client_parts(
    experiment: Experiment, data: FederatedData, options: FabricOptions, max_built: int = 1
) -> tuple[Submodels, LocalTrainer]:
    """Build the parts of the model that a client's own process needs: its structure and the values of frozen parameters."""
    drawn = generators()
    with skeleton():
        module = _prepared(experiment)
    from raafl.submodel.module_state import has_values_beside

    if not same_generators(drawn, generators()) and has_values_beside(module):
        # a skeleton draws other random numbers than the server's model, and so has other values beside the parameters
        module = make_model(experiment)
    _start_buffers(experiment, module, data, make_model)
    submodels = submodels_of(experiment.submodels, module, data.example_batch(2), Rules(experiment.rules))
    if submodels.frozen:
        # a process for one client loads only the variant of the frozen base that its tasks need
        submodels.attach_base(make_model(experiment), (lambda: make_model(experiment)) if max_built == 1 else None)
    return submodels, _make_trainer(experiment, submodels, options, max_built)


def make_executor(
    parts: ServerSetup, workers: int, own: Mapping[int, ClientData] | None = None, *, ranks: bool = False
) -> Executor:
    """Build the executor, which trains the tasks of a simulation or a replay.

    `own`: data of each client that trains on its own data instead of a share of the run's; None = no such client.
    """
    own, max_built = own or {}, min(MAX_BUILT, 2 * len(parts.clients))
    options = parts.experiment.fabric
    if ranks:
        from raafl.devices.gpus import Place

        options = options.on(Place.here(None).gpu)
    trainer = _make_trainer(parts.experiment, parts.submodels, options, max_built)

    if parts.experiment.engine.name == "ray":
        from raafl.runtime.executors.ray_engine import RayExecutor

        return RayExecutor(parts.experiment, trainer, build_worker)
    inner = within_process(parts.experiment, trainer, lambda one: own[one] if one in own else parts.data.client(one))
    if workers > 1:
        from raafl.local.evaluate import Evaluator
        from raafl.runtime.executors.pool import Pool

        submodels, batches, device = parts.submodels, parts.data.test_batches, trainer.fabric.device
        seed = evaluation_seed(parts.experiment)
        return Pool(trainer, inner, workers, lambda: Evaluator(submodels, batches, device, seed=seed))
    if not ranks:
        return inner
    from raafl.runtime.executors.ranks import RankExecutor

    return RankExecutor(trainer, inner)


def build_worker(experiment: Experiment) -> tuple[LocalTrainer, Executor]:
    """Build what a process of a Ray cluster needs to train any client's tasks of a simulation."""
    set_numerics(experiment.threads, experiment.fabric)
    data = load_data(experiment)
    _, trainer = client_parts(experiment, data, experiment.fabric, min(MAX_BUILT, 2 * experiment.clients))
    return trainer, within_process(experiment, trainer, data.client)


def within_process(experiment: Experiment, trainer: LocalTrainer, data: Callable[[int], ClientData]) -> Executor:
    """Build the executor that trains tasks in this process, one by one or as batches."""
    from raafl.runtime.executors import Inline

    if experiment.batch_clients == 1:
        return Inline(trainer, data)
    from raafl.runtime.executors.batched import BatchedExecutor

    return BatchedExecutor(trainer, data, experiment.batch_clients)

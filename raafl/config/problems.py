"""Check the values of an `Experiment`, the configuration of a run: yield a message for each that is wrong, with the remedy."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import fields
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from raafl.config.options import MODES, distance, seconds
from raafl.core.options import CAPTURES, FabricOptions, Training
from raafl.errors import BadInput, installing, nearest, parse_address
from raafl.plain_yaml import LARGEST, load_untrusted_yaml
from raafl.rules import CURRENT, Rules
from raafl.sanitize import is_url, sanitize_text
from raafl.units import quantity

ACCELERATORS = ("auto", "cpu", "cuda", "gpu", "mps")
TRANSPORTS = ("staged", "nccl")
PRECISIONS = ("32-true", "32", "bf16-mixed", "16-mixed")
"""Lightning's precisions that do not change the dtype of parameters, in which these are sent and merged."""
_REPOSITORY = re.compile(r"[\w.-]{1,96}/[\w.-]{1,96}", re.A)


def plain_problems(experiment: Any, *, needs_end: bool = True) -> Iterator[str]:
    """Yield a message for each wrong value among the plain fields.

    Model, data, algorithm and partition are not checked, so torch is not imported.
    """
    least = {f.name: f.metadata["about"].least for f in fields(experiment) if f.metadata["about"].least is not None}
    counts = {name: getattr(experiment, name) for name in least}
    counts |= {f"train.{f.name}": getattr(experiment.train, f.name) for f in fields(Training) if f.type == "int | None"}
    counts["fabric.accumulate_grad_batches"] = experiment.fabric.accumulate_grad_batches
    for name, count in counts.items():
        if isinstance(count, str):
            if count not in ("auto", "fast"):
                yield f"{name} is '{count}': give auto, fast, or a number from 1"
        elif count is not None and count < least.get(name, 1):
            yield f"{name} is {count}: give {least.get(name, 1)} or more"
        elif count is not None and count > LARGEST:  # the run's own folder could not be read again
            yield f"{name} is {count}: give at most {LARGEST}"
    if experiment.rules > CURRENT:
        yield f"rules is {experiment.rules}: give at most {CURRENT}, or use the later version of raafl that made this config"
    if experiment.train.num_epochs is None and experiment.train.num_steps is None:
        yield "train.num_epochs and train.num_steps are both null: give one of them"
    # a subfederation ends when the server above it ends it
    needs_end = needs_end and not experiment.subfederation.is_on
    if needs_end and experiment.max_updates is None and experiment.max_time is None and experiment.target is None:
        yield "max_updates, max_time and target are all null: give at least one, or the run would never end"
    if experiment.progress not in MODES:
        yield f"progress is '{experiment.progress}': give {', '.join(MODES[:-1])} or {MODES[-1]}"
    for wait in fields(experiment.waits):
        value = getattr(experiment.waits, wait.name)
        if not value > 0 and (wait.name, value) != ("resume_s", 0):
            yield f"waits.{wait.name} is {value}: give seconds above 0"
    if experiment.guard.is_on and experiment.privacy.is_on:
        yield "guard and privacy are both on: leave guard out, privacy clips itself and its sum must take every update"
    if experiment.resume is not None and experiment.privacy.is_on:
        yield from seed_file_problems(experiment.privacy.seed_file, Path(experiment.resume))
    yield from _machine_problems(experiment)
    yield from _export_problems(experiment)
    checks = (
        lambda: seconds("max_time", experiment.max_time),
        lambda: seconds("checkpoint_s", experiment.checkpoint_s),
        lambda: distance("eval_every", experiment.eval_every),
        partial(_loggers, experiment),
        experiment.targets,
        experiment.profiles,
        partial(_output, experiment),
        experiment.memory_bytes,
        partial(_monitor, experiment),
    )
    yield from _refused(checks)


def seed_file_problems(seed_file: str | None, folder: Path) -> Iterator[str]:
    """Yield an error if the noise of the run in ``folder`` does not follow from this file: it is missing, or the run had none."""
    recorded, there = _recorded_seed_file(folder, seed_file), seed_file is not None and Path(seed_file).exists()
    if recorded == seed_file and seed_file is not None and not there:
        yield (
            f"privacy.seed_file is '{seed_file}', which is missing: restore the file from which the noise of '{folder}' was "
            "computed"
        )
    elif recorded is None and seed_file is not None:
        yield f"privacy.seed_file is '{seed_file}', but the noise of '{folder}' follows from the run's seed: leave it out"
    elif recorded != seed_file and not there:  # a run would make the file, or take its seed; it may have been moved
        given = "null" if seed_file is None else f"'{seed_file}', which does not exist"
        begun = sanitize_text(recorded)
        yield f"privacy.seed_file is {given}, but the noise of '{folder}' follows from the file '{begun}': give that one"


def _recorded_seed_file(folder: Path, given: str | None) -> str | None:
    """Return the seed file with which a run with privacy began; ``given`` if its folder does not say."""
    try:
        recorded = load_untrusted_yaml((folder / "config.yaml").read_text(encoding="utf-8"))["privacy"]
        return given if recorded["clip_norm"] is None else recorded.get("seed_file")
    except (OSError, ValueError, TypeError, LookupError, AttributeError):
        return given  # reported where the folder is opened


def _machine_problems(experiment: Any) -> Iterator[str]:
    clip, accelerator = experiment.fabric.gradient_clip_val, experiment.fabric.accelerator
    if clip is not None and not clip > 0:
        yield f"fabric.gradient_clip_val is {clip}: give a number above 0, or null for no clipping"
    if accelerator not in ACCELERATORS:
        yield f"fabric.accelerator is '{accelerator}': {nearest(accelerator, ACCELERATORS)}"
    precision = str(experiment.fabric.precision)
    if precision not in PRECISIONS:
        yield f"fabric.precision is '{precision}': give 32-true, bf16-mixed or 16-mixed, which leave the model's dtype alone"
    if precision == "16-mixed" and accelerator == "cpu":
        yield "fabric.precision is 16-mixed, which is for GPUs: use bf16-mixed, or fabric.accelerator cuda"
    if experiment.fabric.capture not in CAPTURES:
        yield f"fabric.capture is '{experiment.fabric.capture}': give {', '.join(CAPTURES[:-1])} or {CAPTURES[-1]}"
    if experiment.batch_clients == "fast" and (experiment.workers > 1 or experiment.engine.name != "processes"):
        yield (
            "batch_clients is fast, which is for one process, so that a replay trains the same clients together: leave "
            "workers and engine out, or give auto"
        )
    one, all_bytes = experiment.payload_memory_bytes, experiment.payload_memory_total_bytes
    if one is not None and 0 <= all_bytes < one:
        yield f"payload_memory_total_bytes is {all_bytes}: give at least payload_memory_bytes, {one}, or lower that, too"
    if not 0 <= experiment.fabric.data_on_device <= 1:
        yield f"fabric.data_on_device is {experiment.fabric.data_on_device}: give a share from 0 to 1"
    if experiment.transport not in TRANSPORTS:
        yield f"transport is '{experiment.transport}': give {' or '.join(TRANSPORTS)}"
    if not re.fullmatch(r"(cpu|cuda)(:\d{1,3})?", experiment.server_device):
        yield f"server_device is '{experiment.server_device}': give cpu, or a GPU such as cuda:0"


def _export_problems(experiment: Any) -> Iterator[str]:
    if experiment.push_to_hub is not None and not _REPOSITORY.fullmatch(experiment.push_to_hub):
        yield f"push_to_hub is '{experiment.push_to_hub}': give OWNER/NAME, the name of a repository"
    wanted = {"push_to_hub": (experiment.push_to_hub is not None, "huggingface_hub")}
    for name, (is_set, package) in (wanted | {"safetensors": (experiment.safetensors, "safetensors")}).items():
        if is_set and find_spec(package) is None:
            yield f"{name} is set, which needs {package}: {installing('hf')}"


def problems_of_parts(experiment: Any) -> Iterator[str]:
    """Yield an error text for each invalid combination of settings, and for each that this machine cannot run."""
    from raafl.parts.protect.assembly import with_options

    def protection() -> None:
        options = experiment.rounds, experiment.guard, experiment.privacy, experiment.num_members
        experiment.secured(with_options(experiment.algorithm, *options))

    if wrong := _parts_of_another_kind(experiment.algorithm):
        yield from wrong
        return
    if experiment.subfederations.size is not None:
        from raafl.core.subfederation import problems_of

        yield from problems_of(experiment)
    cohort, most = getattr(experiment.algorithm.sample, "cohort", None), experiment.num_members
    if cohort is not None and cohort > most > 0:
        yield f"cohort is {cohort}, more than there are clients: give at most {most}, or use more --clients"
    shape = experiment.train.lr_schedule
    if shape != "constant" and not experiment.algorithm.local.traits.uses_optimizer:
        yield f"train.lr_schedule is {shape}, but {experiment.algorithm.name} steps without the module's optimizer: leave it out"
    clip, refuses = experiment.fabric.gradient_clip_val, Rules(experiment.rules).norms_are_of_changes
    if clip is not None and not experiment.algorithm.local.traits.uses_optimizer and refuses:
        yield f"fabric.gradient_clip_val is {clip:g}, but {experiment.algorithm.name} trains without gradients: leave it out"
    if experiment.overlap and (why := overlap_problem(experiment.algorithm)) is not None:
        yield f"overlap is true, but {why}: leave it out, or choose fed_async or fed_buff"
    if experiment.overlap and experiment.secure_aggregation.is_on:
        yield "overlap and secure_aggregation are both on: leave overlap out, a group's members wait for one another"
    yield from _gpu_problems(experiment)
    yield from experiment.algorithm.local.problems(experiment.fabric.precision, experiment.fabric.gradient_clip_val)
    yield from _refused((lambda: _loggers(experiment, importing=True), protection, partial(_compression, experiment)))


def _parts_of_another_kind(algorithm: Any) -> list[str]:
    """List the parts of a user's algorithm that are no parts of their kind, such as a `Sample` in place of a `Select`."""
    from raafl.core.algorithm import Merge, Trigger
    from raafl.core.local import Local
    from raafl.core.sample import Sample
    from raafl.core.select import Select

    kinds = {"sample": Sample, "select": Select, "local": Local, "trigger": Trigger, "merge": Merge}
    given = {name: getattr(algorithm, name) for name in kinds}
    return [
        f"algorithm is {algorithm.name}, whose part `{name}` is {given[name]!r:.100}: give an instance of {kind.__name__}"
        for name, kind in kinds.items()
        if not isinstance(given[name], kind)
    ]


def overlap_problem(algorithm: Any) -> str | None:
    """Explain why a client may not work on its next task while its update travels; None = it may."""
    from raafl.core.local import Local

    traits = algorithm.local.traits
    if traits.steps_ahead:
        return None
    if traits.resident:
        return (
            f"a client of {algorithm.name} makes no step before it has what it receives; a sync_delay above 0 lets it"
        )
    if not algorithm.trigger.allows_overlap:
        return f"a client of {algorithm.name} waits for the merge of its update before its next task"
    if algorithm.merge.personalizes or algorithm.select.needs_last_update:
        return f"a client's next task of {algorithm.name} depends on its last update"
    if type(algorithm.local).exchange is not Local.exchange:
        return f"tasks of {algorithm.name} exchange messages with the server"
    return None


def _gpu_problems(experiment: Any) -> Iterator[str]:
    import torch

    accelerator, num_gpus = experiment.fabric.accelerator, torch.cuda.device_count()
    if (
        experiment.workers > 1
        and experiment.engine.name == "processes"
        and (accelerator in ("cuda", "gpu") or (accelerator == "auto" and torch.cuda.is_available()))
    ):
        yield (
            f"workers is {experiment.workers}, whose processes are forked and can use no GPU: leave it out with "
            f"fabric.accelerator {accelerator}, or start `torchrun --nproc-per-node {experiment.workers} -m raafl simulate`"
        )
    gpu = re.fullmatch(r"cuda(?::(\d{1,3}))?", experiment.server_device)
    if gpu and int(gpu[1] or 0) >= num_gpus:
        yield f"server_device is '{experiment.server_device}', but torch sees {count_gpus()} here: give cpu, or one that is there"


def device_problem(options: FabricOptions) -> str | None:
    """Explain, with a remedy, why the requested device is not available; None = it is."""
    import torch

    from raafl.local.numerics import device_type

    kind, seen = device_type(options), f"torch sees {count_gpus()} here"
    has_cuda, has_mps = torch.cuda.is_available(), torch.backends.mps.is_available()
    if not {"cpu": True, "cuda": has_cuda, "mps": has_mps, "gpu": has_cuda or has_mps}.get(kind, True):
        seen = "torch finds none here" if kind == "mps" else seen
        return f"fabric.accelerator is '{kind}', but {seen}: give cpu, or auto for a GPU where there is one"
    if options.device is None:
        return None
    if kind == "cpu":
        remedy = "leave it out, or give fabric.accelerator cuda"
        return f"fabric.device is {options.device}, the index of a GPU, but steps run on the CPU: {remedy}"
    num_gpus = torch.cuda.device_count() if has_cuda else 1
    if 0 <= options.device < num_gpus:
        return None
    there = "0" if num_gpus == 1 else f"0 to {num_gpus - 1}"
    return f"fabric.device is {options.device}, but {seen}: give {there}, or leave it out"


def count_gpus() -> str:
    """Describe in words how many GPUs torch can use."""
    import torch

    num_gpus = torch.cuda.device_count()
    return quantity(num_gpus, "GPU") if num_gpus else "no GPU"


def _loggers(experiment: Any, *, importing: bool = False) -> None:
    if experiment.logger is not None:
        from raafl.config.loggers import entries, specs

        (specs if importing else entries)(experiment.logger)


def _compression(experiment: Any) -> None:
    if (fixed := experiment.algorithm.local.traits.up_as) is not None:
        from raafl.compression.plan import up_name

        up_name(experiment.compress, fixed)


def _monitor(experiment: Any) -> None:
    seconds("monitor_stall_s", experiment.monitor_stall_s)
    if experiment.monitor is None:
        return
    try:
        parse_address(experiment.monitor)
    except BadInput as wrong:
        raise BadInput(str(wrong).replace("address", "monitor", 1)) from None
    if find_spec("prometheus_client") is None:
        raise BadInput(f"monitor is '{experiment.monitor}', which needs prometheus-client: {installing('monitoring')}")


def _output(experiment: Any) -> None:
    if experiment.output is None or experiment.resume is not None:
        return
    if is_url(experiment.output):
        from raafl.object_store import ObjectStore

        with ObjectStore.answering(experiment.output, "output") as store:
            if store.names():
                raise BadInput(
                    f"output is '{experiment.output}', which is not empty: name another path in the object store"
                )
        return
    path = Path(experiment.output)
    try:
        is_taken = path.exists() and (not path.is_dir() or any(path.iterdir()))
    except OSError as error:  # a name that is too long, or a folder that this user may not read
        raise BadInput(
            f"output is '{experiment.output}', which cannot be used ({error.strerror}): name another folder"
        ) from None
    if is_taken:
        raise BadInput(
            f"output is '{experiment.output}', which is not an empty folder: name a new folder, or remove that one"
        )
    parent = next(folder for folder in (path, *path.absolute().parents) if folder.exists())
    if not parent.is_dir() or not os.access(parent, os.W_OK | os.X_OK):
        raise BadInput(f"output is '{experiment.output}', and {parent} is not writable: name another folder")


def _refused(checks: Iterable[Callable[[], object]]) -> Iterator[str]:
    """Call each check, and yield the lines of the messages of the errors raised."""
    for check in checks:
        try:
            check()
        except (ValueError, OSError) as error:
            yield from str(error).splitlines()

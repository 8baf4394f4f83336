"""Define the configuration of a run as a typed dataclass, which is checked once, whether it comes from YAML or options."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, fields, replace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_type_hints

from raafl.config.options import MODES, About, Engine, Samples, SubmodelOptions, Target, Timeouts, about
from raafl.core.options import (
    CAPTURES,
    Compress,
    FabricOptions,
    Guard,
    Privacy,
    Rounds,
    SecureAggregation,
    Subfederation,
    Training,
)
from raafl.devices.profiles import Device, Profile, assign, load_devices
from raafl.errors import BadInput, installing, nearest, parse_address, positive
from raafl.rules import CURRENT
from raafl.sanitize import is_url

if TYPE_CHECKING:
    from lightning import LightningDataModule, LightningModule

    from raafl.core.algorithm import Algorithm
    from raafl.data.partition import Partition

ACCELERATORS = ("auto", "cpu", "cuda", "gpu", "mps")
TRANSPORTS = ("staged", "nccl")
PRECISIONS = ("32-true", "32", "bf16-mixed", "16-mixed")
"""Lightning's precisions that do not change the dtype of parameters, in which these are sent and merged."""
_REPOSITORY = re.compile(r"[\w.-]{1,96}/[\w.-]{1,96}", re.A)
_UNITS_S = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}


def seconds(field_name: str, value: float | str | None) -> float | None:
    """Convert a duration to seconds; it is a number, or a text such as 90s, 5m, 2h or 1d.

    Raises:
        BadInput: the value is not a duration above 0.
    """
    if value is None:
        return None
    match = re.fullmatch(r"\s*([0-9.]+(?:e[0-9+-]+)?)\s*([smhd]?)\s*", str(value).lower())
    number = float(match[1]) * _UNITS_S[match[2] or "s"] if match and match[1].count(".") < 2 else math.nan
    if not 0 < number < math.inf:
        raise BadInput(f"{field_name} is {value}: give seconds above 0, or text such as 90s, 5m, 2h")
    return number


@dataclass(frozen=True, slots=True)
class Distance:
    """Distance between two evaluations, in versions, in seconds of the run's clock, or in samples trained."""

    size: float
    unit: Literal["versions", "seconds", "samples"]


def distance(field_name: str, value: int | str | None) -> Distance | None:
    """Convert a distance between evaluations: a number of versions, a duration with its unit, or `5000 samples`.

    `value`: value of the field; None = not given.

    Raises:
        BadInput: the value is none of these, or not above 0.
    """
    if value is None:
        return None
    text = str(value).strip().lower()
    match = re.fullmatch(r"(-?[0-9]+)\s*(samples?)?", text)
    if match and int(match[1]) > 0:
        return Distance(int(match[1]), "samples" if match[2] else "versions")
    if match is None and re.fullmatch(r"[0-9.e+-]+\s*[smhd]", text):
        return Distance(seconds(field_name, text) or 0.0, "seconds")
    raise BadInput(
        f"{field_name} is {value}: give 1 or more versions, seconds above 0 such as 10s, or samples such as '5000 samples'"
    )


def _iid() -> Partition:
    from raafl.data.partition import Iid

    return Iid()


@dataclass
class Experiment:
    """Configuration of a federated run; the help text of each field is stored beside the field."""

    model: Callable[[], LightningModule] = field(
        metadata=about(
            "the model to train: makes a LightningModule",
            "CLASS",
            group="who",
            must_match=True,
            sent_to_clients=True,
            keyword=False,
        )
    )
    data: Callable[[], LightningDataModule] = field(
        metadata=about(
            "the data: makes a LightningDataModule, whose training set is shared out among the clients",
            "CLASS",
            group="who",
            must_match=True,
            sent_to_clients=True,
            keyword=False,
        )
    )
    algorithm: Algorithm = field(
        metadata=about(
            "how it is trained: the five parts, from a factory in `raafl.algorithms`",
            "NAME",
            group="who",
            must_match=True,
            sent_to_clients=True,
            keyword=False,
        )
    )
    partition: Partition = field(
        default_factory=_iid,
        metadata=about(
            "how the training set is shared out; evenly at random (raafl.data.Iid) unless given",
            "CLASS",
            group="who",
            must_match=True,
            sent_to_clients=True,
        ),
    )
    clients: int = field(
        default=10,
        metadata=about(
            "number of clients N; under torchrun one fewer than its ranks. "
            "Left out, one for each of the devices, or 10 without any",
            "N",
            group="who",
            must_match=True,
            sent_to_clients=True,
            keyword=False,
            least=1,
            most=1_000_000,
        ),
    )
    name: str = field(
        default="run", metadata=about("name of the run, for its folder", "NAME", group="shown", may_change=True)
    )
    seed: int = field(
        default=0,
        metadata=about(
            "seed of everything that is drawn", "N", group="computed", must_match=True, sent_to_clients=True, least=0
        ),
    )
    devices: list[Device] | str | None = field(
        default=None,
        metadata=about(
            "what the clients can do: a list of devices, or a YAML, JSON or CSV file of them; null = all alike",
            "FILE",
            group="who",
            sent_to_clients=True,
            keyword=False,
        ),
    )
    memory: float | str = field(
        default="measure",
        metadata=about(
            "of a client whose device declares no memory_bytes: measure (what its process can still get; simulated clients "
            "have no limit), none (no limit), or a number of bytes",
            sent_to_clients=True,
        ),
    )
    train: Training = field(
        default_factory=Training, metadata=about("how much a task trains", must_match=True, sent_to_clients=True)
    )
    submodels: SubmodelOptions = field(
        default_factory=SubmodelOptions,
        metadata=about(
            "how the model is cut, and what becomes of batch norm's running statistics",
            must_match=True,
            sent_to_clients=True,
        ),
    )
    fabric: FabricOptions = field(
        default_factory=FabricOptions,
        metadata=about("how local steps run (accelerator, precision, clipping)", sent_to_clients=True),
    )
    guard: Guard = field(
        default_factory=Guard,
        metadata=about(
            "how the merge is protected from bad updates: clipping, refusing, trimmed mean, median, centred clipping"
        ),
    )
    rounds: Rounds = field(default_factory=Rounds, metadata=about("when a round closes without its last clients"))
    privacy: Privacy = field(
        default_factory=Privacy, metadata=about("client-level differential privacy of the global model")
    )
    subfederation: Subfederation = field(
        default_factory=Subfederation,
        metadata=about(
            "how long a task of the server above lasts, which `raafl join --subfederation` has joined", keyword=False
        ),
    )
    secure_aggregation: SecureAggregation = field(
        default_factory=SecureAggregation,
        metadata=about("masks over updates, so that the server reads sums only", must_match=True, sent_to_clients=True),
    )
    compress: Compress = field(
        default_factory=Compress,
        metadata=about(
            "how what travels is compressed, down and up: none, bf16, int8, top_k",
            must_match=True,
            sent_to_clients=True,
        ),
    )
    max_updates: int | None = field(
        default=None,
        metadata=about(
            "end after so many merged updates (a round that is begun is merged whole)",
            "N",
            group="end",
            may_change=True,
            least=1,
        ),
    )
    max_time: float | str | None = field(
        default=None,
        metadata=about(
            "end after so many seconds of the run's own clock (or 90s, 5m, 2h)", "SECONDS", group="end", may_change=True
        ),
    )
    target: str | list[str] | None = field(
        default=None,
        metadata=about(
            "a metric's value to reach, such as accuracy=0.9, loss=0.1 or, where the name does not say what is better, "
            "'gap<=0.1', or a list of them: end when all are reached",
            "METRIC=VALUE",
            group="end",
            may_change=True,
        ),
    )
    eval_every: int | str | None = field(
        default=None,
        metadata=about(
            "versions between evaluations, or seconds of the run's own clock (10s, 5m, 2h), or samples trained (5000 samples); "
            "null = about one for each N updates",
            "N",
            group="shown",
        ),
    )
    checkpoint_every: int | None = field(
        default=None,
        metadata=about(
            "versions between checkpoints; null = by time only", "N", group="shown", may_change=True, least=1
        ),
    )
    checkpoint_s: float | str | None = field(
        default=60.0,
        metadata=about(
            "seconds of real time between checkpoints (or 90s, 5m, 2h); null = by versions only. There is one at the end in "
            "any case",
            "SECONDS",
            group="shown",
            may_change=True,
        ),
    )
    keep_checkpoints: int = field(
        default=3, metadata=about("how many checkpoints to keep", "N", group="shown", may_change=True, least=1)
    )
    keep_best: str | None = field(
        default=None,
        metadata=about(
            "a metric, such as accuracy (or gap:min, where the name does not say what is better), whose best checkpoint is kept "
            "beside the last, as checkpoints/best.ckpt; null = none",
            "METRIC",
            group="shown",
            may_change=True,
        ),
    )
    samples: Samples = field(
        default_factory=Samples,
        metadata=about(
            "texts and predictions of the global model that are recorded at evaluations",
            group="shown",
            may_change=True,
            used_by_replay=False,
        ),
    )
    safetensors: bool = field(
        default=False,
        metadata=about(
            "save the final model of a module without save_pretrained as model/model.safetensors, too",
            "[BOOL]",
            group="shown",
            may_change=True,
        ),
    )
    push_to_hub: str | None = field(
        default=None,
        metadata=about(
            "repository of the Hugging Face Hub, such as me/my-model, to which the final model is uploaded with a card, private "
            "unless it exists; null = none",
            "OWNER/NAME",
            group="shown",
            may_change=True,
            used_by_replay=False,
        ),
    )
    emulate: bool = field(
        default=True,
        metadata=about("in a wall-clock run, make each rank take as long as its device would", group="computed"),
    )
    overlap: bool = field(
        default=False,
        metadata=about(
            "let a client begin its next task while its update travels, where the algorithm allows it",
            "[BOOL]",
            group="who",
        ),
    )
    server_device: str = field(
        default="cpu",
        metadata=about(
            "where the global model lies and is merged and measured: cpu, or cuda:0", "DEVICE", group="computed"
        ),
    )
    transport: str = field(
        default="staged",
        metadata=about(
            "how tensors travel between GPUs under torchrun: staged, through memory of the host, or nccl, where it joins the two",
            "HOW",
            group="computed",
            may_change=True,
        ),
    )
    workers: int = field(
        default=1,
        metadata=about(
            "processes that train in a simulated run, this one included",
            "N",
            group="computed",
            may_change=True,
            least=1,
        ),
    )
    engine: Engine = field(
        default_factory=Engine,
        metadata=about(
            "where the tasks of a simulated run are trained", group="computed", may_change=True, used_by_replay=False
        ),
    )
    batch_clients: int | Literal["auto", "fast"] = field(
        default=1,
        metadata=about(
            "clients of a simulated run that are trained as one batch, to the same bit, at most; auto = as many as are faster;"
            " fast = as many as fit, with products whose last bits differ, so that the run has a digest of its own",
            "N",
            group="computed",
            may_change=True,
            least=1,
        ),
    )
    threads: int = field(
        default=1,
        metadata=about(
            "threads that compute a task; the same everywhere, since results depend on it",
            "N",
            group="computed",
            must_match=True,
            sent_to_clients=True,
            least=1,
            most=1_024,
        ),
    )
    output: str | None = field(
        default=None,
        metadata=about(
            "the run's folder, new or empty, or the URL of one in an object store, to which it is copied; null = runs/NAME-TIME",
            "DIR",
            group="shown",
            may_change=True,
            used_by_replay=False,
        ),
    )
    resume: str | None = field(
        default=None,
        metadata=about(
            "folder or URL of an interrupted run to go on with, from its last checkpoint; its config is taken too. auto = that of "
            "--output, if it has one",
            "RUN",
            group="shown",
            may_change=True,
            keyword=False,
            used_by_replay=False,
        ),
    )
    progress: str = field(
        default="auto",
        metadata=about(
            "how the run is shown: auto, live, plain, verbose or quiet", "HOW", group="shown", may_change=True
        ),
    )
    logger: Any = field(
        default=None,
        metadata=about(
            "Lightning loggers that are sent metrics: csv, mlflow, tensorboard, wandb, or a class with its arguments; one or "
            "a list",
            "NAME",
            group="shown",
            may_change=True,
            used_by_replay=False,
        ),
    )
    monitor: str | None = field(
        default=None,
        metadata=about(
            "HOST:PORT at which the run shows /metrics (Prometheus) and /healthz; null = nowhere",
            "HOST:PORT",
            group="shown",
            may_change=True,
            used_by_replay=False,
        ),
    )
    monitor_clients: int = field(
        default=0,
        metadata=about(
            "clients 1 to N have series of their own in /metrics; 0 = none has",
            "N",
            group="shown",
            may_change=True,
            used_by_replay=False,
            least=0,
            most=10_000,
        ),
    )
    monitor_stall_s: float | str = field(
        default=60.0,
        metadata=about(
            "seconds without a turn of the run's loop after which /healthz answers 503 (or 90s, 5m, 2h)",
            "SECONDS",
            group="shown",
            may_change=True,
            used_by_replay=False,
        ),
    )
    payload_memory_bytes: int | None = field(
        default=16 << 20,
        metadata=about(
            "largest payload (the tensors of a task or an update) that `raafl serve` holds in memory, in bytes; longer ones lie in "
            "files of the run folder, which the system takes from memory when it is short; null = all in memory",
            "BYTES",
            group="computed",
            may_change=True,
            keyword=False,
            used_by_replay=False,
            least=0,
        ),
    )
    rules: int = field(
        default=CURRENT,
        metadata=about(
            "revision of the rules that decide a run's times and bits; a run folder without it ran under 1",
            "N",
            group="computed",
            must_match=True,
            sent_to_clients=True,
            least=1,
            most=CURRENT,
        ),
    )
    waits: Timeouts = field(
        default_factory=Timeouts, metadata=about("deadlines of a wall-clock run", sent_to_clients=True, may_change=True)
    )
    strict: bool = field(
        default=False,
        metadata=about(
            "a warning said before the run starts is an error, and so is a run that diverges",
            "[BOOL]",
            group="shown",
            may_change=True,
        ),
    )

    def check(self, *, needs_end: bool = True) -> None:
        """Check all fields; raise one `BadInput` with a line for each wrong value.

        Args:
            needs_end: whether the config must say when the run ends (max_updates, max_time or target); a client gets
                this from the server.
        """
        problems = list(dict.fromkeys([*self.plain_problems(needs_end=needs_end), *self._problems()]))
        if problems:
            raise BadInput("\n".join(problems))

    def plain_problems(self, *, needs_end: bool = True) -> Iterator[str]:
        """Yield a message for each wrong value among the plain fields.

        Model, data, algorithm and partition are not checked, so torch is not imported.
        """
        least = {name: one.least for name, one in ABOUT.items() if one.least is not None}
        counts = {name: getattr(self, name) for name in least}
        counts |= {f"train.{f.name}": getattr(self.train, f.name) for f in fields(Training) if f.type == "int | None"}
        counts["fabric.accumulate_grad_batches"] = self.fabric.accumulate_grad_batches
        for name, count in counts.items():
            if isinstance(count, str):
                if count not in ("auto", "fast"):
                    yield f"{name} is '{count}': give auto, fast, or a number from 1"
            elif count is not None and count < least.get(name, 1):
                yield f"{name} is {count}: give {least.get(name, 1)} or more"
        if self.rules > CURRENT:
            yield f"rules is {self.rules}: give at most {CURRENT}, or use the later version of raafl that made this config"
        if self.train.num_epochs is None and self.train.num_steps is None:
            yield "train.num_epochs and train.num_steps are both null: give one of them"
        needs_end = needs_end and not self.subfederation.is_on  # a subfederation is ended by the server above
        if needs_end and self.max_updates is None and self.max_time is None and self.target is None:
            yield "max_updates, max_time and target are all null: give at least one, or the run would never end"
        if self.progress not in MODES:
            yield f"progress is '{self.progress}': give {', '.join(MODES[:-1])} or {MODES[-1]}"
        for wait in fields(self.waits):
            value = getattr(self.waits, wait.name)
            if not value > 0 and (wait.name, value) != ("resume_s", 0):
                yield f"waits.{wait.name} is {value}: give seconds above 0"
        if self.guard.is_on and self.privacy.is_on:
            yield "guard and privacy are both on: leave guard out, privacy clips itself and its sum must take every update"
        yield from self._machine_problems()
        yield from self._export_problems()
        checks = (
            lambda: seconds("max_time", self.max_time),
            lambda: seconds("checkpoint_s", self.checkpoint_s),
            lambda: distance("eval_every", self.eval_every),
            self._loggers,
            self.targets,
            self.profiles,
            self._output,
            self._memory_bytes,
            self._monitor,
        )
        yield from _refused(checks)

    def _machine_problems(self) -> Iterator[str]:
        clip, accelerator = self.fabric.gradient_clip_val, self.fabric.accelerator
        if clip is not None and not clip > 0:
            yield f"fabric.gradient_clip_val is {clip}: give a number above 0, or null for no clipping"
        if accelerator not in ACCELERATORS:
            yield f"fabric.accelerator is '{accelerator}': {nearest(accelerator, ACCELERATORS)}"
        precision = str(self.fabric.precision)
        if precision not in PRECISIONS:
            yield f"fabric.precision is '{precision}': give 32-true, bf16-mixed or 16-mixed, which leave the model's dtype alone"
        if precision == "16-mixed" and accelerator == "cpu":
            yield "fabric.precision is 16-mixed, which is for GPUs: use bf16-mixed, or fabric.accelerator cuda"
        if self.fabric.capture not in CAPTURES:
            yield f"fabric.capture is '{self.fabric.capture}': give {', '.join(CAPTURES[:-1])} or {CAPTURES[-1]}"
        if self.batch_clients == "fast" and (self.workers > 1 or self.engine.name != "processes"):
            yield (
                "batch_clients is fast, which is for one process, so that a replay trains the same clients together: leave "
                "workers and engine out, or give auto"
            )
        if not 0 <= self.fabric.data_on_device <= 1:
            yield f"fabric.data_on_device is {self.fabric.data_on_device}: give a share from 0 to 1"
        if self.transport not in TRANSPORTS:
            yield f"transport is '{self.transport}': give {' or '.join(TRANSPORTS)}"
        if not re.fullmatch(r"(cpu|cuda)(:\d{1,3})?", self.server_device):
            yield f"server_device is '{self.server_device}': give cpu, or a GPU such as cuda:0"

    def _export_problems(self) -> Iterator[str]:
        if self.push_to_hub is not None and not _REPOSITORY.fullmatch(self.push_to_hub):
            yield f"push_to_hub is '{self.push_to_hub}': give OWNER/NAME, the name of a repository"
        wanted = {"push_to_hub": (self.push_to_hub is not None, "huggingface_hub")}
        for name, (is_set, package) in (wanted | {"safetensors": (self.safetensors, "safetensors")}).items():
            if is_set and find_spec(package) is None:
                yield f"{name} is set, which needs {package}: {installing('hf')}"

    def secured(self, algorithm: Algorithm) -> Algorithm:
        """Replace the merge of ``algorithm`` by one that merges sums, if the run has secure aggregation.

        Raises:
            BadInput: an option or the algorithm does not work with secure aggregation.
        """
        if not self.secure_aggregation.is_on:
            return algorithm
        from raafl.parts.protect.secure.merge import secured

        options = self.secure_aggregation, self.rounds, self.guard, self.privacy
        return secured(algorithm, *options, self.clients, self.compress.up)

    def _problems(self) -> Iterator[str]:
        """Yield an error text for each invalid combination of settings, and for each that this machine cannot run."""
        from raafl.parts.protect.assembly import with_options

        def protection() -> None:
            self.secured(with_options(self.algorithm, self.rounds, self.guard, self.privacy, self.clients))

        cohort = getattr(self.algorithm.sample, "cohort", None)
        if cohort is not None and cohort > self.clients > 0:
            yield f"cohort is {cohort}, more than there are clients: give at most {self.clients}, or use more --clients"
        shape = self.train.lr_schedule
        if shape != "constant" and not self.algorithm.local.traits.uses_optimizer:
            yield f"train.lr_schedule is {shape}, but {self.algorithm.name} steps without the module's optimizer: leave it out"
        if self.overlap and (why := self.algorithm.overlap_problem()) is not None:
            yield f"overlap is true, but {why}: leave it out, or choose fed_async or fed_buff"
        if self.overlap and self.secure_aggregation.is_on:
            yield "overlap and secure_aggregation are both on: leave overlap out, a group's members wait for one another"
        yield from self._gpu_problems()
        yield from self.algorithm.local.problems(self.fabric.precision, self.fabric.gradient_clip_val)
        yield from _refused((lambda: self._loggers(importing=True), protection, self._compression))

    def _gpu_problems(self) -> Iterator[str]:
        import torch

        from raafl.local.numerics import count_gpus

        accelerator, num_gpus = self.fabric.accelerator, torch.cuda.device_count()
        if (
            self.workers > 1
            and self.engine.name == "processes"
            and (accelerator in ("cuda", "gpu") or (accelerator == "auto" and torch.cuda.is_available()))
        ):
            yield (
                f"workers is {self.workers}, whose processes are forked and can use no GPU: leave it out with "
                f"fabric.accelerator {accelerator}, or start `torchrun --nproc-per-node {self.workers} -m raafl simulate`"
            )
        gpu = re.fullmatch(r"cuda(?::(\d{1,3}))?", self.server_device)
        if gpu and int(gpu[1] or 0) >= num_gpus:
            yield f"server_device is '{self.server_device}', but torch sees {count_gpus()} here: give cpu, or one that is there"

    def targets(self) -> list[Target]:
        """Return the targets of metrics at which the run ends, parsed."""
        texts = [self.target] if isinstance(self.target, str) else self.target or []
        return [Target.parse(text) for text in texts]

    def profiles(self) -> list[Profile]:
        """Return the device profile of each client, in the order of client ids from 1."""
        most = self._memory_bytes()
        if self.devices is None or self.clients < 1:
            return [Profile(memory_bytes=most)] * max(self.clients, 0)
        devices = load_devices(self.devices) if isinstance(self.devices, str) else self.devices

        def limited(device: Profile) -> Profile:
            one = device.profile if isinstance(device, Device) else device
            return replace(one, memory_bytes=most) if one.memory_bytes == math.inf else one

        dealt = assign(devices, self.clients)
        # clients share equal profiles, so each is converted once
        made = {number: limited(one) for number, one in {id(one): one for one in dealt}.items()}
        return [made[id(one)] for one in dealt]

    @property
    def saves_safetensors(self) -> bool:
        """Whether the final model is saved as safetensors if it is a plain `torch.nn.Module`."""
        return self.safetensors or self.push_to_hub is not None

    @property
    def measures_memory(self) -> bool:
        """Whether a client's process measures its available memory if its device profile states none."""
        return self.memory == "measure"

    def _memory_bytes(self) -> float:
        if self.memory in ("measure", "none"):
            return math.inf
        try:
            positive("memory", float(self.memory))
        except ValueError:
            raise BadInput(f"memory is '{self.memory}': give measure, none, or a number of bytes above 0") from None
        return float(self.memory)

    def _loggers(self, *, importing: bool = False) -> None:
        if self.logger is not None:
            from raafl.config.loggers import entries, specs

            (specs if importing else entries)(self.logger)

    def _compression(self) -> None:
        if (fixed := self.algorithm.local.traits.up_as) is not None:
            from raafl.compression.plan import up_name

            up_name(self.compress, fixed)

    def _monitor(self) -> None:
        seconds("monitor_stall_s", self.monitor_stall_s)
        if self.monitor is None:
            return
        try:
            parse_address(self.monitor)
        except BadInput as wrong:
            raise BadInput(str(wrong).replace("address", "monitor", 1)) from None
        if find_spec("prometheus_client") is None:
            raise BadInput(f"monitor is '{self.monitor}', which needs prometheus-client: {installing('monitoring')}")

    def _output(self) -> None:
        if self.output is None or self.resume is not None:
            return
        if is_url(self.output):
            from raafl.object_store import ObjectStore

            with ObjectStore.answering(self.output, "output") as store:
                if store.names():
                    raise BadInput(
                        f"output is '{self.output}', which is not empty: name another path in the object store"
                    )
            return
        path = Path(self.output)
        if path.exists() and (not path.is_dir() or any(path.iterdir())):
            raise BadInput(
                f"output is '{self.output}', which is not an empty folder: name a new folder, or remove that one"
            )
        parent = next(folder for folder in (path, *path.absolute().parents) if folder.exists())
        if not parent.is_dir() or not os.access(parent, os.W_OK | os.X_OK):
            raise BadInput(f"output is '{self.output}', and {parent} is not writable: name another folder")


def _refused(checks: Iterable[Callable[[], object]]) -> Iterator[str]:
    """Run the checks, and yield the lines of the errors that they raise."""
    for check in checks:
        try:
            check()
        except (ValueError, OSError) as error:
            yield from str(error).splitlines()


def field_types(**parts: object) -> dict[str, Any]:
    """Return the type of each field of the configuration.

    This module imports no torch, so the classes of models, data, algorithms and partitions are passed in.
    """
    named = ("LightningModule", "LightningDataModule", "Algorithm", "Partition")
    return get_type_hints(Experiment, localns=dict.fromkeys(named, object) | parts)


ABOUT: dict[str, About] = {f.name: f.metadata["about"] for f in fields(Experiment)}
"""Metadata of each field, by its name."""

SECTIONS: dict[str, Any] = {
    f.name: f.default_factory for f in fields(Experiment) if getattr(f.default_factory, "__name__", "") == f.type
}
"""Type of each field that is itself a section of fields."""


def marked(mark: str) -> tuple[str, ...]:
    """Return the names of the fields whose metadata (`About`) has a certain mark, such as ``must_match``."""
    return tuple(name for name, one in ABOUT.items() if getattr(one, mark))

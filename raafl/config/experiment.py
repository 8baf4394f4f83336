"""Define the configuration of a run as a typed dataclass, which is checked once, whether it comes from YAML or options."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any, Literal, get_type_hints

from raafl.config.options import About, Engine, Samples, SubmodelOptions, Timeouts, about, option
from raafl.core.options import (
    Compress,
    FabricOptions,
    Guard,
    Privacy,
    Rounds,
    SecureAggregation,
    Subfederation,
    Subfederations,
    Training,
)
from raafl.devices.profiles import Device, Profile, assign
from raafl.errors import BadInput, positive
from raafl.rules import CURRENT

if TYPE_CHECKING:
    from lightning import LightningDataModule, LightningModule

    from raafl.config.targets import Target
    from raafl.core.algorithm import Algorithm
    from raafl.data.partition import Partition


def _iid() -> Partition:
    from raafl.data.partition import Iid

    return Iid()


_SENT: dict[str, Any] = {"must_match": True, "sent_to_clients": True}
"""Marks of a field that clients have like the server, and are sent where they have no config."""
_SHOWN: dict[str, Any] = {"group": "shown", "may_change": True}
"""Marks of a field of what is measured, kept and shown, which a resumed run may change."""
_HELD: dict[str, Any] = {
    "group": "computed",
    "may_change": True,
    "keyword": False,
    "used_by_replay": False,
    "least": 0,
}
"""Marks of a bound on the payloads that a server holds in memory."""


@dataclass
class Experiment:
    """Configuration of a federated run; the help text of each field is stored beside the field."""

    model: Callable[[], LightningModule] = field(
        metadata=about("the model to train: makes a LightningModule", "CLASS", group="who", keyword=False, **_SENT)
    )
    data: Callable[[], LightningDataModule] = field(
        metadata=about(
            "the data: makes a LightningDataModule, whose training set is shared out among the clients",
            "CLASS",
            group="who",
            keyword=False,
            **_SENT,
        )
    )
    algorithm: Algorithm = field(
        metadata=about(
            "how it is trained: the five parts, from a factory in `raafl.algorithms`",
            "NAME",
            group="who",
            keyword=False,
            **_SENT,
        )
    )
    partition: Partition = option(
        _iid,
        "how the training set is shared out; evenly at random (raafl.data.Iid) unless given",
        "CLASS",
        group="who",
        **_SENT,
    )
    clients: int = option(
        10,
        "number of clients N; under torchrun one fewer than its ranks. "
        "Left out, one for each of the devices, or 10 without any",
        "N",
        group="who",
        keyword=False,
        least=1,
        most=1_000_000,
        **_SENT,
    )
    name: str = option("run", "name of the run, for its folder", "NAME", **_SHOWN)
    seed: int = option(0, "seed of everything that is drawn", "N", group="computed", least=0, **_SENT)
    devices: list[Device] | str | None = option(
        None,
        "what the clients can do: a list of devices, or a YAML, JSON or CSV file of them; null = all alike",
        "FILE",
        group="who",
        sent_to_clients=True,
        keyword=False,
    )
    memory: float | str = option(
        "measure",
        "of a client whose device declares no memory_bytes: measure (what its process can still get; simulated clients "
        "have no limit), none (no limit), or a number of bytes",
        sent_to_clients=True,
    )
    train: Training = option(Training, "how much a task trains", **_SENT)
    submodels: SubmodelOptions = option(
        SubmodelOptions, "how the model is cut, and what becomes of batch norm's running statistics", **_SENT
    )
    fabric: FabricOptions = option(
        FabricOptions, "how local steps run (accelerator, precision, clipping)", sent_to_clients=True
    )
    guard: Guard = option(
        Guard, "how the merge is protected from bad updates: clipping, refusing, trimmed mean, median, centred clipping"
    )
    rounds: Rounds = option(Rounds, "when a round closes without its last clients")
    privacy: Privacy = option(Privacy, "client-level differential privacy of the global model")
    subfederation: Subfederation = option(
        Subfederation,
        "how long a task of the server above lasts, which `raafl join --subfederation` has joined",
        keyword=False,
    )
    subfederations: Subfederations = option(
        Subfederations,
        "simulated clients of which so many form one client each, whose local training is a federation of them",
        keyword=False,
    )
    secure_aggregation: SecureAggregation = option(
        SecureAggregation, "masks over updates, so that the server reads sums only", **_SENT
    )
    compress: Compress = option(
        Compress, "how what travels is compressed, down and up: none, bf16, int8, top_k", **_SENT
    )
    max_updates: int | None = option(
        None,
        "end after so many merged updates (a round that is begun is merged whole)",
        "N",
        group="end",
        may_change=True,
        least=1,
    )
    max_time: float | str | None = option(
        None,
        "end after so many seconds of the run's own clock (or 90s, 5m, 2h)",
        "SECONDS",
        group="end",
        may_change=True,
    )
    target: str | list[str] | None = option(
        None,
        "a metric's value to reach, such as accuracy=0.9, loss=0.1 or, where the name does not say what is better, "
        "'gap<=0.1', or a list of them: end when all are reached",
        "METRIC=VALUE",
        group="end",
        may_change=True,
    )
    eval_every: int | str | None = option(
        None,
        "versions between evaluations, or seconds of the run's own clock (10s, 5m, 2h), or samples trained (5000 samples); "
        "null = about one for each N updates",
        "N",
        group="shown",
    )
    checkpoint_every: int | None = option(
        None, "versions between checkpoints; null = by time only", "N", least=1, **_SHOWN
    )
    checkpoint_s: float | str | None = option(
        60.0,
        "seconds of real time between checkpoints (or 90s, 5m, 2h); null = by versions only. There is one at the end in "
        "any case",
        "SECONDS",
        **_SHOWN,
    )
    keep_checkpoints: int = option(3, "how many checkpoints to keep", "N", least=1, **_SHOWN)
    keep_best: str | None = option(
        None,
        "a metric, such as accuracy (or gap:min, where the name does not say what is better), whose best checkpoint is kept "
        "beside the last, as checkpoints/best.ckpt; null = none",
        "METRIC",
        **_SHOWN,
    )
    samples: Samples = option(
        Samples,
        "texts and predictions of the global model that are recorded at evaluations",
        used_by_replay=False,
        **_SHOWN,
    )
    safetensors: bool = option(
        False,
        "save the final model of a module without save_pretrained as model/model.safetensors, too",
        "[BOOL]",
        **_SHOWN,
    )
    push_to_hub: str | None = option(
        None,
        "repository of the Hugging Face Hub, such as me/my-model, to which the final model is uploaded with a card, private "
        "unless it exists; null = none",
        "OWNER/NAME",
        used_by_replay=False,
        **_SHOWN,
    )
    emulate: bool = option(
        True, "in a wall-clock run, make each rank take as long as its device would", group="computed"
    )
    overlap: bool = option(
        False,
        "let a client begin its next task while its update travels, where the algorithm allows it",
        "[BOOL]",
        group="who",
    )
    server_device: str = option(
        "cpu", "where the global model lies and is merged and measured: cpu, or cuda:0", "DEVICE", group="computed"
    )
    transport: str = option(
        "staged",
        "how tensors travel between GPUs under torchrun: staged, through memory of the host, or nccl, where it joins the two",
        "HOW",
        group="computed",
        may_change=True,
    )
    workers: int = option(
        1, "processes that train in a simulated run, this one included", "N", group="computed", may_change=True, least=1
    )
    engine: Engine = option(
        Engine,
        "where the tasks of a simulated run are trained",
        group="computed",
        may_change=True,
        used_by_replay=False,
    )
    batch_clients: int | Literal["auto", "fast"] = option(
        1,
        "clients of a simulated run that are trained as one batch, to the same bit, at most; auto = as many as are faster;"
        " fast = as many as fit, with products whose last bits differ, so that the run has a digest of its own",
        "N",
        group="computed",
        may_change=True,
        least=1,
    )
    threads: int = option(
        1,
        "threads that compute a task; the same everywhere, since results depend on it",
        "N",
        group="computed",
        least=1,
        most=1_024,
        **_SENT,
    )
    output: str | None = option(
        None,
        "the run's folder, new or empty, or the URL of one in an object store, to which it is copied; null = runs/NAME-TIME",
        "DIR",
        used_by_replay=False,
        **_SHOWN,
    )
    resume: str | None = option(
        None,
        "folder or URL of an interrupted run to go on with, from its last checkpoint, or of a finished one to go on to a farther "
        "goal; its config is taken too. auto = that of --output, if it has one",
        "RUN",
        keyword=False,
        used_by_replay=False,
        **_SHOWN,
    )
    progress: str = option("auto", "how the run is shown: auto, live, plain, verbose or quiet", "HOW", **_SHOWN)
    logger: Any = option(
        None,
        "Lightning loggers that are sent metrics: csv, mlflow, tensorboard, wandb, or a class with its arguments; one or "
        "a list",
        "NAME",
        used_by_replay=False,
        **_SHOWN,
    )
    monitor: str | None = option(
        None,
        "HOST:PORT at which the run shows /metrics (Prometheus) and /healthz; null = nowhere",
        "HOST:PORT",
        used_by_replay=False,
        **_SHOWN,
    )
    monitor_clients: int = option(
        0,
        "clients 1 to N have series of their own in /metrics; 0 = none has",
        "N",
        used_by_replay=False,
        least=0,
        most=10000,
        **_SHOWN,
    )
    monitor_stall_s: float | str = option(
        60.0,
        "seconds without a turn of the run's loop after which /healthz answers 503 (or 90s, 5m, 2h)",
        "SECONDS",
        used_by_replay=False,
        **_SHOWN,
    )
    payload_memory_bytes: int | None = option(
        16 << 20,
        "largest payload (the tensors of a task or an update) that `raafl serve` holds in memory, in bytes; longer ones lie in "
        "files of the run folder, which the system takes from memory when it is short; null = all in memory",
        "BYTES",
        **_HELD,
    )
    payload_memory_total_bytes: int = option(
        1 << 30,
        "bytes of all payloads together that `raafl serve` holds in memory, at least `payload_memory_bytes`; others are in "
        "files of the run folder, too, whatever their size",
        "BYTES",
        **_HELD,
    )
    rules: int = option(
        CURRENT,
        "revision of the rules that decide a run's times and bits; a run folder without it ran under 1",
        "N",
        group="computed",
        least=1,
        most=CURRENT,
        **_SENT,
    )
    waits: Timeouts = option(Timeouts, "deadlines of a wall-clock run", sent_to_clients=True, may_change=True)
    strict: bool = option(
        False, "a warning said before the run starts is an error, and so is a run that diverges", "[BOOL]", **_SHOWN
    )

    def check(self, *, needs_end: bool = True) -> None:
        """Check all fields; raise one `BadInput` with a line for each wrong value.

        Args:
            needs_end: whether the config must say when the run ends (max_updates, max_time or target); a client gets
                this from the server.
        """
        from raafl.config.problems import plain_problems, problems_of_parts

        problems = list(dict.fromkeys([*plain_problems(self, needs_end=needs_end), *problems_of_parts(self)]))
        if problems:
            raise BadInput("\n".join(problems))

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

    @property
    def num_members(self) -> int:
        """Number of clients that the run itself has: of a run with subfederations their number, and below one its clients."""
        if self.subfederations.size is None:
            return self.clients
        groups, number = self.subfederations.members(self.clients), self.subfederations.number
        return len(groups) if number is None else len(groups[number - 1])

    def targets(self) -> list[Target]:
        """Return the targets of metrics at which the run ends, parsed."""
        from raafl.config.targets import Target

        texts = [self.target] if isinstance(self.target, str) else self.target or []
        return [Target.parse(text) for text in texts]

    def profiles(self) -> list[Profile]:
        """Return the device profile of each client, in the order of client ids from 1."""
        most = self.memory_bytes()
        if self.devices is None or self.clients < 1:
            return [Profile(memory_bytes=most)] * max(self.clients, 0)
        devices = self.devices
        if isinstance(devices, str):
            from raafl.devices.files import load_devices

            devices = load_devices(devices)

        def limited(device: Profile) -> Profile:
            one = device.profile if isinstance(device, Device) else device
            return replace(one, memory_bytes=most) if one.memory_bytes == math.inf else one

        dealt = assign(devices, self.clients)
        # clients share profiles, so each distinct profile is limited only once
        made = {number: limited(one) for number, one in {id(one): one for one in dealt}.items()}
        return [made[id(one)] for one in dealt]

    def memory_bytes(self) -> float:
        """Return the memory, in bytes, of a client whose device declares none; infinite = no limit, or measured."""
        if self.memory in ("measure", "none"):
            return math.inf
        try:
            positive("memory", float(self.memory))
        except ValueError:
            raise BadInput(f"memory is '{self.memory}': give measure, none, or a number of bytes above 0") from None
        return float(self.memory)


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

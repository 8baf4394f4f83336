"""Define the sections of a run's configuration that describe its parts: local work, protection, compression. No torch here."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Literal, Protocol, get_args

from raafl.data.epochs import batches_of_epoch, samples_of
from raafl.errors import BadInput, fraction, one_of, positive, refuse_unused_fields

LrShape = Literal["constant", "linear", "cosine", "step"]
_WARMUP_FROM = 0.1
"""Factor at the beginning of a warm-up: with 0 the first tasks would train nothing."""

_LARGEST = 1_000
"""Largest factor on a learning rate; beyond it a mistake is likelier than an intention."""


class Amount(Protocol):
    """Interface of objects that state the length of a task; `raafl.core.types.Work` implements it."""

    @property
    def num_epochs(self) -> int | None:
        """Number of local epochs; None = the run's own setting."""

    @property
    def num_steps(self) -> int | None:
        """Number of local steps; None = the run's own setting."""


@dataclass(frozen=True, slots=True)
class Training:
    """Settings of local training for every client; an assignment may override its length.

    Attributes:
        num_epochs: number of passes E over the client's data in a task.
        num_steps: number of batches T in a task, instead of epochs; takes precedence if both are given. Each is an optimiser
            step, unless ``fabric.accumulate_grad_batches`` adds up the gradients of several.
        batch_size: local batch size; None = that of the datamodule.
        lr_schedule: shape in which the learning rate changes over the run. A task multiplies its optimizer's own rate
            by the factor at the time of assignment; a scheduler of the module itself restarts in each task. "step"
            multiplies the factor by ``lr_final`` after each span, as `torch.optim.lr_scheduler.StepLR` does.
        lr_versions: number of versions over which the factor falls from 1 to ``lr_final``; None = use ``lr_time_s``.
        lr_time_s: seconds of the run's clock over which the factor falls from 1 to ``lr_final``; None = use
            ``lr_versions``.
        lr_warmup: fraction of that span at its start in which the factor rises linearly from 0.1 to 1.
        lr_final: factor at the end of that span and from then on, at most 1,000; for step, factor of each further span
            relative to the one before, at most 1.
    """

    num_epochs: int | None = 1
    num_steps: int | None = None
    batch_size: int | None = None
    lr_schedule: LrShape = "constant"
    lr_versions: int | None = None
    lr_time_s: float | None = None
    lr_warmup: float = 0.0
    lr_final: float = 0.0

    def __post_init__(self) -> None:
        """Raise `BadInput` for a field of the learning-rate schedule that is out of range, missing, or given twice."""
        if self.lr_schedule not in get_args(LrShape):
            raise BadInput(f"train.lr_schedule is '{self.lr_schedule}': give {', '.join(get_args(LrShape))}")
        if not 0 <= self.lr_warmup < 1:
            raise BadInput(f"train.lr_warmup is {self.lr_warmup}: give a number from 0 to below 1")
        # a "step" schedule raises the factor to a power, so factors above 1 could overflow
        most = 1 if self.lr_schedule == "step" else _LARGEST
        if not 0 <= self.lr_final <= most:
            raise BadInput(f"train.lr_final is {self.lr_final}: give a number from 0 to {most}")
        given = [name for name in ("lr_versions", "lr_time_s") if getattr(self, name) is not None]
        if self.lr_schedule == "constant":
            unused = [*given, *(name for name in ("lr_warmup", "lr_final") if getattr(self, name))]
            if unused:
                raise BadInput(
                    f"train.{unused[0]} has no effect with a constant lr_schedule: set train.lr_schedule to linear, cosine "
                    f"or step, or leave train.{unused[0]} out (at {'null' if unused[0] in given else 0})"
                )
        elif len(given) != 1:
            raise BadInput(
                f"train.lr_schedule is {self.lr_schedule}, which needs a length: give either train.lr_versions or "
                f"train.lr_time_s, not {'both' if given else 'neither'}"
            )
        if self.lr_schedule == "step" and not self.lr_final:
            raise BadInput(
                "train.lr_final is 0, so that nothing is trained after the first step: give 0.1, for example"
            )
        if self.lr_time_s is not None and not 0 < self.lr_time_s < math.inf:
            raise BadInput(f"train.lr_time_s is {self.lr_time_s}: give seconds above 0")

    def lr_scale(self, version: int, now_s: float) -> float:
        """Return the factor on the learning rate of a task that is assigned now; 1 without a schedule.

        Args:
            version: version of the global model.
            now_s: time in seconds of the run's clock.
        """
        if self.lr_schedule == "constant":
            return 1.0
        done = version / self.lr_versions if self.lr_versions is not None else now_s / (self.lr_time_s or 1.0)
        if done < self.lr_warmup:
            return _WARMUP_FROM + (1 - _WARMUP_FROM) * done / self.lr_warmup
        if self.lr_schedule == "step":
            return float(self.lr_final ** math.floor(done))
        share = min((done - self.lr_warmup) / (1 - self.lr_warmup), 1.0)
        left = (1 + math.cos(math.pi * share)) / 2 if self.lr_schedule == "cosine" else 1 - share
        return self.lr_final + (1 - self.lr_final) * left

    def length(self, work: Amount) -> tuple[int | None, int | None]:
        """Return the number of epochs and the number of batches of a task, one of which is None; ``work`` may override them."""
        epochs, steps = work.num_epochs, work.num_steps
        if epochs is None and steps is None:
            epochs, steps = self.num_epochs, self.num_steps
        return (epochs, None) if steps is None else (None, steps)

    def trained_samples(self, work: Amount, num_samples: int, batch_size: int, drop_last: bool) -> int:
        """Return the number of samples that a task trains on, as the client's batches have them.

        Args:
            work: length of the task in epochs or batches; if it has neither, ``num_epochs`` or ``num_steps`` of this
                object.
            num_samples: number of training samples of the client.
            batch_size: local batch size.
            drop_last: whether an epoch drops its last batch if it is smaller than the others and not the only one.
        """
        epochs, steps = self.length(work)
        if steps is None:
            steps = (epochs or 1) * batches_of_epoch(num_samples, batch_size, drop_last)
        return samples_of(steps, num_samples, batch_size, drop_last)

    def nominal_samples(self, work: Amount, num_samples: int, batch_size: int) -> int:
        """Return the number of samples of a task if all of its batches were whole, which is an upper bound.

        Runs of the first rules go by it (`raafl.rules`).

        Args:
            work: length of the task in epochs or batches; if it has neither, ``num_epochs`` or ``num_steps`` of this
                object.
            num_samples: number of training samples of the client.
            batch_size: local batch size.
        """
        epochs, steps = self.length(work)
        return (epochs or 1) * num_samples if steps is None else steps * min(batch_size, num_samples)


Combine = Literal["mean", "trimmed_mean", "median", "centred_clip"]


@dataclass(frozen=True, slots=True)
class Guard:
    """Protection of the merge from bad updates.

    Attributes:
        clip_norm: largest L2 norm of an update's change; a larger change is scaled down. null = no clipping.
        outlier: multiple of the median of accepted norms above which an update is refused; null = refuse none.
        warm_up: number of accepted updates of similar size before `outlier` applies.
        combine: rule for combining updates: mean (the algorithm's own); trimmed_mean or median of each element over the
            updates that trained it; or centred_clip, a mean of updates that are clipped around the last result.
        max_weight: largest weight of a client with its own data (`raafl join --data`), as a multiple of the median of the
            clients' numbers of samples; null = as the client reports. Other clients count with their share of the run's
            data.
        max_norm_ratio: multiple of the median norm of accepted updates with the same layout above which an update is
            refused, once eight are accepted; null = refuse none. See `raafl.parts.protect.assembly`.
        own_data: whether clients may train on their own data; false = such a client is refused when it joins.
        trim: share that trimmed_mean drops at each end, from 0 to below 0.5.
        radius: distance from the last result beyond which centred_clip clips an update, as an L2 norm; null = the median
            distance of the updates.
        max_below: largest number of clients that one client may stand for, as a subfederation (`raafl join
            --subfederation`, docs/sites-and-regions.md); its updates weigh as much as theirs. null = 1, no subfederations.
    """

    clip_norm: float | None = None
    outlier: float | None = None
    warm_up: int = 5
    combine: Combine = "mean"
    trim: float = 0.1
    max_weight: float | None = 10.0
    max_norm_ratio: float | None = 1e4
    own_data: bool = True
    radius: float | None = None
    max_below: int | None = None

    def __post_init__(self) -> None:
        positive("guard.max_below", self.max_below, optional=True)
        positive("guard.clip_norm", self.clip_norm, optional=True)
        if self.outlier is not None and not self.outlier > 1:
            raise BadInput(f"guard.outlier is {self.outlier}: give a number above 1, a multiple of the median norm")
        positive("guard.warm_up", self.warm_up)
        one_of("guard.combine", self.combine, Combine)
        positive("guard.radius", self.radius, optional=True)
        if self.max_weight is not None and not self.max_weight >= 1:
            raise BadInput(f"guard.max_weight is {self.max_weight}: give 1 or more, a multiple of the median, or null")
        if self.max_norm_ratio is not None and not self.max_norm_ratio > 1:
            raise BadInput(
                f"guard.max_norm_ratio is {self.max_norm_ratio}: give a number above 1, a multiple of the median norm, or null"
            )
        if not 0 <= self.trim < 0.5:
            raise BadInput(f"guard.trim is {self.trim}: give a number from 0 to below 0.5")
        for name, needed, is_given in (
            ("trim", "guard.combine trimmed_mean", self.combine == "trimmed_mean"),
            ("radius", "guard.combine centred_clip", self.combine == "centred_clip"),
            ("warm_up", "guard.outlier", self.outlier is not None),
        ):
            if not is_given:
                refuse_unused_fields("guard", self, (name,), f"it belongs to {needed}", f"give {needed}")

    @property
    def is_on(self) -> bool:
        """Whether clipping, refusal of outliers or a robust mean is on; `max_norm_ratio`, on by default, does not count."""
        return self.clip_norm is not None or self.outlier is not None or self.combine != "mean"


@dataclass(frozen=True, slots=True)
class Privacy:
    """Options of client-level differential privacy; it is off unless a clipping norm is given.

    Attributes:
        clip_norm: L2 norm to which each update is clipped (S or C); null = no differential privacy.
        noise_multiplier: standard deviation of the noise on a merge's sum, as a multiple of clip_norm (z or sigma).
        delta: probability that the guarantee epsilon does not hold; below 1 / clients.
        divisor: number by which the noisy sum is divided; null = the number of updates expected in a merge (cohort,
            buffer size or 1).
        max_epsilon: largest epsilon that any client may spend; the run ends before a merge would exceed it. null = no
            limit.
        seed_file: file with the secret seed of the noise, created if missing; null = derive it from the run's seed.
    """

    clip_norm: float | None = None
    noise_multiplier: float = 1.0
    delta: float = 1e-5
    divisor: float | None = None
    seed_file: str | None = None
    max_epsilon: float | None = None

    def __post_init__(self) -> None:
        positive("privacy.max_epsilon", self.max_epsilon, optional=True)
        if self.max_epsilon is not None and not (self.noise_multiplier > 0 and self.clip_norm is not None):
            name = "clip_norm" if self.clip_norm is None else "noise_multiplier"
            raise BadInput(
                f"privacy.max_epsilon is {self.max_epsilon:g}, and privacy.{name} is {getattr(self, name)}: give a "
                "clip_norm and a noise_multiplier above 0, since epsilon is infinite without noise"
            )
        positive("privacy.clip_norm", self.clip_norm, optional=True)
        positive("privacy.divisor", self.divisor, optional=True)
        if not 0 <= self.noise_multiplier < math.inf:
            raise BadInput(f"privacy.noise_multiplier is {self.noise_multiplier}: give a finite number, 0 or more")
        if not 0 < self.delta < 1:
            raise BadInput(f"privacy.delta is {self.delta}: give a number between 0 and 1, such as 1e-5")
        if self.clip_norm == math.inf and self.noise_multiplier > 0:
            raise BadInput("privacy.clip_norm is inf: give a finite norm, since the noise is proportional to it")
        if not self.is_on:
            names = ("noise_multiplier", "delta", "divisor", "seed_file")
            refuse_unused_fields(
                "privacy", self, names, "privacy.clip_norm is null, so privacy is off", "give a clip_norm"
            )

    @property
    def is_on(self) -> bool:
        """Whether differential privacy is on."""
        return self.clip_norm is not None


@dataclass(frozen=True, slots=True)
class Subfederation:
    """Length of a task of the server above, which `raafl join --subfederation` has joined, for the clients of this run.

    Attributes:
        merges: number of merges of a task; null = 1, or as many as `seconds` take.
        seconds: seconds on this run's clock after which the next merge ends a task; null = `merges` ends it.
    """

    merges: int | None = None
    seconds: float | None = None

    def __post_init__(self) -> None:
        positive("subfederation.merges", self.merges, optional=True)
        positive("subfederation.seconds", self.seconds, optional=True)
        if self.merges is not None and self.seconds is not None:
            raise BadInput("subfederation.merges and subfederation.seconds are both given: one of them ends a task")

    @property
    def is_on(self) -> bool:
        """Whether this run is a subfederation, which trains only on tasks of a server above."""
        return self.merges is not None or self.seconds is not None

    def ends(self, num_merges: int, seconds: float) -> bool:
        """Check whether a task ends, which has had so many merges and lasts for so long."""
        return num_merges >= self.merges if self.merges is not None else seconds >= (self.seconds or 0.0)


@dataclass(frozen=True, slots=True)
class Subfederations:
    """Subfederations of a simulated run: clients whose local training is a federation of the devices; off unless size is given.

    Attributes:
        size: number of the run's clients in each subfederation, in order of their ids; the last has the rest. null = none.
        merges: number of merges below for each task of the run; null = 1, or as many as `seconds` take.
        seconds: virtual seconds after which the next merge below ends a task; null = `merges` ends it.
        buffer_size: number of updates in a merge below, for a method with a buffer; null = one of each client.
        down_bytes_per_s: bytes per second of the link from the run's server to a subfederation; null = no limit.
        up_bytes_per_s: bytes per second of the link from a subfederation to the run's server; null = no limit.
        latency_s: seconds of each transfer over these links that do not depend on its size.
        number: number of the subfederation whose own run this is, from 1; raafl sets it in the config of that run's folder.
    """

    size: int | None = None
    merges: int | None = None
    seconds: float | None = None
    buffer_size: int | None = None
    down_bytes_per_s: float | None = None
    up_bytes_per_s: float | None = None
    latency_s: float = 0.0
    number: int | None = None

    def __post_init__(self) -> None:
        counts = ("size", "merges", "seconds", "buffer_size", "down_bytes_per_s", "up_bytes_per_s", "number")
        for name in counts:
            positive(f"subfederations.{name}", getattr(self, name), optional=True)
        if not 0 <= self.latency_s < math.inf:
            raise BadInput(f"subfederations.latency_s is {self.latency_s}: give seconds, 0 or more")
        given = [name for name in (*counts, "latency_s") if getattr(self, name)]
        if given and not self.size:
            raise BadInput(f"subfederations.{given[0]} is given without a size: give subfederations.size, too")
        if self.merges is not None and self.seconds is not None:
            raise BadInput("subfederations.merges and subfederations.seconds are both given: one of them ends a task")

    @property
    def task(self) -> Subfederation:
        """Length of a task below."""
        return Subfederation(self.merges or (1 if self.seconds is None else None), self.seconds)

    def members(self, num_clients: int) -> list[range]:
        """Return the ids of the clients in each subfederation of a run with ``num_clients``, by its number minus 1."""
        size = self.size or num_clients
        return [range(first, min(first + size, num_clients + 1)) for first in range(1, num_clients + 1, size)]


@dataclass(frozen=True, slots=True)
class SecureAggregation:
    """Options of secure aggregation, where the server can read only sums of updates; off unless min_cover is given.

    Attributes:
        min_cover: smallest number of clients that must have trained an element for the server to learn its sum; null =
            no secure aggregation.
        bound: largest magnitude of an element of a client's change; an update beyond it is refused (out-of-range).
        clip_norm: L2 norm to which each client scales its change down before masking; null = no clipping.
        threshold: share of a group's clients, from 0.5 to below 1; more than this share must help to unmask the sum.
        simulate_masks: whether simulated updates are masked, too; false = they are added unmasked, which gives the same
            model to the bit.
        step_s: seconds that a client has for each step of the protocol in a wall-clock run.
    """

    min_cover: int | None = None
    bound: float = 8.0
    clip_norm: float | None = None
    threshold: float = 2 / 3
    simulate_masks: bool = False
    step_s: float = 60.0

    def __post_init__(self) -> None:
        if self.min_cover is not None and self.min_cover < 2:
            raise BadInput(
                f"secure_aggregation.min_cover is {self.min_cover}: give 2 or more, or null, since a sum over one "
                "client reveals its update"
            )
        positive("secure_aggregation.bound", self.bound)
        positive("secure_aggregation.clip_norm", self.clip_norm, optional=True)
        positive("secure_aggregation.step_s", self.step_s)
        if not 0.5 <= self.threshold < 1:
            raise BadInput(f"secure_aggregation.threshold is {self.threshold}: give a number from 0.5 to below 1")
        if self.bound == math.inf:
            raise BadInput("secure_aggregation.bound is inf: give a finite number, such as 8")
        if not self.is_on:
            names = ("bound", "clip_norm", "threshold", "simulate_masks", "step_s")
            reason = "secure_aggregation.min_cover is null, so the server reads each update"
            refuse_unused_fields("secure_aggregation", self, names, reason, "give a min_cover, such as 3")

    @property
    def is_on(self) -> bool:
        """Whether secure aggregation is on."""
        return self.min_cover is not None


@dataclass(frozen=True, slots=True)
class Rounds:
    """Conditions under which a round closes without its slowest clients; by default a round waits for all.

    An update that arrives after its round has closed is refused (refused:late), which counts for its client like any
    refusal.

    Attributes:
        close_at: share of a round's tasks that must report before the round closes, rounded up to whole tasks; 1 = all.
        deadline: time after which the round closes, as a multiple above 1 of the median time from its start to an
            update; null = none.
    """

    close_at: float = 1.0
    deadline: float | None = None

    @property
    def is_on(self) -> bool:
        """Whether a round may close before all of its tasks have reported."""
        return self != Rounds()


Name = Literal["none", "bf16", "int8", "top_k"]
NAMES: tuple[Name, ...] = ("none", "bf16", "int8", "top_k")


@dataclass(frozen=True, slots=True)
class Compress:
    """Compression of tensors between server and clients; off by default.

    Attributes:
        down: compressor of tensors sent to clients: none, bf16, int8 or top_k (on the changes since the client's last
            task).
        up: compressor of tensors sent to the server, as differences from the received ones: none, bf16, int8 or top_k.
        top_k: share of the elements that top_k sends, above 0 and at most 1.
    """

    down: Name = "none"
    up: Name = "none"
    top_k: float = 0.1

    def __post_init__(self) -> None:
        for field, name in (("down", self.down), ("up", self.up)):
            one_of(f"compress.{field}", name, NAMES)
        fraction("compress.top_k", self.top_k)
        if "top_k" not in (self.down, self.up):
            reason = "neither compress.down nor compress.up is top_k"
            refuse_unused_fields("compress", self, ("top_k",), reason, "set one of these to top_k")


CAPTURES = ("auto", "on", "off")
"""Values of `FabricOptions.capture`."""


@dataclass(frozen=True, slots=True)
class FabricOptions:
    """Options of local training, named as in Lightning.

    Attributes:
        accelerator: type of device: cpu, cuda or auto.
        device: number of the GPU that all training processes use; None = distribute the processes over all GPUs.
        precision: numeric precision: 32-true, bf16-mixed, or on a GPU 16-mixed.
        gradient_clip_val: largest gradient norm; None = no clipping.
        accumulate_grad_batches: number of batches whose gradients are added up for one optimiser step.
        capture: whether a training step on a GPU is recorded as a CUDA graph and repeated with one launch: auto = where
            eager steps are seen to give the same; on = the same, and log why others are eager; off. auto and on train
            with the fused or capturable form of torch's optimizers, whose last bits differ. No effect on a CPU.
        data_on_device: largest share of a GPU's free memory that training data may take, which then lie there once for all
            clients of the process, so that only the order of the samples is sent; 0 = batches are sent. No effect on bits.
        deterministic: whether torch and cuDNN must use deterministic kernels, and fail where there is none.
        shard: whether the processes of one client share parameters, gradients and optimizer state (FSDP2); false = each
            process has all of them. No effect on a client of one process.
        tf32: whether float32 products and convolutions on a GPU are rounded to TF32; None = torch's own setting.
    """

    accelerator: str = "cpu"
    device: int | None = None
    precision: str = "32-true"
    gradient_clip_val: float | None = None
    accumulate_grad_batches: int = 1
    capture: str | bool = "auto"
    data_on_device: float = 0.25
    deterministic: bool = False
    tf32: bool | None = None
    shard: bool = False

    def __post_init__(self) -> None:
        """Convert True and False in ``capture`` to "on" and "off", which YAML reads as bools."""
        if isinstance(self.capture, bool):
            object.__setattr__(self, "capture", "on" if self.capture else "off")

    def on(self, gpu: int | None) -> FabricOptions:
        """Return these options for a process that `raafl.devices.gpus` gives this GPU, unless ``device`` is set."""
        on_gpu = self.accelerator in ("cuda", "gpu", "auto")
        return replace(self, device=gpu) if on_gpu and self.device is None else self

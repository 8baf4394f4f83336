"""FedMeZO (Ling et al., "On the Convergence of Zeroth-Order Federated Tuning for Large Language Models", KDD 2024).

Clients train without a backward pass, by MeZO (Malladi et al., "Fine-Tuning Language Models with Just Forward Passes",
NeurIPS 2023, Algorithm 1): they perturb the parameters in place with z ~ N(0, I) drawn from a seed, and step by the difference
of two losses on the same batch::

    g_t = (L(theta + epsilon z_t) - L(theta - epsilon z_t)) / (2 epsilon),    theta <- theta - eta g_t z_t

A client needs no more memory than for a forward pass: no gradients, no optimizer state, no stored activations. The server
averages ``theta <- theta + sum_n |D_n| (theta_n - theta) / sum_n |D_n|``.

Clients send the scalars g_t alone, as in FedKSeed (Qin et al., "Federated Full-Parameter Tuning of Billion-Sized Language Models
with Communication Cost under 18 Kilobytes", ICML 2024): z_t follows from the assignment's seed, so the server replays the
client's steps and obtains its trained values to the last bit.

Choices that the papers leave open, and deviations from them:

- Clients receive the model, as in every other algorithm here. FedKSeed sends scalars in this direction too, for K seeds that
  all share, and clients rebuild the model from its first values.
- The step is plain SGD with a learning rate of its own; the module's optimizer and schedulers are not used. Every batch is a
  step; nothing is accumulated over several.
- Forward passes run in evaluation mode, as in MeZO's code: without dropout, so that both losses see the same network, and with
  batch norm's running statistics, which stay as they were at the start. Buffers neither train nor are sent.
- g_t is rounded to float32 before it is used, so that the server replays exactly the number that it receives.
- ``compress.up`` has nothing to compress, and is refused; ``compress.down`` works.
- Frozen parameters are not perturbed; with LoRA adapters, which FedMeZO tunes, only the adapters are.
- trigger "each" is FedBuff's step with a buffer of one, which neither paper has: theta_n - theta = -eta sum_t g_t z_t does not
  depend on the version from which the client started, so a late update needs no old version to be rebuilt.
- Seeds give equal numbers on machines with the same version of torch and the same vector instructions. Elsewhere z may differ in
  its last bits, and the server's values equal the client's only up to rounding.
"""

from __future__ import annotations

import base64
import binascii
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from torch import Tensor

from raafl.algorithm import (
    Algorithm,
    Assignment,
    ClientInfo,
    Cost,
    FlatTensors,
    Full,
    GlobalState,
    Hook,
    Kind,
    Local,
    Merge,
    MergeMemory,
    Sample,
    Select,
    SelectContext,
    Spec,
    Staleness,
    Submodels,
    Task,
    Traits,
    Update,
    Work,
    derive_seed,
    positive,
)
from raafl.core.local import SkippedBatch, value_of
from raafl.module_hooks import STEP_HOOKS
from raafl.parts.merge.mean import zeros_like
from raafl.parts.select.submodels import WrappedSelect
from raafl.parts.trigger import all_or_each
from raafl.submodel.cut.layers import statistics_of
from raafl.submodel.flat import CHUNK, chunks, reals, wide_dtype


def fed_mezo(
    lr: float = 5e-3,
    epsilon: float = 1e-3,
    trigger: Literal["all", "each"] = "all",
    server_lr: float = 1.0,
    staleness: Kind = "constant",
    staleness_a: float = 0.5,
    staleness_b: float = 4.0,
    by_samples: bool = True,
    cohort: int | None = None,
    concurrency: int | None = None,
    submodel: Select | None = None,
) -> Algorithm:
    """Return FedMeZO: clients train with forward passes only, and send one number for each batch instead of a model.

    Args:
        lr: learning rate of the clients (eta).
        epsilon: size of the random perturbations of the parameters (epsilon in MeZO, mu in FedMeZO).
        trigger: time of a merge: all (when the whole round has reported) or each (at each arrival).
        server_lr: factor on the server's step along the mean change of the clients.
        staleness: form of the function s(.) by which late updates count less, for trigger each: constant, polynomial or hinge.
        staleness_a: parameter a of the polynomial and hinge functions.
        staleness_b: parameter b of the hinge function.
        by_samples: whether to weight clients by their numbers of samples |D_n|; False = equally.
        cohort: number of clients in a round, or at work in an asynchronous run, drawn uniformly; None = all.
        concurrency: largest number of clients that work at the same time; None = no limit.
        submodel: rule that chooses each client's submodel, such as `raafl.parts.RateSelect`; None = the whole model for
            every client.
    """
    return Algorithm(
        name="fed_mezo",
        paper="Ling et al. 2024",
        sample=Sample(cohort, concurrency),
        select=ForwardOnly(submodel or Full()),
        local=ZerothOrder(lr=lr, epsilon=epsilon),
        trigger=all_or_each(trigger, staleness),
        merge=Rebuilt(lr, epsilon, server_lr, Staleness(staleness, staleness_a, staleness_b), by_samples),
    )


SCALARS = "scalars"
"""Key of the scalars g_t in `Update.extra`, and of their expected number in `Work.extra`."""

PASSES = 3
"""Passes over the parameters in a step: to theta + epsilon z, to theta - epsilon z, and back with the update."""


@dataclass
class _SumsMemory(MergeMemory):
    """Merge state: for each element the weighted sum of the clients' changes, and the sum of their weights."""

    key = "zeroth_order"
    sum: FlatTensors
    weight: FlatTensors


@dataclass
class ReceivedTask(MergeMemory):
    """Task whose update the merge will receive next: its random seed, and the parameters it has trained (None = all)."""

    key = "zeroth_order answered"
    seed: int
    trained: list[str] | None = None


# ---- perturbations ----


def _step_seed(seed: int, step: int) -> int:
    """Derive the seed of z_t, the random perturbation in step t of a task."""
    return derive_seed(seed, "perturbation", step)


def add_noise_(tensors: Sequence[Tensor], seed: int, *rates: float) -> None:
    """Add ``rate * z`` to tensors in place, for each of ``rates``; the normal random noise z depends on ``seed`` only.

    The result has the same bits on every device and for any number of threads. To that end z is drawn on the CPU, and
    product and sum are separate operations, since a fused operation may round differently.

    Args:
        tensors: contiguous tensors, whose noise is drawn one after the other.
        seed: seed of the noise z.
        rates: factors of z; the products are added one after the other, which rounds exactly as a client's steps do.
    """
    generator = torch.Generator().manual_seed(seed)
    for tensor in tensors:
        for piece in torch.split(
            tensor.detach().view(-1), CHUNK if not tensor.is_meta else max(CHUNK, tensor.numel() // 64)
        ):
            z = _noise(piece, generator)
            for rate in rates:
                piece.add_(z * rate)


def _noise(piece: Tensor, generator: torch.Generator) -> Tensor:
    """Draw standard normal float32 noise for a flat tensor, always on the CPU, so that all devices get the same.

    The result lies on the tensor's device; for a meta tensor it has a shape, but no values.
    """
    if piece.is_meta:
        return torch.randn_like(piece, dtype=torch.float32)
    return torch.randn(piece.numel(), generator=generator).to(piece.device)


def _replay_(tensors: Sequence[Tensor], seed: int, scalars: Sequence[float], lr: float, epsilon: float) -> None:
    """Replay a client's whole task on ``tensors``, in place, from the task's seed and the scalar g of each step."""
    for step, scalar in enumerate(scalars):
        add_noise_(tensors, _step_seed(seed, step), epsilon, -2 * epsilon, epsilon - lr * scalar)


def parameters_of(submodels: Submodels, spec: Spec) -> list[str]:
    """Return the names of the parameters that a task of ``spec`` trains, in the order in which their noise is drawn."""
    names = submodels.parameter_names
    return [entry.name for entry in submodels.layout(spec, "trained").entries if entry.name in names]


def _num_perturbed(submodels: Submodels, spec: Spec) -> int:
    layout = submodels.layout(spec, "trained")
    return sum(layout.by_name[name].numel for name in parameters_of(submodels, spec))


def _perturbed(spec: Spec, trained: Sequence[str] | None) -> Spec:
    """Return ``spec`` with the parameters that the client perturbs marked as trained; assigned specs mark none."""
    return replace(spec, trained=None if trained is None else tuple(trained))


# ---- train, on the client ----


class Steps(Hook):
    """Hook that trains without a backward pass: one step of MeZO for each batch (Malladi et al. 2023, Algorithm 1)."""

    def __init__(self, task: Task, lr: float, epsilon: float) -> None:
        super().__init__(task)
        self.lr, self.epsilon = lr, epsilon
        self.scalars: list[float] = []
        spec = _perturbed(task.assignment.spec, task.assignment.extra.get("trained"))
        parameters = [task.module.get_parameter(name).detach() for name in parameters_of(task.submodels, spec)]
        self._parameters = [reals(tensor) for tensor in parameters]
        # step in the wide dtype, as the server does when it replays the task; half-precision parameters get the rounded
        # result
        self._wide = [tensor.to(wide_dtype(tensor.dtype)) for tensor in self._parameters]
        task.module.eval()

    @torch.no_grad()
    def loss(self, batch: object, index: int) -> Tensor:
        """Make one step of MeZO; return the mean of the losses at the two perturbed points.

        The step is ``theta -= lr g z``. z is random noise, and ``g = (L(theta + epsilon z) - L(theta - epsilon z)) / (2
        epsilon)`` for the loss L, rounded to float32, as the client sends it.
        """
        seed = _step_seed(self.task.assignment.seed, len(self.scalars))
        self._move(seed, self.epsilon)
        is_above = True
        try:
            plus = value_of(self.task.loss(batch, index), 0.0)
            self._move(seed, -2 * self.epsilon)
            is_above = False
            minus = value_of(self.task.loss(batch, index), 0.0)
        except SkippedBatch:  # counts as a step with g = 0, so that the server replays as many steps
            if is_above:
                self._move(seed, -2 * self.epsilon)
            self._move(seed, self.epsilon)
            self.scalars.append(0.0)
            raise
        scalar = torch.tensor((plus - minus) / (2 * self.epsilon), dtype=torch.float32).item()
        self._move(seed, self.epsilon - self.lr * scalar)
        self.scalars.append(scalar)
        return torch.tensor((plus + minus) / 2)

    def _move(self, seed: int, rate: float) -> None:
        add_noise_(self._wide, seed, rate)
        for parameter, wide in zip(self._parameters, self._wide, strict=True):
            if parameter is not wide:
                parameter.copy_(wide)

    def backward(self, loss: Tensor) -> None:
        """Do nothing, since there are no gradients."""

    def update(self) -> None:
        """Do nothing, since `loss` has already made the step of this batch."""

    def finish(self) -> dict[str, Any]:
        """Return the gradient along the noise in each step, one scalar for each, all encoded as one text for the server."""
        return {SCALARS: pack(self.scalars)}


@dataclass(frozen=True)
class ZerothOrder(Local):
    """Local training without gradients: perturb the parameters twice, and step by the difference of the two losses.

    Attributes:
        lr: learning rate eta.
        epsilon: size of the perturbations.
    """

    lr: float = 5e-3
    epsilon: float = 1e-3

    def __post_init__(self) -> None:
        positive("lr", self.lr)
        positive("epsilon", self.epsilon)

    @property
    def traits(self) -> Traits:
        """What this training can do, needs, and leaves out."""
        return replace(
            super().traits,
            up_as="scalars",
            uses_optimizer=False,
            leaves_out=frozenset(STEP_HOOKS),
            supports_data_parallel=False,  # there are no gradients that several processes could average
        )

    def hook(self, task: Task) -> Hook:
        """Return the hook that trains by MeZO's steps."""
        return Steps(task, self.lr, self.epsilon)

    def cost(self, submodels: Submodels, spec: Spec, batch_size: int, extra: Mapping[str, Any]) -> Cost:
        """Predict the cost of a task, which trains nothing by gradients, by following its forward passes."""
        if spec.trained:
            extra = {**extra, "trained": list(spec.trained)}
        return super().cost(submodels, replace(spec, trained=()), batch_size, extra)

    def cost_depends_on(self, extra: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the settings of a task without the number of its scalars, which are sent only."""
        return {name: value for name, value in extra.items() if name != SCALARS}

    def estimate(self, submodels: Submodels, spec: Spec, batch_size: int, extra: Mapping[str, Any]) -> Cost:
        """Return the cost of a step: two forward passes and three passes over the parameters; no gradients or optimizer state.

        If the model's forward pass could not be traced, it is counted as two FLOPs per parameter.
        """
        cost = submodels.cost(replace(spec, trained=()), batch_size)
        samples = max(batch_size, 1)
        moved = spec if spec.trained else replace(spec, trained=None)
        perturbed, own_bytes = _num_perturbed(submodels, moved), submodels.layout(moved, "trained").single_copy_bytes
        return replace(
            cost,
            flops_per_sample=(2 * cost.flops_per_sample or 4.0 * cost.params) + 2.0 * PASSES * perturbed / samples,
            peak_bytes=cost.peak_bytes + 2 * 4 * min(CHUNK, perturbed) + own_bytes,
            up_bytes=cost.up_bytes + packed_bytes(int(extra.get(SCALARS, 0))),
            moved_bytes_per_sample=2 * cost.moved_bytes_per_sample + 2.0 * PASSES * 4 * perturbed / samples,
            padding_flops_per_sample=2 * cost.padding_flops_per_sample,
            kernels_per_sample=2 * cost.kernels_per_sample,
            launches=None if cost.launches is None else cost.launches.times(2.0),
        )

    def notes(self, submodels: Submodels) -> list[str]:
        """Return messages for the user: what clients send, and how batch norm behaves."""
        count = _num_perturbed(submodels, Spec())
        notes = [
            f"zeroth order: {count:,} parameters are perturbed, and only one number for each batch is sent to the "
            "server; each accumulated batch is a separate step"
        ]
        if statistics_of(submodels.module):
            notes.append("batch norm uses its initial running statistics, as in evaluation")
        return notes

    def __str__(self) -> str:
        return f"zeroth-order steps, lr {self.lr:g}, epsilon {self.epsilon:g}"


# ---- assign and merge, on the server ----


@dataclass(frozen=True)
class ForwardOnly(WrappedSelect):
    """Wrapper of a rule that chooses submodels, for training without gradients.

    It marks all parameters as frozen, so that clients send no tensors, and records the seed of each task.
    """

    def __call__(self, client: ClientInfo, fleet: SelectContext) -> Work:
        """Assign the work that the wrapped select part chooses, but with frozen parameters; say how many scalars must return."""
        work = self.inner(client, fleet)
        extra = {**work.extra, SCALARS: _num_batches(client, work, fleet)}
        if work.spec.trained is not None:
            extra["trained"] = list(work.spec.trained)
        return replace(work, spec=replace(work.spec, trained=()), extra=extra)

    def on_update(self, client: ClientInfo, assignment: Assignment, seconds: float, fleet: SelectContext) -> None:
        """Record the seed of the task for the merge, which receives the update next."""
        fleet.state.memory.put(ReceivedTask(assignment.seed, assignment.extra.get("trained")))
        self.inner.on_update(client, assignment, seconds, fleet)


def _num_batches(client: ClientInfo, work: Work, fleet: SelectContext) -> int:
    """Compute the number of batches that a client's task has."""
    epochs, steps = fleet.training.length(work)
    return steps if steps is not None else (epochs or 1) * -(-client.num_samples // max(fleet.batch_size, 1))


@dataclass(frozen=True)
class Rebuilt(Merge):
    """Merge that rebuilds each client's changes from its seed and scalars, and moves the model by their weighted mean.

    A client sends one scalar g_t for each step t, the gradient along the random noise z_t that follows from its seed.
    Its change ``Delta_n = -lr sum_t g_t z_t`` does not depend on the values from which it started, except for rounding,
    so it is rebuilt from the server's current values. Without a merge in between, the result equals the client's to the
    bit. Each element theta moves by ``server_lr sum_n w_n s(staleness_n) Delta_n / sum_n w_n``, over the clients n that
    train it, with weights w_n.

    Memory: two copies of the model for sums, and one of the submodel while an update is received. Time: each step of
    each client costs one draw of noise and three passes over the submodel.

    Attributes:
        lr: learning rate of the clients.
        epsilon: size of the clients' perturbations.
        server_lr: factor on the server's step.
        staleness: function s by which late updates count less.
        by_samples: whether to weight clients by their numbers of samples |D_n|; False = equally.
    """

    lr: float = 5e-3
    epsilon: float = 1e-3
    server_lr: float = 1.0
    staleness: Staleness = field(default_factory=Staleness)
    by_samples: bool = True
    sends: Literal["values", "delta"] = "values"
    by_client: ClassVar[bool] = True

    def __post_init__(self) -> None:
        positive("server_lr", self.server_lr)

    def reject_reason(self, state: GlobalState, update: Update, spec: Spec, staleness: int) -> str | None:
        """Return a reason to refuse an update whose scalars are unreadable, too few, too many or not finite."""
        scalars = unpack(update.extra.get(SCALARS))
        if scalars is None:
            return "bad-scalars"
        if len(scalars) < update.num_steps:
            return "missing-scalars"
        # each scalar costs the server three passes over the submodel, so their number is limited
        if len(scalars) > update.work.get(SCALARS, math.inf):
            return "surplus-scalars"
        return None if all(map(math.isfinite, scalars)) else "non-finite"

    def numbers(self, update: Update) -> Sequence[float]:
        """Return the scalars of an update (one gradient number per step), so that raafl's guard can refuse too large ones."""
        return unpack(update.extra.get(SCALARS)) or []

    def receive(self, state: GlobalState, update: Update, spec: Spec, staleness: int) -> None:
        """Rebuild the client's trained values from its scalars, and add their change to the sums."""
        task = state.memory.pop(ReceivedTask)
        assert task is not None  # `ForwardOnly` has recorded it when it assigned the task
        perturbed = _perturbed(spec, task.trained)
        plan, memory = state.submodels.plan(perturbed), self._memory(state)
        before = plan.gather(state.values)
        change = self.rebuilt(state.submodels, perturbed, before, task.seed, unpack(update.extra[SCALARS]) or [])
        for dtype, buffer in change.buffers.items():
            buffer.sub_(before.buffers[dtype])
        weight = float(update.num_samples) if self.by_samples else 1.0
        plan.add_(memory.sum, change, weight * self.staleness(staleness))
        plan.cover_(memory.weight, weight)

    def rebuilt(
        self, submodels: Submodels, perturbed: Spec, before: FlatTensors, seed: int, scalars: Sequence[float]
    ) -> FlatTensors:
        """Return the values that a client has at the end of its task.

        Args:
            submodels: submodels of the model.
            perturbed: submodel whose trained tensors the task perturbs.
            before: values of these tensors at the start of the task; unchanged by this call.
            seed: seed of the assignment.
            scalars: scalar g_t of each step, the gradient along its perturbation.
        """
        after = before.clone()
        _replay_([after[name] for name in parameters_of(submodels, perturbed)], seed, scalars, self.lr, self.epsilon)
        return after

    def apply(self, state: GlobalState) -> None:
        """Move the model by the weighted mean of the received changes."""
        memory = self._memory(state)
        trained = state.values.prefix(state.submodels.layout(part="trained"))
        for dtype, theta in trained.buffers.items():
            flats = (flat.buffers[dtype] for flat in (memory.sum, memory.weight))
            for old, total, weight in chunks(theta, *(flat[: len(theta)] for flat in flats)):
                covered = weight > 0
                new = torch.add(old, total / torch.where(covered, weight, 1), alpha=self.server_lr)
                old.copy_(torch.where(covered, new, old))
                total.zero_()
                weight.zero_()

    def _memory(self, state: GlobalState) -> _SumsMemory:
        return state.memory.of(_SumsMemory, lambda: _SumsMemory(zeros_like(state.values), zeros_like(state.values)))

    def __str__(self) -> str:
        words = "mean of what seeds and scalars rebuild, " + (
            "weighted by samples" if self.by_samples else "unweighted"
        )
        words += f", server lr {self.server_lr:g}" if self.server_lr != 1 else ""
        return words + (f" x {self.staleness}" if str(self.staleness) else "")


def pack(scalars: Sequence[float]) -> str:
    """Encode the numbers that a client sends as little-endian float32 in base64."""
    return base64.b64encode(np.asarray(scalars, "<f4").tobytes()).decode("ascii")


def unpack(text: object) -> list[float] | None:
    """Decode text that `pack` has made; return None for any other text."""
    if not isinstance(text, str):
        return None
    try:
        data = base64.b64decode(text.encode("ascii"), validate=True)
    except (UnicodeEncodeError, binascii.Error):
        return None
    return None if len(data) % 4 else [float(value) for value in np.frombuffer(data, "<f4")]


def packed_bytes(num_scalars: int) -> int:
    """Return the length in bytes of the text into which `pack` encodes ``num_scalars`` numbers."""
    return 4 * -(-4 * num_scalars // 3)

"""FedPM (Isik et al., "Sparse Random Networks for Communication-Efficient Federated Learning", ICLR 2023).

Weights are random and frozen; training learns which of them to keep. Each weight has a probability theta, a score
``s = log(theta / (1 - theta))``, and a mask. Client k trains scores for its local steps (Algorithm 1)::

    m ~ Bern(sigmoid(s)),    s <- s - eta dL(w_init * m)/dm * sigmoid'(s)        straight-through gradient, dm/dtheta = 1

then draws one mask ``m_k ~ Bern(theta_k)`` and sends it as one bit for each weight. The server counts the masks (Algorithm 2)::

    alpha <- alpha + sum_k m_k,    beta <- beta + K - sum_k m_k,    theta = (alpha - 1) / (alpha + beta - 2)

with alpha = beta = lambda_0 at the start and again every few rounds. With lambda_0 = 1 and a reset every round theta is the
mean of the masks.

Weights are signed constants, ``+sigma`` or ``-sigma`` with sigma = sqrt(2 / fan_in), the standard deviation of Kaiming's
normal initialisation. Below it says how the model's state represents them.

Choices that the paper leaves open, and deviations from it:

- Weights of linear, convolution, embedding, attention and recurrent layers are masked if they train. The paper's networks have
  nothing else; here biases, norms and positions are frozen at their initial values, and are not sent. Running statistics of batch
  norm are sent as floats and averaged.
- Signs are those of the model's initial weights, so they follow from the seed; a weight of 0 gets a random sign. Nothing else of a
  pretrained model is used.
- Clients receive the expected weight ``theta w``, which contains both theta and the sign: as many bytes as in FedAvg.
- The model is evaluated, and saved, with the expected mask. The paper draws one; the expectation needs no seed.
- Scores are finite only if theta is neither 0 nor 1, so theta stays in [floor, 1 - floor].
- The module's own optimizer steps the scores, with its learning rate times `lr_factor`: a score must move far to change a mask,
  and its gradient has sigma theta (1 - theta) as a factor, less than 0.05 in a layer of 64 inputs.
- With `submodel`, clients train masks of a part of the model; sigma is that of the whole model, and alpha and beta count the
  clients that have a weight.
- The server counts whole masks: it merges in rounds alone, and works with neither differential privacy nor a median.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd

from raafl.algorithm import (
    Algorithm,
    AllReported,
    BadInput,
    Cost,
    FlatTensors,
    Full,
    GlobalState,
    Hook,
    Layout,
    Local,
    Merge,
    MergeMemory,
    Sample,
    Select,
    Spec,
    Submodels,
    Task,
    Traits,
    Update,
    derive_seed,
    positive,
)
from raafl.parts.merge.mean import zeros_like


def fed_pm(
    prior: float = 1.0,
    reset: int = 1,
    initial: float = 0.5,
    floor: float = 0.01,
    lr_factor: float | None = None,
    cohort: int | None = None,
    concurrency: int | None = None,
    submodel: Select | None = None,
) -> Algorithm:
    """Return FedPM: the model's random weights stay frozen, and clients learn a mask of the weights to use.

    Args:
        prior: start value (lambda_0) of alpha and beta, the counts of the masks that use a weight, and of those that do
            not; at least 1.
        reset: number of rounds after which alpha and beta return to their start value.
        initial: probability that a weight is used, before the first round.
        floor: smallest probability; all probabilities (theta) stay in [floor, 1 - floor].
        lr_factor: learning rate of the mask scores (eta), as a multiple of the module's own; None = 1000 if the
            module's optimizer is SGD, else 100.
        cohort: number of clients in a round, drawn uniformly; None = all.
        concurrency: largest number of clients that work at the same time; None = no limit.
        submodel: rule that chooses each client's submodel, such as `raafl.parts.RateSelect`; None = the whole model for
            every client.
    """
    return Algorithm(
        name="fed_pm",
        paper="Isik et al. 2023",
        sample=Sample(cohort, concurrency),
        select=submodel or Full(),
        local=ProbabilisticMaskTraining(initial=initial, floor=floor, lr_factor=lr_factor),
        trigger=AllReported(),
        merge=BayesianMasks(prior, reset, floor),
    )


# Train probabilistic masks over frozen random weights: clients learn which weights to keep, and send one bit for each.
#
# The model's state stores each weight as its expected value ``p w`` under a mask Bernoulli(p): ``w = +sigma`` or ``-sigma``, with
# one sigma for each tensor. So p is ``|value| / sigma``, the sign of w is that of the value, axes and submodels are those of
# the model, and running the stored model applies the expected mask.

DIVERGED = "diverged"
"""Key in `Update.extra` with which a client reports that its scores were not finite, which its masks do not show."""

SGD_LR_FACTOR, LR_FACTOR = 1000.0, 100.0
"""Learning rate of scores as a multiple of the module's: SGD's steps shrink with the small gradients of scores, Adam's do not."""

WEIGHTS: dict[type[nn.Module], tuple[str, ...]] = {
    nn.Linear: ("weight",),
    nn.Bilinear: ("weight",),
    _ConvNd: ("weight",),
    nn.Embedding: ("weight",),
    nn.EmbeddingBag: ("weight",),
    nn.MultiheadAttention: ("in_proj_weight", "q_proj_weight", "k_proj_weight", "v_proj_weight"),
}
"""Names of the parameters that are masked, by type of layer; in recurrent layers all matrices are."""


def _weights_of(layer: nn.Module) -> list[str]:
    """List the parameters of one layer that FedPM masks: its trainable weights of the kinds in `WEIGHTS`."""
    names = [name for kind, names in WEIGHTS.items() if isinstance(layer, kind) for name in names]
    if isinstance(layer, nn.RNNBase):
        # torch has no public list of a recurrent layer's weights
        names += [name for name in layer._flat_weights_names if layer._parameters[name].dim() == 2]  # type: ignore[union-attr]
    else:
        convolves = type(layer).__name__ == "Conv1D" and type(layer).__module__ == "transformers.pytorch_utils"
        names += ["weight"] if convolves else []
    own = layer._parameters
    return [name for name in names if (weight := own.get(name)) is not None and weight.requires_grad]


def scale(shape: tuple[int, ...]) -> float:
    """Return the absolute value that FedPM gives all weights of a tensor: Kaiming's standard deviation sqrt(2 / fan_in)."""
    return math.sqrt(2.0 / max(math.prod(shape[1:]), 1))


def _scales_of(submodels: Submodels, layout: Layout) -> dict[str, float]:
    """Map each masked tensor of a submodel to sigma, the absolute value of its weights, computed from its whole shape."""
    whole, names = submodels.layout().by_name, submodels.parameter_names
    return {entry.name: scale(whole[entry.name].shape) for entry in layout.entries if entry.name in names}


# ---- train masks, on the client ----


class _ScoreTraining(Hook):
    """Training hook of FedPM (Isik et al. 2023, Algorithm 1): it trains scores of masks over frozen weights.

    During a task the module's parameters store the scores, and each forward pass uses randomly masked weights instead.
    At the end the hook draws the mask of zeros and ones that the client sends. The layers use the weights under this
    mask until the next task begins, so that the trained model can be evaluated.
    """

    def __init__(self, task: Task, floor: float, lr_factor: float | None) -> None:
        """Convert each received probability p in place to the score ``log(p / (1 - p))``."""
        super().__init__(task)
        plain = isinstance(task.optimizer, torch.optim.SGD)
        self._lr_factor = lr_factor or (SGD_LR_FACTOR if plain else LR_FACTOR)
        self._done = False
        self._generator = torch.Generator().manual_seed(derive_seed(task.assignment.seed, "masks"))
        self._scales = _scales_of(task.submodels, task.submodels.layout(task.assignment.spec, "trained"))
        for layer in task.module.modules():
            _uncover(layer)  # remove the masked weights with which the last task's model was evaluated
        names = {id(parameter): name for name, parameter in task.module.named_parameters()}
        self._places = [
            (layer, attribute, names[id(parameter)])
            for layer in task.module.modules()
            for attribute, parameter in layer._parameters.items()
            if parameter is not None and names[id(parameter)] in self._scales
        ]
        self._scores = {name: task.module.get_parameter(name) for name in self._scales}
        self._negative = {name: torch.signbit(score.detach()) for name, score in self._scores.items()}
        with torch.no_grad():
            for name, score in self._scores.items():
                score.copy_(torch.logit(score.abs().div_(self._scales[name]), floor))

    def loss(self, batch: object, index: int) -> Tensor:
        """Draw new masks for this batch and return the loss under them."""
        self._cover({name: self._masked(name, score) for name, score in self._scores.items()})
        return self.task.loss(batch, index)

    def _masked(self, name: str, score: Tensor) -> Tensor:
        masked: Tensor = Masked.apply(score, self._uniform(score), self._negative[name], self._scales[name])
        return masked

    def _uniform(self, like: Tensor) -> Tensor:
        if like.is_meta:  # on the meta device a task only predicts costs, and there a generator cannot draw
            return torch.rand_like(like)
        return torch.rand(like.shape, generator=self._generator).to(like.device)

    def update(self) -> None:
        """Make the optimizer's step on the scores, with the module's learning rate times `lr_factor`."""
        self._uncover()
        groups = self.task.optimizer.param_groups
        rates = [group["lr"] for group in groups]
        for group in groups:
            group["lr"] = group["lr"] * self._lr_factor
        try:
            self.task.update()
        finally:
            for group, rate in zip(groups, rates, strict=True):
                group["lr"] = rate

    @torch.no_grad()
    def finish(self) -> dict[str, Any]:
        """Draw the mask that the client sends, and apply it to the module for evaluation; report scores that are not finite."""
        finite = all(bool(torch.isfinite(score).all()) for score in self._scores.values())
        weights = {}
        for name, score in self._scores.items():
            score.copy_(self._uniform(score) < torch.sigmoid(score))
            weights[name] = score * self._scales[name] * signs_of(self._negative[name], score.dtype)
        self._cover(weights)
        self._done = True
        return {} if finite else {DIVERGED: True}

    def close(self) -> None:
        """Put the scores back as the module's parameters if the task was cut short."""
        if not self._done:
            self._uncover()

    def _cover(self, weights: Mapping[str, Tensor]) -> None:
        for layer, attribute, name in self._places:
            # `nn.Module` looks an attribute up in `__dict__` first, and so finds the masked weight before the parameter
            layer.__dict__[attribute] = weights[name]
            if isinstance(layer, nn.RNNBase):
                flat = [layer.__dict__.get(n, layer._parameters.get(n)) for n in layer._flat_weights_names]
                layer.__dict__["_flat_weights"] = flat

    def _uncover(self) -> None:
        for layer in dict.fromkeys(layer for layer, _, _ in self._places):
            _uncover(layer)


def _uncover(layer: nn.Module) -> None:
    for attribute in [name for name in layer._parameters if name in layer.__dict__]:
        del layer.__dict__[attribute]
    if isinstance(layer, nn.RNNBase):
        layer.__dict__["_flat_weights"] = [layer._parameters.get(n) for n in layer._flat_weights_names]


@dataclass(frozen=True)
class ProbabilisticMaskTraining(Local):
    """Local training of FedPM: learns for each frozen weight the probability that it is used.

    Attributes:
        initial: probability that a weight is used, before the first round.
        floor: smallest probability; all probabilities stay in [floor, 1 - floor].
        lr_factor: learning rate of the scores as a multiple of the module's own; None = `SGD_LR_FACTOR` if the module's
            optimizer is SGD, else `LR_FACTOR`.
    """

    initial: float = 0.5
    floor: float = 0.01
    lr_factor: float | None = None

    @property
    def traits(self) -> Traits:
        """What this training can do, needs, and leaves out."""
        return replace(super().traits, up_as="bits")

    def __post_init__(self) -> None:
        _check_floor(self.floor)
        if not self.floor <= self.initial <= 1 - self.floor:
            raise BadInput(
                f"initial is {self.initial}: give a probability from {self.floor} (floor) to {1 - self.floor:g} (1 - floor)"
            )
        positive("lr_factor", self.lr_factor, optional=True)

    @torch.no_grad()
    def prepare(self, module: nn.Module) -> nn.Module:
        """Give each weight the probability ``initial`` of being used, and freeze all other parameters, in place.

        A weight stores its probability in its own value, as sign times sigma times probability. sigma, the absolute
        value that a used weight has, is the same for all weights of a layer.

        Raises:
            BadInput: no weight can be masked, or a masked weight is complex.
        """
        masked: dict[int, nn.Parameter] = {}
        for layer in module.modules():
            for name in _weights_of(layer):
                weight = getattr(layer, name)
                masked[id(weight)] = weight
        if any(weight.is_complex() for weight in masked.values()):
            name = next(n for n, p in module.named_parameters() if id(p) in masked and p.is_complex())
            raise BadInput(f"parameter '{name}' is complex, and fed_pm masks real weights: use another algorithm")
        if not masked:
            raise BadInput(
                f"{type(module).__name__} has no weights to mask: fed_pm trains masks for linear, convolution, "
                "embedding, attention and recurrent layers that train"
            )
        for parameter in module.parameters():
            parameter.requires_grad_(id(parameter) in masked)
        for weight in masked.values():
            if weight.device.type != "meta":
                coin = torch.where(torch.rand(weight.shape, device=weight.device) < 0.5, -1.0, 1.0).to(weight.dtype)
                signs = torch.where(weight == 0, coin, torch.sign(weight))
                weight.copy_(signs * (scale(tuple(weight.shape)) * self.initial))
        return module

    def hook(self, task: Task) -> Hook:
        """Return the hook that trains the mask scores."""
        return _ScoreTraining(task, self.floor, self.lr_factor)

    def estimate(self, submodels: Submodels, spec: Spec, batch_size: int, extra: Mapping[str, Any]) -> Cost:
        """Return the cost of ordinary training plus the memory and operations that the masks need.

        The uploaded bytes are those of floats, though a mask takes one bit for each weight; the caller corrects this.
        """
        cost = submodels.cost(spec, batch_size)
        layout, samples = submodels.layout(spec, "trained"), max(batch_size, 1)
        masked = [layout.by_name[name] for name in _scales_of(submodels, layout)]
        num, num_bytes = sum(e.numel for e in masked), sum(e.numel * e.dtype.itemsize for e in masked)
        largest = max((e.numel * max(e.dtype.itemsize, 4) for e in masked), default=0)
        return replace(
            cost,
            flops_per_sample=cost.flops_per_sample + FLOPS * num / samples,
            peak_bytes=cost.peak_bytes + num + num_bytes + 4 * largest,
            moved_bytes_per_sample=cost.moved_bytes_per_sample + MOVED * num_bytes / samples,
        )

    def notes(self, submodels: Submodels) -> list[str]:
        """Return a message for the user: how many weights are masked, and how many parameters stay frozen."""
        masked = _scales_of(submodels, submodels.layout(part="trained"))
        num, total = sum(submodels.parameters[name] for name in masked), sum(submodels.parameters.values())
        rest = (
            f"; the other {total - num:,} parameters (biases, norms, positions, frozen ones) do not change"
            if total > num
            else ""
        )
        return [
            f"masks over {num:,} weights in {len(masked)} tensors, of which only the signs of the initial values "
            f"are used: pretrained values are lost{rest}"
        ]

    def __str__(self) -> str:
        factor = "many" if self.lr_factor is None else f"{self.lr_factor:g}"
        return f"SGD on scores of masks over frozen weights, {factor} times the learning rate"


FLOPS = 12
"""FLOPs for each masked weight in a step: sigmoid, comparison, two products; in the backward pass sigmoid and five more."""

MOVED = 20
"""Number of times that these operations read or write each masked weight."""


def _check_floor(floor: float) -> None:
    """Raise `BadInput` unless ``floor`` lies above 0 and below 0.5."""
    if not 0 < floor < 0.5:
        raise BadInput(f"floor is {floor}: give a number above 0, below 0.5, so that no probability can become 0 or 1")


# ---- merge masks, on the server ----


@dataclass
class _CountsMemory(MergeMemory):
    """Merge state: for each weight, the number of masks received since the last reset, and how many of them use it."""

    key = "probabilistic_masks"
    ones: FlatTensors  # number of received masks with a one, for each element
    all: FlatTensors  # number of received masks, for each element
    merges: int = 0  # number of merges since the start of the run


@dataclass(frozen=True)
class BayesianMasks(Merge):
    """FedPM's Bayesian merge (Isik et al. 2023, Algorithm 2): estimates from the clients' masks how likely each weight is used.

    For each weight, alpha counts the clients whose mask uses it (1), beta those whose mask does not (0), both from the
    start value ``prior``. The new probability is the mode of the Beta distribution, ``p = (alpha - 1) / (alpha + beta -
    2)``. Every ``reset`` merges the counts return to ``prior``. A weight that no client has keeps its p. Running
    statistics become the mean over the clients that sent them.

    Attributes:
        prior: start value of alpha and beta (lambda_0), at least 1 (a uniform prior).
        reset: number of merges from one reset to the next; 1 with prior 1 gives the plain mean of masks.
        floor: smallest probability; all probabilities stay in [floor, 1 - floor].
    """

    prior: float = 1.0
    reset: int = 1
    floor: float = 0.01
    sends: Literal["values", "delta"] = "values"
    by_client: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if not 1 <= self.prior < math.inf:
            raise BadInput(f"prior is {self.prior}: give a number of 1 or more")
        positive("reset", self.reset)
        _check_floor(self.floor)

    def reject_reason(self, state: GlobalState, update: Update, spec: Spec, staleness: int) -> str | None:
        """Return "non-finite" if the client reports diverged scores, "not-a-mask" if a value is neither 0 nor 1, else None."""
        if update.extra.get(DIVERGED):
            return "non-finite"
        for name in _scales_of(state.submodels, update.tensors.layout):
            mask = update.tensors[name]
            if not bool(((mask == 0) | (mask == 1)).all()):
                return "not-a-mask"
        return None

    def receive(self, state: GlobalState, update: Update, spec: Spec, staleness: int) -> None:
        """Count for each weight whether the client's mask uses it."""
        memory, plan = self._memory(state), state.submodels.plan(spec)
        plan.add_(memory.ones, update.tensors)
        plan.cover_(memory.all)

    def apply(self, state: GlobalState) -> None:
        """Set each weight's probability to the mode of its Beta distribution."""
        memory = self._memory(state)
        ones, total = memory.ones, memory.all
        scales = _scales_of(state.submodels, state.submodels.layout(part="trained"))
        for name, values in state.values.prefix(state.submodels.layout(part="trained")).items():
            if name in scales:
                p = (ones[name] + (self.prior - 1)) / (total[name] + (2 * self.prior - 2)).clamp_min(1e-30)
                new = torch.copysign(p.clamp_(self.floor, 1 - self.floor) * scales[name], values)
            else:
                new = ones[name] / total[name].clamp_min(1)
            values.copy_(torch.where(total[name] > 0, new, values))
            if name not in scales:  # running statistics have no prior, so their sums are cleared after each merge
                ones[name].zero_()
                total[name].zero_()
        memory.merges += 1
        if memory.merges % self.reset == 0:
            for flat in (ones, total):
                for buffer in flat.buffers.values():
                    buffer.zero_()

    def _memory(self, state: GlobalState) -> _CountsMemory:
        return state.memory.of(_CountsMemory, lambda: _CountsMemory(zeros_like(state.values), zeros_like(state.values)))

    def report(self, state: GlobalState) -> dict[str, Any]:
        """Return an entry "masks" for the run's summary: the number of masked weights, and the mean share of them in use."""
        trained: FlatTensors = state.values.prefix(state.submodels.layout(part="trained"))
        scales = _scales_of(state.submodels, trained.layout)
        num = sum(trained[name].numel() for name in scales)
        expected = math.fsum(
            float(trained[name].abs().sum(dtype=torch.float64)) / sigma for name, sigma in scales.items()
        )
        return {"masks": {"weights": num, "kept": expected / max(num, 1)}}

    def __str__(self) -> str:
        every = "merge" if self.reset == 1 else f"{self.reset} merges"
        return f"mode of Beta counts of masks, prior {self.prior:g}, reset every {every}"


class Masked(torch.autograd.Function):
    """Autograd function that masks weights at random: ``w * m`` with ``m ~ Bernoulli(sigmoid(score))``.

    The gradient passes straight through the draw: dm/dp = 1.
    """

    @staticmethod
    def forward(ctx: Any, score: Tensor, uniform: Tensor, negative: Tensor, sigma: float) -> Tensor:
        """Draw a mask and return the masked weights, of the same shape as ``score``.

        Args:
            ctx: context of the autograd function.
            score: logit of the probability that a weight is used.
            uniform: random numbers in [0, 1) that decide the draw, of the same shape as ``score``.
            negative: mask of the weights that are -sigma, of the same shape as ``score``; the others are +sigma.
            sigma: absolute value of all weights.
        """
        ctx.save_for_backward(score, negative)
        ctx.sigma = sigma
        return (uniform < torch.sigmoid(score)).to(score.dtype).mul_(sigma).mul_(signs_of(negative, score.dtype))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradient of the score, ``gradient * w * p (1 - p)``, for a weight w used with probability p = sigmoid(score).

        The other inputs of `forward` get None.
        """
        score, negative = ctx.saved_tensors
        p = torch.sigmoid(score)
        return gradient * signs_of(negative, score.dtype) * ctx.sigma * p * (1 - p), None, None, None


def signs_of(negative: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a tensor with -1 where ``negative`` is True and 1 elsewhere."""
    return 1 - 2 * negative.to(dtype)

"""Co-S2P (Li et al., "Unity is Power: Semi-Asynchronous Collaborative Training of Large-Scale Models with Structured Pruning").

The title ends "... in Resource-Limited Clients". Client n trains a share ``r_n = r_w r_d`` of the model (section IV-A):

- depth: ``ceil(r_d L)`` consecutive blocks train; blocks below are frozen, blocks above absent; the window moves up from
  task to task, so that all blocks train as evenly as windows allow, and no client needs to hold the whole model;
- width: each linear layer is cut into segments, each attention into heads. A segment has a score s and is kept with probability
  ``sigmoid(s)``; masks m are drawn from Bernoulli(sigmoid(s)) for each batch, with straight-through gradients
  ``d m / d s = sigmoid(s) (1 - sigmoid(s))``. With the weights frozen the client trains the scores on

      L_mask = CE + lambda sum_l |rho_l - r_w|^2,   rho_l = the share of mask l that is 1              (Eq. 2)

  and then trains the small dense model that remains when the mask is applied permanently.

Self-distillation between classifiers at several depths c = 1 .. C of a submodel, with the deepest as the teacher (section IV-B),
in Eq. 3::

    L = sum_c [ (1 - w) CE(z_c, y) + w T^2 KL( softmax(z_C / T) || softmax(z_c / T) ) ]

Once the share `min_ratio` of the clients has reported, the server waits another `wait_s` seconds and merges all waiting updates
(Algorithm 2). For segment i and the clients N_i that trained it (Eqs. 4, 5)::

    score_n^i = ||Delta_n^i|| / (1 + ||theta_t^i - theta_{t - tau_n}^i|| / ||theta_t^i||)
    theta_{t+1}^i = theta_t^i - eta sum_{n in N_i} score_n^i Delta_n^i / sum_{n in N_i} score_n^i

Choices that the paper leaves open (some symbols are missing from its equations; they are taken from the text around them):

- Mask training: the scores of a block train in a client's first `mask_rounds` visits of that block, in a separate task before the
  one that trains the window, so that no block keeps a random mask; the paper has 20 rounds of masks among 120 of training.
  Each client has scores of its own, stored on the server between its tasks, starting at ``sigmoid^-1(r_w)``. Their optimizer is
  Adam.
- Clients start with different windows (`raafl.parts.select.windows.first_window`), so that all blocks train from the first
  round on.
- The permanent mask keeps, on each axis, the ``ceil(r_w S)`` segments with the largest scores: the most likely mask within the
  budget. A random draw would exceed the budget about every other time.
- A segment of a linear layer is a range of the hidden units of a feed-forward part, on both of its sides: the layer after it
  cannot use units that it drops. Frozen blocks below the window are as narrow as the client's mask.
- In a task that trains scores the blocks of the window have their whole width; a client without memory for that gets random
  masks. Random masks are drawn anew for each task.
- Each block except the last gets an exit, a copy of the model's own last layers, if the model's type is known
  (`raafl.submodel.add_exits`). The exit at the top of the window is the teacher, exits inside it are students; the global model is
  evaluated with its own last layers. A submodel without students trains on the plain loss.
- width:depth (Table VIII) sets how width and depth share r: ``log r_w = ratio * log r_d``, so that 0 cuts depth alone.
- Each tensor on no axis (norms, embeddings, exits) is one segment. Deltas are differences of parameters, so eta is 1 where the
  paper writes the clients' learning rate.
- Without a stack of blocks (MLP, CNN) only the width is cut, and nothing is distilled; in a model without exits its own last
  layers end each window.
- Adan, the clients' optimizer, is set in the model: ``optimizer: adan`` of the zoo's transformers.

At rate 1 with `merge` mean and trigger sync this is unweighted FedAvg of the model with its exits.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from raafl.algorithm import (
    Algorithm,
    AllReported,
    Assignment,
    Cost,
    Deltas,
    EachArrival,
    FlatTensors,
    Hook,
    Layout,
    Local,
    Merge,
    MinRatio,
    Rates,
    RollingWindows,
    Sample,
    Select,
    Spec,
    Staleness,
    Submodels,
    Task,
    Traits,
    Trigger,
    derive_seed,
    fraction,
    one_of,
    positive,
)
from raafl.algorithms.co_s2p.merge import ImportanceMerge, PublishedMerge
from raafl.errors import refuse_unused
from raafl.module_hooks import OPTIMIZER_HOOKS
from raafl.parts.local.distilled import (
    Distilled,
    Exit,
    TrainsExits,
    counted,
    exit_depths,
    knowledge_loss,
    with_every_exit,
)
from raafl.parts.local.mask_training import SCORES, MaskTraining, best, masks_of, score_layout
from raafl.parts.merge.personal import RecordingSelect, WithScores
from raafl.parts.select.segments import cuts_of, stack_of
from raafl.parts.select.windows import Masks
from raafl.submodel.cost.fused import FusedKernels
from raafl.submodel.cost.ledger import Ledger
from raafl.submodel.isolated_run import loss_of, settle
from raafl.submodel.nested_batch import batch_tensors, meta_batch

RATES = [1.0, 0.5625, 0.25, 0.0625]
"""Shares r of the paper's clients (Table III) but the smallest, 0.0156, and 1."""


def co_s2p(
    rates: Rates | None = None,
    width_depth: float | Literal["inf"] = 1.0,
    linear_masks: Masks = "trained",
    attention_masks: Masks = "trained",
    segments: int = 16,
    mask_rounds: int = 5,
    mask_epochs: int | None = 5,
    mask_steps: int | None = None,
    mask_lr: float = 1e-2,
    mask_strength: float = 1.0,
    distil: bool = True,
    distil_weight: float = 0.2,
    temperature: float = 3.0,
    trigger: Literal["semi", "sync", "async"] = "semi",
    min_ratio: float = 0.5,
    wait_s: float = 0.0,
    merge: Literal["importance", "mean", "published"] = "importance",
    server_lr: float = 1.0,
    cohort: int | None = None,
    concurrency: int | None = None,
    submodel: Select | None = None,
    as_published: bool = False,
) -> Algorithm:
    """Return Co-S2P, whose clients train some consecutive blocks of the model, narrowed by masks that they learn.

    Args:
        rates: share r of the model that each client trains: one number for all; a list, one number for each of clients
            1, 2, ..., repeating; or a mapping from device name to number. None = the list 1, 0.5625, 0.25, 0.0625.
        width_depth: division of the share r between width and depth (Table VIII): 1 = equally, 0 = depth only, inf =
            width only.
        linear_masks: origin of the masks on linear layers: trained, or drawn at random (Table VII).
        attention_masks: origin of the masks on attention heads: trained, or drawn at random.
        segments: number of equal segments of each linear layer; a mask keeps or drops a segment as a whole.
        mask_rounds: number of visits to a block in which a client first trains the block's mask scores. The 20 rounds of
            the paper's experiment E1 equal 5 visits for a client that trains a quarter of the blocks at a time.
        mask_epochs: number of local epochs in a task that trains mask scores.
        mask_steps: number of local steps in a task that trains mask scores, instead of epochs; set mask_epochs to null
            then.
        mask_lr: learning rate of the mask scores (gamma_m).
        mask_strength: weight of the loss that pulls the masks to the client's width (lambda); 1 to 1.5 in the paper.
        distil: whether the model's exits (heads after earlier blocks) also learn from each other, by self-distillation.
        distil_weight: weight of the distillation (w), 0.2 or 0.3 in the paper.
        temperature: temperature of the distillation (T).
        trigger: time of a merge: semi (a share of the clients has reported and a wait is over), sync (all have
            reported) or async (at each arrival).
        min_ratio: share of the clients that must have reported before the wait begins; for trigger semi.
        wait_s: length of that wait in seconds; for trigger semi; 60 to 150 in the paper.
        merge: weights of updates in a merge: importance (Eqs. 4, 5), mean (equal weights), or published (as in the
            authors' code, see `raafl.algorithms.co_s2p.merge`).
        server_lr: factor on the merged change (eta): with trigger async some 1 / N for N clients, since with 1 each arrival
            moves the model by the client's whole change; leave it out for merge published.
        cohort: number of clients drawn when work starts, uniformly; None = all.
        concurrency: largest number of clients that work at the same time; None = no limit.
        submodel: rule that chooses submodels in place of the masked blocks, such as `raafl.parts.RateSelect`; leave out
            rates to mask_steps then.
        as_published: whether to do what the authors' code does where it differs from the paper
            (docs/methods/co-s2p.md), in rounds of all clients. Leave out width_depth, distil_weight, trigger to
            server_lr and submodel then.
    """
    if mask_steps is not None:
        refuse_unused(f"mask_steps is {mask_steps}", mask_epochs=(mask_epochs or 5, 5))
        mask_epochs = None
    ratio = float("inf") if width_depth == "inf" else width_depth
    if as_published:
        refuse_unused(
            "as_published is true",
            width_depth=(ratio, 1.0),
            distil_weight=(distil_weight, 0.2),
            trigger=(trigger, "semi"),
            min_ratio=(min_ratio, 0.5),
            wait_s=(wait_s, 0.0),
            merge=(merge, "importance"),
            server_lr=(server_lr, 1.0),
            submodel=(submodel, None),
        )
        trigger, merge = "sync", "published"
    asked = (LeadingDraws if as_published else RollingWindows)(
        list(RATES) if rates is None else rates,
        ratio,
        linear_masks,
        attention_masks,
        segments,
        mask_rounds,
        mask_epochs,
        mask_steps,
        distil,
    )
    return Algorithm(
        name="co_s2p",
        paper="Li et al. 2025",
        sample=Sample(cohort, concurrency),
        select=RecordingSelect(_submodel_rule(asked, submodel)),
        local=MaskedAndDistilled(distil, distil_weight, temperature, mask_strength, mask_lr, segments, as_published),
        trigger=_trigger(trigger, min_ratio, wait_s),
        merge=WithScores(_merge(merge, server_lr, segments)),
    )


def _submodel_rule(asked: RollingWindows, submodel: Select | None) -> Select:
    """Return the user's own ``submodel`` rule if there is one, else ``asked``, Co-S2P's rolling windows.

    Raises `BadInput` if the user gives both an own rule and settings of the windows.
    """
    if submodel is None:
        return asked
    usual = RollingWindows(list(RATES), segments=asked.segments, distils=asked.distils)
    fields = ("rates", "ratio", "linear", "attention", "mask_rounds", "mask_epochs", "mask_steps")
    given = {name: (getattr(asked, name), getattr(usual, name)) for name in fields}
    refuse_unused("submodel says what each client trains", **given)
    return submodel


def _trigger(name: str, min_ratio: float, wait_s: float) -> Trigger:
    one_of("trigger", name, ("semi", "sync", "async"))
    if name == "semi":
        return MinRatio(min_ratio, wait_s)
    refuse_unused(f"trigger is {name}", min_ratio=(min_ratio, 0.5), wait_s=(wait_s, 0.0))
    return AllReported() if name == "sync" else EachArrival()


def _merge(name: str, server_lr: float, segments: int) -> Merge:
    one_of("merge", name, ("importance", "mean", "published"))
    if name == "published":
        refuse_unused("merge is published", server_lr=(server_lr, 1.0))
        return PublishedMerge()
    return ImportanceMerge(server_lr, segments) if name == "importance" else Deltas(server_lr, Staleness())


_More = tuple[float, int, float, float]
"""Costs that a hook adds: FLOPs per sample, bytes at the peak, moved bytes per sample, FLOPs on padding per sample."""


@dataclass(frozen=True)
class MaskedAndDistilled(TrainsExits):
    """Local training of Co-S2P: a task trains either mask scores (Eq. 2), or the model, with self-distillation (Eq. 3).

    Mask scores decide which units of the model a client keeps. The server decides which kind of task it is.

    Attributes:
        distils: whether exits (output heads after several blocks) learn from the deepest one; False = only the loss of
            the deepest exit is used.
        weight: weight of the distillation (w).
        temperature: temperature of the distillation (T).
        strength: weight of the loss that pulls the masks to the client's width (lambda).
        mask_lr: learning rate of the mask scores.
        segments: number of equal groups into which the neurons of a layer are divided; masks keep or drop a group as a
            whole. Attention has a group for each head.
        published: whether to train as the authors' code does, see `raafl.algorithms.co_s2p`.
    """

    down: ClassVar[tuple[str, ...]] = (SCORES,)
    up: ClassVar[tuple[str, ...]] = (SCORES,)

    distils: bool = True
    weight: float = 0.2
    temperature: float = 3.0
    strength: float = 1.0
    mask_lr: float = 1e-2
    segments: int = 16
    published: bool = False

    def __post_init__(self) -> None:
        fraction("distil_weight", self.weight, zero=True)
        positive("temperature", self.temperature)
        positive("mask_lr", self.mask_lr)
        if self.strength != 0:
            positive("mask_strength", self.strength)

    def prepare(self, module: nn.Module) -> nn.Module:
        """Return the model with exits after its blocks; see `TrainsExits.prepare`."""
        return super().prepare(module) if self.distils else with_every_exit(module)

    @property
    def traits(self) -> Traits:
        """What this training can do, needs, and leaves out."""
        # OPTIMIZER_HOOKS: Lightning would not unscale the gradients of the scores' own optimizer
        return replace(super().traits, uses_gradients=True, leaves_out=frozenset(OPTIMIZER_HOOKS))

    def hook(self, task: Task) -> Hook:
        """Return the task's hook: for training mask scores, for training with distillation, or for ordinary training."""
        if "masks" in task.assignment.extra:
            training = PublishedMaskTraining if self.published else MaskTraining
            return training(task, cuts_of(task.submodels, self.segments), self.mask_lr, self.strength)
        if self.distils:
            distilled = PublishedDistillation if self.published else Distilled
            return distilled(task, self.weight, self.temperature)
        return Hook(task)

    def evaluates_on_client(self, extra: Mapping[str, Any]) -> bool:
        """Return False for a task that trains mask scores, since its result is not a model to evaluate."""
        return "masks" not in extra

    def layout_of(self, submodels: Submodels, bundle: str, spec: Spec | None) -> Layout:
        """Return names and shapes of the mask scores that are sent: all of them if the task trains scores, otherwise none."""
        return score_layout(submodels, self.segments, spec)

    def estimate(self, submodels: Submodels, spec: Spec, batch_size: int, extra: Mapping[str, Any]) -> Cost:
        """Return the cost of ordinary training plus that of training mask scores or of distillation; cached."""
        cost, axes = submodels.cost(spec, batch_size), tuple(extra.get("masks", ()))
        if not axes and (not self.distils or not exit_depths(submodels)):
            return cost
        key = (self, submodels.normal(spec).leading, batch_size, axes)
        more = submodels.cached("co_s2p", key, lambda: self._more(submodels, key[1], batch_size, axes))
        flops, peak_bytes, moved_bytes, padding_flops = more
        return replace(
            cost,
            flops_per_sample=cost.flops_per_sample + flops,
            peak_bytes=cost.peak_bytes + peak_bytes,
            moved_bytes_per_sample=cost.moved_bytes_per_sample + moved_bytes,
            padding_flops_per_sample=cost.padding_flops_per_sample + padding_flops,
        )

    def _more(self, submodels: Submodels, spec: Spec, batch_size: int, axes: Sequence[str]) -> _More:
        """Predict what Co-S2P's training costs beyond ordinary training: FLOPs, bytes moved, padding FLOPs, peak memory.

        Returns FLOPs per sample, bytes of peak memory, moved bytes per sample and padding FLOPs per sample.
        """
        if submodels.example_batch is None:
            return 0.0, 0, 0.0, 0.0
        extra = {"masks": axes, "rate": 0.5} if axes else {}
        try:
            plain, own = (_traced(submodels, spec, batch_size, local, extra) for local in (Local(), self))
        except Exception:  # the user's step needs values, which meta tensors lack, so predict no extra cost
            return 0.0, 0, 0.0, 0.0
        samples = max(batch_size, 1)
        return (
            max(own.task_flops - plain.task_flops, 0.0) / samples,
            max(own.peak_bytes - plain.peak_bytes, 0),
            max(own.moved_bytes - plain.moved_bytes, 0) / samples,
            max(own.padding_flops - plain.padding_flops, 0.0) / samples,
        )

    def notes(self, submodels: Submodels) -> list[str]:
        """Return a message for the user if the model has no exits (output heads between blocks), which distillation needs."""
        if not self.distils or exit_depths(submodels):
            return []
        return ["the model has no exits between its blocks, so there is no distillation"]

    def __str__(self) -> str:
        words = f"masks at lambda {self.strength:g}"
        return words + (
            f", distilled with w {self.weight:g}, T {self.temperature:g}" if self.distils else ", SGD on the loss"
        )


def _traced(submodels: Submodels, spec: Spec, batch_size: int, local: Local, extra: Mapping[str, Any]) -> Ledger:
    """Trace one training step of ``spec`` with the method ``local`` on the meta device, and return the ledger of its costs."""
    module: Any = submodels.shrink(spec, device="meta").module
    batch = meta_batch(submodels.example_batch, batch_size)
    settle(module)
    task = Task(
        Assignment(0, 0, 0, 0, 0, spec, 0, None, None, 0, 0.0, extra=extra),
        submodels,
        module,
        torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.0),
        FlatTensors.empty(Layout(())),
        1,
        torch.Generator(),
        loss=lambda batch, index: loss_of(module, batch),
        backward=lambda loss: torch.autograd.backward(loss) if loss.requires_grad else None,
        update=lambda: None,
    )
    task.down = {
        name: FlatTensors.empty(local.layout_of(submodels, name, spec) or Layout(()), "meta") for name in local.down
    }
    hook = local.hook(task)
    ledger = Ledger([*module.parameters(), *module.buffers(), *batch_tensors(batch)])
    try:
        with torch.device("meta"), ledger, FusedKernels(submodels.rules):
            hook.backward(hook.loss(batch, 0))
    finally:
        hook.close()
    return ledger


# Reproduce Co-S2P's published code where it differs from the paper: its windows, masks and distillation, for
# `as_published`.
#
# Its merge is in `published_merge`. docs/methods/co-s2p.md lists all differences, and which are not reproduced.

FIRST_DISTILLED = 10
"""Global version from which clients distil."""
KNOWLEDGE_WEIGHT = 0.5
DRAWS = 100
"""Largest number of draws of a mask that keeps no segment; then the segment with the largest score is kept."""


@dataclass(frozen=True)
class LeadingDraws(RollingWindows):
    """Choice of submodels as in Co-S2P's published code: a client trains the lowest blocks, narrowed by randomly drawn masks.

    A client of rate r trains the lowest ``int(r L)`` of L blocks, at least one. In them it keeps each segment (a
    group of units, such as neurons) with a learned probability, drawn anew for each task; on average it keeps the share
    r of the width. Whether a submodel fits the client's memory is checked for this average size.
    """

    def starts(self, submodels: Submodels, num_blocks: int, depth: float) -> tuple[int, ...]:
        """Return the possible indices of the first block that a client trains: only 0, since it trains the lowest blocks."""
        return (0,)

    def _shape(self, submodels: Submodels, rate: float) -> tuple[float, int, float]:
        stack = stack_of(submodels)
        return rate, 1 if stack is None else max(1, int(rate * len(stack))), rate

    def _kept(
        self, submodels: Submodels, stop: int, width: float, scores: Mapping[str, list[float]], seed: int
    ) -> dict[str, list[int]]:
        """Choose the units that a submodel keeps, by axis: of the blocks before block ``stop``, and of layers outside all blocks.

        Where the axis has mask scores, whole segments are drawn at random by these; elsewhere units are kept as in the paper.
        """
        units = super()._kept(submodels, stop, width, scores, seed)
        for name, cut in self._cuts(submodels).items():
            if name in units and name in scores and self._is_trained(cut):
                units[name] = cut.units(sample_segments(scores[name], random.Random(derive_seed(seed, name))))
        return units

    def __str__(self) -> str:
        return "lowest blocks, Bernoulli draws of trained masks, as published"


def sample_segments(scores: Sequence[float], source: random.Random) -> list[int]:
    """Draw the segments (groups of units) to keep, each with probability sigmoid(score); at least one is kept.

    Args:
        scores: mask score of each segment.
        source: random generator to draw from.
    """
    probabilities = torch.sigmoid(torch.tensor(scores, dtype=torch.float64)).tolist()
    for _ in range(DRAWS):
        chosen = [index for index, p in enumerate(probabilities) if source.random() < p]
        if chosen:
            return chosen
    return best(list(scores), 1)


class PublishedMaskTraining(MaskTraining):
    """Hook that trains mask scores with the penalty and gradient of Co-S2P's published code.

    The penalty is ``|mean of all masks - r_w|``, times its weight lambda; r_w is the share of the width that the client
    should keep. The gradient of a score is ``p^2 (1 - p)``, where p = sigmoid(score) is the probability that the mask
    is 1; a straight-through gradient would be ``p (1 - p)``.
    """

    def loss(self, batch: object, index: int) -> Tensor:
        """Return the loss of a batch with randomly masked units, plus the weighted penalty on the share of units kept."""
        masks = {}
        for axis, scores in self.scores.items():
            mask, p = masks_of(scores, self.generator), torch.sigmoid(scores.detach())
            masks[axis] = mask.detach() + p * (mask - mask.detach())
        with self.gates.set(masks):
            loss = self.task.loss(batch, index)
        return loss + self.strength * (torch.cat(list(masks.values())).mean() - self.rate).abs()


class PublishedDistillation(Distilled):
    """Hook that adds the self-distillation of Co-S2P's published code to the loss.

    The loss sums the cross entropies of all exits (output heads after several blocks). From version 10 of the global
    model on, each exit also learns from the deepest one: ``0.5 T^2 KL`` is added, with the temperature T and the
    Kullback-Leibler divergence KL of their outputs. Unlike Eq. 3 of the paper, KL is also divided by the number of classes.
    """

    def joined(self, deepest: Exit, others: Sequence[Exit], batch: object) -> Tensor:
        """Return the summed loss of all exits (output heads), with distillation from the deepest exit to the others."""
        loss = deepest.loss
        for one in others:
            loss = loss + one.loss
            if self.task.assignment.version >= FIRST_DISTILLED:
                knowledge = knowledge_loss(one.logits, deepest.logits, self.temperature, counted(batch, one.logits))
                loss = loss + KNOWLEDGE_WEIGHT * knowledge / one.logits.shape[-1]
        return loss

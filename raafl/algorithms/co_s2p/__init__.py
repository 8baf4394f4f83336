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

from typing import Literal

from raafl.algorithms.co_s2p.as_published import LeadingDraws
from raafl.algorithms.co_s2p.local import MaskedAndDistilled
from raafl.algorithms.co_s2p.merge import ImportanceMerge
from raafl.algorithms.co_s2p.published_merge import PublishedMerge
from raafl.core.algorithm import Algorithm, Merge, Select, Trigger
from raafl.core.sample import Sample
from raafl.errors import one_of, refuse_unused
from raafl.parts.merge.mean import Deltas, Staleness
from raafl.parts.merge.personal import RecordingSelect, WithScores
from raafl.parts.select.rate_select import Rates
from raafl.parts.select.windows import Masks, RollingWindows
from raafl.parts.trigger import AllReported, EachArrival, MinRatio

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
            authors' code, see `raafl.algorithms.co_s2p.published_merge`).
        server_lr: factor on the merged change (eta); leave it out for merge published.
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
        select=RecordingSelect(_instead(asked, submodel)),
        local=MaskedAndDistilled(distil, distil_weight, temperature, mask_strength, mask_lr, segments, as_published),
        trigger=_trigger(trigger, min_ratio, wait_s),
        merge=WithScores(_merge(merge, server_lr, segments)),
    )


def _instead(asked: RollingWindows, submodel: Select | None) -> Select:
    """Return ``submodel`` if it is given, else the masked windows; raises `BadInput` if settings of both are given."""
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

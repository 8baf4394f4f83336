"""AdaViT (Meng et al., "AdaViT: Adaptive Vision Transformers for Efficient Image Recognition", CVPR 2022).

Co-S2P's comparison trains with it on each client, under FedAvg. Each block has a decision head, a linear layer on the class
token of its input, ``m = W Z``, that says for each image which heads and which of its two sublayers (attention, feed-forward
part) are used. Decisions are drawn by Gumbel-softmax while training, hard forward and soft backward, and are ``m > 0``
afterwards. The heads are trained with the model, by the task's loss and

    L_usage = (1/D_h sum M^h - gamma_h)^2 + (1/D_b sum M^b - gamma_b)^2,

the usage of all heads (D_h) and sublayers (D_b) in a batch against the targets ``heads`` and ``blocks``. What is decided
against adds nothing: a head's output is 0 before the layer that joins heads, a sublayer's 0 before it is added.

Here the decision heads are parameters of the model that travel and are averaged like the rest.

The paper leaves open, or this does otherwise:
- Its third policy, over patches, is left out: layers would have to run on other patches for each image.
- Its pretrained start, distillation from it, and its code's terms of entropy and diversity are left out.
- Gates are open at the start as often as the targets say.
- Nothing is saved: all is computed and multiplied by 0 or 1, in training as when the model is measured. A client's cost is
  that of the whole model and the decision heads.
- torch's own attention (`nn.MultiheadAttention`) shows no heads to a hook: there the sublayers alone are decided on.
- In a model of another kind the first position of the input stands for the class token. Without blocks, heads are groups of
  units (or channels) of each hidden layer that one other layer reads, decided on by the layer's input, of images its mean over
  pixels. A model with neither is trained plainly, and so is one with LoRA adapters, whose other layers have no axes; a note
  says so.
- The loss that is reported while training has the usage loss in it.
"""

from __future__ import annotations

from raafl.algorithms.ada_vit.adaptive import Adaptive
from raafl.core.algorithm import Algorithm
from raafl.core.sample import Sample
from raafl.parts.merge.mean import Mean
from raafl.parts.select.submodels import Full
from raafl.parts.trigger import AllReported


def ada_vit(
    heads: float = 0.7,
    blocks: float = 0.7,
    weight: float = 2.0,
    temperature: float = 5.0,
    units: int = 8,
    by_samples: bool = True,
    cohort: int | None = None,
    concurrency: int | None = None,
) -> Algorithm:
    """Make AdaViT under FedAvg.

    Args:
        heads: share of the heads that is to be used (gamma_h), in (0, 1].
        blocks: share of the sublayers that is to be used (gamma_b), in (0, 1].
        weight: of the usage loss.
        temperature: of Gumbel-softmax.
        units: the most groups of units of a hidden layer, in a model without blocks.
        by_samples: weigh by |D_n|; False = every client alike.
        cohort: clients in a round, drawn uniformly; None = all.
        concurrency: how many of them work at a time; None = no cap.
    """
    return Algorithm(
        name="ada_vit",
        paper="Meng et al. 2022",
        sample=Sample(cohort, concurrency),
        select=Full(),
        local=Adaptive(heads, blocks, weight, temperature, units),
        trigger=AllReported(),
        merge=Mean(by_samples=by_samples),
    )

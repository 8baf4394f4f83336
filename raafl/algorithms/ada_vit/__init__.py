"""AdaViT (Meng et al., "AdaViT: Adaptive Vision Transformers for Efficient Image Recognition", CVPR 2022).

Co-S2P compares with AdaViT trained on each client under FedAvg. Each block has a decision head, a linear layer on the class
token of its input, ``m = W Z``, which decides for each image which heads and which of the two sublayers (attention, feed-forward
part) to use. During training decisions are drawn by Gumbel-softmax, hard in the forward pass and soft in the backward pass; in
evaluation a part is used if ``m > 0``. The decision heads are trained with the model, by the task's loss and

    L_usage = (1/D_h sum M^h - gamma_h)^2 + (1/D_b sum M^b - gamma_b)^2,

which compares the usage of all heads (D_h) and sublayers (D_b) in a batch with the targets ``heads`` and ``blocks``. A part that
is not used adds nothing: a head's output is 0 before the layer that joins heads, a sublayer's 0 before the residual addition.

Here the decision heads are parameters of the model that are sent and averaged like the rest.

Choices that the paper leaves open, and deviations from it:
- The paper's third policy, over patches, is left out: layers would have to run on different patches for each image.
- The pretrained start, distillation from it, and the code's entropy and diversity terms are left out.
- At the start gates are open as often as the targets say.
- No computation is saved: everything is computed and multiplied by 0 or 1, in training and in evaluation. A client's cost is
  that of the whole model and the decision heads.
- torch's own attention (`nn.MultiheadAttention`) exposes no heads to a hook: in it only sublayers are decided on.
- In other models the first position of the input takes the place of the class token. Without blocks, heads are groups of
  units (or channels) of each hidden layer that exactly one other layer reads, decided on by the layer's input, averaged over
  pixels for images. A model with neither is trained plainly, and so is one with LoRA adapters, whose only axes are ranks; a
  warning says so.
- The loss reported during training includes the usage loss.
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
    """Return AdaViT, trained by FedAvg: the model learns which attention heads and sublayers each image needs.

    Args:
        heads: target share of the attention heads that an image uses (gamma_h), in (0, 1].
        blocks: target share of the sublayers that an image uses (gamma_b), in (0, 1].
        weight: weight of the loss that pulls the used shares to their targets.
        temperature: temperature of Gumbel-softmax, by which heads and sublayers are drawn in training.
        units: largest number of groups into which the neurons of a hidden layer are divided, in a model without
            transformer blocks; a group is used or skipped as a whole.
        by_samples: whether to weight clients by their numbers of samples |D_n|; False = equally.
        cohort: number of clients in a round, drawn uniformly; None = all.
        concurrency: largest number of clients that work at the same time; None = no limit.
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

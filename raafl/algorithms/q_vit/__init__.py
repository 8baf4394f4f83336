"""Q-ViT (Li et al., "Q-ViT: Fully Differentiable Quantization for Vision Transformer", arXiv:2201.07703, 2022).

Co-S2P's comparison trains with it on each client, under FedAvg. Weights w and inputs x of layers are quantised in b bits,

    x^ = round(clip(x / s, -Q_n, Q_p)) s,      Q_n = 2^(b-1),  Q_p = 2^(b-1) - 1,

and the step sizes s and the bit widths b are trained with the model: s by the gradient of learned step sizes (LSQ, Esser et al.
2020), b by what more levels would change in the values that are clipped, with a loss that holds its mean at ``bits``. Rounding
passes gradients straight through. For each width that b may come to, a layer has a step size of its own (switchable scale).

Here step sizes and widths are parameters of the model that travel and are averaged like the rest.

The paper leaves open, or this does otherwise:
- The paper learns a bit width for each head; here each layer has one for its weight and one for its input.
- Layers are linear and convolutional ones, in models of any kind. Products between activations (the scores of an attention),
  norms, embeddings, recurrent layers and `nn.MultiheadAttention`'s own projections stay as they are.
- An input without a number below 0 (after ReLU) has all levels at 0 and above: Q_n = 0, Q_p = 2^b - 1.
- The step size of a weight begins at ``2 mean |w| / sqrt(Q_p)``; that of an input so by the first batch of each client's first
  task, and is their mean after the first merge. Until then inputs are not quantised when the model is measured. A weight that
  is 0 at the start, such as LoRA's B, gets its step size at the beginning of the first task that finds it otherwise.
- The first and the last layer have 8 bits. Widths are from 2 to 8.
- The paper's limit is on operations; here the mean width over all weights is drawn to ``bits``.
- Nothing is saved: quantised values are held, multiplied and sent as floating-point numbers. A client's cost is that of the
  model with what quantising needs on top.
- The loss that is reported while training has that of the bits in it.

With 32 bits it is FedAvg, bit for bit.
"""

from __future__ import annotations

from raafl.algorithms.q_vit.quantised import Quantised
from raafl.core.algorithm import Algorithm, Select
from raafl.core.sample import Sample
from raafl.parts.merge.mean import Mean
from raafl.parts.select.submodels import Full
from raafl.parts.trigger import AllReported


def q_vit(
    bits: int = 4,
    learn_bits: bool = True,
    edge_bits: int = 8,
    weight: float = 1.0,
    by_samples: bool = True,
    cohort: int | None = None,
    concurrency: int | None = None,
    submodel: Select | None = None,
) -> Algorithm:
    """Make Q-ViT under FedAvg.

    Args:
        bits: of weights and inputs, 2 to 8, on average where they are learned; 32 = nothing is quantised.
        learn_bits: learn the bit widths of each layer; False = bits for all.
        edge_bits: of the first and the last layer.
        weight: of the loss that draws the mean width to bits.
        by_samples: weigh by |D_n|; False = every client alike.
        cohort: clients in a round, drawn uniformly; None = all.
        concurrency: how many of them work at a time; None = no cap.
        submodel: what each client trains, such as `raafl.parts.RateSelect`; None = the whole model.
    """
    return Algorithm(
        name="q_vit",
        paper="Li et al. 2022, Q-ViT",
        sample=Sample(cohort, concurrency),
        select=submodel or Full(),
        local=Quantised(bits, learn_bits, edge_bits, weight),
        trigger=AllReported(),
        merge=Mean(by_samples=by_samples),
    )

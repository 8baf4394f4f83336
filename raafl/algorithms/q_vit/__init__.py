"""Q-ViT (Li et al., "Q-ViT: Fully Differentiable Quantization for Vision Transformer", arXiv:2201.07703, 2022).

Co-S2P compares with Q-ViT trained on each client under FedAvg. Weights w and inputs x of layers are quantised to b bits,

    x^ = round(clip(x / s, -Q_n, Q_p)) s,      Q_n = 2^(b-1),  Q_p = 2^(b-1) - 1,

and the step sizes s and bit widths b are trained with the model: s by the gradient of learned step sizes (LSQ, Esser et al.
2020), b by the effect of more levels on clipped values, with a loss that holds the mean width at ``bits``. Rounding
passes gradients straight through. A layer has a separate step size for each bit width that it may reach (switchable scale).

Here step sizes and bit widths are parameters of the model that are sent and averaged like the rest.

Choices that the paper leaves open, and deviations from it:
- The paper learns a bit width for each head; here each layer has one for its weight and one for its input.
- Linear and convolutional layers are quantised, in models of any kind. Products between activations (the scores of an attention),
  norms, embeddings, recurrent layers and `nn.MultiheadAttention`'s own projections stay in floating point.
- An input without a negative number (after ReLU) uses only levels of 0 and above: Q_n = 0, Q_p = 2^b - 1.
- Gradients of a step size and of its bounds are scaled as in LSQ, by ``1 / sqrt(n Q_p)``: n weights of the layer, or features of
  one sample's input, and Q_p of the bit width that it has.
- The step size of a weight starts at ``2 mean |w| / sqrt(Q_p)``. That of an input starts so from the first batch of each client's
  first task, and is the clients' mean after the first merge; until then evaluation does not quantise inputs. A weight that is 0
  at the start, such as LoRA's B, gets its step size in the first task that starts with a nonzero weight.
- The first and the last layer have 8 bits. Bit widths range from 2 to 8.
- The paper limits operations; here a loss pulls the mean bit width over all weights to ``bits``.
- No memory or time is saved: quantised values are stored, multiplied and sent as floating-point numbers. A client's cost is that
  of the model plus that of quantising.
- The loss reported during training includes the loss on bit widths.

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
    """Return Q-ViT, trained by FedAvg: quantised layers whose step sizes and bit widths are learned.

    Args:
        bits: number of bits of weights and inputs, 2 to 8, or its target on average if it is learned; 32 = no
            quantisation.
        learn_bits: whether each layer learns its number of bits; False = the same for all layers.
        edge_bits: number of bits in the first and the last layer.
        weight: weight of the loss that pulls the mean number of bits to ``bits``.
        by_samples: whether to weight clients by their numbers of samples |D_n|; False = equally.
        cohort: number of clients in a round, drawn uniformly; None = all.
        concurrency: largest number of clients that work at the same time; None = no limit.
        submodel: rule that chooses each client's submodel, such as `raafl.parts.RateSelect`; None = the whole model for
            every client.
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

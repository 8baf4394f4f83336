"""FedPM (Isik et al., "Sparse Random Networks for Communication-Efficient Federated Learning", ICLR 2023).

Weights are random and frozen; training learns which of them to keep. Each weight has a probability theta, a score
``s = log(theta / (1 - theta))``, and a mask. Client k trains scores for its local steps (Algorithm 1)::

    m ~ Bern(sigmoid(s)),    s <- s - eta dL(w_init * m)/dm * sigmoid'(s)        straight-through gradient, dm/dtheta = 1

then draws one mask ``m_k ~ Bern(theta_k)`` and sends it as one bit for each weight. The server counts the masks (Algorithm 2)::

    alpha <- alpha + sum_k m_k,    beta <- beta + K - sum_k m_k,    theta = (alpha - 1) / (alpha + beta - 2)

with alpha = beta = lambda_0 at the start and again every few rounds. With lambda_0 = 1 and a reset every round theta is the
mean of the masks.

Weights are signed constants, ``+sigma`` or ``-sigma`` with sigma = sqrt(2 / fan_in), the standard deviation of Kaiming's
normal initialisation. `raafl.algorithms.fed_pm.masks` describes how the model's state represents them.

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

from raafl.algorithms.fed_pm.masks import BayesianMasks, ProbabilisticMaskTraining
from raafl.core.algorithm import Algorithm, Select
from raafl.core.sample import Sample
from raafl.parts.select.submodels import Full
from raafl.parts.trigger import AllReported


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

"""FedPM (Isik et al., "Sparse Random Networks for Communication-Efficient Federated Learning", ICLR 2023).

Weights are random and frozen; what is learned is which of them to keep. Each weight has a probability theta, a score
``s = log(theta / (1 - theta))``, and a mask. Client k trains scores for its local steps (Algorithm 1)::

    m ~ Bern(sigmoid(s)),    s <- s - eta dL(w_init * m)/dm * sigmoid'(s)        straight through the draw, dm/dtheta = 1

then draws one mask ``m_k ~ Bern(theta_k)`` and sends its bits: one bit for each weight. The server counts (Algorithm 2)::

    alpha <- alpha + sum_k m_k,    beta <- beta + K - sum_k m_k,    theta = (alpha - 1) / (alpha + beta - 2)

with alpha = beta = lambda_0 at the start and again every few rounds. With lambda_0 = 1 and a reset every round this is the
mean of the masks.

Weights are signed constants, ``+sigma`` or ``-sigma`` with sigma = sqrt(2 / fan_in), the standard deviation of Kaiming's
normal initialisation. See `raafl.algorithms.fed_pm.masks` for how they lie in the model's state.

The paper leaves open, or this does otherwise:

- What is masked: weights of linear, convolution, embedding, attention and recurrent layers that train. The paper's networks have
  nothing else; here biases, norms and positions are frozen as they were made, and do not travel. Running statistics of batch
  norm go up as floats and are averaged.
- Signs are those that the model was made with, hence by the seed; a weight at 0 gets one at random. Of a pretrained model
  nothing else is left.
- Down goes the expected weight ``theta w``, which says both theta and the sign: as many bytes as in FedAvg.
- The model is measured, and saved, with the expected mask. The paper draws one; the expectation needs no seed.
- Scores are finite as long as theta is neither 0 nor 1: it stays in [floor, 1 - floor].
- Scores are stepped by the module's own optimiser with its learning rate times `lr_factor`, since a score must go far to
  change a mask: its gradient has sigma theta (1 - theta) as a factor, less than 0.05 in a layer of 64 inputs.
- With `submodel`, clients have masks for a part of the model; sigma is the whole model's, and alpha and beta count the clients
  that have a weight.
- The server counts whole masks: it merges in rounds alone, and neither differential privacy nor a median goes with it.
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
    """Make FedPM.

    Args:
        prior: alpha and beta at the start (lambda_0), at least 1.
        reset: rounds after which they are prior again.
        initial: probability of every weight before the first round.
        floor: probabilities (theta) stay in [floor, 1 - floor].
        lr_factor: learning rate of the scores (eta), as a multiple of the module's own; None = 1000 where that optimises by
            SGD, else 100.
        cohort: clients in a round, drawn uniformly; None = all.
        concurrency: how many of them work at a time; None = no cap.
        submodel: what each client masks instead of the whole model, such as `raafl.parts.RateSelect`.
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

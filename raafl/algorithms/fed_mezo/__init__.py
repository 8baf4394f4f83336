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

from typing import Literal

from raafl.algorithms.fed_mezo.zeroth_order import ForwardOnly, Rebuilt, ZerothOrder
from raafl.core.algorithm import Algorithm, Select
from raafl.core.sample import Sample
from raafl.parts.merge.mean import Kind, Staleness
from raafl.parts.select.submodels import Full
from raafl.parts.trigger import all_or_each


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

"""FedMeZO (Ling et al., "On the Convergence of Zeroth-Order Federated Tuning for Large Language Models", KDD 2024).

Clients train without a backward pass, by MeZO (Malladi et al., "Fine-Tuning Language Models with Just Forward Passes",
NeurIPS 2023, Algorithm 1): perturb the parameters in place with z ~ N(0, I) drawn from a seed, and go by two losses on
the same batch::

    g_t = (L(theta + epsilon z_t) - L(theta - epsilon z_t)) / (2 epsilon),    theta <- theta - eta g_t z_t

A client needs no more memory than a forward pass does: no gradients, no optimiser state, no activations kept. The server
averages ``theta <- theta + sum_n |D_n| (theta_n - theta) / sum_n |D_n|``.

Only the scalars g_t go up, as in FedKSeed (Qin et al., "Federated Full-Parameter Tuning of Billion-Sized Language Models
with Communication Cost under 18 Kilobytes", ICML 2024): z_t follows from the assignment's seed, so the server replays the
client's steps and gets its trained values to the last bit.

The papers leave open, or this does otherwise:

- What goes down: the model, as in every other algorithm here. FedKSeed sends scalars in this direction too, for K seeds that
  all share, and clients rebuild the model from its first values.
- The step is plain SGD with a learning rate of its own: the module's optimiser and schedulers have no part in it. Every
  batch is a step; there is nothing to accumulate over several.
- Forward passes are as in evaluation, as in MeZO's code: no dropout, so that both losses see the same network, and batch norm runs
  on its running statistics, which stay as they were at the start. Buffers neither train nor go up.
- g_t is rounded to float32 before it is used, so that what travels is what was used.
- ``compress.up`` has nothing to compress, and is refused; ``compress.down`` is not.
- Frozen parameters are not perturbed; with LoRA adapters, which FedMeZO tunes, only these are.
- trigger "each" is FedBuff's step with a buffer of one, which neither paper has: theta_n - theta = -eta sum_t g_t z_t does not
  depend on the version that the client began with, so a late update needs no old version to be rebuilt.
- Seeds repeat on machines with the same version of torch and the same vector instructions. Elsewhere z may differ in its last
  bits: the server's values are then the client's up to rounding.
"""

from __future__ import annotations

from typing import Literal

from raafl.algorithms.fed_mezo.zeroth_order import ForwardOnly, Rebuilt, ZerothOrder
from raafl.core.algorithm import Algorithm, Select
from raafl.core.sample import Sample
from raafl.parts.merge.staleness import Kind, Staleness
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
    """Make FedMeZO.

    Args:
        lr: clients' learning rate (eta).
        epsilon: size of the perturbations (epsilon in MeZO, mu in FedMeZO).
        trigger: all (rounds) or each (asynchronous).
        server_lr: the server's step along the mean difference.
        staleness: s(.) where each arrival is merged: constant, polynomial or hinge.
        staleness_a: a of polynomial and hinge.
        staleness_b: b of hinge.
        by_samples: weigh by |D_n|; False = every client alike.
        cohort: clients in a round (or kept at work), drawn uniformly; None = all.
        concurrency: how many of them work at a time; None = no cap.
        submodel: what each client trains instead of the whole model, such as `raafl.parts.RateSelect`.
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

"""SplitFed V1 (Thapa et al., "SplitFed: When Federated Learning Meets Split Learning", AAAI 2022).

The model is cut in two: ``W = [W^C ; W^S]``. In each round every client k trains its copy ``W^C_k`` of the lower part, and the
main server, for every client on its own and in parallel, a copy ``W^S_k`` of the upper part. For each batch (Algorithms 1, 2)

1. the client computes the activation ``A_k = f(W^C_k, X_k)`` and sends it with the labels ``Y_k``;
2. the server goes on to the loss, computes the gradients of ``W^S_k`` and ``dA_k``, and sends ``dA_k`` back;
3. the client goes on from ``dA_k`` to the gradients of ``W^C_k``. Each side makes its own optimiser's step.

At the end of the round the fed server averages the ``W^C_k``, the main server the ``W^S_k``, both weighted by ``n_k / n``: FedAvg
of the whole model with the same batches, bit for bit where nothing is drawn in training. What is different is where the work is:
the client's memory, compute and parameters on the wire are those of its part, and every sample's activation and its gradient
travel as well.

Where the paper leaves it open, or this does otherwise:

- Both servers are one here: rank 0 receives the ``W^C_k``, has the ``W^S_k``, and merges them as one update.
- Where to cut: the paper cuts LeNet-5 and AlexNet after their second layer, ResNet-18 after its third; so the default is at most
  two layers with parameters. A place is possible where a single value leads from the layers below to those above, in any
  model (`raafl.algorithms.split_fed.cut`). A model without one (tied embeddings, a block that is used again and again) is trained
  whole by the clients, which is FedAvg and is said at the start.
- The user's `training_step` runs on both sides, to the cut and from there. What it draws (dropout) the server's half draws from
  a stream of its own; what it draws for both sides at once, such as a mixup of inputs and labels, would not be the same there.
- The server sees the activations, and the labels as they are. The paper's differential privacy at the client (PixelDP) is not here.
- The time of a task, simulated, predicted or emulated, is the client's compute and link: the latency counts once each way for the
  task, and once each way again for every batch. What the server computes for its half takes no time there.
- A norm over all parameters (`fabric.gradient_clip_val`) is known to neither side alone: it is refused.
- V2, where one upper part learns from the clients one after the other, is not here.
"""

from __future__ import annotations

from raafl.algorithms.split_fed.local import Halved, Split
from raafl.core.algorithm import Algorithm
from raafl.core.sample import Sample
from raafl.parts.merge.mean import Mean
from raafl.parts.trigger import AllReported

CLIENT_LAYERS = 2
"""Layers with parameters at the client, where nothing else is said."""


def split_fed(
    client_layers: int | None = None,
    share: float | None = None,
    cut: str | None = None,
    by_samples: bool = True,
    cohort: int | None = None,
    concurrency: int | None = None,
) -> Algorithm:
    """Make SplitFed V1.

    Args:
        client_layers: the client's part W^C is at most so many layers with parameters, from the input on (at least the first
            place where the model can be cut); None = 2, where share and cut are not given.
        share: W^C is what is nearest to this share of the parameters.
        cut: W^C is all up to this module's output, by its path in the model, such as layers.2.
        by_samples: weigh by |D_n| (n_k in Algorithm 1); False = every client alike.
        cohort: clients in a round, drawn uniformly; None = all.
        concurrency: how many of them work at a time; None = no cap.
    """
    if client_layers is None and share is None and cut is None:
        client_layers = CLIENT_LAYERS
    return Algorithm(
        name="split_fed",
        paper="Thapa et al. 2022",
        sample=Sample(cohort, concurrency),
        select=Halved(),
        local=Split(client_layers, share, cut),
        trigger=AllReported(),
        merge=Mean(by_samples=by_samples),
    )

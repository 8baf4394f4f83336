"""SplitFed V1 (Thapa et al., "SplitFed: When Federated Learning Meets Split Learning", AAAI 2022).

The model is cut in two: ``W = [W^C ; W^S]``. In each round every client k trains its copy ``W^C_k`` of the lower part, and the
main server trains, for every client separately and in parallel, a copy ``W^S_k`` of the upper part. For each batch
(Algorithms 1, 2)

1. the client computes the activation ``A_k = f(W^C_k, X_k)`` and sends it with the labels ``Y_k``;
2. the server computes the loss and the gradients of ``W^S_k`` and ``A_k``, and sends the latter, ``dA_k``, back;
3. the client computes the gradients of ``W^C_k`` from ``dA_k``. Each side makes its own optimizer's step.

At the end of the round the fed server averages the ``W^C_k``, the main server the ``W^S_k``, both weighted by ``n_k / n``. That is
FedAvg of the whole model on the same batches, bit for bit if training draws no random numbers. The work is placed differently:
the client's memory, computation and transferred parameters are those of its part, and every sample's activation and its gradient
are transferred as well.

Choices that the paper leaves open, and deviations from it:

- Both servers are one here: rank 0 receives the ``W^C_k``, holds the ``W^S_k``, and merges them as one update.
- Place of the cut: the paper cuts LeNet-5 and AlexNet after their second layer, ResNet-18 after its third; so the default is at
  most two layers with parameters. A cut is possible wherever a single value leads from the layers below to those above, in any
  model (`raafl.algorithms.split_fed.cut`). A model without such a place (tied embeddings, a block that is used repeatedly) is
  trained whole by the clients, as in FedAvg, and a warning says so at the start.
- The user's `training_step` runs on both sides, up to the cut and from the cut on. The server's half draws random numbers
  (dropout) from a stream of its own; a draw that must agree on both sides, such as a mixup of inputs and labels, would differ.
- The server sees the activations, and the labels in clear. The paper's differential privacy at the client (PixelDP) is not
  implemented.
- The time of a task, simulated, predicted or emulated, is the client's computation and link: the latency counts once each way for
  the task, and once more each way for every batch. The server's computation for its half counts as 0.
- Gradient clipping by the norm over all parameters (`fabric.gradient_clip_val`) is refused, since neither side knows that norm.
- V2, where one upper part learns from the clients one after the other, is not implemented.
"""

from __future__ import annotations

from raafl.algorithms.split_fed.local import Halved, Split
from raafl.core.algorithm import Algorithm
from raafl.core.sample import Sample
from raafl.parts.merge.mean import Mean
from raafl.parts.trigger import AllReported

CLIENT_LAYERS = 2
"""Default of `client_layers`."""


def split_fed(
    client_layers: int | None = None,
    share: float | None = None,
    cut: str | None = None,
    by_samples: bool = True,
    cohort: int | None = None,
    concurrency: int | None = None,
) -> Algorithm:
    """Return SplitFed V1: each client trains the lower layers, and the server trains the upper ones together with it.

    Args:
        client_layers: largest number of layers with parameters in the client's part W^C, counted from the input; the
            part reaches at least to the first possible cut. None = 2, unless share or cut is given.
        share: share of the model's parameters that the client's part W^C should have, as nearly as possible.
        cut: path of the module whose output is sent to the server, such as layers.2; it ends the client's part W^C.
        by_samples: whether to weight clients by their numbers of samples |D_n| (n_k in Algorithm 1); False = equally.
        cohort: number of clients in a round, drawn uniformly; None = all.
        concurrency: largest number of clients that work at the same time; None = no limit.
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

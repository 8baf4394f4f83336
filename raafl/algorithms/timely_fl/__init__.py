"""TimelyFL (Zhang et al., "TimelyFL: Heterogeneity-aware Asynchronous Federated Learning with Adaptive Partial Training", 2023).

Each round has n clients. Each reports ``t_cmp``, the time of one unit of local training of the full model, and
``t_com``, the time of transferring the model (Algorithm 2). ``T_k`` is the k-th smallest ``t_cmp + t_com`` of all n, those still at
work from earlier rounds and those newly drawn (Algorithm 1), and

    E_c     = max(floor((T_k - t_com) / t_cmp), 1)      units of local work,
    alpha_c = min(T_k / (t_com + t_cmp), 1)             share of the parameters that train, the output-side layers,
    t_rpt   = T_k - t_com * alpha_c                     when the client must start to send (Algorithm 3).

Updates that arrive within T_k are merged, each layer over the clients that trained it. With equal devices and data every
E_c and alpha_c is 1 and this is FedAvg.

Choices that the paper leaves open:

- In the paper, reports come from a batch of real training before each round. Here they are predictions from the profile, which
  equal that measurement in a simulation; later rounds scale them by the ratio of measured to predicted time of the client's
  last task, by the runtime's clock. ``t_com`` is the time of download and upload.
- A unit of work is one local epoch in the paper, here the run's own `train.num_epochs` or `train.num_steps`.
- The paper assumes that a partly trained model costs alpha_c of the full one. Frozen layers still run forward, and are still
  received, so a client with alpha_c of the parameters would be late in every round. The paper's guarantee that clients report in
  time is kept instead: of the layers that alpha_c allows, as many train as are predicted to finish within T_k
  (``layers="time"``); ``layers="share"`` uses alpha_c alone. ``clock="share"`` is the paper's clock, on which a task costs
  alpha of the full one (Equation 1), so that with ``layers="share"`` all clients are in time by construction: use it to compare
  with the paper's figures in simulation. No real device behaves so.
- No real task takes exactly as long as the one before, so of equal clients half would finish after the k-th. Therefore a merge
  waits `slack`, a share of T_k, beyond T_k while clients are still at work, and a client that is predicted to finish within it
  trains all layers. E_c depends on T_k alone. On a virtual clock, which has no jitter, the paper's 0 may be given.
- An update that arrives after T_k is in the next merge, unchanged; the paper says only that it is not in this one.
  ``T_k`` starts when work is assigned, so that clients in time satisfy ``t_rpt``.
"""

from __future__ import annotations

from raafl.algorithms.timely_fl.workload import Clock, Cut, Interval, Layers, ShareOfTime, Timely
from raafl.core.algorithm import Algorithm, Local
from raafl.core.sample import Sample
from raafl.errors import BadInput, one_of, refuse_unused
from raafl.parts.merge.mean import Mean
from raafl.parts.merge.server_optimizer import ServerKind, ServerOptimizer


def timely_fl(
    participation: float = 0.5,
    adaptive: bool = True,
    layers: Layers = "time",
    server_optimizer: ServerKind | None = None,
    server_lr: float = 0.01,
    cohort: int | None = None,
    concurrency: int | None = None,
    cut: Cut = "layers",
    slack: float = 0.05,
    clock: Clock = "device",
    by_samples: bool = True,
    most_slack: float | None = None,
) -> Algorithm:
    """Return TimelyFL: each round lasts a fixed time, and each client trains as many epochs or last layers as fit into it.

    Args:
        participation: share k of the round's clients that should finish in time, which sets the round's length; the
            paper's is 0.5.
        adaptive: whether to adapt the workload (E_c, alpha_c) to measured times in every round; False = a client keeps
            the workload of its first round (Fig. 7).
        layers: rule for choosing layers: share = the last layers with at most the share alpha_c of the parameters, as in
            the paper; time = as many of these as are predicted to finish within the round's length T_k.
        server_optimizer: optimizer of the server, adam, yogi or adagrad (FedOpt); None = FedAvg's mean by samples.
        server_lr: learning rate of the server optimizer; leave it out if there is none.
        cohort: number of clients in a round, drawn uniformly (the training concurrency n); None = all.
        concurrency: largest number of clients that work at the same time; the round's other clients start later. None =
            no limit.
        cut: way to reduce a slow client's work: layers = train only the last layers, as in the paper; width = train a
            narrower model.
        slack: share of the round's length T_k by which a client may be late and still be part of the merge; 0 = as in the paper.
        clock: duration of a task on a virtual clock: device = predicted for the client's device; share = alpha times
            the whole model's duration (Equation 1), as the paper assumes.
        by_samples: whether to weight clients by their numbers of samples |D_n|; False = equally, as FedBuff does.
        most_slack: largest slack that the server may set: so much that 4 of 5 tasks are in time, by how late the latest ones
            were, but never less than ``slack``. None = slack never changes.
    """
    one_of("clock", clock, Clock)
    if cut == "width":
        refuse_unused("cut is 'width', and a narrower model is charged what it costs", clock=(clock, "device"))
    if server_optimizer is None and server_lr != 0.01:
        raise BadInput(
            f"server_lr is {server_lr}, but there is no server_optimizer: leave it out, or give adam, yogi or adagrad"
        )
    return Algorithm(
        name="timely_fl",
        paper="Zhang et al. 2023",
        sample=Sample(cohort, concurrency),
        select=Timely(participation, adaptive, layers, cut, slack, most_slack),
        local=ShareOfTime() if clock == "share" else Local(),
        trigger=Interval(slack, most_slack),
        merge=Mean(by_samples=by_samples)
        if server_optimizer is None
        else ServerOptimizer(server_optimizer, server_lr, by_samples=by_samples),
    )

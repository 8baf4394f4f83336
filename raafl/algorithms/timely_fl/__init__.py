"""TimelyFL (Zhang et al., "TimelyFL: Heterogeneity-aware Asynchronous Federated Learning with Adaptive Partial Training", 2023).

Each round has n clients; each reports ``t_cmp``, the time of one unit of local training of the full model, and
``t_com``, the time of moving the model (Algorithm 2). ``T_k`` is the k-th smallest ``t_cmp + t_com`` of all n, of those from
earlier rounds that are still under way as of those newly drawn (Algorithm 1), and

    E_c     = max(floor((T_k - t_com) / t_cmp), 1)      units of local work,
    alpha_c = min(T_k / (t_com + t_cmp), 1)             share of the parameters that train, the output-side layers,
    t_rpt   = T_k - t_com * alpha_c                     when the client must start to send (Algorithm 3).

What has arrived within T_k is merged, each layer over the clients that trained it. With equal devices and data every
E_c and alpha_c is 1 and this is FedAvg.

Where the paper leaves it open:

- Its reports come from a batch of real training before each round. Here they are the profile's predictions, which is what
  that batch would take in a simulation; each later round scales them by what the client's last task took against what was
  predicted for it, by the runtime's clock. ``t_com`` is the time down and up.
- A unit of work is one local epoch in the paper, here the run's own `train.num_epochs` or `train.num_steps`.
- The paper takes a partly trained model to cost alpha_c of the full one. Frozen layers still run forward, and are still
  received, so a client with alpha_c of the parameters would be late every round. Its guarantee that clients report in time
  is kept instead: of the layers that alpha_c allows, as many train as are predicted to be done within T_k
  (``layers="time"``); ``layers="share"`` goes by alpha_c alone. ``clock="share"`` is the paper's clock, on which a task costs
  alpha of the full one (Equation 1), so that with ``layers="share"`` everybody is in time by construction: to compare with
  its figures in simulation. No device keeps it.
- No real task takes exactly as long as the one before, and of equal clients half would be later than the k-th. So `slack`, a share
  of T_k, is waited beyond T_k while somebody is out, and who is predicted to be done within it trains all layers. E_c goes by
  T_k alone. On a virtual clock, which has no jitter, the paper's 0 may be given.
- An update that comes after T_k is in the next merge, with the values it has; the paper says only that it is not in this one.
  ``T_k`` runs from the moment work is handed out, so that ``t_rpt`` is kept by whoever is in time.
"""

from __future__ import annotations

from raafl.algorithms.timely_fl.workload import Clock, Cut, Interval, Layers, ShareOfTime, Timely
from raafl.core.algorithm import Algorithm, Local
from raafl.core.sample import Sample
from raafl.errors import BadInput, one_of, refuse_unused
from raafl.parts.merge.mean import Mean, ServerKind, ServerOptimizer


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
) -> Algorithm:
    """Make TimelyFL.

    Args:
        participation: aggregation participation target, k as a share of the round's clients; the paper's is 0.5.
        adaptive: fit every round's workload (E_c, alpha_c) to the times measured; False = keep that of a client's first
            round (Fig. 7).
        layers: time = the last layers within alpha_c that are predicted to be done within T_k; share = by alpha_c alone.
        server_optimizer: adam, yogi or adagrad (FedOpt); None = FedAvg's mean by samples.
        server_lr: learning rate of the server optimizer; to be left out without one.
        cohort: clients drawn in a round, uniformly (the training concurrency n); None = all.
        concurrency: how many of them work at a time, the others start late; None = no cap.
        cut: what a client that is short of time does without: layers (the paper's), or width, for a physically smaller model.
        slack: share of T_k by which a client may come late and still be in the merge; 0 = the paper's.
        clock: what a task is charged: device = what its device is predicted to need; share = alpha of the whole model's task
            (Equation 1), the paper's assumption, on a virtual clock.
        by_samples: weigh clients by their samples; False = all alike, as FedBuff does.
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
        select=Timely(participation, adaptive, layers, cut, slack),
        local=ShareOfTime() if clock == "share" else Local(),
        trigger=Interval(slack),
        merge=Mean(by_samples=by_samples)
        if server_optimizer is None
        else ServerOptimizer(server_optimizer, server_lr, by_samples=by_samples),
    )

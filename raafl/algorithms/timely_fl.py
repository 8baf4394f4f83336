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

import math
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import Any, ClassVar, Literal

from raafl.algorithm import (
    FULL,
    Algorithm,
    Assignment,
    BadInput,
    ClientInfo,
    Cost,
    GlobalState,
    Local,
    Mean,
    MergeMemory,
    Sample,
    Select,
    SelectContext,
    Spec,
    Submodels,
    Trigger,
    TriggerContext,
    Work,
    fraction,
    leading,
    one_of,
)
from raafl.core.algorithm import Restart
from raafl.core.types import Adjusted, Warn
from raafl.errors import refuse_unused
from raafl.parts.merge.server_optimizer import ServerKind, ServerOptimizer
from raafl.parts.select.submodels import uncut
from raafl.parts.select.units import steps
from raafl.submodel import last_fraction


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


MOST_UNITS = 1_000_000
"""Largest number of units of work in an interval, whatever speed a client reports."""

SLACK = 1 + 1e-9
"""Tolerance for rounding errors in sums of seconds."""

_IN_TIME = 0.8
"""Share of the tasks that should be in time once the slack has been adjusted."""
_TASKS_EACH, _LEAST_TASKS, _MOST_TASKS = 4, 20, 1000
"""Number of tasks between two adjustments of the slack: for each client, and at least and at most in all."""
_CHANGE, _CHANGE_SHARE = 0.01, 0.25
"""Smallest change of the slack that is made, absolute and as a share of the slack, so that it does not oscillate."""


@dataclass
class TimelyMemory(MergeMemory):
    """State of TimelyFL on the server: the length of a round, and measurements of each client.

    Attributes:
        T_k: length of the round in seconds; 0 before the first round.
        ratio: measured time of a client's latest task divided by its predicted time, by client.
        fixed: work and submodel of a client for all rounds, by client, if the workload is not adapted to measured
            times.
        slack: share of the round's length by which clients may be late, if it was adapted to measured times; None = the
            configured share.
        late: delay of each recent task: the ratio of the client after the task, divided by its ratio before, minus 1.
    """

    key = "timely_fl"
    T_k: float = 0.0
    ratio: dict[int, float] = field(default_factory=dict)
    fixed: dict[int, tuple[int, Spec]] = field(default_factory=dict)
    slack: float | None = None
    late: list[float] = field(default_factory=list)


Layers = Literal["time", "share"]
Cut = Literal["layers", "width"]
Clock = Literal["device", "share"]


@dataclass(frozen=True, slots=True)
class TimeReport:
    """Time that a client needs for one unit of work: the full model, trained for the run's epochs or steps (Algorithm 2).

    Attributes:
        compute_s: seconds of training and of evaluation on the client's own test samples (t_cmp).
        link_s: seconds of transferring the model both ways (t_com).
    """

    compute_s: float
    link_s: float

    @property
    def total_s(self) -> float:
        """Total seconds of one unit of work (t_total)."""
        return self.compute_s + self.link_s


@dataclass(frozen=True, slots=True)
class Workload:
    """Work that a client can do in one round (Algorithm 3).

    Attributes:
        num_units: number of units of local work, such as epochs (E_c).
        share: share of the model's parameters that it trains (alpha_c).
        report_s: seconds after which the client must start to send its update (t_rpt).
    """

    num_units: int
    share: float
    report_s: float


def interval(totals_s: Sequence[float], participation: float) -> float:
    """Return the length of a round in seconds, so that the share ``participation`` of the clients finishes in time.

    Args:
        totals_s: seconds that each client needs for one unit of work, with transfers (t_cmp + t_com).
        participation: share k of the clients that should finish in time; their number is rounded up.
    """
    k = max(1, math.ceil(participation * len(totals_s) - 1e-9))
    return sorted(totals_s)[k - 1]


def workload(interval_s: float, report: TimeReport) -> Workload:
    """Return the work that a client can do within one round (Algorithm 3).

    Args:
        interval_s: length of the round in seconds (T_k).
        report: times that the client needs for one unit of work (t_cmp and t_com).
    """
    units = (interval_s - report.link_s) / report.compute_s if report.compute_s > 0 else 1.0
    share = min(interval_s / report.total_s, 1.0) if report.total_s > 0 else 1.0
    return Workload(max(math.floor(min(units * SLACK, MOST_UNITS)), 1), share, interval_s - report.link_s * share)


def _trained_share(submodels: Submodels, spec: Spec) -> float:
    """Return the parameters that ``spec`` trains as a share of those that the whole model trains."""
    return _num_trained(submodels, spec) / _num_trained(submodels, FULL)


def _num_trained(submodels: Submodels, spec: Spec) -> int:
    names = submodels.parameter_names
    return sum(entry.numel for entry in submodels.layout(spec, "trained").entries if entry.name in names)


@dataclass(frozen=True)
class ShareOfTime(Local):
    """Local training whose time in a simulation is predicted as in the paper: proportional to the parameters trained (Eq. 1).

    FLOPs, memory traffic and transferred bytes of the whole model are multiplied by the share of its parameters that
    trains; peak memory is not. With this prediction all clients finish in time. Real devices are slower, since frozen
    layers still run forward and are received, so use this with a virtual clock only.
    """

    def cost(self, submodels: Submodels, spec: Spec, batch_size: int, extra: Mapping[str, Any]) -> Cost:
        """Return the cost of training the whole model, multiplied by the share of its parameters that is trained."""
        whole, share = submodels.cost(FULL, batch_size), _trained_share(submodels, spec)
        return replace(
            submodels.cost(spec, batch_size),
            flops_per_sample=whole.flops_per_sample * share,
            moved_bytes_per_sample=whole.moved_bytes_per_sample * share,
            padding_flops_per_sample=whole.padding_flops_per_sample * share,
            kernels_per_sample=whole.kernels_per_sample * share,
            launches=None if whole.launches is None else whole.launches.times(share),
            down_bytes=round(whole.down_bytes * share),
            up_bytes=round(whole.up_bytes * share),
        )

    def __str__(self) -> str:
        return f"{super().__str__()}, charged by the share that trains"


def last_layers(submodels: Submodels) -> list[tuple[float, Spec]]:
    """Return all submodels that train only the last layers, each with its share of the trained parameters, largest first."""
    names, full = submodels.parameter_names, last_fraction(submodels, 1.0)
    sizes = [entry.numel for entry in submodels.layout(full).entries if entry.name in names]
    ends = [num_values / sum(sizes) for num_values in accumulate(sizes[::-1])]
    specs = dict.fromkeys(last_fraction(submodels, share) for share in reversed(ends))
    return [(_trained_share(submodels, spec), spec) for spec in specs if _num_trained(submodels, spec)]


@dataclass(frozen=True)
class Timely(Select):
    """Rule that gives each client as many epochs, or as many of the last layers, as it can train within a round.

    A round is so long (T_k) that the share ``participation`` of its clients can train and send the whole model in time
    (Algorithms 1, 2). A faster client trains more epochs (E_c), a slower one a smaller share of the parameters
    (alpha_c, Algorithm 3).

    Times are predicted from the client's device profile, and scaled by the ratio of measured to predicted time of its
    last task. So a device that has slowed down gets less work in its next round.

    Attributes:
        participation: share k of the round's clients that should finish in time.
        adaptive: whether the workload follows measured times; False = a client keeps the workload of its first round
            (Fig. 7).
        layers: rule for choosing layers: share = the last layers with at most the share alpha_c of the parameters, as
            in the paper; time = as many of these as are predicted to be trained and sent within T_k. The two differ
            because frozen layers still run forward and are still received.
        cut: way to reduce a slow client's work: layers = train only the last layers of the whole model, as in the
            paper; width = train all layers of a narrower model, as wide as T_k allows.
        slack: share of T_k by which a client may be predicted to be late and still train the whole model; the trigger
            `Interval` needs the same value.
        most_slack: largest slack, where that follows measured times; None = it never changes.
    """

    participation: float = 0.5
    adaptive: bool = True
    layers: Layers = "time"
    cut: Cut = "layers"
    slack: float = 0.0
    most_slack: float | None = None

    def __post_init__(self) -> None:
        fraction("participation", self.participation)
        if not 0 <= self.slack < math.inf:
            raise BadInput(f"slack is {self.slack}: give 0 or more, a share of the round's length")
        if self.most_slack is not None and not self.slack < self.most_slack < math.inf:
            raise BadInput(
                f"most_slack is {self.most_slack}, but slack is {self.slack:g}: give more, or null to leave slack as it is"
            )
        if self.most_slack is not None and not self.adaptive:
            raise BadInput(
                "most_slack is given, but adaptive is false, so that no times are measured: leave most_slack out"
            )
        for name, choices in (("layers", Layers), ("cut", Cut)):
            one_of(name, getattr(self, name), choices)
        if self.cut == "width":
            refuse_unused("cut is 'width', and every layer trains", layers=(self.layers, "time"))

    # ---- reports, and the interval T_k computed from them ----

    def on_round_start(self, out: Sequence[ClientInfo], fleet: SelectContext) -> None:
        """Set the length of the round from the times of all its clients, including those still at work."""
        fleet.state.memory.of(TimelyMemory).T_k = interval(
            [self.report(client, fleet).total_s for client in out], self.participation
        )

    def on_update(self, client: ClientInfo, assignment: Assignment, seconds: float, fleet: SelectContext) -> None:
        """Update the client's ratio of measured to predicted time from its task."""
        ratio = fleet.time_ratio(client, assignment, seconds) if self.adaptive else None
        if ratio is None:
            return
        memory = fleet.state.memory.of(TimelyMemory)
        if self.most_slack is not None and client.id in memory.ratio:
            memory.late.append(ratio / memory.ratio[client.id] - 1)
        memory.ratio[client.id] = ratio

    def report(self, client: ClientInfo, fleet: SelectContext) -> TimeReport:
        """Estimate the seconds that a client needs to train and to transfer the model, from its device and its last task."""
        time, ratio = fleet.task_time(client, Work()), self._ratio(client, fleet)
        return TimeReport(time.compute_s * ratio, (time.down_s + time.up_s) * ratio)

    def _ratio(self, client: ClientInfo, fleet: SelectContext) -> float:
        return float(fleet.state.memory.of(TimelyMemory).ratio.get(client.id, 1.0))

    # ---- assign work ----

    def __call__(self, client: ClientInfo, fleet: SelectContext) -> Work:
        """Assign E_c units of work on as many layers as alpha_c allows; raise `BadInput` if not even one fits the memory."""
        fixed = fleet.state.memory.of(TimelyMemory).fixed
        # memory may be less than in the first round, on another device or after a task that ran out of it
        if client.id in fixed and (not fleet.rules.follows_memory or fleet.fits(client, fixed[client.id][1])):
            num_units, spec = fixed[client.id]
            return self._work(num_units, spec, fleet)
        target = workload(fleet.state.memory.of(TimelyMemory).T_k, self.report(client, fleet))
        work = self._trained(client, target, fleet)
        if not self.adaptive:
            fixed[client.id] = (target.num_units, work.spec)
        return work

    def _trained(self, client: ClientInfo, target: Workload, fleet: SelectContext) -> Work:
        """Assign as many of the model's last layers as all limits allow, at least the last one.

        The limits are the share alpha_c, the memory and, with ``layers: time``, the interval T_k.
        """
        memory = fleet.state.memory.of(TimelyMemory)
        tolerance = SLACK + (self.slack if memory.slack is None else memory.slack)
        limit_s = memory.T_k * tolerance / self._ratio(client, fleet)

        def may(layers: tuple[float, Spec]) -> bool:
            share, spec = layers
            in_time = (
                self.layers == "share" or fleet.cost_s(client, self._work(target.num_units, spec, fleet)) <= limit_s
            )
            return share <= target.share * tolerance and in_time and fleet.fits(client, spec)

        candidates = self._submodels(fleet)
        first = 0 if may(candidates[0]) else bisect_left(candidates, True, hi=len(candidates) - 1, key=may)
        spec = candidates[first][1]
        if not fleet.fits(client, spec):
            raise BadInput(self._problem(client, fleet))
        return self._work(target.num_units, spec, fleet)

    def _submodels(self, fleet: SelectContext) -> list[tuple[float, Spec]]:
        """List the submodels that clients may get, largest first, each with the least alpha_c that permits it; cached."""
        submodels = fleet.state.submodels
        if "submodels" not in fleet.cache:
            if self.cut == "layers":
                candidates = last_layers(submodels)
            else:
                candidates = [(0.0, leading(submodels.axes, width)) for width in reversed(steps(submodels.axes))]
            fleet.cache["submodels"] = candidates
        cached: list[tuple[float, Spec]] = fleet.cache["submodels"]
        return cached

    def _work(self, num_units: int, spec: Spec, fleet: SelectContext) -> Work:
        training = fleet.training
        if num_units == 1:
            return Work(spec)
        if training.num_steps is not None:
            return Work(spec, num_steps=num_units * training.num_steps)
        return Work(spec, num_epochs=num_units * (training.num_epochs or 1))

    @property
    def names_trained(self) -> bool:
        """Whether each client trains last layers of its own; see `Select.names_trained`."""
        return self.cut == "layers"

    # ---- when a client joins or leaves ----

    def on_join(self, client: ClientInfo, fleet: SelectContext) -> None:
        """Delete the client's measured ratio, since it may have joined from another device."""
        fleet.state.memory.of(TimelyMemory).ratio.pop(client.id, None)

    def forget(self, client: ClientInfo, fleet: SelectContext) -> None:
        """Do nothing: what is cached depends on no client."""

    def check(self, fleet: SelectContext) -> list[str]:
        """Return an error message for each client whose memory is too small even to train the last layer only."""
        least = self._submodels(fleet)[-1][1]
        return [self._problem(c, fleet) for c in fleet.clients.values() if not fleet.fits(c, least)]

    def notes(self, fleet: SelectContext) -> list[str]:
        """Return a warning if the model has no layers or units that slow clients could leave out."""
        if self.cut == "width":
            return uncut(fleet.state.submodels, "narrow")
        if len(self._submodels(fleet)) > 1:
            return []
        return [
            Warn("the model has only one layer that trains, so every client trains all of it: slow clients are late")
        ]

    def _problem(self, client: ClientInfo, fleet: SelectContext) -> str:
        need = fleet.cost(self._submodels(fleet)[-1][1]).peak_bytes
        what = "training the last layer alone" if self.cut == "layers" else "the narrowest submodel"
        return (
            f"client {client.id}: memory_bytes is {client.profile.memory_bytes:.4g}, {what} needs "
            f"{need:.4g}: raise memory_bytes, or use a smaller batch or model"
        )

    def __str__(self) -> str:
        what = "last layers" if self.cut == "layers" else "width"
        return f"epochs and {what} by {'time' if self.adaptive else 'the first time'}" + (
            "" if self.layers == "time" else ", layers by share alone"
        )


@dataclass(frozen=True, slots=True)
class Interval(Trigger):
    """Rule for the time of a merge: at the end of the round's length T_k, or earlier if all clients have reported.

    `Timely` sets T_k. If no update has arrived by then, the first one is merged when it arrives. A client that reports
    late is part of the next merge, and gets new work after it.

    Attributes:
        slack: share of T_k by which the merge may be delayed while clients are still at work.
        most_slack: largest slack, if it is adapted so that four fifths of the delayed tasks arrive in time; `Timely`
            must get the same value. None = the slack never changes.
    """

    slack: float = 0.0
    most_slack: float | None = None
    restart: ClassVar[Restart] = "merge"

    def due(self, waiting: TriggerContext) -> bool:
        """Check whether to merge now: the round's time is over, or all clients have reported."""
        return waiting.num_active == 0 or waiting.now_s >= self.wake_at(waiting)

    def wake_at(self, waiting: TriggerContext) -> float:
        """Return the time at which the round ends, slack included, in seconds of the run's clock."""
        memory = waiting.memory.of(TimelyMemory)
        return waiting.opened_s + memory.T_k * (SLACK + (self.slack if memory.slack is None else memory.slack))

    def on_update(self, assignment: Assignment, num_active: int, state: GlobalState) -> Adjusted | None:
        """Adapt the slack (share by which a round may be longer) so that four in five recent tasks would have been in time."""
        memory = state.memory.of(TimelyMemory)
        if self.most_slack is None or len(memory.late) < self._num_tasks(state.num_clients):
            return None
        measured = sorted(memory.late)[math.ceil(_IN_TIME * len(memory.late)) - 1]
        memory.late.clear()
        before = self.slack if memory.slack is None else memory.slack
        wanted = min(max(measured, self.slack), self.most_slack)
        if abs(wanted - before) <= max(_CHANGE, _CHANGE_SHARE * max(wanted, before)):
            return None
        memory.slack = wanted
        return Adjusted("slack", before, wanted, measured, self.slack, "the share of its time by which a task is late")

    def _num_tasks(self, num_clients: int) -> int:
        return min(max(_TASKS_EACH * num_clients, _LEAST_TASKS), _MOST_TASKS)

    def __str__(self) -> str:
        slack = f" and {self.slack:.3g} of it" if self.slack else ""
        most = "" if self.most_slack is None else f", up to {self.most_slack:.3g} more where tasks are late"
        return f"the interval T_k{slack}{most}"

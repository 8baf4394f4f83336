"""DiLoCo (Douillard et al., "DiLoCo: Distributed Low-Communication Training of Language Models", 2023), in rounds or not.

Each worker makes H steps of AdamW from the global model. The mean of their deltas is the gradient of an outer Nesterov step
(Algorithm 1): ``m <- beta m + Delta; theta <- theta + eta (Delta + beta m)``, eta = 0.7, beta = 0.9.

The asynchronous form is that of Liu et al., "Asynchronous Local-SGD Training for Language Modeling", 2024: *delayed Nesterov*
(Algorithm 3, `raafl.parts.merge.nesterov.DelayedNesterov`) at each arrival, and *dynamic local updates* (`steps` "speed"), where
a slow worker makes fewer steps. The quorum with a grace window, and its weights by tokens, are those of Douillard et al.,
"Decoupled DiLoCo for Resilient Distributed Pre-training", 2026; their formula is taken from a second source, without fragments.

Choices that the papers leave open, and this does:
- H is `train.num_steps`; the inner optimizer is the model's own.
- A client keeps nothing between tasks, so the inner optimizer starts anew in each (as in the authors' public toy of the
  asynchronous form). `inner_state` "kept" is DiLoCo's own: the moments of AdamW travel with the task, three times the bytes.
- `outer` "heloco" corrects deltas by their angle to the momentum (`HeLoCo`); experimental.
- Submodels: means, momentum and N are over the updates that cover an element (`raafl.parts.merge.nesterov`).
- Algorithm 3's c, which spreads the momentum over the N updates, is 0, the paper's default.
- A client that is lost takes part again when it returns, from the model as it is then.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Literal, get_args

import torch
from torch import Tensor, nn

from raafl.algorithm import (
    Algorithm,
    AllReported,
    Assignment,
    BadInput,
    ClientInfo,
    EachArrival,
    FlatTensors,
    Full,
    GlobalState,
    Hook,
    Kind,
    Layout,
    Local,
    Merge,
    MergeMemory,
    MinRatio,
    Sample,
    Select,
    SelectContext,
    Spec,
    Staleness,
    Submodels,
    Task,
    Traits,
    Trigger,
    Update,
    Work,
    at_least,
    one_of,
    positive,
)
from raafl.core.local import value_of
from raafl.core.payload import Bundles
from raafl.errors import refuse_unused
from raafl.parts.merge.mean import Accumulator, trained_values
from raafl.parts.merge.nesterov import DelayedNesterov, Nesterov, NesterovMemory, Weights
from raafl.parts.merge.wrapped import Wrapped
from raafl.parts.select.submodels import WrappedSelect

When = Literal["all", "quorum", "each"]
Steps = Literal["equal", "speed"]
InnerState = Literal["new", "kept"]
Outer = Literal["nesterov", "heloco"]


def diloco(
    outer_lr: float = 0.7,
    outer_momentum: float = 0.9,
    trigger: When = "all",
    quorum: float = 0.5,
    grace_s: float = 0.0,
    delay: int | None = None,
    steps: Steps = "equal",
    least_steps: int = 5,
    weights: Weights = "equal",
    staleness: Kind = "constant",
    staleness_a: float = 0.5,
    inner_state: InnerState = "new",
    outer: Outer = "nesterov",
    cohort: int | None = None,
    concurrency: int | None = None,
    submodel: Select | None = None,
) -> Algorithm:
    """Return DiLoCo: clients make many local steps, and the server steps along their changes with Nesterov momentum.

    Args:
        outer_lr: outer learning rate (eta).
        outer_momentum: outer momentum (beta); 0 = none.
        trigger: time of a merge: all (when all clients of the round have reported), quorum (when a share has, and a
            wait is over) or each (at each arrival, with delayed Nesterov momentum).
        quorum: share of the clients at work that must have reported, from 0 to 1; for trigger quorum.
        grace_s: seconds for which a merge waits for further updates: for trigger quorum, after the quorum has reported;
            for trigger each, after the first arrival, so that clients that finish together get the same model.
        delay: number of updates (N) after which the momentum is applied once, for trigger each; the updates between are
            added without it. 1 = at each arrival, the naive form; None = the number of clients, the least otherwise.
        steps: number of local steps of a client: equal (H for all) or speed (dynamic local updates: H for the fastest,
            fewer for slower clients).
        least_steps: smallest number of local steps of a task; for steps speed.
        weights: weight of an update: equal; samples (its client's |D_n|); or tokens (tokens x tokens / steps). For
            triggers all and quorum.
        staleness: form of the function s(.) by which late updates count less: constant, polynomial or hinge.
        staleness_a: parameter a of the polynomial and hinge functions.
        inner_state: state of the clients' Adam or AdamW: new = it starts anew in each task; kept = it continues from
            the client's last task, for which its moments travel with each task and are stored on the server.
        outer: rule of the server's step: nesterov (delayed for trigger each), or heloco (experimental), which corrects
            the mean change by its angle to the momentum.
        cohort: number of clients in a round, or at work, drawn uniformly; None = all.
        concurrency: largest number of clients that work at the same time; None = no limit.
        submodel: rule that chooses each client's submodel, such as `raafl.parts.RateSelect`; None = the whole model for
            every client.
    """
    for name, value, allowed in (
        ("trigger", trigger, When),
        ("steps", steps, Steps),
        ("inner_state", inner_state, InnerState),
        ("outer", outer, Outer),
    ):
        one_of(name, value, allowed)
    if steps == "equal":
        refuse_unused("steps is 'equal'", least_steps=(least_steps, 5))
    stale = Staleness(staleness, staleness_a)
    select: Select = submodel or Full()
    if outer == "heloco":
        refuse_unused("outer is 'heloco', whose merges are whole steps", delay=(delay, None))
        merge: Merge = HeLoCo(outer_lr, outer_momentum, weights, stale)
    else:
        merge = _merge(trigger, outer_lr, outer_momentum, delay, weights, stale)
    return Algorithm(
        name="diloco",
        paper="Douillard et al. 2023",
        sample=Sample(cohort, concurrency),
        select=BySpeed(select, least_steps) if steps == "speed" else select,
        local=KeptInner() if inner_state == "kept" else Local(),
        trigger=_trigger(trigger, quorum, grace_s),
        merge=WithInner(merge) if inner_state == "kept" else merge,
    )


def _trigger(when: When, quorum: float, grace_s: float) -> Trigger:
    if when == "quorum":
        return MinRatio(quorum, grace_s)
    refuse_unused(f"trigger is '{when}'", quorum=(quorum, 0.5))
    if when == "each":
        return MinRatio(0.0, grace_s) if grace_s else EachArrival()
    refuse_unused(f"trigger is '{when}'", grace_s=(grace_s, 0.0))
    return AllReported()


def _merge(when: When, lr: float, beta: float, delay: int | None, weights: Weights, stale: Staleness) -> Merge:
    if when == "each":
        refuse_unused("trigger is 'each', which moves by 1/N of each update", weights=(weights, "equal"))
        return DelayedNesterov(lr, beta, staleness=stale, every=delay)
    refuse_unused(f"trigger is '{when}', whose merges are whole steps", delay=(delay, None))
    if when == "all":
        refuse_unused("in a round nothing is late", staleness=(stale.kind, "constant"))
    return Nesterov(lr, beta, weights, stale)


MOMENTS = ("exp_avg", "exp_avg_sq")
"""Bundles, and entries of `torch.optim.Adam`'s state: first and second moment of each parameter."""
STEPS = "inner_steps"
"""Bundle of one number: the steps that the client's optimizer has made."""

MOST_STEPS = 2**24
"""Largest number of steps that float32 counts exactly; beyond it the bias correction is 1 in any case."""


@dataclass(frozen=True)
class KeptInner(Local):
    """Local training in which Adam or AdamW continues with the moments from the end of the client's previous task.

    A client stores nothing between tasks. So the moments travel with each task in both directions and are stored on the
    server, two numbers for each parameter. A client that was lost gets them again when it returns.
    """

    down: ClassVar[tuple[str, ...]] = (*MOMENTS, STEPS)
    up: ClassVar[tuple[str, ...]] = (*MOMENTS, STEPS)

    def layout_of(self, submodels: Submodels, bundle: str, spec: Spec | None) -> Layout | None:
        """Return names and shapes of the extra tensors in ``bundle``, which has either the number of steps or a moment.

        For a moment, None is returned, which stands for the names and shapes of the trained parameters.
        """
        return Layout.pack([("steps", (1,), torch.float32)]) if bundle == STEPS else None

    @property
    def traits(self) -> Traits:
        """What this training can do, needs, and leaves out."""
        return replace(super().traits, captures=(), sends_roots=True)

    def hook(self, task: Task) -> Hook:
        """Return the hook that loads the moments at the start of a task and returns them at its end."""
        return _KeptMoments(task)

    def __str__(self) -> str:
        return f"{super().__str__()}, the optimizer's moments kept"


def adam_of(task: Task) -> torch.optim.Adam:
    """Return the task's optimizer after a check that it has Adam's moments, which are kept from task to task.

    Raises:
        BadInput: the module's optimizer is not Adam or AdamW.
    """
    if not isinstance(task.optimizer, torch.optim.Adam) or task.optimizer.defaults["amsgrad"]:
        raise BadInput(
            f"inner_state is 'kept', but the model's optimizer is {type(task.optimizer).__name__}, whose state is not known: "
            "use torch.optim.AdamW or Adam without amsgrad, or inner_state 'new'"
        )
    return task.optimizer


def count_of(steps: float, optimizer: torch.optim.Optimizer, device: torch.device) -> Tensor:
    """Return Adam's step count as a tensor; on the parameters' device for fused and capturable Adam, else on the CPU."""
    group = optimizer.param_groups[0]
    return torch.tensor(steps, device=device if group.get("fused") or group.get("capturable") else "cpu")


class _KeptMoments(Hook):
    """Training hook that loads Adam's state from the client's previous task, and sends back how the task changed it."""

    def __init__(self, task: Task) -> None:
        """Load the received moments into the optimizer; raise `BadInput` unless it is Adam or AdamW."""
        super().__init__(task)
        optimizer = adam_of(task)
        self._start = min(value_of(task.down[STEPS]["steps"], 1.0), MOST_STEPS)
        for name, parameter in self._carried():
            first, second = (task.down[moment][name].to(parameter.device, copy=True) for moment in MOMENTS)
            # lossy compression can make a second moment slightly negative, of which Adam would take the square root
            optimizer.state[parameter] = {
                "step": count_of(self._start, optimizer, parameter.device),
                MOMENTS[0]: first,
                MOMENTS[1]: second.clamp_min_(0.0),
            }

    def _carried(self) -> list[tuple[str, nn.Parameter]]:
        named = self.task.module.named_parameters()
        return [(name, parameter) for name, parameter in named if name in self.task.down[MOMENTS[0]]]

    def finish(self) -> dict[str, Any]:
        """Write the optimizer's step count and the changes of its moments into the update's bundles."""
        steps = []
        for name, parameter in self._carried():
            state: Mapping[str, Tensor] = self.task.optimizer.state[parameter]
            steps.append(state["step"])
            for moment in MOMENTS:
                change = state[moment] - self.task.down[moment][name].to(state[moment].device)
                self.task.up[moment][name].copy_(change)
        # reduce on the GPU first, so that the host waits for one value only
        steps = [torch.stack(steps).max()] if steps and steps[0].is_cuda else steps
        self.task.up[STEPS]["steps"].fill_(max([0.0, *(float(step) - self._start for step in steps)]))
        return {}


@dataclass(frozen=True)
class WithInner(Wrapped):
    """Merge that also stores the state of each client's optimizer: its moments and its number of steps."""

    by_client: ClassVar[bool] = True

    def personalize(self, state: GlobalState, client: int, spec: Spec, values: FlatTensors, bundles: Bundles) -> None:
        """Put the client's stored optimizer state (moments and number of steps) into the extra tensors that it will receive.

        In a client's first task all of it is 0.
        """
        for name, bundle in bundles.items():
            own = state.clients.find(name, client)
            if own is None:
                bundle.zero_()
            elif name == STEPS:
                bundle.copy_(own)
            else:
                state.submodels.plan(spec, "trained", "trained").gather(own, bundle)
        super().personalize(state, client, spec, values, bundles)

    def reject_reason(self, state: GlobalState, update: Update, spec: Spec, staleness: int) -> str | None:
        """Refuse an update with the reason "bad-inner" if the client's optimizer reports an impossible number of steps."""
        made = float(update.bundles[STEPS]["steps"])
        return super().reject_reason(state, update, spec, staleness) if 0 <= made <= MOST_STEPS else "bad-inner"

    def receive(self, state: GlobalState, update: Update, spec: Spec, staleness: int) -> None:
        """Add the reported changes to the client's stored optimizer state, and merge the update by the algorithm's own rule."""
        plan = state.submodels.plan(spec, "trained", "trained")
        for name in MOMENTS:
            own = state.clients.of(name, update.client, plan.full_layout, state.values.device)
            plan.add_(own, update.bundles[name], 1.0)
        steps = update.bundles[STEPS]
        state.clients.of(STEPS, update.client, steps.layout)["steps"].add_(steps["steps"].cpu())
        super().receive(state, update, spec, staleness)

    def notes(self, state: GlobalState, num_clients: int) -> list[str]:
        """Return messages for the user, such as the memory and traffic that storing the optimizers' moments costs."""
        each = len(MOMENTS) * state.submodels.layout(part="trained").num_bytes
        return [
            *super().notes(state, num_clients),
            f"inner_state kept: a task of the whole model sends {each:,} more bytes each way, and the server stores "
            f"{num_clients * each:,} bytes in memory and in each checkpoint, for {num_clients} clients",
        ]

    def __str__(self) -> str:
        return f"{self.inner}, each client's moments kept"


# Correct each tensor's mean delta by its angle to the outer momentum, before the outer step: HeLoCo. Experimental.
#
# Al Asif et al., "HeLoCo: Efficient asynchronous low-communication training under data and device heterogeneity", 2026. The
# formulas come from a secondary source, and the constants c_ok, k_s, beta_max, k_d and kappa are raafl's, not the paper's.

_TINY = 1e-12


@dataclass(frozen=True)
class HeLoCo(Nesterov):
    """Outer step of the server along the clients' mean change, which is first turned towards the momentum if the two disagree.

    For each parameter tensor theta, Delta is the clients' mean change and m the momentum. c is the cosine of the angle
    between the two, and ``conf = |Delta| / (|Delta| + kappa |m|)``. Three cases:

    - ``c >= c_ok``, about the same direction: Delta stays as it is;
    - ``c < 0``, opposed directions: the share ``min(k_s (-c) conf, beta_max)`` of Delta's component against m is removed;
    - otherwise Delta keeps its length and takes the direction of ``(1 - l) Delta / |Delta| + l m / |m|``, with
      ``l = min(k_d (1 - c) conf, 1)``.

    Then ``m <- mu m + (1 - mu) Delta`` and ``theta <- theta + eta (Delta + mu m)``, with the momentum's decay mu and
    the outer learning rate eta. Elements that no update trains stay unchanged.

    Attributes:
        aligned: cosine from which on a change stays as it is (c_ok).
        shrink: strength with which the component against the momentum is removed (k_s).
        most_shrunk: largest share of that component that is removed (beta_max), 0 to 1.
        turn: strength with which a change is turned towards the momentum (k_d).
        trust: weight of the momentum's length relative to the change's (kappa).
    """

    aligned: float = 0.5
    shrink: float = 1.0
    most_shrunk: float = 1.0
    turn: float = 0.5
    trust: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.beta == 0:
            raise BadInput(
                "outer_momentum is 0, but outer 'heloco' corrects updates by the momentum: give a number above 0 and below 1"
            )
        for name, value in (("shrink", self.shrink), ("turn", self.turn), ("trust", self.trust)):
            at_least(name, value, 0)
        if not 0 <= self.most_shrunk <= 1:
            raise BadInput(f"most_shrunk is {self.most_shrunk}: give a number from 0 to 1")

    def apply(self, state: GlobalState) -> None:
        """Move the global model along the clients' mean change, corrected by its angle to the momentum."""
        memory = state.memory.of(NesterovMemory)
        sums = Accumulator(state, memory)
        is_whole = sums.common is not None and sums.common.is_full
        count = None if is_whole else sums.cover()
        for name, theta in trained_values(state).items():
            weight = sums.weight if count is None else count[name]
            where = weight > 0 if isinstance(weight, Tensor) else None
            delta = sums.total[name] / (weight.clamp_min(_TINY) if isinstance(weight, Tensor) else weight)
            # running statistics, such as batch norm's means, take the mean delta without momentum
            if name not in state.submodels.parameter_names:
                theta.add_(delta)
                continue
            m = memory.momentum(state)[name]
            seen = m if where is None else torch.where(where, m, 0.0)
            delta = self.corrected(delta, seen)
            seen = self.beta * seen + (1 - self.beta) * delta
            m.copy_(seen if where is None else torch.where(where, seen, m))
            theta.add_(delta + self.beta * seen, alpha=self.lr)
        sums.clear()

    def corrected(self, delta: Tensor, m: Tensor) -> Tensor:
        """Return the mean change ``delta`` of a tensor, corrected by its angle to the momentum ``m``.

        Args:
            delta: mean change of the tensor over the clients; 0 where no client has trained.
            m: momentum of the same shape; 0 at the same elements.
        """
        length, own = _length(delta), _length(m)
        if length < _TINY or own < _TINY:
            return delta
        cosine = float((delta * m).sum()) / (length * own)
        if cosine >= self.aligned:
            return delta
        confidence = length / (length + self.trust * own)
        direction = m / own
        if cosine < 0:
            share = min(self.shrink * -cosine * confidence, self.most_shrunk)
            return delta - share * cosine * length * direction
        share = min(self.turn * (1 - cosine) * confidence, 1.0)
        turned = (1 - share) / length * delta + share * direction
        return turned * (length / _length(turned))

    def __str__(self) -> str:
        return f"{super().__str__()} as an average, deltas corrected towards it (HeLoCo, experimental)"


def _length(tensor: Tensor) -> float:
    return float(torch.linalg.vector_norm(tensor))


Table = Literal["measured", "predicted"]


@dataclass
class SpeedMemory(MergeMemory):
    """State of `BySpeed`: seconds that one local step takes on each client that is present."""

    key = "by_speed"
    # measured seconds of one local step in the client's latest submodel, by client id; only clients with a finished
    # task
    measured: dict[int, float] = field(default_factory=dict)
    # predicted seconds of one local step, by client id; only clients that have finished no task yet
    predicted: dict[int, float] = field(default_factory=dict)
    # measured divided by predicted seconds of the client's latest task, by client id
    ratio: dict[int, float] = field(default_factory=dict)
    # ratio of the task that finished last, whoever did it; it corrects predictions for clients without a ratio
    latest: float = 1.0


@dataclass(frozen=True)
class BySpeed(WrappedSelect):
    """Wrapper of a select part (choice of submodels) that gives fast clients more local steps.

    This is called dynamic local updates (Liu et al. 2024, section 5). A client whose step takes s_i seconds makes
    ``floor(H min_j s_j / s_i)`` steps, but at least `least`. H is `train.num_steps`, and the minimum is over all clients
    that are present. s_i refers to the submodel that the wrapped part selects, so that a client with a narrower one
    makes more steps. s_i is predicted from the device profile, and scaled by the ratio of measured to predicted time of
    the client's last task.

    Attributes:
        least: smallest number of steps in a task.
    """

    least: int = 5

    def __post_init__(self) -> None:
        positive("least_steps", self.least)

    def __call__(self, client: ClientInfo, fleet: SelectContext) -> Work:
        """Assign the work that the wrapped select part chooses, but with local steps in proportion to the client's speed."""
        work = super().__call__(client, fleet)
        most = work.num_steps or fleet.training.num_steps
        if most is None or work.num_epochs is not None:
            return work
        own_s = self._record(client, work, fleet)
        share = _fastest_s(fleet) / own_s if own_s > 0 else 1.0
        return replace(work, num_steps=min(max(math.floor(most * share + 1e-9), self.least), most))

    def on_join(self, client: ClientInfo, fleet: SelectContext) -> None:
        """Predict the client's speed, and delete its measured speed, since it may have joined from another device."""
        super().on_join(client, fleet)
        fleet.state.memory.of(SpeedMemory).ratio.pop(client.id, None)
        self._record(client, Work(), fleet)

    def on_loss(self, client: ClientInfo, fleet: SelectContext) -> None:
        """Delete the record of the lost client's speed."""
        super().on_loss(client, fleet)
        fleet.state.memory.of(SpeedMemory).ratio.pop(client.id, None)
        for table in get_args(Table):
            _forget(table, client.id, fleet)

    def on_update(self, client: ClientInfo, assignment: Assignment, seconds: float, fleet: SelectContext) -> None:
        """Update the client's ratio of measured to predicted time, from the task that it has just finished.

        Not with `overlap`: an update then waits until the one before is sent, which is no slowness of the client's steps.
        """
        super().on_update(client, assignment, seconds, fleet)
        if fleet.overlap and fleet.rules.predicts_overlapped:
            return
        ratio = fleet.time_ratio(client, assignment, seconds)
        if ratio is not None:
            memory = fleet.state.memory.of(SpeedMemory)
            memory.latest = memory.ratio[client.id] = ratio

    def check(self, fleet: SelectContext) -> list[str]:
        """Return the wrapped select part's problems, and one if `train.num_steps`, the number of local steps, is not set."""
        if fleet.training.num_steps is not None:
            return super().check(fleet)
        return [
            *super().check(fleet),
            "train.num_steps is null, but steps by speed need it as the number of steps of the fastest client: "
            "give it, such as 500",
        ]

    def _record(self, client: ClientInfo, work: Work, fleet: SelectContext) -> float:
        """Store and return a client's seconds for one local step, without the fixed costs of a task."""
        one_s, two_s = (fleet.task_time(client, replace(work, num_steps=num)).compute_s for num in (1, 2))
        step_s, memory = two_s - one_s, fleet.state.memory.of(SpeedMemory)
        ratio = memory.ratio.get(client.id)
        if ratio is None:
            _forget("measured", client.id, fleet)
            _set("predicted", client.id, step_s, fleet)
            return step_s * memory.latest
        _forget("predicted", client.id, fleet)
        _set("measured", client.id, step_s * ratio, fleet)
        return step_s * ratio

    def __str__(self) -> str:
        return f"{self.inner}, steps by speed, at least {self.least}"


def _set(table: Table, client: int, step_s: float, fleet: SelectContext) -> None:
    """Store a client's seconds per step in ``table``, and keep the cached minimum of that table correct."""
    _table(table, fleet)[client] = step_s
    least = fleet.cache.get(f"least {table}")
    if least is not None and step_s < least[1]:
        fleet.cache[f"least {table}"] = (client, step_s)
    elif least is not None and least[0] == client:  # this client was the fastest, and may no longer be
        del fleet.cache[f"least {table}"]


def _forget(table: Table, client: int, fleet: SelectContext) -> None:
    if _table(table, fleet).pop(client, None) is not None:
        fleet.cache.pop(f"least {table}", None)


def _least_s(table: Table, fleet: SelectContext) -> float:
    """Return the least seconds per step in ``table``; infinite if it is empty.

    The minimum is cached, since a search over a large fleet for each task would be slow.
    """
    found, key = _table(table, fleet), f"least {table}"
    if found and key not in fleet.cache:
        client = min(found, key=found.__getitem__)
        fleet.cache[key] = (client, found[client])
    return float(fleet.cache[key][1]) if found else math.inf


def _fastest_s(fleet: SelectContext) -> float:
    """Return the seconds of one local step on the fastest present client, measured or predicted."""
    return min(_least_s("measured", fleet), _least_s("predicted", fleet) * fleet.state.memory.of(SpeedMemory).latest)


def _table(table: Table, fleet: SelectContext) -> dict[int, float]:
    memory = fleet.state.memory.of(SpeedMemory)
    return memory.measured if table == "measured" else memory.predicted

"""Streaming DiLoCo (Douillard et al., "Streaming DiLoCo with overlapping communication", 2025): a fragment at a time.

Workers train on without being reset to the global model. Of P fragments of the model one is synchronised every H/P inner steps: its
outer gradient ``Delta_p``, the difference to the values that the worker received last of it, is averaged, and an outer Nesterov
step moves the global fragment. The worker mixes that in tau steps later: ``theta_p <- alpha theta_p + (1 - alpha) theta_p global``.

Choices that the paper leaves open, or that differ from it here:
- A task is H/P steps, so H is ``fragments`` times `train.num_steps`. Fragments go out at its end, and come in with the next task.
- What a worker holds stays on the client (`raafl.compression.streams`): its parameters, the values that it received last, and with
  `inner_state` "kept" AdamW's moments. A client that joins, or returns, gets the whole model once and begins from it.
- The paper overlaps a transfer with tau steps, and then waits for it. So it is here with `overlap`: a client makes the first tau
  steps of its next task (`Traits.steps_ahead`) while its update and the merged fragment travel. tau is `sync_delay`, at most the
  steps of a task, H/P, so that a fragment is mixed in before the client sends its next one. Without `overlap` the arithmetic is the
  same, but a task starts once its fragment has arrived.
- alpha and tau are as torchft and others describe the method; the paper's text was not at hand. alpha = 0 takes the global values,
  alpha = 1 would never synchronise. With one fragment, alpha 0 and tau 0 it is `diloco`.
- The wire is `compress`: bf16 or int8; the paper has 4 bits.
- `trigger` "each" is raafl's: each client goes through the fragments by itself, and delayed Nesterov
  (`raafl.parts.merge.nesterov.DelayedNesterov`) counts N = clients times fragments.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Literal

import torch
from torch import nn

from raafl.algorithm import (
    FULL,
    Algorithm,
    Assignment,
    ClientInfo,
    FlatTensors,
    Full,
    GlobalState,
    Hook,
    Layout,
    Local,
    Sample,
    SelectContext,
    Spec,
    Submodels,
    Task,
    Traits,
    Update,
    Work,
    at_least,
    fraction,
    one_of,
    positive,
)
from raafl.algorithms.diloco import MOMENTS, MOST_STEPS, STEPS, BySpeed, InnerState, Steps, adam_of, count_of
from raafl.core.local import value_of
from raafl.core.payload import Way
from raafl.core.state import OneValue
from raafl.errors import refuse_unused
from raafl.parts.merge.nesterov import DelayedNesterov, Nesterov
from raafl.parts.merge.wrapped import Wrapped
from raafl.parts.select.submodels import WrappedSelect
from raafl.parts.trigger import all_or_each
from raafl.submodel import SpecError

Pattern = Literal["strided", "sequential"]

UP, DOWN = "up", "down"
"""Keys in `Work.extra`: index of the fragment that the task sends, and of the one that it receives; no "down" = the whole model."""


@dataclass(frozen=True)
class Fragments:
    """Division of a model into P fragments, each of whole layers (section 2.1 of the paper).

    A layer is a block of the model, such as a transformer's, or another module that has tensors of its own. There are
    at most as many fragments as layers.

    Attributes:
        num: number of fragments (P).
        pattern: assignment of layers to fragments: strided = layer l is in fragment l mod P; sequential = neighbouring
            layers, in fragments of about equal size.
    """

    num: int = 4
    pattern: Pattern = "strided"

    def __post_init__(self) -> None:
        positive("fragments", self.num)
        one_of("pattern", self.pattern, Pattern)

    def names(self, submodels: Submodels) -> tuple[frozenset[str], ...]:
        """Return the names of the tensors in each fragment: trained parameters, and the running statistics of their layers."""
        return submodels.cached("fragments", self, lambda: self._names(submodels))

    def _names(self, submodels: Submodels) -> tuple[frozenset[str], ...]:
        layers: dict[str, list[str]] = {}
        sizes: dict[str, int] = {}
        for entry in submodels.layout(part="trained").entries:
            layer = _layer(entry.name)
            layers.setdefault(layer, []).append(entry.name)
            sizes[layer] = sizes.get(layer, 0) + entry.numel
        num = min(self.num, len(layers))
        turns = [i % num for i in range(len(layers))] if self.pattern == "strided" else _runs(list(sizes.values()), num)
        found: list[list[str]] = [[] for _ in range(num)]
        for turn, names in zip(turns, layers.values(), strict=True):
            found[turn] += names
        return tuple(map(frozenset, found))

    def count(self, submodels: Submodels) -> int:
        """Return the number of fragments of this model, at most the number of its layers."""
        return len(self.names(submodels))

    def spec(self, submodels: Submodels, index: int) -> Spec:
        """Return the submodel that trains only one fragment.

        Args:
            submodels: submodels of the model.
            index: number of the fragment, from 0.
        """
        names = self.names(submodels)
        return FULL if len(names) == 1 else Spec.select(trained=names[index] & submodels.parameter_names)

    def names_for_task(self, submodels: Submodels, extra: Mapping[str, Any], key: str) -> frozenset[str] | None:
        """Return the names of the tensors that a task receives or sends; None = those of the whole model.

        Args:
            submodels: submodels of the model.
            extra: the task's settings, with the numbers of its fragments.
            key: `UP` = the fragment that the client sends, `DOWN` = the one that it receives.

        Raises:
            SpecError: there is no such fragment.
        """
        index, names = extra.get(key), self.names(submodels)
        if index is None:
            return None
        if type(index) is not int or not 0 <= index < len(names):
            raise SpecError(
                f"fragment {str(index)[:20]!r} is not one of this model's {len(names)}: give 0 to {len(names) - 1}"
            )
        return names[index]

    def __str__(self) -> str:
        return f"{self.num} {self.pattern} fragments"


def _runs(sizes: Sequence[int], num: int) -> list[int]:
    """Divide consecutive layers into ``num`` non-empty fragments of about equal size.

    ``sizes`` are the layers' sizes; the result has the fragment's number of each layer.
    """
    total, before, turns = sum(sizes), 0, [-1]
    for index, size in enumerate(sizes):
        middle = (2 * before + size) * num // (2 * total)
        turns.append(max(min(middle, turns[-1] + 1), num - len(sizes) + index))
        before += size
    return turns[1:]


def _layer(name: str) -> str:
    """Return the path of the layer that owns a tensor: the numbered block around it, else its module."""
    parts = name.split(".")
    member = next((i for i, part in enumerate(parts) if part.isdigit()), len(parts) - 2)
    return ".".join(parts[: member + 1])


@dataclass
class _TurnMemory(OneValue[dict[int, int]]):
    """State of the select part: the fragment that each present client sends with its latest task, by client id."""

    key = "fragment_turns"
    value: dict[int, int] = field(default_factory=dict)


@dataclass(frozen=True)
class InTurn(WrappedSelect):
    """Rule that chooses which fragment of the model a client sends with its next task, and which one it receives.

    A client receives the fragment that it sent with its last task, now merged with those of other clients. In synchronous
    rounds all clients send the same fragment, t mod P in round t (P fragments). Otherwise each client sends one fragment
    after the other, beginning with the number that is its id.

    Attributes:
        fragments: division of the model.
        in_rounds: whether clients work in synchronous rounds.
    """

    fragments: Fragments = field(default_factory=Fragments)
    in_rounds: bool = True

    def __call__(self, client: ClientInfo, fleet: SelectContext) -> Work:
        """Assign the work that the wrapped select part chooses, with the numbers of the fragments to send and to receive."""
        work, state = super().__call__(client, fleet), fleet.state
        turns, num = state.memory.of(_TurnMemory).value, self.fragments.count(state.submodels)
        last = turns.get(client.id)
        turn = state.version if self.in_rounds else client.id if last is None else last + 1
        turns[client.id] = turn % num
        return replace(work, extra={**work.extra, UP: turn % num, **({} if last is None else {DOWN: last})})

    @property
    def needs_last_update(self) -> bool:
        """Whether a client's next task needs its last one to be complete: yes, it continues from the client's own copy."""
        return True

    def on_update(self, client: ClientInfo, assignment: Assignment, seconds: float, fleet: SelectContext) -> None:
        """Tell the wrapped select part how long a task took, for its estimate of the client's speed.

        With `overlap` it is not told: a client may then begin a task before the server assigns it, so that the time
        from assignment to update is too short.
        """
        if not fleet.overlap:
            super().on_update(client, assignment, seconds, fleet)

    def on_join(self, client: ClientInfo, fleet: SelectContext) -> None:
        """Delete the record of the client's fragment, since a newly joined client has no copy of the model yet."""
        super().on_join(client, fleet)
        fleet.state.memory.of(_TurnMemory).value.pop(client.id, None)

    def on_loss(self, client: ClientInfo, fleet: SelectContext) -> None:
        """Delete the record of the lost client's fragment."""
        super().on_loss(client, fleet)
        fleet.state.memory.of(_TurnMemory).value.pop(client.id, None)

    def __str__(self) -> str:
        return f"{self.inner}, {self.fragments} in turn"


@dataclass(frozen=True)
class ByFragment(Wrapped):
    """Merge that takes one fragment (some layers) of each client's update, and merges it by another rule, ``inner``.

    The server decides which fragment a client sends.

    Attributes:
        fragments: division of the model.
    """

    by_client: ClassVar[bool] = True
    fragments: Fragments = field(default_factory=Fragments)

    def _part(self, state: GlobalState, update: Update) -> tuple[Update, Spec]:
        spec = self.fragments.spec(state.submodels, update.work[UP])
        if spec.is_full:
            return update, spec
        layout = state.submodels.layout(spec, "trained")
        return replace(update, tensors=FlatTensors.empty(layout, update.tensors.device).take_(update.tensors)), spec

    def check(self, state: GlobalState) -> list[str]:
        """Return error messages, such as for running statistics (of batch norm) that belong to no fragment."""
        found = {name for names in self.fragments.names(state.submodels) for name in names}
        covered: set[str] = set()
        for index in range(self.fragments.count(state.submodels)):
            covered |= set(state.submodels.layout(self.fragments.spec(state.submodels, index), "trained").by_name)
        problems = self.inner.check(state)
        if found != covered:
            name = min(found ^ covered)
            problems.append(
                f"'{name}' is in no fragment: use submodel_batch_norm static, or a norm without running statistics"
            )
        return problems

    def notes(self, state: GlobalState, num_clients: int) -> list[str]:
        """Return messages for the user, one of them on the number of fragments and the bytes of the largest one."""
        submodels = state.submodels
        specs = [self.fragments.spec(submodels, index) for index in range(self.fragments.count(submodels))]
        largest = max(submodels.layout(spec, "trained").num_bytes for spec in specs)
        whole = submodels.layout(part="trained").num_bytes
        return [
            *self.inner.notes(state, num_clients),
            f"streaming: {len(specs)} fragments of at most {largest:,} of {whole:,} bytes before compression; a client's first "
            "task brings the whole model",
        ]

    def reject_reason(self, state: GlobalState, update: Update, spec: Spec, staleness: int) -> str | None:
        """Return the reason for which the inner merge rule refuses the fragment; None = it accepts the fragment."""
        return self.inner.reject_reason(state, *self._part(state, update), staleness)

    def receive(self, state: GlobalState, update: Update, spec: Spec, staleness: int) -> None:
        """Add the update's fragment to the next merge."""
        self.inner.receive(state, *self._part(state, update), staleness)

    def __str__(self) -> str:
        return f"{self.inner}, by fragment"


@dataclass(frozen=True)
class DelayedByFragment(DelayedNesterov):
    """Nesterov momentum that is applied once in N updates, after which each client has sent each fragment once.

    N is the number of clients times the number of fragments, unless a number is given.

    Attributes:
        fragments: division of the model.
    """

    fragments: Fragments = field(default_factory=Fragments)

    def period(self, state: GlobalState) -> int:
        """Return the number of updates after which the momentum is applied once."""
        return self.every or state.num_clients * self.fragments.count(state.submodels)


When = Literal["all", "each"]


def streaming_diloco(
    fragments: int = 4,
    pattern: Pattern = "strided",
    alpha: float = 0.5,
    sync_delay: int = 1,
    outer_lr: float = 0.7,
    outer_momentum: float = 0.9,
    trigger: When = "all",
    delay: int | None = None,
    steps: Steps = "equal",
    least_steps: int = 5,
    inner_state: InnerState = "new",
    cohort: int | None = None,
    concurrency: int | None = None,
) -> Algorithm:
    """Return Streaming DiLoCo: clients keep their own copy of the model, and exchange only one fragment of it with each task.

    Args:
        fragments: number of fragments P into which the model's layers are divided; at most as many as there are layers.
        pattern: assignment of layers to fragments: strided = layer l is in fragment l mod P; sequential = neighbouring
            layers, in fragments of about equal size.
        alpha: weight of the client's own values when a received fragment is mixed in (alpha), 0 to below 1; 0 = take
            the global values.
        sync_delay: number of local steps after which a received fragment is mixed in (tau); at the end of the task at
            the latest. With `overlap` these steps hide transfers: they are made before the fragment is there.
        outer_lr: outer learning rate (eta).
        outer_momentum: outer momentum (beta); 0 = none.
        trigger: time of a merge: all (when the whole round has reported) or each (at each arrival, with delayed
            Nesterov momentum).
        delay: number of updates after which the momentum is applied once, for trigger each; None = clients times fragments.
        steps: number of local steps of a client: equal (H/P) or speed (H/P for the fastest, fewer for slower clients).
        least_steps: smallest number of local steps of a task; for steps speed.
        inner_state: state of the clients' Adam or AdamW: new = it starts anew in each task; kept = it continues from
            the client's last task; its moments stay on the client.
        cohort: number of clients in a round, or at work in an asynchronous run, drawn uniformly; None = all. A client
            that is rarely drawn trains on with old fragments, since it only receives the one that it has sent before.
        concurrency: largest number of clients that work at the same time; None = no limit.
    """
    for name, value, allowed in (
        ("trigger", trigger, When),
        ("steps", steps, Steps),
        ("inner_state", inner_state, InnerState),
    ):
        one_of(name, value, allowed)
    if steps == "equal":
        refuse_unused("steps is 'equal'", least_steps=(least_steps, 5))
    divided = Fragments(fragments, pattern)
    if trigger == "each":
        merge: Nesterov = DelayedByFragment(outer_lr, outer_momentum, every=delay, fragments=divided)
    else:
        refuse_unused("trigger is 'all', whose merges are whole steps", delay=(delay, None))
        merge = Nesterov(outer_lr, outer_momentum)
    local = ReplicaWithMoments if inner_state == "kept" else Replica
    return Algorithm(
        name="streaming_diloco",
        paper="Douillard et al. 2025",
        sample=Sample(cohort, concurrency),
        select=InTurn(BySpeed(Full(), least_steps) if steps == "speed" else Full(), divided, trigger == "all"),
        local=local(divided, alpha, sync_delay),
        trigger=all_or_each(trigger),
        merge=ByFragment(merge, divided),
    )


REPLICA = "replica"
"""Bundle of the parameters and running statistics with which the client's last task ended."""


@dataclass(frozen=True)
class Replica(Local):
    """Local training that continues from the client's own parameters; each task receives one fragment and sends one.

    Between tasks the client stores its own copy of the model, the number of steps made, and for each fragment the values
    that it received last. It sends the difference from these values.

    Attributes:
        fragments: division of the model.
        alpha: weight of the client's own values when a received fragment is mixed in (alpha), 0 to below 1.
        sync_delay: number of local steps after which a received fragment is mixed in (tau).
    """

    down: ClassVar[tuple[str, ...]] = (REPLICA, STEPS)
    up: ClassVar[tuple[str, ...]] = (REPLICA, STEPS)

    fragments: Fragments = field(default_factory=Fragments)
    alpha: float = 0.5
    sync_delay: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.alpha != 0:
            fraction("alpha", self.alpha)
        at_least("sync_delay", self.sync_delay, 0)

    def travels(self, submodels: Submodels, extra: Mapping[str, Any], way: Way) -> frozenset[str] | None:
        """Return the names of the tensors that a task receives or sends; None = those of the whole model.

        Args:
            submodels: submodels of the model.
            extra: the task's settings, with the numbers of its fragments.
            way: "sent" = what the server sends to the client; otherwise what the client sends back.
        """
        return self.fragments.names_for_task(submodels, extra, DOWN if way == "sent" else UP)

    def layout_of(self, submodels: Submodels, bundle: str, spec: Spec | None) -> Layout | None:
        """Return names and shapes of the extra tensors that stay on the client: one number of steps, and copies of the model."""
        return Layout.pack([("steps", (1,), torch.float32)]) if bundle == STEPS else None

    @property
    def traits(self) -> Traits:
        """What this training can do, needs, and leaves out."""
        # without a proximal term the first tau steps need nothing from the server, so they can start before the values
        # arrive
        ahead = 0 if self.prox else self.sync_delay
        return replace(super().traits, resident=True, steps_ahead=ahead, captures=())

    def hook(self, task: Task) -> Hook:
        """Return the hook that loads the client's copy of the model, mixes in the received fragment, and stores the copy again."""
        return _Streaming(task, self)

    def __str__(self) -> str:
        return f"{super().__str__()} from its own copy, {self.alpha:g} of which stays after {self.sync_delay} steps"


@dataclass(frozen=True)
class ReplicaWithMoments(Replica):
    """Local training from the client's own copy of the model, which also keeps the moments of Adam or AdamW."""

    down: ClassVar[tuple[str, ...]] = (REPLICA, STEPS, *MOMENTS)
    up: ClassVar[tuple[str, ...]] = (REPLICA, STEPS, *MOMENTS)

    def __str__(self) -> str:
        return f"{super().__str__()}, the optimizer's moments kept"


class _Streaming(Hook):
    """Training hook that loads the client's own replica of the model, and mixes in the received fragment after tau steps."""

    def __init__(self, task: Task, local: Replica) -> None:
        """Load the replica and the optimizer's moments; if they are missing or not finite, train from the received values."""
        super().__init__(task)
        self._local, self._keeps = local, MOMENTS[0] in local.down
        optimizer = adam_of(task) if self._keeps else None
        named = [*task.module.named_parameters(), *task.module.named_buffers()]
        self._named = [(name, tensor) for name, tensor in named if name in task.down[REPLICA]]
        self._start, self._made = min(value_of(task.down[STEPS]["steps"], 1.0), MOST_STEPS), 0
        self._waits = self._start > 0 and all(bundle.is_finite() for bundle in task.down.values())
        if not self._waits:
            self._start = 0.0
            return
        with torch.no_grad():
            for name, tensor in self._named:
                tensor.copy_(task.down[REPLICA][name])
        for name, tensor in self._named:
            if optimizer is not None and isinstance(tensor, nn.Parameter):
                optimizer.state[tensor] = self._moments(name, tensor)
        if local.sync_delay == 0:
            self._mix()

    def _moments(self, name: str, parameter: nn.Parameter) -> dict[str, torch.Tensor]:
        moments = {one: self.task.down[one][name].to(parameter.device, copy=True) for one in MOMENTS}
        return {"step": count_of(self._start, self.task.optimizer, parameter.device), **moments}

    @torch.no_grad()
    def _mix(self) -> None:
        """Set the fragment to ``alpha`` times the client's own values plus ``1 - alpha`` times the received ones."""
        self._waits = False
        received = self._local.travels(self.task.submodels, self.task.arrived().extra, "sent")
        for name, tensor in self._named:
            if received is None or name in received:
                tensor.lerp_(self.task.received[name].to(tensor.device), 1.0 - self._local.alpha)

    def stepped(self) -> None:
        """Count the step; after ``sync_delay`` of them, mix in the fragment that the server has sent."""
        self._made += 1
        if self._waits and self._made >= self._local.sync_delay:
            self._mix()

    def finish(self) -> dict[str, Any]:
        """Write the replica and the optimizer's moments into the update, from which the client's next task continues."""
        if self._waits:  # the task had fewer steps than ``sync_delay``, so the fragment is not mixed in yet
            self._mix()
        up = self.task.up
        up[STEPS]["steps"].fill_(self._start + self._made)
        with torch.no_grad():
            for name, tensor in self._named:
                up[REPLICA][name].copy_(tensor)
                state = self.task.optimizer.state.get(tensor, {}) if self._keeps else {}
                for one in MOMENTS if state else ():
                    up[one][name].copy_(state[one])
        return {}

"""Give slow clients fewer local steps, so that all tasks take about as long: DiLoCo's dynamic local updates."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import Literal, get_args

from raafl.core.algorithm import SelectContext
from raafl.core.state import MergeMemory
from raafl.core.types import Assignment, ClientInfo, Work
from raafl.errors import positive
from raafl.parts.merge.wrapped import WrappedSelect

Table = Literal["measured", "predicted"]


@dataclass
class SpeedMemory(MergeMemory):
    """State of `BySpeed`: seconds that one local step takes on each client that is present."""

    key = "by_speed"
    # seconds of one step in its latest submodel, for each client with a finished task, by client id
    measured: dict[int, float] = field(default_factory=dict)
    # the same for each client without a finished task, predicted from its device profile, by client id
    predicted: dict[int, float] = field(default_factory=dict)
    # measured divided by predicted time of a client's latest task, by client id
    ratio: dict[int, float] = field(default_factory=dict)
    latest: float = 1.0  # the newest of these ratios; it corrects the predicted seconds


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
        """Return the wrapped select part's work with a number of steps in proportion to the client's speed."""
        work = super().__call__(client, fleet)
        most = work.num_steps or fleet.training.num_steps
        if most is None or work.num_epochs is not None:
            return work
        own_s = self._record(client, work, fleet)
        share = _fastest_s(fleet) / own_s if own_s > 0 else 1.0
        return replace(work, num_steps=min(max(math.floor(most * share + 1e-9), self.least), most))

    def on_join(self, client: ClientInfo, fleet: SelectContext) -> None:
        """Predict the client's speed, and forget what was measured, since it may have joined from another device."""
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
        """Update the client's ratio of measured to predicted time, from the task that it has just finished."""
        super().on_update(client, assignment, seconds, fleet)
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
        """Record and return the client's seconds for one local step, without a task's fixed costs."""
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
    """Set a client's seconds in the table, and update the cached least value of the table."""
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
    """Return the least seconds in a table; the value is cached, since a fleet may be large."""
    found, key = _table(table, fleet), f"least {table}"
    if found and key not in fleet.cache:
        client = min(found, key=found.__getitem__)
        fleet.cache[key] = (client, found[client])
    return float(fleet.cache[key][1]) if found else math.inf


def _fastest_s(fleet: SelectContext) -> float:
    """Return the seconds of a step on the fastest client that is present."""
    return min(_least_s("measured", fleet), _least_s("predicted", fleet) * fleet.state.memory.of(SpeedMemory).latest)


def _table(table: Table, fleet: SelectContext) -> dict[int, float]:
    memory = fleet.state.memory.of(SpeedMemory)
    return memory.measured if table == "measured" else memory.predicted

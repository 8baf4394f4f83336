"""Drive a coordinator by hand, with a tiny model and updates whose elements all have one value."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import nn

from raafl.core import saving
from raafl.core.algorithm import Algorithm, Training
from raafl.core.coordinator import Coordinator
from raafl.core.state import GlobalState
from raafl.core.types import Action, Arrived, Assign, Assignment, ClientInfo, Joined, Limits, Update
from raafl.devices.profiles import Profile
from raafl.submodel import FlatTensors, Spec, Submodels


class Line(nn.Module):
    """Model with two inputs, ``hidden`` units and one output without bias, small enough to compute by hand."""

    def __init__(self, hidden: int = 4) -> None:
        super().__init__()
        self.fc1 = nn.Linear(2, hidden, bias=False)
        self.fc2 = nn.Linear(hidden, 1, bias=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc2(torch.relu(self.fc1(x)))

    def training_step(self, batch: tuple[torch.Tensor, torch.Tensor], index: int) -> torch.Tensor:
        x, y = batch
        return nn.functional.mse_loss(self(x).squeeze(1), y)

    def submodel_axes(self) -> dict[str, list[tuple[str, int]]]:
        return {"hidden": [("fc1.weight", 0), ("fc2.weight", 1)]}


EXAMPLE = (torch.zeros(2, 2), torch.zeros(2))


def line_state(hidden: int = 4, value: float = 0.0) -> GlobalState:
    """Return a state of `Line` with every parameter at `value`."""
    module = Line(hidden)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.fill_(value)
    submodels = Submodels(module, EXAMPLE)
    return GlobalState(submodels, submodels.state(module))


def filled(state: GlobalState, value: float, spec: Spec | None = None) -> FlatTensors:
    """Return tensors for an update of the submodel ``spec``, None = the whole model; each element is ``value``."""
    tensors = FlatTensors.empty(state.submodels.layout(spec or Spec(), "trained"))
    for buffer in tensors.buffers.values():
        buffer.fill_(value)
    return tensors


def update_for(
    state: GlobalState, assignment: Assignment, value: float, *, num_samples: int = 1, refusal: str | None = None
) -> Update:
    """Return an answer to ``assignment`` whose elements are all ``value``; ``refusal``: why the client did not train."""
    return Update(
        assignment.id,
        assignment.client,
        assignment.incarnation,
        filled(state, value, assignment.spec),
        num_samples,
        refusal=refusal,
    )


def coordinator_for(
    algorithm: Algorithm, state: GlobalState | None = None, seed: int = 0, **limits: object
) -> Coordinator:
    """Return a coordinator of ``algorithm`` for a tiny model; ``state`` None = a `Line`, ``limits``: fields of `Limits`."""
    return Coordinator(
        algorithm,
        state or line_state(),
        Limits(**limits),
        training=Training(num_epochs=1),
        batch_size=1,
        seed=seed,  # type: ignore[arg-type]
    )


def join(
    coordinator: Coordinator, clients: Iterable[int], speed: dict[int, float] | None = None, now: float = 0.0
) -> list[Action]:
    """Let clients join at ``now`` seconds, and return all actions; ``speed``: FLOP/s by client, None = profiles have none."""
    actions: list[Action] = []
    for client in clients:
        profile = Profile(flops_per_s=(speed or {}).get(client, 1.0))
        actions += coordinator.handle(Joined(ClientInfo(client, 1, profile)), now)
    return actions


def assigned(actions: Iterable[Action]) -> dict[int, Assignment]:
    """Return the newest assignment of each client among `actions`."""
    return {action.assignment.client: action.assignment for action in actions if isinstance(action, Assign)}


def answer(
    coordinator: Coordinator, assignment: Assignment, value: float, now: float = 0.0, num_samples: int = 1
) -> list[Action]:
    """Answer an assignment at ``now`` seconds by an update whose elements are all ``value``; return the coordinator's actions."""
    return coordinator.handle(Arrived(update_for(coordinator.state, assignment, value, num_samples=num_samples)), now)


def values_of(state: GlobalState) -> torch.Tensor:
    """Return all floating-point values in one tensor, (values,)."""
    return torch.cat([b for d, b in state.values.buffers.items() if d.is_floating_point])


def cut_in_the_middle(
    fresh: Callable[[], Coordinator], cut: int, value: Callable[[int], float], steps: int = 14
) -> tuple[Coordinator, Coordinator]:
    """Let four clients answer in turn, once in one go and once saved and restored after ``cut`` steps; return both results.

    `fresh`: makes a coordinator. `value`: value of all elements of an update, by step.
    """

    from raafl.core.restoring import restore  # a room, without which other tests of the core run

    def play(coordinator: Coordinator, tasks: dict[int, Assignment], steps: Iterable[int]) -> None:
        for step in steps:
            given = answer(coordinator, tasks.pop(min(tasks)), value(step))
            tasks |= {task.id: task for task in assigned(given).values()}

    whole, again = fresh(), fresh()
    tasks = {task.id: task for task in assigned(join(whole, range(1, 5))).values()}
    play(whole, tasks, range(cut))
    values, rest, left = whole.state.values.clone(), saving.save(whole), dict(tasks)
    play(whole, tasks, range(cut, steps))
    again.state.values.copy_(values)
    restore(again, rest)
    play(again, left, range(cut, steps))
    return whole, again

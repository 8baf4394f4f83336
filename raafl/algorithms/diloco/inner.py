"""Carry the state of each client's inner optimizer from one of its tasks to the next."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from raafl.core.algorithm import Hook, Local, Task
from raafl.core.local import value_of
from raafl.core.payload import Bundles
from raafl.core.state import GlobalState
from raafl.core.types import Update
from raafl.errors import BadInput
from raafl.parts.merge.wrapped import Wrapped
from raafl.submodel import FlatTensors, Layout, Spec, Submodels

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

    def hook(self, task: Task) -> Hook:
        """Return the hook that loads the moments at the start of a task and returns them at its end."""
        return _Carried(task)

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


class _Carried(Hook):
    """Hook that sets the optimizer's state before the first step, and sends how it has changed."""

    def __init__(self, task: Task) -> None:
        """Load the received moments.

        Raises:
            BadInput: the module's optimizer is not Adam or AdamW.
        """
        super().__init__(task)
        optimizer = adam_of(task)
        self._start = min(value_of(task.down[STEPS]["steps"], 1.0), MOST_STEPS)
        for name, parameter in self._carried():
            first, second = (task.down[moment][name].to(parameter.device, copy=True) for moment in MOMENTS)
            # a compressed second moment may be a little below 0
            optimizer.state[parameter] = {
                "step": torch.tensor(self._start, device="cpu"),
                MOMENTS[0]: first,
                MOMENTS[1]: second.clamp_min_(0.0),
            }

    def _carried(self) -> list[tuple[str, nn.Parameter]]:
        named = self.task.module.named_parameters()
        return [(name, parameter) for name, parameter in named if name in self.task.down[MOMENTS[0]]]

    def finish(self) -> dict[str, Any]:
        """Send the number of steps of the optimizer and the change of its moments, besides the update."""
        made = 0.0
        for name, parameter in self._carried():
            state: Mapping[str, Tensor] = self.task.optimizer.state[parameter]
            made = max(made, float(state["step"]) - self._start)
            for moment in MOMENTS:
                change = state[moment] - self.task.down[moment][name].to(state[moment].device)
                self.task.up[moment][name].copy_(change)
        self.task.up[STEPS]["steps"].fill_(made)
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

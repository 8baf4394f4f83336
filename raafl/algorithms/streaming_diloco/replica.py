"""Train a copy of the model that stays on the client, and mix what is received into it: Streaming DiLoCo's worker."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import torch
from torch import nn

from raafl.algorithms.diloco.inner import MOMENTS, MOST_STEPS, STEPS, adam_of
from raafl.algorithms.streaming_diloco.fragments import DOWN, UP, Fragments
from raafl.core.algorithm import Hook, Local, Task
from raafl.core.local import Traits, value_of
from raafl.core.payload import Way
from raafl.errors import at_least, fraction
from raafl.submodel import Layout, Spec, Submodels

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
        # the first tau steps use the client's own parameters alone, but for a proximal term
        return replace(super().traits, resident=True, steps_ahead=0 if self.prox else self.sync_delay)

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
    """Hook that loads the replica before the first step, and mixes the received fragment in tau steps later."""

    def __init__(self, task: Task, local: Replica) -> None:
        """Load the replica; without one, or where it is not finite, train from the values received."""
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
        return {"step": torch.tensor(self._start, device="cpu"), **moments}

    @torch.no_grad()
    def _mix(self) -> None:
        """Set the received fragment to ``alpha`` times the replica's plus ``1 - alpha`` times the received values."""
        self._waits = False
        received = self._local.travels(self.task.submodels, self.task.arrived().extra, "sent")
        for name, tensor in self._named:
            if received is None or name in received:
                tensor.lerp_(self.task.received[name].to(tensor.device), 1.0 - self._local.alpha)

    def update(self) -> None:
        """Make one step; after ``sync_delay`` steps, mix in the fragment that the server has sent."""
        self.task.update()
        self._made += 1
        if self._waits and self._made >= self._local.sync_delay:
            self._mix()

    def finish(self) -> dict[str, Any]:
        """Store the client's copy of the model and the optimizer's moments on the client, for its next task."""
        if self._waits:  # a task of fewer steps
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

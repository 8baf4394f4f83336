"""What a client does with its submodel: hooks around the steps of the user's own module."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from raafl.core.part import Part
from raafl.core.payload import Bundles, Payload, UpAs
from raafl.core.types import Warn
from raafl.errors import at_least
from raafl.submodel.cost import Cost
from raafl.submodel.flat import FlatTensors, Layout
from raafl.submodel.spec import Spec

if TYPE_CHECKING:
    from raafl.core.exchange import ClientLink, Exchange
    from raafl.core.training import Training
    from raafl.core.types import Assignment, ClientInfo
    from raafl.submodel.submodels import Submodels


class SkippedBatch(Exception):
    """`training_step` has returned None: the batch has no loss, and makes no step."""


@dataclass(slots=True)
class Task:
    """One task under way on a client, as a hook sees it.

    Attributes:
        assignment: what was asked for.
        submodels: of the model.
        module: the small module that trains; it lives on, so that what a hook does to it has to be undone in `Hook.close`.
        optimizer: its own, as `configure_optimizers` made it.
        received: values as received, by name; to be read.
        num_batches: how many batches the task has.
        generator: seeded by the assignment; the data's order is drawn from it.
        loss: ``loss(batch, index)``: `training_step`, in the precision of the run; raises `SkippedBatch` where it returns None.
        backward: backward pass of a loss.
        down: bundles as received, by name; to be read.
        up: bundles to send, by name, all 0; to be filled by `Hook.finish`.
        update: proximal pull and gradient clipping, if any, then the optimiser's step; gradients are None afterwards.
        draws: ``draws(seed)``: a stream of random numbers of its own, to draw from within it, as often as it is entered.
        link: to the server, for a task with an exchange (`raafl.core.exchange`); None = there is none, or both sides are here.
    """

    assignment: Assignment
    submodels: Submodels
    module: torch.nn.Module
    optimizer: torch.optim.Optimizer
    received: FlatTensors
    num_batches: int
    generator: torch.Generator
    loss: Callable[[Any, int], torch.Tensor]
    backward: Callable[[torch.Tensor], None]
    update: Callable[[], None]
    down: Bundles = field(default_factory=dict)
    up: Bundles = field(default_factory=dict)
    draws: Callable[[int], AbstractContextManager[Any]] = nullcontext
    link: ClientLink | None = None


class Hook(Part):
    """Around the steps of one task: plain training, of which a method replaces what it does otherwise.

    A task is a pure function of its assignment, the payload received and the client's data: a hook keeps nothing from one
    task to the next. What is to be remembered goes to the server in ``task.up`` or the answer of `finish`; the merge keeps
    it in `GlobalState.clients`, and it comes back in ``task.down`` (`Merge.personalize`).
    """

    def __init__(self, task: Task) -> None:
        self.task = task

    def loss(self, batch: Any, index: int) -> torch.Tensor:
        """Return the loss of a batch, a scalar."""
        return self.task.loss(batch, index)

    def backward(self, loss: torch.Tensor) -> None:
        """Compute the gradients of ``loss``, which is divided by the number of batches that are accumulated."""
        self.task.backward(loss)

    def update(self) -> None:
        """Make one optimiser step."""
        self.task.update()

    def finish(self) -> dict[str, Any]:
        """Return the plain data for the server beside the values, `Update.extra`; called after the last step."""
        return {}

    def close(self) -> None:
        """Undo what was done to the module; called however the task ends."""
        return


@dataclass(frozen=True)
class Local(Part):
    """What does the client do with it? Hooks around the user's own training step.

    A method that does more than these settings is a subclass, in `raafl.parts`, with a `hook` of its own.

    Attributes:
        prox: weight of the pull towards the received values, prox/2 * ||theta - theta_received||^2 (rho in Fed-RAA,
            mu in FedProx); 0 = none.
        rescale: multiply a kept layer's activation by 1/keep-fraction while training (HeteroFL's scaler).
        down: names of the bundles that a client is sent beside the submodel (`raafl.core.payload`).
        up: names of those that it sends back: steps, as a difference is, so that they can be compressed as such.
        masked: set the logits of classes that the client has no samples of to 0 while training (HeteroFL's masked loss), and
            tell the server which were left (`raafl.parts.merge.label_split`).
    """

    proven_as_trained: ClassVar[bool] = True
    """False: what `prepare` adds to a model acts by its width on purpose, so that axes are proven on the user's own model."""

    up_as: ClassVar[UpAs | None] = None
    """What its values always go up as, whatever `compress.up` says."""

    uses_gradients: ClassVar[bool] = False
    """Whether its hook works with gradients before the step, which 16-mixed scales and may leave infinite."""

    uses_optimizer: ClassVar[bool] = True
    """Whether it steps with the module's optimizer, whose learning rate ``train.lr_schedule`` changes."""

    leaves_out: ClassVar[frozenset[str]] = frozenset()
    """Hooks of Lightning, of `raafl.module_hooks.TASK_HOOKS`, that its way of stepping does not call."""

    down: ClassVar[tuple[str, ...]] = ()
    up: ClassVar[tuple[str, ...]] = ()

    prox: float = field(default=0.0, kw_only=True)
    rescale: bool = field(default=False, kw_only=True)
    masked: bool = field(default=False, kw_only=True)

    def __post_init__(self) -> None:
        at_least("prox", self.prox, 0)

    def __init_subclass__(cls, **more: Any) -> None:
        """Refuse a method with bundles and an exchange: in a task of two sides neither has a place for bundles."""
        super().__init_subclass__(**more)
        if cls.exchange is not Local.exchange and (cls.down or cls.up):
            raise TypeError(
                f"{cls.__name__} has an exchange and bundles ({', '.join((*cls.down, *cls.up))}): have one of them"
            )

    @property
    def supports_data_parallel(self) -> bool:
        """Whether a client of several processes can train this way: by gradients of the module alone, which are averaged."""
        return True

    @property
    def steps_are_plain(self) -> bool:
        """Whether its hook is `Hook` itself, so that nothing reads a gradient but the pull, the clipping and the optimiser."""
        return type(self).hook is Local.hook and self.hook.__func__ is Local.hook  # type: ignore[attr-defined]

    def prepare(self, module: Any) -> Any:
        """Return the model as this method trains it, such as with heads of its own; on server and clients, also without values.

        Raises:
            BadInput: the method cannot be used on it.
        """
        return module

    def exchange(self, submodels: Submodels, extra: Mapping[str, Any] | None = None) -> Exchange | None:
        """Find the exchange of client and server in the middle of a task; None = one request, one answer.

        ``extra`` is of the task's work; None = any task's of this run.

        Raises:
            SpecError: ``extra`` asks for what the model has not.
        """
        return None

    def payload(self, submodels: Submodels) -> Payload:
        """Return all that travels with a task."""
        return Payload(submodels, self.down, self.up, self.up_as, partial(self.layout_of, submodels))

    def layout_of(self, submodels: Submodels, bundle: str, spec: Spec | None) -> Layout | None:
        """Return the layout of a bundle for a task of ``spec``, of None all that there is of it; None = it is as what trains."""
        return None

    def hook(self, task: Task) -> Hook:
        """Make the hook that runs the steps of ``task``."""
        return Hook(task)

    def cost(self, submodels: Submodels, spec: Spec, batch_size: int, extra: Mapping[str, Any]) -> Cost:
        """Predict the cost of a task of ``spec`` that a client trains this way, at a batch size."""
        return submodels.cost(spec, batch_size)

    def task_options(
        self, client: ClientInfo, submodels: Submodels, training: Training, batch_size: int, drop_last: bool
    ) -> dict[str, Any]:
        """Return the part of `Work.extra` that all tasks of ``client`` share; their cost is predicted with it."""
        return {}

    def evaluates_on_client(self, extra: Mapping[str, Any]) -> bool:
        """Check whether a client measures what such a task has trained on its own test part, if it has one."""
        return True

    def problems(self, precision: str, gradient_clip_val: float | None) -> list[str]:
        """Explain why its steps cannot be run with these settings of `fabric`, one line each."""
        if self.uses_gradients and precision == "16-mixed":
            return [
                "fabric.precision is 16-mixed, and this algorithm works with gradients, which are scaled: use bf16-mixed"
            ]
        return []

    def notes(self, submodels: Submodels) -> list[str]:
        """List the notes for the user at the start, one line each; a `Warn` where it is likely not what was meant."""
        if not self.masked:
            return []
        from raafl.core.masked_loss import why_unmasked

        why = why_unmasked(submodels)
        return [] if why is None else [Warn(f"masked loss: nothing is masked, clients train on the plain loss: {why}")]

    def __str__(self) -> str:
        words = "SGD on the loss"
        if self.prox:
            words += f" + proximal term {self.prox:g}"
        words += ", activations rescaled" if self.rescale else ""
        return words + (", logits of absent classes masked" if self.masked else "")

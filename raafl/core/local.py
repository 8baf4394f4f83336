"""Define what a client does with its submodel: settings, and hooks around the steps of the user's own module."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, fields
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from raafl.core.payload import Payload, UpAs, Way
from raafl.core.task import Task as Task
from raafl.core.types import Part, Warn
from raafl.errors import at_least
from raafl.submodel.cost import Cost
from raafl.submodel.flat import Layout
from raafl.submodel.spec import Spec

if TYPE_CHECKING:
    from raafl.core.exchange import Exchange
    from raafl.core.options import Training
    from raafl.core.types import ClientInfo
    from raafl.submodel.submodels import Submodels


class SkippedBatch(Exception):
    """Raised where `training_step` returns None, which means: no loss for this batch, so skip the optimiser step."""


def value_of(tensor: torch.Tensor, instead: float) -> float:
    """Return the number that a tensor holds; ``instead`` if it has no values, as in a task whose cost is predicted."""
    return instead if tensor.is_meta else float(tensor)


class Hook(Part):
    """Steps of one training task. The base class trains as usual; a method overrides the steps in which it differs.

    A hook must keep nothing for later tasks: the result may depend only on the assignment, the received tensors and the
    client's data. Values to remember go to the server in ``task.up`` or in the result of `finish`. There the merge
    stores them in `GlobalState.clients`, and `Merge.personalize` sends them back in ``task.down``.
    In methods with `Traits.resident` the tensors in ``task.up`` stay on the client instead; its next task finds them in
    ``task.down``.
    """

    def __init__(self, task: Task) -> None:
        self.task = task

    def loss(self, batch: Any, index: int) -> torch.Tensor:
        """Return the scalar loss of a batch."""
        return self.task.loss(batch, index)

    def backward(self, loss: torch.Tensor) -> None:
        """Compute the gradients of ``loss``, which was already divided by the number of accumulated batches."""
        self.task.backward(loss)

    def update(self) -> None:
        """Make one optimiser step."""
        self.task.update()

    def stepped(self) -> None:
        """Do what belongs on Python's side of a step, such as counting; called after each `update`.

        Steps that are captured as CUDA graphs (`Traits.captures`) repeat what `loss`, `backward` and `update` have computed,
        but run none of their Python code again; this they run.
        """
        return

    def finish(self) -> dict[str, Any]:
        """Return plain data to send to the server as `Update.extra`. Called after the task's last step."""
        return {}

    def close(self) -> None:
        """Undo this hook's changes to the module; called at the end of every task, even a failed one."""
        return


@dataclass(frozen=True, slots=True)
class Traits:
    """Abilities and needs of a method's local training.

    Attributes:
        proven_as_trained: whether axes are checked on the prepared model; False = what `prepare` adds depends on its own
            width by design.
        up_as: encoding in which trained values are always sent, whatever `compress.up` says; None = as configured.
        uses_gradients: whether the hook uses gradients, which 16-mixed precision scales and may leave infinite.
        uses_optimizer: whether steps use the module's optimizer, whose learning rate ``train.lr_schedule`` changes.
        leaves_out: Lightning hooks of `raafl.module_hooks.TASK_HOOKS` that the method's training loop does not call.
        resident: whether bundles stay on the client between tasks, so that only the values in `travels` are sent.
        supports_data_parallel: whether several processes of one client can share a task and average the gradients of
            the module.
        captures: names of the hook's attributes that hold tensors which its steps read or change, besides the module's;
            None = its steps cannot be captured as a CUDA graph, for example since they read values of tensors.
        steps_ahead: number of first steps of a task that need no received values, and so may run before it arrives.
        exact_zeros: whether the merge reads from an update which elements a task has left alone: those that are 0.
        sends_roots: whether bundles hold numbers by whose root steps are divided, so that none may become 0 on its way.
    """

    proven_as_trained: bool = True
    up_as: UpAs | None = None
    uses_gradients: bool = False
    uses_optimizer: bool = True
    leaves_out: frozenset[str] = frozenset()
    resident: bool = False
    supports_data_parallel: bool = True
    captures: tuple[str, ...] | None = None
    steps_ahead: int = 0
    exact_zeros: bool = False
    sends_roots: bool = False


@dataclass(frozen=True)
class Local(Part):
    """Base class of the part of an algorithm that decides how a client trains its submodel.

    It holds common settings. A method that needs more subclasses it and returns its own hook from `hook`.

    Attributes:
        prox: weight of the proximal term, prox/2 times the squared distance of the parameters from the received ones
            (rho in Fed-RAA, mu in FedProx); 0 = none.
        rescale: whether training multiplies the activations of a layer by the number of its units in the whole model
            divided by the number in the submodel (HeteroFL's scaler).
        down: names of the extra tensors (bundles) that a client receives beside the submodel; see `raafl.core.payload`.
        up: names of the extra tensors (bundles) that a client sends back as differences, which compress better than
            values.
        masked: whether to set the logits of classes of which the client has no samples to 0 while training (HeteroFL's
            masked loss), and to tell the server which classes the client has (`raafl.parts.merge.label_split`).
    """

    down: ClassVar[tuple[str, ...]] = ()
    up: ClassVar[tuple[str, ...]] = ()

    prox: float = field(default=0.0, kw_only=True)
    rescale: bool = field(default=False, kw_only=True)
    masked: bool = field(default=False, kw_only=True)

    def __post_init__(self) -> None:
        at_least("prox", self.prox, 0)

    def __init_subclass__(cls, **more: object) -> None:
        """Check a new subclass; raise TypeError if it sets a trait as a class attribute, or has both bundles and an exchange."""
        super().__init_subclass__(**more)
        if stray := vars(cls).keys() & {one.name for one in fields(Traits)}:
            raise TypeError(f"{cls.__name__} sets {', '.join(sorted(stray))}: return it in the property traits")
        if cls.exchange is not Local.exchange and (cls.down or cls.up):
            raise TypeError(
                f"{cls.__name__} exchanges messages during a task and also sends bundles of extra tensors "
                f"({', '.join((*cls.down, *cls.up))}): use only one of them"
            )

    @property
    def traits(self) -> Traits:
        """Abilities and needs of this method; a subclass returns ``replace(super().traits, ...)``."""
        return Traits()

    @property
    def steps_are_plain(self) -> bool:
        """Whether training uses the base class `Hook`, so that only proximal term, clipping and optimiser read the gradients."""
        return type(self).hook is Local.hook and self.hook.__func__ is Local.hook  # type: ignore[attr-defined]

    def prepare(self, module: torch.nn.Module) -> torch.nn.Module:
        """Return the model as this method trains it, for example with additional heads.

        This runs on the server and on each client, even where the model's parameters have no values yet.

        Raises:
            BadInput: the method cannot be used on the model.
        """
        return module

    def trial(self, module: torch.nn.Module) -> AbstractContextManager[Any]:
        """Return a context within which a training step of the prepared model is tried before the run; it may watch the model.

        Raises:
            BadInput: at its end, if the step shows that the method cannot be used on the model.
        """
        return nullcontext()

    def exchange(self, submodels: Submodels, extra: Mapping[str, Any] | None = None) -> Exchange | None:
        """Return the protocol by which client and server exchange messages during a task; None = this method has none.

        Args:
            submodels: submodels of the model.
            extra: further settings of the task (`Work.extra`); None = the protocol for any task of this run.

        Raises:
            SpecError: ``extra`` names parts that the model does not have.
        """
        return None

    def payload(self, submodels: Submodels) -> Payload:
        """Return the layouts of all tensors that a task sends and receives."""
        travels = partial(self.travels, submodels) if self.traits.resident else None
        return Payload(submodels, self.down, self.up, self.traits.up_as, partial(self.layout_of, submodels), travels)

    def travels(self, submodels: Submodels, extra: Mapping[str, Any], way: Way) -> frozenset[str] | None:
        """Return the names of the values that are sent in one direction for a task; None = all.

        Called only for methods in which clients keep their values between tasks (`Traits.resident`).

        Args:
            submodels: submodels of the model.
            extra: further settings of the task (`Work.extra`).
            way: "sent" to a client that has received values before, or "trained" back to the server.

        Raises:
            SpecError: ``extra`` names values that the model does not have.
        """
        return None

    def layout_of(self, submodels: Submodels, bundle: str, spec: Spec | None) -> Layout | None:
        """Return the layout of a bundle, a named group of extra tensors that travels beside the submodel.

        Args:
            submodels: submodels of the model.
            bundle: name of the bundle.
            spec: submodel of the task; None = lay the bundle out for the whole model.

        Returns:
            The bundle's layout; None if it equals the layout of the trained parameters.
        """
        return None

    def hook(self, task: Task) -> Hook:
        """Return the hook that runs the steps of ``task``."""
        return Hook(task)

    def cost(self, submodels: Submodels, spec: Spec, batch_size: int, extra: Mapping[str, Any]) -> Cost:
        """Predict the cost of a task: where the method has a hook of its own, two steps of it run without values.

        A hook that asks for values may give any to a tensor on the meta device (`value_of`). If it cannot be followed,
        `estimate` counts.

        Args:
            submodels: submodels of the model.
            spec: submodel to train.
            batch_size: local batch size.
            extra: further settings of the task (`Work.extra`).
        """
        if self.steps_are_plain:
            return submodels.cost(spec, batch_size)
        from raafl.core.own_steps import followed_cost

        return followed_cost(
            self, submodels, spec, batch_size, extra, self.estimate(submodels, spec, batch_size, extra)
        )

    def cost_depends_on(self, extra: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the entries of a task's settings that change its cost; equal ones are predicted once."""
        return extra

    def estimate(self, submodels: Submodels, spec: Spec, batch_size: int, extra: Mapping[str, Any]) -> Cost:
        """Estimate the cost of a task by a formula: what it sends and receives, and the rest where it cannot be followed.

        Runs of the first rules (`raafl.rules`) go by it, too.

        Args:
            submodels: submodels of the model.
            spec: submodel to train.
            batch_size: local batch size.
            extra: further settings of the task (`Work.extra`).
        """
        return submodels.cost(spec, batch_size)

    def task_options(
        self, client: ClientInfo, submodels: Submodels, training: Training, batch_size: int, drop_last: bool
    ) -> dict[str, Any]:
        """Return the entries of `Work.extra` that all tasks of ``client`` share; they influence the predicted cost.

        Args:
            client: client that gets the tasks.
            submodels: submodels of the model.
            training: the run's settings of local work.
            batch_size: local batch size.
            drop_last: whether an epoch drops its last batch when that is smaller than the others.
        """
        return {}

    def evaluates_on_client(self, extra: Mapping[str, Any]) -> bool:
        """Check whether a client evaluates its trained submodel on its own test samples, in a task with settings ``extra``."""
        return True

    def problems(self, precision: str, gradient_clip_val: float | None) -> list[str]:
        """Return reasons why this method cannot train with the given precision and gradient clipping, one line each."""
        if self.traits.uses_gradients and precision == "16-mixed":
            return [
                "fabric.precision is 16-mixed, and this algorithm works with gradients, which are scaled: use bf16-mixed"
            ]
        return []

    def notes(self, submodels: Submodels) -> list[str]:
        """Return remarks on local training, for the user at the start of a run, one line each.

        A remark is a `Warn` if a setting is probably a mistake.
        """
        if not self.masked:
            return []
        from raafl.core.masked_loss import why_unmasked

        why = why_unmasked(submodels)
        return [] if why is None else [Warn(f"masked loss: no class is masked, since {why}")]

    def __str__(self) -> str:
        words = "SGD on the loss"
        if self.prox:
            words += f" + proximal term {self.prox:g}"
        words += ", activations rescaled" if self.rescale else ""
        return words + (", logits of absent classes masked" if self.masked else "")

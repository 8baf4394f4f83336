"""Join the losses of the exits of one submodel, and distil between them (Co-S2P, Eq. 3; Zhang et al. 2019)."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from raafl.core.local import Hook, Local, Task
from raafl.core.masked_loss import HasLogits
from raafl.errors import BadInput
from raafl.parts.local.swap_parameters import patched, quiet
from raafl.submodel import EarlyLogits, Spec, Submodels, add_exits
from raafl.submodel.cost import Cost
from raafl.submodel.declared import declarations, find_stacks, join
from raafl.submodel.depth import tail_of

IGNORED = -100
"""Label of positions that the loss ignores, as in torch's cross entropy."""

_NO_LOGITS = (
    "algorithm distils between the model's exits and needs their logits, but the model's forward computes the loss: return logits "
    "from forward, and compute the loss in `training_step`; a Trainer's model has it computed there, so take a method without "
    "distillation, such as hetero_fl, fed_raa, or co_s2p with distil: false"
)


def with_every_exit(module: nn.Module) -> nn.Module:
    """Add an exit (an output head) after each block but the last, in place, to the transformers model in ``module``.

    The module is returned unchanged if it declares exits, or does not contain exactly one model of a known type.
    """
    models = [part for part in module.modules() if tail_of(part) is not None]
    if len(models) != 1 or any(True for _ in declarations(module, "submodel_exits")):
        return module
    stacks = list(find_stacks(models[0]).values())
    if len(stacks) == 1 and len(stacks[0]) > 1:
        add_exits(models[0], range(1, len(stacks[0])))
    return module


def exit_depths(submodels: Submodels) -> dict[int, str]:
    """Return the exits (early output heads) at which a shorter model can end.

    The result maps the number of blocks before an exit to the exit's name. It is empty unless the model has exactly one
    stack of blocks.
    """
    if len(submodels.stacks) != 1:
        return {}
    (stack,) = submodels.stacks.values()
    depths = {stack.block(i): i + 1 for i in range(len(stack))}
    exits = {}
    for path, part in submodels.module.named_modules():
        for name, block in part.__dict__.get("submodel_exits_after", {}).items():
            if join(path, block) in depths and submodels.exits[join(path, name)].instead_of:
                exits[depths[join(path, block)]] = join(path, name)
    return exits


def knowledge_loss(student: Tensor, teacher: Tensor, temperature: float, counted: Tensor | None = None) -> Tensor:
    """Return the distillation loss ``T^2 KL(softmax(teacher / T) || softmax(student / T))``, averaged over samples or positions.

    `student`: logits of the model that learns, shape (..., classes).
    `teacher`: logits from which it learns, of the same shape; they get no gradient.
    `counted`: mask of the positions to average over, shape (...); None = all of them.
    """
    # detach the teacher, which learns from the labels alone
    teacher_log = F.log_softmax(teacher.detach() / temperature, -1)
    student_log = F.log_softmax(student / temperature, -1)
    divergence = F.kl_div(student_log, teacher_log, reduction="none", log_target=True).sum(-1) * temperature**2
    if counted is None:
        return divergence.mean()
    weight = counted.to(divergence.dtype)
    return (divergence * weight).sum() / weight.sum().clamp_min(1.0)


def _early_exits(module: nn.Module) -> EarlyLogits | None:
    """Register hooks that record the logits of a module's trained exits, except the last; None if there is no such exit."""
    if not any("submodel_exits_after" in part.__dict__ for part in module.modules()):
        return None
    early = EarlyLogits(module)
    trains = {name: p.requires_grad for name, p in early.model.named_parameters(remove_duplicate=False)}
    early.names = [
        name
        for name in early.names
        if any(
            trains[n] for path in early.model.submodel_exits[name].values() for n in trains if n.startswith(path + ".")
        )
    ]
    if early.names:
        return early
    early.close()
    return None


@dataclass(frozen=True, slots=True)
class Exit:
    """Output of one exit (an output head at some depth) for a batch.

    Attributes:
        logits: the exit's logits, shape (batch, ..., classes).
        loss: the module's own loss, computed from these logits.
    """

    logits: Tensor
    loss: Tensor


@dataclass(frozen=True)
class TrainsExits(Local):
    """Base class of local training with all exits (output heads at several depths) of a submodel."""

    def prepare(self, module: nn.Module) -> nn.Module:
        """Return the model with an exit (an output head) after each block, if its type is known and it has no exits yet.

        Raises:
            BadInput: the model has exits and is a Trainer's, whose forward computes the loss.
        """
        module = with_every_exit(module)
        if getattr(module, "loss_in_forward", False) and any(True for _ in declarations(module, "submodel_exits")):
            raise BadInput(_NO_LOGITS)
        return module

    def cost(self, submodels: Submodels, spec: Spec, batch_size: int, extra: Mapping[str, Any]) -> Cost:
        """Predict the cost of a task; without a batch to follow, an output layer counts anew for each exit that reads it."""
        cost = super().cost(submodels, spec, batch_size, extra)
        if submodels.example_batch is not None:
            return cost
        values = _values_read_by_exits(submodels.shrink(spec, device="meta").module)
        return replace(cost, flops_per_sample=cost.flops_per_sample + 6.0 * values)

    def estimate(self, submodels: Submodels, spec: Spec, batch_size: int, extra: Mapping[str, Any]) -> Cost:
        """Return the cost of ordinary training, as if exits cost nothing."""
        return submodels.cost(spec, batch_size)


def _values_read_by_exits(module: nn.Module) -> int:
    """Count the values that early exits read in a language model's output layer: its size times the number of exits."""
    early = _early_exits(module)
    if early is None:
        return 0
    early.close()
    head = getattr(early.model, "lm_head", None)  # layer that the exits of `raafl.submodel.depth` share
    return 0 if head is None else len(early.names) * sum(p.numel() for p in head.parameters())


class ByExits(Hook):
    """Base class of hooks that train the exits (output heads at several depths) of a submodel in one forward pass.

    The module's `training_step` computes one loss for each exit from this exit's logits. A subclass combines the losses
    by its method `joined`. A submodel with a single exit is trained by its ordinary loss.
    """

    def __init__(self, task: Task) -> None:
        super().__init__(task)
        self.students = _early_exits(task.module)
        self._output: Any = None
        self._handle = None
        if self.students is not None:
            self._handle = self.students.model.register_forward_hook(self._seen)

    def _seen(self, model: nn.Module, args: object, output: object) -> None:
        self._output = output

    def joined(self, deepest: Exit, others: Sequence[Exit], batch: object) -> Tensor:
        """Combine the losses of all exits into the loss of a batch."""
        raise NotImplementedError

    def loss(self, batch: object, index: int) -> Tensor:
        """Return the combined loss of all exits; the ordinary loss if there is only one exit."""
        if self.students is None:
            return self.task.loss(batch, index)
        device = next(self.task.module.parameters()).device
        before = _generators(device)
        loss = self.task.loss(batch, index)
        deepest = Exit(_logits(self._output), loss)
        early = self.students.logits()
        after, output, others = _generators(device), self._output, []
        for logits in early.values():
            _restore(device, before)  # each exit's loss draws the random numbers that the first one drew
            model, exit_output = self.students.model, _with_logits(output, logits)
            # do not run the forward pass again: the step gets this exit's logits instead
            with patched({(model, "forward"): _constant(exit_output), **quiet(self.task.module)}):
                others.append(Exit(logits, self.task.loss(batch, index)))
        _restore(device, after)
        self._output = None
        return self.joined(deepest, others, batch)

    def close(self) -> None:
        """Remove the hooks that capture the exits' logits."""
        if self._handle is not None:
            self._handle.remove()
        if self.students is not None:
            self.students.close()


class Distilled(ByExits):
    """Hook that trains all exits (output heads at several depths), and lets the deepest one teach the others.

    This is self-distillation (Co-S2P, Eq. 3): ``L = sum_c [(1 - w) CE(z_c, y) + w T^2 KL(softmax(z_C / T) ||
    softmax(z_c / T))]`` over the exits c with logits z_c. C is the deepest exit, y are the labels, CE is the module's
    own loss, w is the weight of the distillation and T its temperature.
    """

    def __init__(self, task: Task, weight: float, temperature: float) -> None:
        super().__init__(task)
        self.weight, self.temperature = weight, temperature

    def joined(self, deepest: Exit, others: Sequence[Exit], batch: object) -> Tensor:
        """Return the loss of a batch: the exits' (output heads') own losses, plus distillation from the deepest exit.

        See `ByExits.joined`.
        """
        loss = (1 - self.weight) * deepest.loss
        for one in others:
            knowledge = knowledge_loss(one.logits, deepest.logits, self.temperature, counted(batch, one.logits))
            loss = loss + (1 - self.weight) * one.loss + self.weight * knowledge
        return loss


def _logits(output: Any) -> Tensor:
    if getattr(output, "loss", None) is not None:
        raise BadInput(_NO_LOGITS)
    logits: Tensor = output if isinstance(output, Tensor) else output.logits
    return logits


def _with_logits(output: Tensor | HasLogits, logits: Tensor) -> object:
    if isinstance(output, Tensor):
        return logits
    other = copy.copy(output)
    other.logits = logits
    return other


def _constant(output: object) -> Callable[..., Any]:
    """Return a forward method that ignores its arguments and returns ``output``."""
    return lambda *args, **kwargs: output


def _generators(device: torch.device) -> list[Tensor]:
    states = [torch.default_generator.get_state()]
    return [*states, torch.cuda.get_rng_state(device)] if device.type == "cuda" else states


def _restore(device: torch.device, states: list[Tensor]) -> None:
    torch.default_generator.set_state(states[0])
    if device.type == "cuda":
        torch.cuda.set_rng_state(states[1], device)


def counted(batch: object, logits: Tensor) -> Tensor | None:
    """Return a mask of the positions of ``logits`` whose label counts (is not `IGNORED`); None if each sample has one label.

    `logits`: logits for the batch, shape (batch, ..., classes).
    """
    if logits.dim() < 3:
        return None
    items = batch.values() if isinstance(batch, dict) else batch if isinstance(batch, list | tuple) else ()
    labels = [x for x in items if isinstance(x, Tensor) and x.shape == logits.shape[:-1] and x.dtype == torch.long]
    return torch.stack([x != IGNORED for x in labels]).all(0) if labels else None

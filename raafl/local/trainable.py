"""Reuse a small module between tasks, with everything that its training needs, and change its gradients before a step."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from copy import deepcopy
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, Adagrad, Optimizer, SparseAdam

from raafl.core.local import Local
from raafl.core.payload import Payload
from raafl.errors import BadInput
from raafl.local.record import Recorder
from raafl.module_hooks import BATCH_HOOKS, TASK_HOOKS, Schedule, configure, move_batch, overrides
from raafl.rng import seed_everything
from raafl.submodel import FlatTensors, Spec, Submodels
from raafl.submodel.cut.layers import counts_in_eval_mode
from raafl.submodel.submodels import Shrunk

if TYPE_CHECKING:
    from lightning.fabric import Fabric

    from raafl.local.lightning_hooks import TaskHooks
    from raafl.submodel.module_state import ModuleState


class TrainableSubmodel:
    """A submodel's module with its optimizer, reused from task to task: only its values change.

    `parameters`: all parameters of the module, listed once, since walking a module takes a small step's time.
    `trainer`: object that stands in for the module's Lightning Trainer.
    `hooks`: object that calls the Lightning hooks which the module overrides; None = it overrides none.
    `transfer`: function object that moves batches to its device.
    `masks`: masks of classes without samples (`raafl.core.masked_loss`), by number of classes.
    `state`: record of the module's initial state other than the values that it receives.
    `is_configured_anew`: whether the present task has called `configure_optimizers`.
    """

    def __init__(self, submodels: Submodels, spec: Spec, local: Local, payload: Payload, fabric: Fabric) -> None:
        self.base = submodels.base_of(spec)
        shrunk = self._placed(submodels.shrink(spec, rescale=local.rescale, device=fabric.device, base=self.base))
        self.module, self.present, self.trained = shrunk.module, shrunk.present, shrunk.trained
        self._answer = FlatTensors.empty(payload.layout(spec, "trained"), fabric.device) if local.up else self.trained
        self._values, self.up = payload.split(self._answer, spec, "trained")
        self.parameters = list(self.module.parameters())
        self.masks: dict[int, Tensor] = {}
        self.recorder = Recorder()
        self.recorder.attach(self.module)
        from raafl.trainer_stand_in import attach

        self.trainer = attach(self.module)
        self.trainer.measure(self.recorder.latest.metrics)
        self.hooks = _hooks_of(self.module, local.traits.leaves_out)
        self.transfer = Transfer(self.module)
        self._configure()
        self._groups = [_options(group) for group in self.optimizer.param_groups]
        self._members = [list(map(id, group["params"])) for group in self.optimizer.param_groups]
        self.buffers = Buffers(self.module, self.present)
        self.state = self._state_of(submodels.base_variant(spec))
        named, frozen = () if self.base is None else self.module.named_parameters(), submodels.base_variant(spec).frozen
        self.frozen = [(name, p) for name, p in named if name in frozen]
        self._addresses = [p.data_ptr() for _, p in self.frozen]
        self._fixed = [] if submodels.batch_norm == "static" else counts_in_eval_mode(self.module)

    def _placed(self, shrunk: Shrunk) -> Shrunk:
        """Return the module to train, which subclasses may move to a device or shard."""
        return shrunk

    def _state_of(self, submodels: Submodels) -> ModuleState:
        from raafl.submodel.module_state import ModuleState

        return ModuleState(self.module, submodels)

    def gather(self) -> None:
        """Copy buffers that steps have replaced by new tensors into the values to send, which are in `trained`."""
        self.buffers.gather()

    def load(self, values: FlatTensors) -> None:
        """Load the values for another task, and reset everything else to its initial state."""
        self.state.restore()
        self.buffers.restore()  # an aborted task may have left tensors elsewhere
        self._put(values)
        # read the counters again, since merges into a shared frozen base also raise them
        self.versions = [p._version for _, p in self.frozen]
        self._fixed_versions = [count._version for _, count in self._fixed]

    def written_frozen(self) -> str | None:
        """Return the name of a frozen parameter that steps have written to, or whose ``data`` they have set; None = none."""
        for (name, p), version, address in zip(self.frozen, self.versions, self._addresses, strict=True):
            if p._version != version or (p.is_floating_point() and p.data_ptr() != address):  # packed ones may move
                return name
        return None

    def _put(self, values: FlatTensors) -> None:
        """Copy the values that the client received into the module."""
        self.present.copy_(values)

    def check_fixed_statistics(self) -> None:
        """Check that batch norms in eval mode have kept their running statistics, which are not sent to the server.

        Raises:
            BadInput: steps have changed them since `load`, since the user's code has set another mode.
        """
        for (path, count), version in zip(self._fixed, self._fixed_versions, strict=True):
            if count._version != version:
                raise BadInput(
                    f"batch norm '{path}' trains in train mode, but was in eval mode when the model was built, so that its running "
                    "statistics are not sent: call .train() on it in __init__, and .eval() in on_train_start where it is due"
                )

    def reset(self, received: FlatTensors, seed: int, lr_scale: float = 1.0) -> None:
        """Load the values for a new task, whose seed is ``seed``, and discard all results of the last one."""
        self.recorder.clear()  # an aborted task may have left records behind
        self.load(received)
        for bundle in self.up.values():
            bundle.zero_()
        for parameter in self.parameters:
            parameter.grad = None
        self.begin_anew(seed)
        if lr_scale != 1.0:
            scale_rates(self.optimizer, [schedule.scheduler for schedule in self.schedulers], lr_scale)

    def begin_anew(self, seed: int) -> None:
        """Reset the optimizer and its schedulers to their state before the first step of a task with this seed."""
        self.is_configured_anew = self._remembers()
        if self.is_configured_anew:
            seed_everything(seed, self.present.device)  # `configure_optimizers` may draw random numbers
            self._configure()
            return
        self.optimizer.state.clear()
        for group, fresh in zip(self.optimizer.param_groups, self._groups, strict=True):
            for added in group.keys() - fresh.keys() - {"params"}:  # by the optimizer, which may count its steps there
                del group[added]
            group.update(_options(fresh))

    def _remembers(self) -> bool:
        """Check whether what `configure_optimizers` made may remember steps or values, so that each task calls it.

        Of torch's own optimizers all that they remember is known; any other may keep more, or read the parameters.
        """
        optimizer = self.optimizer
        is_known = type(optimizer).__module__.startswith("torch.optim.") and "step" not in vars(optimizer)
        groups = [list(map(id, group["params"])) for group in optimizer.param_groups]
        return bool(self.schedulers) or self._depends_on_task or not is_known or groups != self._members

    def answer(self) -> FlatTensors:
        """Return the tensors to send to the server, which are valid until the next task."""
        if self._answer is not self.trained:
            self._values.copy_(self.trained)
        return self._answer

    def _configure(self) -> None:
        self.schedulers: list[Schedule] = []
        self.trainer.asked.clear()
        if any(p.requires_grad for p in self.module.parameters()):
            self.optimizer, self.schedulers = configure(self.module)
        else:  # a submodel without trained parameters needs an optimizer, too, and optimizers reject an empty list
            self.optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.0)
        hooks = self.optimizer._optimizer_step_pre_hooks or self.optimizer._optimizer_step_post_hooks
        self._depends_on_task = bool(self.trainer.asked_of_task or hooks)  # hooks may count steps
        self.trainer.begin(self.optimizer, self.schedulers)


_FIXED = frozenset({type(None), bool, int, float, str, tuple})


def _options(group: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of a parameter group, lists and tensors as copies, since a step may change them in place."""
    return {
        name: value if type(value) in _FIXED else deepcopy(value) for name, value in group.items() if name != "params"
    }


_RATES = ("lr", "initial_lr", "max_lr", "min_lr", "swa_lr")
"""Names of options of a parameter group that are learning rates, those of schedulers included."""
_BOUNDS = ("base_lrs", "max_lrs", "min_lrs", "eta_min")
"""Attributes of torch's schedulers that are learning rates: a number, or a list with one for each group."""


def scale_rates(optimizer: Optimizer, schedulers: Sequence[Any], factor: float) -> None:
    """Multiply all learning rates of an optimizer and of its unused schedulers by a factor, in place.

    A scheduler computes a rate from the previous one and from its own bounds, such as ``eta_min``. These are scaled,
    too, so that every later rate is scaled.
    """
    for group in optimizer.param_groups:
        group.update({name: group[name] * factor for name in _RATES if name in group})
    for scheduler in _with_inner(schedulers):
        for name in filter(vars(scheduler).__contains__, _BOUNDS):
            rates = getattr(scheduler, name)
            scaled = [rate * factor for rate in rates] if isinstance(rates, list | tuple) else rates * factor
            setattr(scheduler, name, scaled)


def _with_inner(schedulers: Iterable[Any]) -> Iterator[Any]:
    """Yield the schedulers, and recursively those inside sequences and chains."""
    for scheduler in schedulers:
        yield scheduler
        # a private attribute, since torch has no public list of these schedulers
        yield from _with_inner(getattr(scheduler, "_schedulers", ()))


class Buffers:
    """Tensors of a submodel's module in the storage that is sent, of which a step may replace buffers or the memory by others."""

    def __init__(self, module: nn.Module, present: FlatTensors) -> None:
        self._views = [
            (part, name, buffer)
            for path, part in module.named_modules()
            for name, buffer in part._buffers.items()
            if buffer is not None and (f"{path}.{name}" if path else name) in present
        ]
        named = (*module.named_parameters(), *module.named_buffers())  # a sharded module's may be elsewhere
        sent = [
            (tensor, present[name]) for name, tensor in named if name in present and not hasattr(tensor, "to_local")
        ]
        self._bound = [(own, view, view.data_ptr()) for own, view in sent if own.data_ptr() == view.data_ptr()]

    def gather(self) -> None:
        """Copy buffers replaced by a step, and tensors whose ``data`` it set, into the original memory; use that again."""
        elsewhere = [(part._buffers[name], view) for part, name, view in self._views if part._buffers[name] is not view]
        elsewhere += [(own, view) for own, view, address in self._bound if own.data_ptr() != address]
        for own, view in elsewhere:
            if own is not None:
                view.copy_(own.detach())
        self.restore()

    def restore(self) -> None:
        """Use the original buffers and the memory of all tensors again; values that are elsewhere are lost."""
        for part, name, view in self._views:
            part._buffers[name] = view
        for own, view, address in self._bound:
            if own.data_ptr() != address:
                own.data = view


def _hooks_of(module: nn.Module, left_out: frozenset[str]) -> TaskHooks | None:
    """Return an object that calls those hooks that ``module`` overrides; None if it overrides none."""
    overridden = frozenset(name for name in TASK_HOOKS if name not in left_out and overrides(module, name))
    if not overridden:
        return None
    from raafl.local.lightning_hooks import TaskHooks

    return TaskHooks(module, overridden)


class Transfer:
    """Function object that moves batches to a device, by the module's own hooks if it overrides them.

    Attributes:
        is_own: whether the module overrides these hooks.
    """

    def __init__(self, module: nn.Module) -> None:
        """Create a function that moves batches to a device, through the module's transfer hooks if it overrides any."""
        self._module = module
        self.is_own = any(overrides(module, name) for name in BATCH_HOOKS)

    def __call__(self, batch: object, device: torch.device) -> object:
        """Move a batch to ``device``; the module's hooks are skipped for a batch with ``is_transferred``."""
        if not self.is_own or getattr(batch, "is_transferred", False):
            return to_device(batch, device)
        return move_batch(self._module, batch, device, to_device)


def to_device(batch: object, device: torch.device) -> object:
    """Move the tensors of a batch to ``device``; a batch for a CPU stays as it is."""
    if device.type == "cpu":
        return batch
    from raafl.submodel.nested_batch import moved

    return moved(batch, device)


def takes_sparse(optimizer: Optimizer) -> bool:
    """Check whether an optimizer accepts sparse gradients."""
    # with weight decay these optimizers add a dense tensor to the gradient
    if isinstance(optimizer, SGD | Adagrad):
        return all(not group["weight_decay"] for group in optimizer.param_groups)
    return isinstance(optimizer, SparseAdam)


def _dense_by(local: Local, clip: float | None) -> str | None:
    """Name the option that needs dense gradients, since it reads or changes them before a step; None if no option does."""
    if local.prox:
        return "the proximal term"
    if clip is not None:
        return "fabric.gradient_clip_val"
    return None if local.steps_are_plain else "the algorithm's own steps"


def check_optimizer(optimizer: Optimizer, local: Local, clip: float | None, num_processes: int = 1) -> None:
    """Raise `BadInput` if `SparseAdam`, which accepts only sparse gradients, would get dense ones.

    `clip`: largest gradient norm; None = no clipping.
    """
    reader = _dense_by(local, clip) or ("a client of several processes" if num_processes > 1 else None)
    if isinstance(optimizer, SparseAdam) and reader is not None:
        raise BadInput(
            f"configure_optimizers gives {type(optimizer).__name__}, which accepts only sparse gradients, but "
            f"{reader} needs dense ones: use torch.optim.Adam"
        )


def backward_of(
    run: Callable[[Tensor, None], None],
    parameters: Sequence[nn.Parameter],
    optimizer: Optimizer,
    local: Local,
    clip: float | None,
    num_processes: int,
) -> Callable[[Tensor], None]:
    """Return a function that runs the backward pass, and makes sparse gradients dense unless only the optimizer reads them.

    `run`: backward pass of Fabric's strategy; its second argument is None.
    `parameters`: all parameters of the module.
    `clip`: largest gradient norm; None = no clipping.

    Raises:
        BadInput: the optimizer needs sparse gradients; see `check_optimizer`.
    """
    check_optimizer(optimizer, local, clip, num_processes)
    stays_sparse = _dense_by(local, clip) is None and takes_sparse(optimizer)

    def backward(loss: Tensor) -> None:
        run(loss, None)
        if not stays_sparse:
            make_dense_(parameters)

    return backward


@torch.no_grad()
def make_dense_(parameters: Iterable[nn.Parameter]) -> None:
    """Replace sparse gradients by dense ones, in place."""
    for parameter in parameters:
        if parameter.grad is not None and parameter.grad.is_sparse:
            parameter.grad = parameter.grad.to_dense()


class ProximalTerm:
    """Proximal term ``prox/2 * ||theta - theta_received||^2``, which keeps local values close to the received ones.

    Here theta are the trained parameters.
    """

    def __init__(self, parameters: list[nn.Parameter], anchors: list[Tensor]) -> None:
        """Create the term that pulls ``parameters`` towards ``anchors``, tensors of the same shapes."""
        self.parameters, self.anchors = parameters, anchors

    @classmethod
    def towards(cls, received: FlatTensors, module: nn.Module) -> ProximalTerm:
        """Return the proximal term for a module's trained parameters."""
        trained = [(name, p) for name, p in module.named_parameters() if p.requires_grad]
        return cls([p for _, p in trained], [received[name].to(p.device) for name, p in trained])

    @torch.no_grad()
    def add_to_gradients(self, prox: float) -> None:
        """Add the term's gradient to each parameter's: ``prox`` times the parameter's difference from the received value."""
        used = [(p, a) for p, a in zip(self.parameters, self.anchors, strict=True) if p.grad is not None]
        grads: list[Tensor] = [p.grad for p, _ in used if p.grad is not None]
        # in half precision, small gradients would be lost beside prox * theta, so the difference is computed first
        if any(grad.dtype.itemsize == 2 for grad in grads):
            torch._foreach_add_(grads, torch._foreach_sub([p for p, _ in used], [a for _, a in used]), alpha=prox)
            return
        torch._foreach_add_(grads, [p for p, _ in used], alpha=prox)
        torch._foreach_sub_(grads, [a for _, a in used], alpha=prox)

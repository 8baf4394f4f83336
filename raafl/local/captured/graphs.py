"""Capture and replay the steps of one submodel's module: its graphs, and the memory at fixed addresses that they share."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.utils._python_dispatch import TorchDispatchMode

from raafl.exact_key import exact_key
from raafl.local.captured.limits import NotCapturable, Rates, problems_of_built, problems_of_optimizer
from raafl.local.record import START, attach_log, reduction_of, widened
from raafl.local.train import LocalTrainer, PreparedTask, TaskSteps
from raafl.local.trainable import TrainableSubmodel
from raafl.rng import generators, same_generators
from raafl.submodel import FlatTensors
from raafl.submodel.nested_batch import batch_tensors, mapped, tensors_in

WARM_UPS = 2
"""Eager steps of each shape before its capture: the first makes the optimizer's state, the second finds it there."""
PROOFS = 2
"""Tasks in which each graph is used that are also trained eagerly, and compared."""
MOST_GRAPHS = 32
"""Graphs of a process; beyond it the one that was used least recently goes."""
LEAST_REPLAYS = 3
"""Replays of a capture on average below which capturing anew costs more than it saves."""
_PLAIN = (str, bytes, int, float, bool, type(None))


@dataclass(eq=False, slots=True)
class Step:
    """The step of one key: what is fixed in it, and its graph once it is captured."""

    batch: Any  # batch whose tensors are at the addresses from which the graph reads
    inputs: list[Tensor]  # tensors of ``batch``, in the order of `batch_tensors`
    warm_ups: int = 0
    graph: torch.cuda.CUDAGraph | None = None
    # by parameter: names of its optimizer state's tensors after the step
    state: dict[Any, list[str]] = field(default_factory=dict)
    # by name of a logged value: its reduction, and its weight in one step
    logged: dict[str, tuple[str, float]] = field(default_factory=dict)
    # the same for a batch of clients: name, weight and reduction
    said: list[tuple[str, float, str]] = field(default_factory=list)
    proofs: int = 0  # number of tasks that were trained captured and eagerly with equal results


class Owner(Protocol):
    """Objects that all CUDA graphs of a process share; see `raafl.local.captured.tasks.Capture`."""

    device: torch.device

    @property
    def stream(self) -> Any:
        """Stream of warm-up steps and captures."""

    @property
    def pool(self) -> Any:
        """Memory of all graphs."""

    def beside(self) -> AbstractContextManager[None]:
        """Return a context that computes on the stream of captures."""

    def use(self, step: Step) -> None:
        """Note that a graph was replayed."""


class FixedState:
    """State of an optimizer at fixed addresses, which graphs read and write.

    `tensors`: tensors of the state, by parameter and name.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.tensors: dict[Any, dict[str, Tensor]] = {}

    def bind(self, optimizer: Optimizer) -> None:
        """Move the optimizer's tensors to the addresses that graphs use; its first tensors define these addresses."""
        for parameter, state in optimizer.state.items():
            own = self.tensors.setdefault(parameter, {})
            for name, value in state.items():
                if isinstance(value, Tensor):
                    state[name] = own[name] = self._bound(own.get(name), value)
                elif value is not None:
                    raise NotCapturable(f"the optimizer counts '{name}' in Python")

    def _bound(self, own: Tensor | None, value: Tensor) -> Tensor:
        if own is None:
            return value.to(self._device)
        return own if own is value else own.copy_(value)

    def keep(self, optimizer: Optimizer) -> dict[Any, list[str]]:
        """Copy the optimizer's state after a captured step to fixed addresses; return the names of the tensors."""
        found = {}
        for parameter, state in optimizer.state.items():
            found[parameter] = [name for name, value in state.items() if isinstance(value, Tensor)]
            for name in found[parameter]:
                own = self.tensors.get(parameter, {}).get(name)
                if own is None:
                    raise NotCapturable("the optimizer makes its state later than in its first steps")
                if state[name] is not own:
                    own.copy_(state[name])
        return found

    def note_step(self, optimizer: Optimizer, names: Mapping[Any, list[str]]) -> None:
        """Mark an optimizer as stepped after a replay; give it the state with these names if it has none."""
        if not optimizer.state:
            for parameter, own in names.items():
                optimizer.state[parameter] = {name: self.tensors[parameter][name] for name in own}
        optimizer._opt_called = True  # type: ignore[attr-defined]  # schedulers warn of a rate that no step has used


class Graphs:
    """Base class of the CUDA graphs of one client's steps, and of those of a batch of clients."""

    def __init__(self, owner: Owner) -> None:
        self._owner, self._state = owner, FixedState(owner.device)
        self._steps: dict[Any, Step] = {}
        # by shape of a batch: what is fixed in its steps, and their inputs, which all graphs of that shape read
        self._batches: dict[Hashable, tuple[Any, list[Tensor]]] = {}
        self._is_bound = False  # whether the optimizer's state is at the addresses of `_state`
        self._num_captures = self._num_replays = 0

    def _count_capture(self) -> None:
        """Count a capture; raise `NotCapturable` if graphs are replayed too seldom to be worth further captures."""
        self._num_captures += 1
        if self._num_captures > MOST_GRAPHS and self._num_replays < LEAST_REPLAYS * self._num_captures:
            raise NotCapturable("shapes of batches, or options of the optimizer, change too often")

    def _step_of(
        self, key: Hashable, shape: Hashable, given: Sequence[Tensor], batch_of: Callable[[list[Tensor]], Any]
    ) -> Step:
        """Return the step of a key, with the tensors of a batch copied to where the graphs of all batches of its shape read them.

        `batch_of`: function that builds a batch from these copies.
        """
        step = self._steps.get(key)
        if step is None:
            if shape not in self._batches:
                inputs = [torch.empty_like(x, device=self._owner.device) for x in given]
                self._batches[shape] = batch_of(inputs), inputs
            step = self._steps[key] = Step(*self._batches[shape])
        for own, x in zip(step.inputs, given, strict=True):
            own.copy_(x)
        return step

    def _recording(self, graph: torch.cuda.CUDAGraph) -> AbstractContextManager[None]:
        """Return a context in which all operations on the GPU are recorded into ``graph``."""
        owner = self._owner
        return torch.cuda.graph(graph, pool=owner.pool, stream=owner.stream, capture_error_mode="thread_local")

    def _launch(self, step: Step, optimizer: Optimizer) -> None:
        """Replay a step's graph, and record in the optimizer's state that it has made a step."""
        assert step.graph is not None
        step.graph.replay()
        self._owner.use(step)
        self._num_replays += 1
        self._state.note_step(optimizer, step.state)


class StepGraphs(Graphs):
    """Graphs of one submodel's module, and the memory at fixed addresses that they share.

    Attributes:
        reason: why its steps are not captured; None = they may be.
        rates: learning rates of its optimizer; None = the optimizer stays as the user made it.
        waits: whether its next task is eager, and makes the masks of a masked loss, which graphs read.
    """

    def __init__(self, owner: Owner, built: TrainableSubmodel, waits: bool) -> None:
        super().__init__(owner)
        self.waits, device = waits, owner.device
        has_form = not problems_of_optimizer(built.optimizer)
        self.rates = Rates(device) if has_form else None
        found = problems_of_built(built)
        self.reason: str | None = found[0] if found else None
        self._total = torch.zeros((), dtype=torch.float64, device=device)
        self._sums: dict[str, Tensor] = {}
        # tensors of the method's hook and anchors of the proximal term, at addresses from which graphs read
        self._static: dict[str, Any] = {}

    def begin(self, steps: CapturedSteps) -> None:
        """Move what a task brings, and its steps read, to addresses that stay; raise if its optimizer has no form for graphs."""
        built, optimizer = steps.built, steps.built.optimizer
        for problem in problems_of_optimizer(optimizer):  # each task may have made another one
            raise NotCapturable(problem)
        members = (tuple(map(id, group["params"])) for group in optimizer.param_groups)
        self._optimizer_form = type(optimizer), *members
        self._changed = _changed(built) if self._runs_between(built) else {}
        fixed = [name for name, value in self._changed.items() if type(value) in _PLAIN]
        if fixed and built.trainer.asked_of_task:
            raise NotCapturable(f"configure_optimizers reads self.trainer, and sets the attribute {min(fixed)}")
        self._is_bound = False
        steps.move(self._at)

    def end(self, built: TrainableSubmodel) -> None:
        """Raise if code that runs between the captured steps of a task has changed values in Python, which steps may read."""
        now = _changed(built) if self._runs_between(built) else {}
        if new := [name for name, value in now.items() if name not in self._changed or self._changed[name] != value]:
            raise NotCapturable(f"a hook or a scheduler changes the attribute {new[0]}")

    def _runs_between(self, built: TrainableSubmodel) -> bool:
        return built.hooks is not None or built.is_configured_anew

    def _at(self, name: str, values: Any) -> Any:
        """Copy tensors to the addresses from which CUDA graphs read them; return the copies in the same nested structure."""
        if isinstance(values, FlatTensors):
            if name not in self._static:
                self._static[name] = FlatTensors.empty(values.layout, self._owner.device)
            return self._static[name].copy_(values)
        tensors = tensors_in(values)
        own = self._static.setdefault(name, [torch.empty_like(x, device=self._owner.device) for x in tensors])
        if [x.shape for x in own] != [x.shape for x in tensors]:
            raise NotCapturable(f"the tensors '{name}' of the algorithm's steps have other shapes in each task")
        for x, given in zip(own, tensors, strict=True):
            x.copy_(given)
        return _with_tensors(values, own)

    # ---- a step ----

    def run(self, steps: CapturedSteps, batch: object) -> None:
        """Make one step with a batch: eagerly at first, then by its graph."""
        optimizer = steps.built.optimizer
        weight, shape = steps.built.recorder.weight, form_of(batch)
        hooks = len(steps.built.module._forward_hooks)  # number of hooks, which differs if logits are masked
        flags = () if steps.built.hooks is None else steps.built.state.flags  # which hooks at the start may set
        key = shape, weight, bool(optimizer.state), options_of(optimizer), self._optimizer_form, hooks, flags
        is_new, inputs = key not in self._steps, batch_tensors(batch)
        step = self._step_of(key, shape, inputs, lambda fixed: _with_tensors(batch, fixed))
        if is_new:
            # the first step of a task has no optimizer state yet; eager steps with state count as its warm-ups, too
            step.warm_ups = max((one.warm_ups for (form, *_), one in self._steps.items() if form == shape), default=0)
        if step.graph is None and step.warm_ups < WARM_UPS:
            self._warm_up(steps, step)
            return
        if step.graph is None:
            self._capture(steps, step)
        self._replay(steps, step)

    def _warm_up(self, steps: CapturedSteps, step: Step) -> None:
        """Make a step eagerly; raise if it waits for the GPU or has effects that a graph would not repeat."""
        built, before = steps.built, generators()
        asked, changed = built.trainer.asked, set(built.state.changed())
        asked.clear()
        with self._owner.beside(), waits_refused(), Watch():
            steps.step_eagerly(step.batch)
        step.warm_ups += 1
        self._is_bound = False
        if not same_generators(before, generators()):
            raise NotCapturable("training_step draws random numbers on the CPU")
        if built.trainer.asked_of_task:
            raise NotCapturable(f"training_step reads self.trainer.{built.trainer.asked_of_task[0]}")
        if new := set(built.state.changed()) - changed:
            raise NotCapturable(f"training_step changes the attribute {min(new)}")
        if stray := [name for name, p in built.module.named_parameters() if p.grad is not None]:
            raise NotCapturable(f"parameter '{stray[0]}' has a gradient, but is not in the optimizer")
        if built.recorder.metrics:
            raise NotCapturable(f"training_step logs '{min(built.recorder.metrics)}', a Metric")

    def _capture(self, steps: CapturedSteps, step: Step) -> None:
        """Record a step as a CUDA graph, which computes nothing, and undo the changes that this made to Python objects."""
        self._count_capture()
        built = steps.built
        for name, (total, _) in built.recorder.sums.items():
            if not isinstance(total, Tensor):
                raise NotCapturable(f"training_step logs '{name}', a number of Python, which a graph would freeze")
            self._sums.setdefault(name, torch.zeros_like(total))
        self._bind(built)
        logged, graph = _Logged(built.recorder.weight, self._sums), torch.cuda.CUDAGraph()
        attach_log(built.module, logged.log)
        counts = steps.counts(self._total)
        try:
            with self._recording(graph):
                steps.step_eagerly(step.batch)
                self._total.copy_(steps.total)  # type: ignore[arg-type]  # a tensor after a step
                built.gather()
                step.state = self._state.keep(built.optimizer)
        finally:
            built.recorder.attach(built.module)
            steps.restore(counts)
        step.graph, step.logged = graph, logged.found
        self._is_bound = False

    def _bind(self, built: TrainableSubmodel) -> None:
        """Copy the optimizer's state to the addresses from which CUDA graphs read it, unless it is there already."""
        if self._is_bound:
            return
        built.gather()  # copies back buffers that eager steps have replaced by other tensors
        self._state.bind(built.optimizer)
        self._is_bound = True

    def _replay(self, steps: CapturedSteps, step: Step) -> None:
        """Make a step by replaying its CUDA graph, and update the Python counters that a graph cannot change."""
        built = steps.built
        assert self.rates is not None
        self.rates.refresh(built.optimizer)
        self._bind(built)
        for name, (how, weight) in step.logged.items():
            built.recorder.carry(name, how, self._sums[name], weight)
        steps.sum_in(self._total)
        self._launch(step, built.optimizer)
        steps.count()
        steps.used[step] = None

    def forget(self, reason: str) -> None:
        """Train eagerly from now on, and release the graphs."""
        self.reason = reason
        self._steps.clear()
        for memory in (self._batches, self._sums, self._state.tensors, self._static):
            memory.clear()


class _Logged:
    """Stand-in for a recorder while a CUDA graph is captured, which adds logged values to sums at fixed addresses."""

    def __init__(self, weight: float, sums: Mapping[str, Tensor]) -> None:
        self._weight, self._sums = weight, sums
        self.found: dict[str, tuple[str, float]] = {}

    def log(
        self,
        name: str,
        value: Any,
        *,
        reduce_fx: str | Callable[..., Any] = "mean",
        batch_size: int | None = None,
        **kwargs: Any,
    ) -> None:
        """Add a logged value to its sum; see `Recorder.log`."""
        how = reduction_of(reduce_fx)
        if not isinstance(value, Tensor) or how not in START or name not in self._sums:
            raise NotCapturable(f"training_step logs '{name}' in a form, or at a time, that a graph would freeze")
        own, value = self._sums[name], widened(value)
        weight = self._weight if batch_size is None else float(batch_size)
        before = self.found.get(name, (how, 0.0))[1]
        if how in ("mean", "sum"):
            own.copy_(own + (value * weight if how == "mean" else value))
        else:
            own.copy_((torch.minimum if how == "min" else torch.maximum)(own, value))
        self.found[name] = how, before + weight if how == "mean" else 1.0


class Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Dispatch mode that raises on what a graph would omit or freeze: tensors on the CPU, the user's own generators."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._numbers: list[Tensor] = []  # tensors made of Python numbers, which are constants of the graph in any case

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        answer = func(*args, **(kwargs or {}))
        if func.overloadpacket is torch.ops.aten.scalar_tensor:
            self._numbers.append(answer)
        for tensor in tensors_in((args, kwargs or {}, answer)):
            is_number = any(tensor is number for number in self._numbers)
            if tensor.device.type == "cpu" and tensor.numel() and not is_number:
                raise NotCapturable(f"a step works on a tensor of the CPU ({func.overloadpacket})")
            if tensor.layout is not torch.strided:
                raise NotCapturable(f"a step has sparse tensors ({func.overloadpacket})")
        if (kwargs or {}).get("generator") is not None:
            raise NotCapturable("training_step draws from a generator of its own")
        return answer


@contextmanager
def waits_refused() -> Iterator[None]:
    """Make waiting for the GPU raise an error within the ``with`` block, in the whole process."""
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)


def _with_tensors(item: Any, tensors: Iterable[Tensor]) -> Any:
    """Return a nested structure like ``item``, with other tensors in their order."""
    left = iter(tensors)
    return mapped(item, lambda _: next(left))


def form_of(item: object) -> Hashable:
    """Return the form of a batch, which a CUDA graph fixes: structure, shapes, dtypes, strides, and values that are no tensors."""
    if isinstance(item, Tensor):
        return item.shape, item.dtype, item.stride()
    if isinstance(item, Mapping):
        return type(item), tuple((key, form_of(value)) for key, value in item.items())
    if type(item) in (list, tuple):
        return type(item), tuple(form_of(value) for value in item)  # type: ignore[attr-defined]
    if type(item) not in _PLAIN:
        raise NotCapturable(f"a batch holds an object of {type(item).__name__}")
    return exact_key(item)


def options_of(optimizer: Optimizer) -> Hashable:
    """Return the options of an optimizer's parameter groups that a graph fixes: all but the learning rates."""
    return tuple(
        tuple((name, exact_key(value)) for name, value in group.items() if name not in _NOT_FIXED)
        for group in optimizer.param_groups
    )


_NOT_FIXED = frozenset({"params", "lr", "initial_lr", "max_lr", "min_lr"})


def _changed(built: TrainableSubmodel) -> dict[str, Any]:
    """Return attributes that differ from their recorded state: plain values, keys of other objects, None in containers."""
    found = {}
    for name in built.state.changed():
        try:
            value = attrgetter(name)(built.module)
        except AttributeError:
            value = None
        found[name] = value if type(value) in _PLAIN else exact_key(value)
    return found


class CapturedSteps(TaskSteps):
    """The steps of one task, made by graphs.

    `used`: steps whose graphs this task has used.
    """

    def __init__(self, trainer: LocalTrainer, task: PreparedTask, graphs: StepGraphs) -> None:
        super().__init__(trainer, task)
        self.built, self._graphs, self.used = task.built, graphs, dict[Step, None]()
        graphs.begin(self)

    @property
    def total(self) -> Tensor | float:
        """Sum of the losses so far."""
        return self._total

    def move(self, at: Callable[[str, Any], Any]) -> None:
        """Move the tensors that a task brings to fixed addresses.

        `at`: function that copies tensors to those of their name, and returns them there.
        """
        if self._pull is not None:
            self._pull.anchors = at("anchors", self._pull.anchors)
        for name in self._trainer.local.traits.captures or ():
            setattr(self._hook, name, at(name, getattr(self._hook, name)))

    def _run_batch(self, batch: object) -> None:
        """Train on a batch without its attention mask if that is all ones, since transformers waits for the GPU to check it."""
        if isinstance(batch, Mapping) and _is_of_ones(batch.get("attention_mask")):
            batch = {name: value for name, value in batch.items() if name != "attention_mask"}
        super()._run_batch(batch)

    def _make_step(self, batch: object, is_due: bool) -> None:
        self._graphs.run(self, batch)

    def step_eagerly(self, batch: object) -> None:
        """Make a step as without graphs."""
        before = self._num_losses
        super()._make_step(batch, is_due=True)
        if self._num_losses == before:
            raise NotCapturable("training_step returns None, to skip a batch")

    def counts(self, total: Tensor) -> tuple[Any, ...]:
        """Return the counts of steps, and put the sum of losses into ``total``'s place; see `restore`."""
        found = self._num_losses, self.num_steps, self._total
        self._total = total
        self._hook.stepped = lambda: None  # type: ignore[method-assign]  # a capture is no step
        return found

    def restore(self, counts: tuple[Any, ...]) -> None:
        """Set the counts of steps that `counts` has returned."""
        self._num_losses, self.num_steps, self._total = counts
        del self._hook.stepped

    def sum_in(self, total: Tensor) -> None:
        """Let the sum of losses go on in ``total``."""
        if self._total is not total:
            total.copy_(self._total) if isinstance(self._total, Tensor) else total.fill_(self._total)
            self._total = total

    def count(self) -> None:
        """Count a step that a graph has made."""
        self._num_losses += 1
        self.num_steps += 1
        self._hook.stepped()


def _is_of_ones(mask: object) -> bool:
    return isinstance(mask, Tensor) and mask.device.type == "cpu" and mask.dim() == 2 and bool(mask.all())

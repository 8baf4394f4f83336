"""Find the places where a model can be cut in two, by tracing a training step on the meta device.

A model can be cut at a module's output if nothing else leads from the operations before to those after: no other value computed
from parameters (a skip connection, a mask computed by a layer), and no parameter that is used on both sides (tied
embeddings). Values that cross the cut and depend on no parameter, such as labels or an attention mask, are computed from the
batch; the client must send these parts of the batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from raafl.algorithm import FULL, Cost, FlatTensors, Layout, Spec, Submodels
from raafl.parts.local.swap_parameters import patched, quiet
from raafl.submodel import SpecError
from raafl.submodel.batch_norm import keep_static
from raafl.submodel.cost.fused import FusedKernels
from raafl.submodel.cost.ledger import Ledger, storage_key
from raafl.submodel.cost.predicted import Method
from raafl.submodel.cut.layers import copy_structure
from raafl.submodel.cut.shrink import Structure, build
from raafl.submodel.declared import above
from raafl.submodel.frozen import FrozenBase
from raafl.submodel.isolated_run import loss_of
from raafl.submodel.nested_batch import meta_batch, tensors_in
from raafl.submodel.submodels import Caches, Part, Shrunk

Shapes = tuple[tuple[int, ...], ...]
"""Shape of each tensor in a batch, in order."""


@dataclass(slots=True)
class Call:
    """One call of a module in a traced training step.

    Attributes:
        path: path of the module in the model.
        parent: index of the call within which this one happens; -1 = none.
        start: number of operations that were traced before the call.
        end: number of operations at the end of the call; -1 = it has not ended.
        output: result of the call, tensors or a structure of them.
    """

    path: str
    parent: int
    start: int
    end: int = -1
    output: object = None


@dataclass(slots=True)
class _Value:
    """Record of one tensor storage in a traced step: where it came from, and which operations used it.

    `came`, `first`, `last`: numbers of the operations that created it, used it first and used it last.
    """

    came: int
    first: int = -1
    last: int = -1
    name: str = ""  # name of the parameter or buffer; "" for an intermediate result
    learned: bool = False  # whether it was computed from parameters
    leaves: frozenset[int] = frozenset()  # positions in the flattened batch of the tensors from which it was computed


@dataclass(frozen=True, slots=True)
class Cut:
    """A place at which the model can be cut into a client's and a server's part.

    Attributes:
        path: path of the client's last module, whose output is sent to the server.
        lower: names of the parameters and buffers that the client's part uses.
        num_layers: number of modules in the client's part that have parameters of their own.
        num_values: number of elements of the parameters in the client's part.
        leaves: positions of the batch's tensors that the server's part needs, such as labels.
        sample_bytes: size of one sample's activation in bytes, in single precision.
    """

    path: str
    lower: frozenset[str]
    num_layers: int
    num_values: int
    leaves: tuple[int, ...]
    sample_bytes: float


@dataclass(frozen=True)
class Outline:
    """Shapes of what the client's part of the model outputs for a batch, as tensors without values (on the meta device).

    Attributes:
        path: path of the module at the cut.
        calls: outputs of the modules before the cut, which the server skips: by module path, one for each call.
        output: output of the module at the cut.
        index: position of the activation among the tensors in ``output``.
        activation: activation that is sent to the server, on the meta device.
    """

    path: str
    calls: dict[str, list[Any]]
    output: object
    index: int
    activation: Tensor = field(repr=False)

    def with_activation(self, activation: Tensor, fill: Callable[[Any], Any]) -> object:
        """Build the output of the module at the cut from the activation that was received.

        Args:
            activation: activation to insert.
            fill: function that creates each of the output's other tensors, given a tensor on the meta device (shape only).
        """
        flat, structure = tree_flatten(self.output)
        return tree_unflatten([activation if i == self.index else fill(item) for i, item in enumerate(flat)], structure)


class Trace(Ledger):  # type: ignore[no-untyped-call]
    """Tracer of a training step: it records calls of modules, and which tensors are computed from which."""

    def __init__(self, submodels: Submodels, batch: object) -> None:
        """Copy the module to the meta device; `run` then traces its training step on ``batch``, a batch of meta tensors."""
        super().__init__()
        self.rules = submodels.rules
        self.module: Any = copy_structure(submodels.module, {}).to("meta")
        self.batch, self.calls = batch, list[Call]()
        self._stack: list[int] = []
        self._now = 0
        self._values: dict[int, _Value] = {}
        self._held: list[Any] = []  # keeps all storages alive: a new storage could get the key of a freed one
        state = set(submodels.layout().by_name)
        for name, tensor in (*self.module.named_parameters(), *self.module.named_buffers()):
            if name in state:
                self._value(tensor).name = name
                self._value(tensor).learned = True
        for i, leaf in enumerate(tree_flatten(batch)[0]):
            self._value(leaf).leaves = frozenset([i])

    def run(self) -> Trace:
        """Trace the training step and return the tracer itself; an exception of the step is passed on."""
        for path, part in self.module.named_modules():
            part.register_forward_pre_hook(lambda part, args, path=path: self._enter(path))
            part.register_forward_hook(lambda part, args, output: self._leave(output))
        with torch.enable_grad(), patched(quiet(self.module)), self, FusedKernels(self.rules):
            loss_of(self.module, self.batch)
        return self

    def _enter(self, path: str) -> None:
        self.calls.append(Call(path, self._stack[-1] if self._stack else -1, self._now))
        self._stack.append(len(self.calls) - 1)

    def _leave(self, output: object) -> None:
        call = self.calls[self._stack.pop()]
        call.end, call.output = self._now, output

    def _value(self, tensor: Tensor) -> _Value:
        key = storage_key(tensor)
        value = self._values.get(key)
        if value is None:
            self._held.append(tensor.untyped_storage())
            value = self._values[key] = _Value(self._now)
        return value

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> object:
        """Run one operation of the traced step, and record which storages it reads and writes."""
        result = super().__torch_dispatch__(func, types, args, kwargs)
        self._now += 1
        operands = [self._value(tensor) for tensor in tensors_in((args, kwargs or {}))]
        learned = any(value.learned for value in operands)
        leaves = frozenset().union(*(value.leaves for value in operands))
        for value in operands:
            value.first = self._now if value.first < 0 else value.first
            value.last = self._now
        results = [self._value(tensor) for tensor in tensors_in(result)]
        for value in results:
            value.learned |= learned
            value.leaves |= leaves
        return result

    # ---- find the cuts ----

    def cuts(self, submodels: Submodels) -> Iterator[Cut]:
        """Yield each possible cut of the model, from the first layer to the last."""
        times: dict[str, int] = {}
        for call in self.calls:
            times[call.path] = times.get(call.path, 0) + 1
        for call in sorted(self.calls, key=lambda call: call.end):
            if call.path and call.end >= 0 and times[call.path] == 1:
                cut = self._cut(submodels, call)
                if cut is not None:
                    yield cut

    def _cut(self, submodels: Submodels, call: Call) -> Cut | None:
        index = _activation(call.output)
        if index is None:
            return None
        activation: Tensor = tree_flatten(call.output)[0][index]
        storage, now = self._value(activation), call.end
        if activation.numel() * activation.itemsize != activation.untyped_storage().nbytes():
            return None  # a view: the layers above may read other parts of the same storage
        lower = self._lower(now)
        inside = [(skipped.start, skipped.end) for skipped in (*self.skipped_calls(call, lower), call)]
        leaves: frozenset[int] = frozenset()
        for value in self._values.values():
            if value.name:
                if 0 <= value.first <= now < value.last:  # a parameter or buffer that both halves use
                    return None
            elif value.came <= now < value.last and value is not storage:
                if value.learned or any(start < value.came <= end for start, end in inside):
                    return None
                # computed from the batch alone, so the server can compute it again from these tensors
                leaves |= value.leaves
        trained = {name for name, p in submodels.module.named_parameters() if p.requires_grad}
        if not trained & lower or not trained - lower:
            return None
        sizes = submodels.parameters
        owners = {name.rpartition(".")[0] for name in lower if name in sizes}
        num_values = sum(sizes[name] for name in lower if name in sizes)
        sample_bytes = activation.numel() * activation.itemsize / max(activation.shape[0], 1) if activation.dim() else 0
        return Cut(call.path, lower, len(owners), num_values, tuple(sorted(leaves)), sample_bytes)

    def _lower(self, now: int) -> frozenset[str]:
        return frozenset(value.name for value in self._values.values() if value.name and 0 <= value.first <= now)

    def skipped_calls(self, call: Call, lower: frozenset[str]) -> list[Call]:
        """Return the calls of modules that the server can skip, since they belong to the client's part of the model.

        Of nested calls only the outermost is returned.

        Args:
            call: call of the module at the cut.
            lower: names of the parameters and buffers in the client's part.
        """
        enclosing = set()
        parent = call.parent
        while parent >= 0:
            enclosing.add(parent)
            parent = self.calls[parent].parent
        owners = {path for name in lower for path in above(name)[1:]}
        inside: set[int] = set()
        skipped = []
        for number, other in enumerate(self.calls):
            if other is call:
                break
            if other.parent in inside:
                inside.add(number)
            elif number not in enclosing and other.path in owners:
                inside.add(number)
                skipped.append(other)
        return skipped

    def outline(self, cut: Cut) -> Outline:
        """Return the shapes of what the client's part outputs if the model is cut at ``cut``.

        Raises:
            ValueError: the training step does not run the module at the cut for a batch of these shapes.
        """
        call = next((call for call in self.calls if call.path == cut.path and call.end >= 0), None)
        index = None if call is None else _activation(call.output)
        if call is None or index is None:
            raise ValueError(
                f"the training step does not call '{cut.path}', where the model is cut, for a batch of this shape"
            )
        calls: dict[str, list[Any]] = {}
        for skipped in self.skipped_calls(call, cut.lower):
            calls.setdefault(skipped.path, []).append(_detached(skipped.output))
        output = _detached(call.output)
        return Outline(cut.path, calls, output, index, tree_flatten(output)[0][index])


def _activation(output: object) -> int | None:
    """Return the position in a module's output of the only tensor that requires a gradient; None unless there is exactly one."""
    flat = tree_flatten(output)[0]
    places = [i for i, item in enumerate(flat) if isinstance(item, Tensor) and item.requires_grad]
    return places[0] if len(places) == 1 else None


def _detached(output: object) -> object:
    return tree_map(lambda item: item.detach() if isinstance(item, Tensor) else item, output)


def trace_step(submodels: Submodels, shapes: Shapes | None = None) -> Trace:
    """Trace a training step of the whole model on a batch with the structure of the example batch.

    Args:
        submodels: submodels of the model, with its example batch.
        shapes: shape of each tensor in the batch; None = that of the example batch.

    Raises:
        ValueError: there is no example batch, it contains other things than tensors, or the step cannot be traced.
    """
    flat, structure = tree_flatten(submodels.example_batch)
    if not flat or not all(isinstance(item, Tensor) for item in flat):
        raise ValueError("the model's batches contain something other than tensors: split_fed needs batches of tensors")
    if not callable(getattr(submodels.module, "training_step", None)):
        raise ValueError("the model has no training_step: define one that returns the loss")
    sizes: Sequence[Any] = [item.shape for item in flat] if shapes is None else shapes
    failure: Exception | None = None
    # try "meta", then "cpu", for tensors that the step itself creates: some steps read values of their masks or indices
    for default in ("meta", "cpu"):
        leaves = [torch.empty(size, dtype=item.dtype, device="meta") for size, item in zip(sizes, flat, strict=True)]
        try:
            with torch.device(default):
                return Trace(submodels, tree_unflatten(leaves, structure)).run()
        except Exception as error:
            failure = failure or error
    raise ValueError(
        f"the model's training step cannot be traced without real values: {' '.join(str(failure).split())[:200]}"
    )


def shapes_of(batch: object) -> Shapes:
    """Return the shapes of the tensors in a batch, in order."""
    return tuple(tuple(item.shape) for item in tree_flatten(batch)[0])


def cuts_of(submodels: Submodels) -> tuple[tuple[Cut, ...], str]:
    """Return the places where a model can be cut in two, first layer first, and the reason if there are none; cached."""
    return submodels.cached("cuts", "all", lambda: _cuts_of(submodels))


def _cuts_of(submodels: Submodels) -> tuple[tuple[Cut, ...], str]:
    try:
        cuts = tuple(trace_step(submodels).cuts(submodels))
    except ValueError as error:
        return (), str(error)
    return cuts, "" if cuts else "at every layer more than one value is passed to the layers above"


# Represent one half of a model that is cut in two: its tensors, layouts and module, and the way to run it.
#
# The user's own `training_step` runs both halves. The client's half runs it up to the cut, and stops there. The server's half runs
# all of it, but modules below the cut return blank outputs of the right shapes, and the module at the cut returns the received
# activation, at which autograd ends.

Side = Literal["lower", "upper"]


class Reached(BaseException):
    """Signal that the client's half has reached the cut. It is no `Exception`, since the user's code might catch that."""

    def __init__(self, output: object) -> None:
        """Carry ``output``, the output of the module at the cut, to the caller."""
        self.output = output


class Half(Submodels):
    """One half of a model that is cut in two: the tensors of the other half take no memory here and are not sent."""

    whole: Submodels

    def __init__(self, whole: Submodels, cut: Cut, side: Side) -> None:
        self.__dict__.update(whole.__dict__)
        self._caches = Caches()
        self.whole, self.cut, self.side = whole, cut, side
        memo: dict[int, Any] = {}
        for name, tensor in whole.module.named_buffers():
            if name in whole._buffers and not self.has(name):
                memo[id(tensor)] = blank(tensor.shape, tensor.dtype, "cpu")
        self.module = copy_structure(whole.module, memo)

    def has(self, name: str) -> bool:
        """Check whether the tensor ``name`` belongs to this half."""
        return (name in self.cut.lower) == (self.side == "lower")

    def _layout(self, spec: Spec, part: Part) -> Layout:
        layout = super()._layout(spec, part)
        return layout.only(frozenset(filter(self.has, layout.by_name)))

    def _trains(self, spec: Spec) -> frozenset[str]:
        return frozenset(filter(self.has, super()._trains(spec)))

    def shrink(
        self,
        spec: Spec = FULL,
        rescale: bool = False,
        device: torch.device | str = "cpu",
        present: FlatTensors | None = None,
        base: FrozenBase | None = None,
    ) -> Shrunk:
        """Build a module that trains this half of the model. Tensors of the other half have a shape but take no memory.

        Args:
            spec: must be the whole model, since split_fed has no smaller submodels.
            rescale: ignored, since nothing is narrowed.
            device: device of the module.
            present: values of this half; None = leave them uninitialised.
            base: frozen parameters, which are not sent; None = they are among ``present``.

        Raises:
            SpecError: ``spec`` is not the whole model.
        """
        if self.normal(spec) != FULL:
            raise SpecError(f"spec is {spec}: split_fed trains the whole model in two halves: give no smaller submodel")
        present = present or FlatTensors.empty(self.layout(FULL, "present" if base is None else "sent"), device)
        device = torch.device(device)
        theirs = {name: tensor for name, tensor in self._parameters.items() if not self.has(name)}
        frozen = {name: blank(tensor.shape, tensor.dtype, device) for name, tensor in theirs.items()}
        if base is not None:
            frozen |= base.selected(self.layout(FULL), {}, device)
        module = build(Structure(self.module, {}, self._trains(FULL), (), {}, {}, frozen), present, rescale=False)
        if self.batch_norm == "static":
            keep_static(module)
        return Shrunk(module, present, present.prefix(self.layout(FULL, "trained")))

    def _step(self, module: nn.Module, step: Any, batch: object, index: int) -> object:
        """Run one training step of this half alone, on the meta device; return the tensor whose backward pass trains it."""
        if self.side == "lower":
            return activation_in(run_to_cut(module, self.cut.path, lambda: step(batch, index))).sum()
        outline = self.outline(shapes_of(batch))
        activation = torch.empty_like(outline.activation, requires_grad=True)
        with with_received_activation(module, outline, activation):
            return step(batch, index)

    def predicted_cost(self, spec: Spec, batch_size: int, method: Method | None = None) -> Cost:
        """Predict the cost of this half."""
        # trace the shapes at the cut (the outline) first, since a step cannot be traced while another one is
        self.outline(shapes_of(meta_batch(self.example_batch, batch_size)))
        return super().predicted_cost(spec, batch_size, method)

    def with_own_step(self, module: nn.Module) -> nn.Module:
        """Replace the module's training step by one that runs only this half, and return the module."""
        module.__dict__["training_step"] = partial(self._step, module, module.training_step)
        return module

    # ---- what the server must know of the client's half ----

    def outline(self, shapes: Shapes, draws: Callable[[int], AbstractContextManager[Any]] = nullcontext) -> Outline:
        """Return the shapes of what the client's half outputs for a batch of ``shapes``; cached.

        Args:
            shapes: shape of each tensor in the batch.
            draws: function that maps a seed to a context with a random stream of its own. The trace runs in ``draws(0)``,
                so that it does not change the run's random numbers.

        Raises:
            ValueError: the training step fails on such a batch.
        """

        def follow() -> Outline:
            with draws(0):
                return trace_step(self.whole, shapes).outline(self.cut)

        return self.whole.cached("outline", (self.cut.path, shapes), follow)

    def batch_from(self, shapes: Shapes, leaves: Sequence[Tensor], device: torch.device) -> object:
        """Build a batch for the server's half: the tensors that the client has sent, and zeros in place of all others.

        Args:
            shapes: shape of each tensor in the batch.
            leaves: tensors that the client has sent, such as labels, in the order of `Cut.leaves`.
            device: device of the zeros.
        """
        flat, structure = tree_flatten(self.example_batch)
        flat = [blank(shape, item.dtype, device) for item, shape in zip(flat, shapes, strict=True)]
        for i, leaf in zip(self.cut.leaves, leaves, strict=True):
            flat[i] = leaf
        return tree_unflatten(flat, structure)


def blank(shape: Sequence[int], dtype: torch.dtype, device: torch.device | str) -> Tensor:
    """Return zeros of any shape that take the memory of one element.

    Args:
        shape: shape of the tensor.
        dtype: dtype of the tensor.
        device: device of the tensor.
    """
    return torch.zeros((), dtype=dtype, device=device).expand(shape)


# ---- run the client's half ----


def run_to_cut(module: nn.Module, path: str, step: Callable[[], Any]) -> object:
    """Run ``step`` up to the end of the module at ``path``; return that module's output. Logging is suppressed.

    Args:
        module: the client's half.
        path: path of the module at the cut.
        step: function that runs the user's training step.
    """

    def reached(part: nn.Module, args: object, output: object) -> None:
        raise Reached(output)

    handle = module.get_submodule(path).register_forward_hook(reached)
    try:
        with patched(quiet(module)):
            step()
    except Reached as end:
        return end.output
    finally:
        handle.remove()
    raise RuntimeError(
        f"{type(module).__name__}.training_step did not call '{path}', the layer at which the model is cut: let it call "
        "this layer for every batch"
    )


def activation_in(output: object) -> Tensor:
    """Return the tensor that requires a gradient among the outputs of the module after which the model is cut."""
    activation: Tensor = next(
        item for item in tree_flatten(output)[0] if isinstance(item, Tensor) and item.requires_grad
    )
    return activation


# ---- run the server's half ----


def with_received_activation(module: nn.Module, outline: Outline, activation: Tensor) -> AbstractContextManager[None]:
    """Return a context in which the server's half trains on a received activation, as if its lower layers had run.

    The modules before the cut are skipped, and the module at the cut returns ``activation``.

    Args:
        module: the server's half.
        outline: shapes of what the client's half outputs.
        activation: activation that the client has sent.
    """

    def filled(item: object) -> object:
        return blank(item.shape, item.dtype, activation.device) if isinstance(item, Tensor) else item

    forwards = {path: _given(tree_map(filled, outputs)) for path, outputs in outline.calls.items()}
    forwards[outline.path] = lambda *args, **kwargs: outline.with_activation(activation, filled)
    return patched({(module.get_submodule(path), "forward"): forward for path, forward in forwards.items()})


def _given(outputs: list[Any]) -> Callable[..., Any]:
    """Make a forward method that returns the next element of ``outputs`` at each call, without computing anything."""
    remaining = iter(outputs)
    return lambda *args, **kwargs: next(remaining)

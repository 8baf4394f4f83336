"""Follow the dimensions of a model's tensors through the operations of a training step.

The step runs on the meta device, where tensors have shapes and no values; where it needs values (`.item()`, experts chosen by a
router), it runs on random ones, several times, so that more branches are seen. A large model is followed without values as long
as it only evaluates conditions: those are taken as false, as in `raafl.submodel.cost.ledger`.
"""

from __future__ import annotations

import inspect
import itertools
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from raafl import rng
from raafl.errors import USER_ERRORS
from raafl.submodel import isolated_run
from raafl.submodel.cost.kernels import result_of
from raafl.submodel.cost.ledger import LARGE, storage_key
from raafl.submodel.cut.layers import on_meta, remade
from raafl.submodel.declared import within
from raafl.submodel.find import rules  # noqa: F401  # it registers them
from raafl.submodel.find.labels import Dim, Labels
from raafl.submodel.find.operations import MOVING, Call, Dims, follow, rule_of
from raafl.submodel.find.size_tracker import SizeTracker
from raafl.submodel.isolated_run import uncached
from raafl.submodel.nested_batch import meta_batch, tensors_in

TIMES = 3
"""Number of steps with random values; as many again follow a step that reads new parameters, such as an expert's."""

SMALL = 1_000_000
"""Number of parameters of a model up to which four times as many steps follow."""

MOST_VALUES = 300_000_000
"""Largest number of parameters of a model for which steps run with random values, also in double precision for the proof."""

_MOST_CONDITIONS = 1000
"""Largest number of conditions on values that are assumed in one step, so that no loop runs for ever."""

_SCALAR = torch.ops.aten._local_scalar_dense.default


@dataclass
class TraceResult:
    """Result of following a model's dimensions through a training step."""

    # labels of each tensor's dimensions, by name of the parameter or buffer; dimensions with one label shrink together
    dims: dict[str, list[Dim]]
    labels: Labels  # registry of the labels
    parameters: frozenset[str]  # names of the tensors in ``dims`` that are parameters
    watch: SizeTracker  # tracker of the sizes that the model's code has used
    untouched: set[str] = field(default_factory=set)  # names of the parameters that no operation has read
    # labels of the outputs of those modules that the training step calls itself, by path
    given: list[tuple[str, list[Dim]]] = field(default_factory=list)
    problem: str | None = None  # reason for which the step could not be followed to its end; None if it was


class Tracer(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Context that follows every torch operation and labels dimensions: those that must shrink together get the same label."""

    def __init__(self, module: nn.Module, *, is_blind: bool = False) -> None:
        """Label the parameters and buffers of ``module``; ``is_blind``: each condition on a tensor counts as false."""
        super().__init__()  # type: ignore[no-untyped-call]
        self.is_blind, self.num_conditions = is_blind, 0
        self.labels = Labels(_place_in_code)
        # tensors are stored, too, so that no other gets the same id
        self._dims: dict[int, tuple[Tensor, Dims]] = {}
        self._read: set[int] = set()
        self.named = dict(module.named_parameters()) | dict(module.named_buffers())
        for tensor in self.named.values():
            self._label(tensor, [self.labels.new(size) for size in tensor.shape])

    def _label(self, tensor: Tensor, dims: Dims) -> Dims:
        self._dims[id(tensor)] = tensor, dims
        return dims

    def forget(self) -> None:
        """Forget which dimensions shrink together (their labels), except for the module's own parameters and buffers."""
        self._dims = {id(x): self._dims[id(x)] for x in self.named.values()}

    def dims_of(self, tensor: Tensor) -> Dims:
        """Return the labels of a tensor's dimensions; dimensions that share a label must shrink together.

        A tensor without labels counts as an input, whose dimensions cannot shrink.
        """
        _, known = self._dims.get(id(tensor), (None, ()))
        if len(known) != tensor.dim() or any(dim.size != n for dim, n in zip(known, tensor.shape, strict=True)):
            return self._label(tensor, [self.labels.given(size) for size in tensor.shape])
        return known

    def knows(self, tensor: Tensor) -> bool:
        """Check whether a tensor's dimensions have labels, which show what must shrink together.

        Tensors of the module and results of traced operations have them.
        """
        return id(tensor) in self._dims

    def untouched(self) -> set[str]:
        """Return the names of the module's tensors that no operation has read."""
        return {name for name, tensor in self.named.items() if _storage(tensor) not in self._read}

    def __torch_dispatch__(
        self,
        func: torch._ops.OpOverload,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> object:
        kwargs = kwargs or {}
        if func is _SCALAR and args[0].dtype == torch.bool:
            self.num_conditions += 1
            if self.is_blind and self.num_conditions < _MOST_CONDITIONS:
                return False
        ins = tensors_in((args, kwargs))
        # read the labels before the call, which may change a shape in place
        before = {id(tensor): self.dims_of(tensor) for tensor in ins}
        answer = result_of(func, args, kwargs)
        outs = tensors_in(answer)
        schema = func._schema
        alias = schema.returns[0].alias_info if schema.returns else None
        is_view = alias is not None and not alias.is_write
        if not is_view and (not outs or any(x.numel() for x in outs)):  # views and empty results read no values
            self._read.update(filter(None, map(_storage, ins)))
        if not outs:
            return answer
        arguments = {a.name: a.default_value if a.has_default_value() else None for a in schema.arguments}
        arguments.update(zip(arguments, args, strict=False))
        arguments.update(kwargs)
        name = schema.name.split("::")[1].rstrip("_")
        call = Call(name, arguments, ins, outs, self.labels, lambda x: before[id(x)], is_view)
        for tensor, dims in zip(outs, follow(rule_of(func), call), strict=True):
            if name in MOVING or id(tensor) not in before:  # a tensor changed in place keeps its labels
                self._label(tensor, list(dims))
        return answer


def _storage(tensor: Tensor) -> int | None:
    return storage_key(tensor) if tensor.layout == torch.strided else None


def _place_in_code() -> str:
    """Return the user's line of code that runs, as ``file.py:line``; "" if none does."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        name = frame.f_code.co_filename
        if isolated_run.is_theirs(name):
            return f"{Path(name).name}:{frame.f_lineno}"
        frame = frame.f_back
    return ""


def trace(module: nn.Module, batch: object) -> TraceResult:
    """Follow the dimensions of ``module`` through one or more training steps, or through forward passes if it has no step.

    `batch`: batch of real data, of which a few samples are enough; None = generate one, see `made_batch`.
    """
    first, runs = None, (isolated_run.loss_of, isolated_run.call) if _has_step(module) else (isolated_run.call,)
    ways, size = ["meta", "cpu"], sum(p.numel() for p in module.parameters())
    ways += (["blind"] if size > LARGE else []) + (["values"] if size <= MOST_VALUES else [])
    with rng.undisturbed():
        if batch is None:
            with uncached(module, is_cold=False):
                runs, batch = (isolated_run.call,), made_batch(module, partial(_runs, module))
            if batch is None:
                return _unseen(module, "there is no batch to follow: give an example batch")
        for run, way in itertools.product(runs, ways):
            seen = _attempt_cold(module, batch, run, way)
            if seen.problem is None:
                return seen
            first = seen if first is None or (way == ways[-1] and run is runs[0]) else first
    assert first is not None
    return first


def _unseen(module: nn.Module, problem: str) -> TraceResult:
    labels = Labels()
    return TraceResult(
        {}, labels, frozenset(), SizeTracker(nn.Module(), labels, lambda x: (), lambda x: False), problem=problem
    )


def _runs(module: nn.Module, batch: object) -> bool:
    """Check on the meta device whether a module's forward pass accepts ``batch``."""
    copy = _copy(module, values=False)
    try:
        with torch.no_grad(), torch.device("meta"):
            isolated_run.call(copy, meta_batch(batch))
    except USER_ERRORS:
        return False
    return True


def _attempt_cold(module: nn.Module, batch: object, run: Callable[[Any, Any], Any], way: str) -> TraceResult:
    """Trace a step with the user code's caches hidden and, if that fails, with them, since they may be tables of constants."""
    with uncached(module) as hidden:
        seen = _attempt(module, batch, run, way)
    if seen.problem is not None and hidden.any:
        with uncached(module, is_cold=False):
            seen = _attempt(module, batch, run, way)
    if seen.problem is not None and seen.watch.uses.was_key:
        with uncached(module, is_cold=False):
            plain = _attempt(module, batch, run, way, are_keys_plain=True)
        seen = seen if plain.problem else plain
    return seen


def _attempt(
    module: nn.Module, batch: object, run: Callable[[Any, Any], Any], way: str, *, are_keys_plain: bool = False
) -> TraceResult:
    """Trace a step, or a call, of the module: on random values or on the meta device.

    `way`: "values" traces random values; "meta" and "cpu" trace meta tensors, with that default device for tensors that
    code creates; "blind" is "meta" with each condition on a tensor taken as false.
    """
    values, default = way == "values", "cpu" if way in ("cpu", "values") else "meta"
    copy = _copy(module, values)
    if not values:
        batch = meta_batch(batch)
    isolated_run.settle(copy)
    tracer = Tracer(copy, is_blind=way == "blind")
    parameters = frozenset(name for name, _ in copy.named_parameters())
    watch = SizeTracker(copy, tracer.labels, tracer.dims_of, tracer.knows, are_keys_plain=are_keys_plain)
    dims = {name: list(tracer.dims_of(tensor)) for name, tensor in tracer.named.items()}
    seen = TraceResult(dims, tracer.labels, parameters, watch)
    isolated_run.watch_outputs(
        copy,
        lambda path, given: seen.given.append(
            (path, [d for x in given for d in tracer.dims_of(isolated_run.unwrapped(x))])
        ),
    )

    def step(time: int) -> None:
        if values:
            tracer.forget()
            isolated_run.draw(copy, time)
        rng.seeded(time)
        with torch.no_grad(), torch.device(default), isolated_run.unfused(), watch, tracer:
            run(copy, batch)

    patience = TIMES * (4 if sum(p.numel() for p in copy.parameters()) <= SMALL else 1)
    time, end = 0, TIMES if values else 1
    unread: Set[str] = parameters
    try:
        while time < end:
            step(time)
            time, before, unread = time + 1, unread, tracer.untouched() & parameters
            if values and unread and unread != before:
                end = min(time + patience, 5 * patience)
    except USER_ERRORS as error:
        if time < TIMES:
            seen.problem = ": ".join(filter(None, (isolated_run.user_frame(error), isolated_run.one_line(error))))
    if values and tracer.num_conditions and seen.problem is None:
        # trace once more with conditions on masks taken as false, so that the code for padding is traced, too
        tracer.is_blind, tracer.num_conditions = True, 0
        with suppress(Exception):
            step(end)
    beside = [path for path, part in copy.named_modules() if getattr(part, "is_beside_axes", False)]
    seen.untouched = {name for name in tracer.untouched() & parameters if not within(name, beside)}
    return seen


def _has_step(module: object) -> bool:
    """Check whether a module's class defines a training step itself."""
    own = getattr(type(module), "training_step", None)
    return own is not None and not own.__module__.startswith(("lightning.", "pytorch_lightning."))


def _copy(module: nn.Module, values: bool) -> nn.Module:
    """Copy a module, without hooks marked by ``is_beside_axes``, to the meta device or, with ``values``, to the CPU."""
    real = _zeros, lambda x: _zeros(x) if x.is_meta else x.clone()
    copy = remade(module, *(real if values else (on_meta, on_meta)))
    for part in copy.modules():
        for hooks in (part._forward_hooks, part._forward_pre_hooks):
            for key in [key for key, hook in hooks.items() if getattr(hook, "is_beside_axes", False)]:
                del hooks[key]
                part._forward_pre_hooks_with_kwargs.pop(key, None)
    return copy


def _zeros(tensor: Tensor) -> Tensor:
    return torch.zeros(tensor.shape, dtype=tensor.dtype)


PIXELS = (*dict.fromkeys((8, 28, 32, 64, 96, 224, *range(4, 33), 128, 256)),)
"""Sizes of images that are tried, the most likely first."""

LENGTHS = (9, 4, 2, 3, 5, 8, 16)
"""Lengths of sequences that are tried."""

_FIRST: tuple[Any, ...] = (nn.modules.conv._ConvNd, (nn.Embedding, nn.EmbeddingBag), nn.Linear)


def made_batch(module: nn.Module, runs: Callable[[Mapping[str, Any]], bool]) -> Mapping[str, Any] | None:
    """Generate input for a model without example data, by trial; None if nothing worked."""
    own = getattr(module, "example_input_array", None)
    names = _required(module)
    if own is not None and names:
        values = own if isinstance(own, tuple) else (own,)
        return own if isinstance(own, Mapping) else dict(zip(names, values, strict=False))
    return next((batch for batch in _options(module, names) if runs(batch)), None)


def _options(module: nn.Module, names: list[str]) -> Iterator[Mapping[str, Any]]:
    hub = getattr(module, "dummy_inputs", None)  # an attribute of Hugging Face models
    if getattr(module, "main_input_name", None) == "input_ids":
        yield {"input_ids": torch.ones(2, 9, dtype=torch.long), "attention_mask": torch.ones(2, 9, dtype=torch.long)}
    if isinstance(hub, Mapping):
        yield hub
    names = names or [getattr(module, "main_input_name", "x")]
    layers = [part for part in module.modules() if list(part.parameters(recurse=False))]
    firsts = (next((layer for layer in layers if isinstance(layer, kind)), None) for kind in _FIRST)
    for layer in dict.fromkeys(layer for layer in (*layers[:1], *firsts) if layer is not None):
        for value in _values(layer):
            yield dict.fromkeys(names, value)
    config: Any = getattr(module, "config", None)
    if hasattr(config, "image_size"):
        yield {"pixel_values": torch.zeros(2, getattr(config, "num_channels", 3), config.image_size, config.image_size)}


def _values(first: nn.Module) -> Iterator[Tensor]:
    """Yield inputs of several shapes, to be tried on a model whose first layer is ``first``."""
    if isinstance(first, nn.Embedding | nn.EmbeddingBag):
        yield from (torch.ones(2, length, dtype=torch.long) for length in LENGTHS)
    elif isinstance(first, nn.modules.conv._ConvNd):
        for side in PIXELS:
            yield torch.zeros(2, first.in_channels, *[side] * (first.weight.dim() - 2), dtype=first.weight.dtype)
    else:
        weight = next((p for p in first.parameters(recurse=False) if p.dim() > 1), None)
        if weight is not None:
            yield torch.zeros(2, weight.shape[1], dtype=weight.dtype)
            yield from (torch.zeros(2, length, weight.shape[1], dtype=weight.dtype) for length in LENGTHS)


def _required(module: nn.Module) -> list[str]:
    """Return the names of forward's positional parameters without default."""
    forward = inspect.signature(module.forward)
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return [p.name for p in forward.parameters.values() if p.kind in kinds and p.default is inspect.Parameter.empty]

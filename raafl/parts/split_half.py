"""One side's half of a model that is cut in two: its tensors, its layouts, its module, and how to run it.

Both halves are run by the user's own `training_step`. The client's runs it up to the cut, where it ends. The server's runs
all of it, but the modules below the cut give what their outputs look like, without values, and the module at the cut gives
the activation that was received; autograd then ends there.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from raafl.parts.split_cut import Cut, Frame, Shapes, cuts_of, followed
from raafl.submodel import FULL, FlatTensors, Layout, Spec, SpecError, Submodels
from raafl.submodel.batch_norm import keep_static
from raafl.submodel.caches import Caches
from raafl.submodel.cost import Cost, meta_batch
from raafl.submodel.frozen import FrozenBase
from raafl.submodel.shrink import Shrunk, Structure, build, copy_structure
from raafl.submodel.submodels import Part

Side = Literal["lower", "upper"]
_LOGS = ("log", "log_dict")
MAX_FRAMES = 64
"""Shapes of batches of which frames are remembered."""


class Reached(BaseException):
    """The client's half has come to the cut; not an `Exception`, which the user's own code might catch."""

    def __init__(self, output: Any) -> None:
        """Carry the output of the module at the cut."""
        self.output = output


class Half(Submodels):
    """One half of a model as if it were all there is: of the other half's tensors it has no values, and none travel.

    Attributes:
        whole: the model's submodels.
        cut: where it is cut.
        side: which half.
        exchange: what a hook of this half talks to the other half by; set by the runtime.
        frames: what stands for the client's half on the server.
    """

    def __init__(self, whole: Submodels, cut: Cut, side: Side) -> None:
        """Take what is known of the whole model."""
        self.__dict__.update(whole.__dict__)
        self._caches = Caches()
        self.whole, self.cut, self.side = whole, cut, side
        self.exchange: Any = None
        self.frames = Frames(whole, cut)
        memo: dict[int, Any] = {}
        for name, tensor in whole.module.named_buffers():
            if name in whole._buffers and not self.has(name):
                memo[id(tensor)] = blank(tensor, "cpu")
        self.module = copy_structure(whole.module, memo)

    def has(self, name: str) -> bool:
        """Check whether a tensor belongs to this half."""
        return (name in self.cut.lower) == (self.side == "lower")

    def _layout(self, spec: Spec, part: Part) -> Layout:
        entries = super()._layout(spec, part).entries
        return Layout.pack((entry.name, entry.shape, entry.dtype) for entry in entries if self.has(entry.name))

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
        """Return the module with the values of this half; the other's have their shapes and take no memory.

        Raises:
            SpecError: ``spec`` is not the whole model.
        """
        if self.normal(spec) != FULL:
            raise SpecError(f"spec is {spec}: a model that is cut in two is trained whole")
        present = present or FlatTensors.empty(self.layout(FULL, "present" if base is None else "sent"), device)
        device = torch.device(device)
        frozen = {name: blank(tensor, device) for name, tensor in self._parameters.items() if not self.has(name)}
        if base is not None:
            frozen |= base.selected(self.layout(FULL), {}, device)
        module = build(Structure(self.module, {}, self._trains(FULL), (), {}, {}, frozen), present, rescale=False)
        if self.batch_norm == "static":
            keep_static(module)
        if device.type == "meta":  # what follows a step to predict its cost follows this half's
            module.__dict__["training_step"] = partial(self._step, module, module.training_step)
        return Shrunk(module, present, present.prefix(self.layout(FULL, "trained")))

    def _step(self, module: nn.Module, step: Any, batch: Any, index: int) -> Any:
        """Make a training step of this half without values; return something to go back from."""
        if self.side == "lower":
            return activation_in(run_to_cut(module, self.cut.path, lambda: step(batch, index))).sum()
        frame = self.frames.of(tuple(tuple(item.shape) for item in tree_flatten(batch)[0]))
        activation = torch.empty_like(frame.activation, requires_grad=True)
        with replaced(module, frame, activation):
            return step(batch, index)

    def _cost(self, spec: Spec, batch_size: int, num_optimizer_slots: int) -> Cost:
        batch = meta_batch(self.example_batch, batch_size)
        self.frames.of(tuple(tuple(item.shape) for item in tree_flatten(batch)[0]))  # not while a step is followed
        return super()._cost(spec, batch_size, num_optimizer_slots)

    def take_(self, target: FlatTensors, values: FlatTensors) -> FlatTensors:
        """Copy into ``target``, tensors of this half, their values among all of the model; in place."""
        for name, tensor in target.items():
            tensor.copy_(values[name])
        return target


def halves(submodels: Submodels, path: str) -> dict[Side, Half]:
    """Return both halves of a model that is cut after the module at ``path``.

    Raises:
        SpecError: it cannot be cut there.
    """
    found, reason = cuts_of(submodels)
    cut = next((cut for cut in found if cut.path == path), None)
    if cut is None:
        raise SpecError(
            f"the model cannot be cut after '{path}': {reason or 'use one of ' + ', '.join(c.path for c in found)}"
        )
    return {"lower": Half(submodels, cut, "lower"), "upper": Half(submodels, cut, "upper")}


def blank(tensor: Tensor, device: torch.device | str) -> Tensor:
    """Return zeros of the shape of ``tensor`` in the memory of one element."""
    return torch.zeros((), dtype=tensor.dtype, device=device).expand(tensor.shape)


# ---- the client's half ----


def run_to_cut(module: nn.Module, path: str, step: Callable[[], Any]) -> Any:
    """Call ``step`` as far as the module at ``path`` and return what that gives; nothing is logged."""

    def reached(part: nn.Module, args: Any, output: Any) -> None:
        raise Reached(output)

    logs: dict[str, Any] = {name: module.__dict__.pop(name) for name in _LOGS if name in module.__dict__}
    for name in _LOGS:
        module.__dict__[name] = _ignore
    handle = module.get_submodule(path).register_forward_hook(reached)
    try:
        step()
    except Reached as end:
        return end.output
    finally:
        handle.remove()
        for name in _LOGS:
            del module.__dict__[name]
        module.__dict__.update(logs)
    raise RuntimeError(f"{type(module).__name__}.training_step did not come to '{path}', where the model is cut")


def activation_in(output: Any) -> Tensor:
    """Return the tensor in the output at the cut that gradients go through."""
    found: Tensor = next(item for item in tree_flatten(output)[0] if isinstance(item, Tensor) and item.requires_grad)
    return found


# ---- the server's half ----


class Frames:
    """What stands for the client's half, for batches of any shapes."""

    def __init__(self, submodels: Submodels, cut: Cut) -> None:
        """Start with none."""
        self._submodels, self.cut = submodels, cut
        self._known: OrderedDict[Shapes, Frame] = OrderedDict()
        flat, self._structure = tree_flatten(submodels.example_batch)
        self.dtypes = [item.dtype for item in flat]
        self.shapes: Shapes = tuple(tuple(item.shape) for item in flat)

    def __contains__(self, shapes: object) -> bool:
        """Check whether the frame for batches of ``shapes`` is at hand."""
        return shapes in self._known

    def of(self, shapes: Shapes) -> Frame:
        """Return the frame for a batch of ``shapes``.

        Raises:
            ValueError: the step cannot be made with such a batch.
        """
        if shapes not in self._known:
            self._known[shapes] = followed(self._submodels, shapes).frame(self.cut)
            while len(self._known) > MAX_FRAMES:
                self._known.popitem(last=False)
        self._known.move_to_end(shapes)
        return self._known[shapes]

    def batch(self, shapes: Shapes, leaves: Sequence[Tensor], device: torch.device) -> Any:
        """Return a batch of ``shapes`` with ``leaves`` where the server's half needs them, and blanks elsewhere."""
        flat: list[Tensor] = [
            torch.zeros((), dtype=dtype, device=device).expand(shape)
            for dtype, shape in zip(self.dtypes, shapes, strict=True)
        ]
        for place, leaf in zip(self.cut.leaves, leaves, strict=True):
            flat[place] = leaf
        return tree_unflatten(flat, self._structure)


@contextmanager
def replaced(module: nn.Module, frame: Frame, activation: Tensor) -> Iterator[None]:
    """Within this context the modules below the cut compute nothing, and the one at the cut gives ``activation``."""
    device = activation.device

    def filled(item: Any) -> Any:
        return blank(item, device) if isinstance(item, Tensor) else item

    forwards: dict[str, Callable[..., Any]] = {
        path: _Given([tree_map(filled, output) for output in outputs]) for path, outputs in frame.calls.items()
    }
    forwards[frame.path] = lambda *args, **kwargs: frame.with_activation(activation, filled)
    before: list[tuple[nn.Module, Any]] = []
    try:
        for path, forward in forwards.items():
            part = module.get_submodule(path)
            before.append((part, part.__dict__.get("forward")))
            part.__dict__["forward"] = forward
        yield
    finally:
        for part, own in before:
            if own is None:
                del part.__dict__["forward"]
            else:
                part.__dict__["forward"] = own


class _Given:
    """A forward that gives what is known already, call by call."""

    def __init__(self, outputs: list[Any]) -> None:
        self._outputs = iter(outputs)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return next(self._outputs)


def _ignore(*args: Any, **kwargs: Any) -> None:
    return None

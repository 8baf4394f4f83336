"""Represent one half of a model that is cut in two: its tensors, layouts and module, and the way to run it.

The user's own `training_step` runs both halves. The client's half runs it up to the cut, and stops there. The server's half runs
all of it, but modules below the cut return blank outputs of the right shapes, and the module at the cut returns the received
activation, at which autograd ends.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from raafl.algorithms.split_fed.cut import Cut, Outline, Shapes, shapes_of, trace_step
from raafl.parts.local.swap_parameters import patched, quiet
from raafl.submodel import FULL, FlatTensors, Layout, Spec, SpecError, Submodels
from raafl.submodel.batch_norm import keep_static
from raafl.submodel.cost import Cost, Method
from raafl.submodel.cut.copying import copy_structure
from raafl.submodel.cut.shrink import Shrunk, Structure, build
from raafl.submodel.frozen import FrozenBase
from raafl.submodel.nested_batch import meta_batch
from raafl.submodel.submodels import Caches, Part

Side = Literal["lower", "upper"]


class Reached(BaseException):
    """Signal that the client's half has reached the cut. It is no `Exception`, since the user's code might catch that."""

    def __init__(self, output: object) -> None:
        """Store the output of the module at the cut."""
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
        """Run a training step of this half on the meta device; return a tensor from which backward can start."""
        if self.side == "lower":
            return activation_in(run_to_cut(module, self.cut.path, lambda: step(batch, index))).sum()
        outline = self.outline(shapes_of(batch))
        activation = torch.empty_like(outline.activation, requires_grad=True)
        with with_received_activation(module, outline, activation):
            return step(batch, index)

    def _predicted(self, spec: Spec, batch_size: int, method: Method | None = None) -> Cost:
        # cached now, since one step cannot be traced inside the trace of another
        self.outline(shapes_of(meta_batch(self.example_batch, batch_size)))
        return super()._predicted(spec, batch_size, method)

    def with_own_step(self, module: nn.Module) -> nn.Module:
        """Return the module with a training step that runs this half alone."""
        module.__dict__["training_step"] = partial(self._step, module, module.training_step)
        return module

    # ---- the client's half as the server sees it ----

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


# ---- the client's half ----


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


# ---- the server's half ----


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
    """Return a forward method that returns given outputs, one for each call."""
    remaining = iter(outputs)
    return lambda *args, **kwargs: next(remaining)

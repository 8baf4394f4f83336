"""Refuse models whose tensors a copy would not follow: what raafl copies, cuts and sends must be the whole model."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor, nn

from raafl.errors import BadInput
from raafl.submodel.cut.copying import persistent_buffers
from raafl.submodel.cut.layers import computed_by


def check_tensors(module: nn.Module) -> None:
    """Raise `BadInput` if a part of a model cannot be copied, cut or sent.

    Such parts are: a module made by `torch.jit`; a tensor that is not dense, has no fixed size, or was made in inference
    mode; a parameter that overlaps itself or another in memory; an attribute with a tensor that was computed from
    parameters.
    """
    problem = next(_problems(module), None)
    if problem is not None:
        raise BadInput(f"the model cannot be copied, cut and sent: {type(module).__name__}{problem}")


def _problems(module: nn.Module) -> Iterator[str]:
    for path, part in module.named_modules():
        if isinstance(part, torch.jit.ScriptModule):
            place = f".{path} is" if path else " is"
            yield f"{place} made by torch.jit, which has no smaller copies: give the module from which it was made"
            return
    state: Mapping[str, Tensor] = dict(module.named_parameters()) | persistent_buffers(module)
    for name, tensor in state.items():
        if isinstance(tensor, nn.UninitializedParameter | nn.UninitializedBuffer):
            layer = repr(module.get_submodule(name.rpartition(".")[0]))[:80]
            yield f".{name} has no size before a first batch: give {layer} the size of its input"
        elif tensor.layout != torch.strided or tensor.is_quantized:
            kind = "quantised" if tensor.is_quantized else str(tensor.layout).removeprefix("torch.")
            is_parameter = isinstance(tensor, nn.Parameter)
            remedy = "make it dense" + ("" if is_parameter else ", or register it with persistent=False")
            yield f".{name} is {kind}, but all sent tensors must be dense: {remedy}"
        elif tensor.is_inference():
            yield f".{name} was made in torch.inference_mode, where no gradients are recorded: make it outside, or clone it there"
        elif isinstance(tensor, nn.Parameter) and _overlaps_itself(tensor):
            yield (
                f".{name} is expanded, {tuple(tensor.shape)} with several elements in one place of memory, so no step can write "
                "it: give nn.Parameter a .clone(), or expand it in forward"
            )
    yield from _shared(module, state)
    yield from _computed(module)


def _overlaps_itself(tensor: Tensor) -> bool:
    """Check whether a tensor has more elements than places in memory, as after `expand`."""
    span = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return 0 < span < tensor.numel()


def _shared(module: nn.Module, state: Mapping[str, Tensor]) -> Iterator[str]:
    """Find a parameter that trains in the memory of another tensor: a copy of the model has two of them."""
    first: dict[int, str] = {}
    known = {name: tensor for name, tensor in state.items() if tensor.layout == torch.strided}
    for name, tensor in (*known.items(), *_attributes(module)):
        if not tensor.numel() or not tensor.data_ptr():  # without values
            continue
        other = first.setdefault(tensor.data_ptr(), name)
        if other == name or known.get(name) is known[other]:
            continue
        if known[other].requires_grad or (name in known and tensor.requires_grad):
            yield (
                f".{name} shares memory with '{other}', but copies of the model have two separate tensors: assign "
                "the parameter itself, as in self.b.weight = self.a.weight, or compute one from the other in "
                "forward"
            )


def _attributes(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors that parts have as plain attributes, without those that a hook computes before each forward."""
    for path, part in module.named_modules():
        hooked = {computed_by(hook) for hook in part._forward_pre_hooks.values()}
        for name, value in vars(part).items():
            if isinstance(value, Tensor) and name not in hooked:
                yield f"{path}.{name}".removeprefix("."), value


def _computed(module: nn.Module) -> Iterator[str]:
    for name, tensor in _attributes(module):
        if not tensor.is_leaf:
            yield (
                f".{name} was computed from parameters, but copies of the model do not update it: compute it in "
                "forward, or give a function that makes the model"
            )

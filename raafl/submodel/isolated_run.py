"""Run steps on an isolated copy of the model: no Trainer, submodule outputs recorded."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from raafl.module_hooks import begin, move_batch
from raafl.submodel.flat import is_merged, reals
from raafl.submodel.nested_batch import batch_tensors

Note = Callable[[str, list[Tensor]], None]
"""Callback ``note(path, tensors)`` with the outputs of the module at this path."""


@contextmanager
def unfused() -> Iterator[None]:
    """Return a context in which recurrent layers run step by step, and attention in eval mode operation by operation.

    Torch's fused kernels would hide these operations.
    """
    before = torch._C._get_mkldnn_enabled(), torch.backends.mha.get_fastpath_enabled()
    torch._C._set_mkldnn_enabled(False)
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch._C._set_mkldnn_enabled(before[0])
        torch.backends.mha.set_fastpath_enabled(before[1])


def settle(module: nn.Module) -> None:
    """Prepare a copy of a module for training without a Trainer: ignore logging, make gradients dense.

    Sparse gradients cannot be traced. Modes stay as they are: a part in eval mode may return something else in train mode.
    """
    for part in module.modules():
        if isinstance(part, nn.Embedding | nn.EmbeddingBag):
            part.sparse = False
        for name in ("log", "log_dict"):
            if hasattr(type(part), name):
                part.__dict__[name] = _ignore


def _ignore(*args: object, **kwargs: object) -> None:
    return None


def watch_outputs(module: nn.Module, note: Note) -> list[Any]:
    """Call ``note`` with the outputs of all modules that the training step calls directly; return the hooks' handles."""
    depth = [0]

    def begin(layer: nn.Module, args: object) -> None:
        depth[0] += 1

    def end(path: str) -> object:
        def noted(layer: nn.Module, args: object, answer: object) -> None:
            depth[0] -= 1
            if depth[0] == 0:
                note(path, list(_tensors_given(answer)))

        return noted

    handles: list[Any] = []
    for path, layer in module.named_modules():
        handles += [layer.register_forward_pre_hook(begin), layer.register_forward_hook(end(path))]
    return handles


def _tensors_given(answer: object) -> Iterator[Tensor]:
    """Yield the tensors in a module's output, also nested in mappings, lists and dataclasses."""
    for one in tree_leaves(dict(answer) if isinstance(answer, Mapping) else answer):
        if isinstance(one, Tensor):
            yield one
        elif is_dataclass(one) and not isinstance(one, type):
            yield from _tensors_given([getattr(one, field.name, None) for field in fields(one)])


def unwrapped(tensor: Tensor) -> Tensor:
    """Return the values of a tensor inside of `torch.func` (vmap, grad), with all its batch dimensions; others unchanged.

    A tensor of vmap cannot be read once vmap has ended.
    """
    while torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        tensor = torch._C._functorch.get_unwrapped(tensor)
    return tensor


def loss_of(module: Any, batch: Any) -> Any:
    """Run a training step and the Lightning hooks before it; return its loss, or None if it skips the batch."""
    device = next((tensor.device for tensor in batch_tensors(batch)), torch.device("cpu"))
    batch = move_batch(module, batch, device, lambda batch, device: batch)
    begin(module, batch)
    answer = module.training_step(batch, 0)
    # some steps return None for their first batch
    answer = module.training_step(batch, 1) if answer is None else answer
    return answer["loss"] if isinstance(answer, Mapping) else answer


def call(module: nn.Module, batch: Any) -> Any:
    """Run a forward pass on a batch; if the batch is a list, on its first tensor."""
    if isinstance(batch, Mapping):
        return module(**batch)
    return module(batch[0] if isinstance(batch, list | tuple) else batch)


def draw_(name: str, value: Tensor, noise: Tensor) -> None:
    """Set a parameter to values like those of freshly initialised layers.

    `noise`: standard normal numbers in the shape of ``value``.
    """
    if value.dim() > 1:
        value.copy_(noise / math.sqrt(max(value.numel() // max(len(value), 1), 1)))
    else:
        value.copy_(0.1 * noise + (0.0 if name.endswith("bias") else 1.0))


def noise_like(value: Tensor, generator: torch.Generator) -> Tensor:
    """Return standard normal numbers in the shape of ``value``; for complex values, in both parts.

    `value`: tensor whose shape is used.
    """
    noise = torch.randn(reals(value).shape, generator=generator)
    return torch.view_as_complex(noise) if value.is_complex() else noise


def draw(module: nn.Module, seed: int) -> None:
    """Set all parameters to random values like those of freshly initialised layers, no two equal; integers become 0."""
    generator = torch.Generator().manual_seed(7 + seed)
    for name, parameter in module.named_parameters():
        value = parameter.detach()
        if is_merged(value.dtype):
            draw_(name, value, noise_like(value, generator))
        else:
            value.zero_()


def user_frame(error: BaseException) -> str:
    """Return the last line of the user's code in an error's traceback, as ``file.py:line``."""
    place, frame = "", error.__traceback__
    while frame is not None:
        if is_theirs(frame.tb_frame.f_code.co_filename):
            place = f"{Path(frame.tb_frame.f_code.co_filename).name}:{frame.tb_lineno}"
        frame = frame.tb_next
    return place


def is_theirs(file: str) -> bool:
    """Check whether a file is the user's code, that is, neither torch's nor this package's."""
    return "/torch/" not in file and "/raafl/submodel/" not in file and not file.startswith("<")


def one_line(error: BaseException) -> str:
    """Format an error of the user's code as one line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"

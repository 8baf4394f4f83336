"""Mask the cross entropy over a client's absent classes (HeteroFL): the loss, and the layer whose logits it masks.

`raafl.local.train` masks them, `raafl.parts.merge.label_split` merges that layer's rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Set
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from raafl.data.labels import classes_in
from raafl.submodel import FULL, Submodels
from raafl.submodel.isolated_run import loss_of, settle
from raafl.submodel.nested_batch import meta_batch

CLASSES = "classes"
"""Key in `Update.extra` of the classes whose logits a client's task has left as they were, ascending."""


class HasLogits(Protocol):
    """Protocol of model outputs that have an attribute ``logits``, as in `transformers`."""

    logits: Tensor | None


def logits_of(output: object) -> Tensor | None:
    """Return the logits (batch, num_classes) of a forward pass: the output itself or its attribute ``logits``.

    None = no logits.
    """
    logits = output if isinstance(output, Tensor) else getattr(output, "logits", None)
    return logits if isinstance(logits, Tensor) and logits.ndim == 2 and logits.is_floating_point() else None


def why_unmasked(submodels: Submodels) -> str | None:
    """Explain why a model's loss would not change if the logits of absent classes were set to 0.

    To find out, one training step runs on the meta device, where tensors have shapes but no values.

    Returns:
        The reason; None if the loss would change, or if this is unknown because the step needs values or there is no
        example batch.
    """
    batch = submodels.example_batch
    if batch is None:
        return None
    if classes_in([batch]) is None:
        return "the last entry of a batch is not one class for each sample"
    found = _on_meta(submodels, _why_unused)
    return None if found is None else found[0]


def output_layer(submodels: Submodels) -> str | None:
    """Return the path of the linear layer whose output is the logits, unchanged; None if the model has no such layer.

    To find the layer, one training step runs on the meta device, where tensors have shapes but no values. The result is
    also None if the step needs values or there is no example batch.
    """
    found = _on_meta(submodels, _layer_of)
    return None if found is None else found[0]


def _on_meta(submodels: Submodels, ask: Callable[[Any, Any], str | None]) -> tuple[str | None] | None:
    """Call ``ask`` with the whole model and a batch, both without values (meta device); None if the call raises."""
    if submodels.example_batch is None:
        return None
    for device in ("meta", "cpu"):  # default device for tensors that the user's code creates
        try:
            with torch.device(device), torch.enable_grad():
                module = submodels.shrink(FULL, device="meta").module
                settle(module)
                return (ask(module, meta_batch(submodels.example_batch, 2)),)
        except Exception:  # without values the user's code may raise any error
            continue
    return None


def _why_unused(module: nn.Module, batch: object) -> str | None:
    """Return the reason why the training step's loss ignores the logits of the forward pass; None if it uses them."""
    found: list[Tensor | None] = []

    def cut(_: object, args: object, output: Tensor | HasLogits) -> object:
        logits = logits_of(output)
        found.append(None if logits is None else logits.detach().requires_grad_())
        if logits is None or isinstance(output, Tensor):
            return found[-1]  # returning None from a hook leaves the layer's output as it is
        output.logits = found[-1]
        return output

    module.register_forward_hook(cut)
    loss = loss_of(module, batch)
    logits = [one for one in found if one is not None]
    name = type(module).__name__
    if not found:
        return f"{name}.training_step does not call the module itself"
    if not logits:
        return f"{name}.forward returns no logits of shape (batch, classes)"
    used = loss.requires_grad and any(g is not None for g in torch.autograd.grad(loss, logits, allow_unused=True))
    return None if used else f"the loss of {name} is not computed from the logits that its forward returns"


def _layer_of(module: nn.Module, batch: object) -> str | None:
    """Return the path of the linear layer whose output is the model's logits; None if there is no single such layer."""
    given: list[tuple[str, Tensor]] = []
    logits: list[Tensor | None] = []
    for path, layer in module.named_modules():
        if isinstance(layer, nn.Linear):
            layer.register_forward_hook(lambda _, args, output, path=path: given.append((path, output)))
    # the model's hook runs after those of its layers
    module.register_forward_hook(lambda _, args, output: logits.append(logits_of(output)))
    loss_of(module, batch)
    makers = {next((path for path, output in given if output is one), None) for one in logits}
    maker = makers.pop() if len(makers) == 1 else None
    return maker if sum(path == maker for path, _ in given) == len(logits) else None


@contextmanager
def masked(module: nn.Module, classes: Set[int] | None, masks: dict[int, Tensor] | None = None) -> Iterator[list[int]]:
    """Return a context that keeps classes without samples out of the loss: their logits are 0 and have no gradient.

    The context yields a list, which the first forward pass fills with the classes that have samples, in ascending
    order; if all classes have samples, it stays empty and nothing changes. The module must return logits of shape
    (batch, num_classes), as a tensor or as the attribute ``logits``; other outputs stay unchanged.

    `classes`: classes of the client's samples; None = unknown, so nothing is masked.
    `masks`: masks by number of classes, on the module's device, which stay where they are from task to task, since
    graphs read them; those of earlier tasks are rewritten. None = masks of this context alone.
    """
    left: list[int] = []
    if not classes:
        yield left
        return
    masks = {} if masks is None else masks
    for num, mask in masks.items():
        mask.copy_(_absent(num, classes, left))
    handle = module.register_forward_hook(lambda _, args, output: _masked(output, classes, left, masks))
    try:
        yield left
    finally:
        handle.remove()


def _absent(num: int, classes: Set[int], left: list[int]) -> Tensor:
    """Return a mask of the classes without samples, `(num,)`, and put the others in ``left``; all False if labels are invalid."""
    absent = torch.zeros(num, dtype=torch.bool)
    if min(classes) >= 0 and max(classes) < num and len(classes) < num:
        left[:] = sorted(classes)
        absent.fill_(True)[left] = False
    return absent


def _masked(output: Tensor | HasLogits, classes: Set[int], left: list[int], masks: dict[int, Tensor]) -> object:
    logits = logits_of(output)
    if logits is None:
        return output
    num = logits.shape[1]
    if num not in masks:
        masks[num] = _absent(num, classes, left).to(logits.device)
    # on a GPU an empty mask is applied, too, so that all tasks can replay one captured graph
    if not left and not logits.is_cuda:
        return output
    zeroed = logits.masked_fill(masks[num], 0.0)
    if isinstance(output, Tensor):
        return zeroed
    output.logits = zeroed
    return output

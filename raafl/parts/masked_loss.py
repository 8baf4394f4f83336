"""On which models the logits of a client's absent classes can be masked (HeteroFL's masked loss); `raafl.local.masked` does it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from raafl.data.labels import classes_in
from raafl.submodel import FULL, Submodels
from raafl.submodel.cost import meta_batch


def logits_of(output: Any) -> Tensor | None:
    """Return the logits (batch, num_classes) that a forward pass gave, as a tensor or an attribute; None where there are none."""
    logits = output if isinstance(output, Tensor) else getattr(output, "logits", None)
    return logits if isinstance(logits, Tensor) and logits.ndim == 2 and logits.is_floating_point() else None


def why_unmasked(submodels: Submodels) -> str | None:
    """Return in words why nothing would be masked on any client, or None.

    One training step runs on the meta device; None also where it needs values, or there is no example batch.
    """
    batch = submodels.example_batch
    if batch is None:
        return None
    if classes_in([batch]) is None:
        return "a batch does not end in one class for each sample"
    for device in ("meta", "cpu"):  # of tensors that the user's code makes without saying where
        try:
            with torch.device(device), torch.enable_grad():
                return _why_unused(submodels.shrink(FULL, device="meta").module, meta_batch(batch, 2))
        except Exception:  # whatever the user's code raises without values
            continue
    return None


def _why_unused(module: Any, batch: Any) -> str | None:
    """Return why the loss of a training step does not come from logits that the module's own call gives, or None."""
    found: list[Tensor | None] = []

    def cut(_: Any, args: Any, output: Any) -> Any:
        logits = logits_of(output)
        found.append(None if logits is None else logits.detach().requires_grad_())
        if logits is None or isinstance(output, Tensor):
            return found[-1]  # None leaves the output as it is
        output.logits = found[-1]
        return output

    for name in ("log", "log_dict"):
        if hasattr(module, name):
            module.__dict__[name] = _ignore
    module.train()
    module.register_forward_hook(cut)
    answer = module.training_step(batch, 0)
    loss = answer["loss"] if isinstance(answer, Mapping) else answer
    logits = [one for one in found if one is not None]
    name = type(module).__name__
    if not found:
        return f"{name}.training_step does not call the module itself"
    if not logits:
        return f"{name}.forward gives no logits of shape (batch, classes)"
    used = loss.requires_grad and any(g is not None for g in torch.autograd.grad(loss, logits, allow_unused=True))
    return None if used else f"the loss of {name} does not come from the logits that its forward gives"


def _ignore(*args: Any, **kwargs: Any) -> None:
    return None

"""AdamW, or Adan, as transformers are trained with it: weight decay on matrices only, a linear warm-up."""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import nn

from model_zoo.adan import Adan

Optimizer = Literal["adamw", "adan"]
_KINDS = {"adamw": torch.optim.AdamW, "adan": Adan}


def adamw(module: nn.Module, lr: float, weight_decay: float, warmup_steps: int, optimizer: Optimizer = "adamw") -> Any:
    """Return an optimizer for the trained parameters of ``module``: AdamW or Adan, with a warm-up of the learning rate if set.

    Biases and norms have no weight decay. A federated client begins each task with a new optimizer, so the warm-up also
    begins anew. AdamW: Loshchilov and Hutter 2019 (arXiv:1711.05101).

    Args:
        module: module whose trained parameters are updated.
        lr: learning rate after the warm-up.
        weight_decay: decoupled weight decay of matrices, not of biases and norms.
        warmup_steps: number of steps over which the learning rate rises linearly to ``lr``; 0 = no warm-up.
        optimizer: name of the optimizer: adamw, or adan (Xie et al. 2022).

    Returns:
        A result that `LightningModule.configure_optimizers` may return: the optimizer, with a scheduler if needed.

    Raises:
        ValueError: the name of the optimizer is unknown.
    """
    if optimizer not in _KINDS:
        raise ValueError(f"optimizer is '{optimizer}': give one of {', '.join(_KINDS)}")
    trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
    groups = [
        {"params": [p for p in trained if p.dim() >= 2], "weight_decay": weight_decay},
        {"params": [p for p in trained if p.dim() < 2], "weight_decay": 0.0},
    ]
    made: torch.optim.Optimizer = _KINDS[optimizer]([group for group in groups if group["params"]], lr=lr)
    if warmup_steps < 1:
        return made
    schedule = torch.optim.lr_scheduler.LambdaLR(made, lambda step: min(1.0, (step + 1) / warmup_steps))
    return {"optimizer": made, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

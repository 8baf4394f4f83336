"""AdamW, or Adan, as transformers are trained with it: weight decay on matrices only, a linear warm-up."""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import nn

from model_zoo.adan import Adan

Optimizer = Literal["adamw", "adan"]
_KINDS = {"adamw": torch.optim.AdamW, "adan": Adan}


def adamw(module: nn.Module, lr: float, weight_decay: float, warmup_steps: int, optimizer: Optimizer = "adamw") -> Any:
    """Return AdamW, or Adan, over the parameters of ``module`` that train, with a warm-up schedule if one is set.

    Biases and norms are not decayed. An optimiser begins anew with each task of a federated client, and so does the
    warm-up. AdamW: Loshchilov and Hutter 2019 (arXiv:1711.05101).

    Args:
        module: module whose parameters train.
        lr: learning rate after the warm-up.
        weight_decay: decoupled weight decay of matrices.
        warmup_steps: number of steps over which the learning rate rises from lr / warmup_steps; 0 = none.
        optimizer: adamw, or adan (Xie et al. 2022).

    Returns:
        What `LightningModule.configure_optimizers` may return.

    Raises:
        ValueError: the optimiser is unknown.
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

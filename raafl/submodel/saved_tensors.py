"""Save a model's tensors as a safetensors file."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

SAFETENSORS: Final = "model.safetensors"


def save_tensors(state: Mapping[str, Any], folder: Path, warn: Callable[[str], None]) -> None:
    """Write the tensors of a state dict to `SAFETENSORS` in ``folder``; ``warn`` of its other values, which are left out."""
    from safetensors.torch import save_file

    # safetensors stores tensors only, none that share memory, and none with gaps
    named = {
        name: value.cpu().clone(memory_format=torch.contiguous_format)
        for name, value in state.items()
        if isinstance(value, Tensor)
    }
    if len(named) < len(state):
        others = ", ".join(name for name in state if name not in named)
        warn(f"{SAFETENSORS} holds tensors only, without {others}: load the checkpoint instead, or set them yourself")
    save_file(named, folder / SAFETENSORS, metadata={"format": "pt"})

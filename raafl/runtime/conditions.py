"""What a result's bits depend on besides the config: versions, threads, device. Checked by a replay."""

from __future__ import annotations

import platform
from typing import Any

import torch

import raafl


def conditions(threads: int, accelerator: str, precision: str) -> dict[str, Any]:
    """Return the conditions of a run in this process.

    Args:
        threads: that compute a task.
        accelerator: that local steps run on, by Lightning's name.
        precision: of local steps, by Lightning's name.
    """
    return {
        "raafl": raafl.__version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "machine": platform.machine(),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "threads": threads,
        "accelerator": accelerator,
        "precision": precision,
    }


def differences(recorded: dict[str, Any], here: dict[str, Any]) -> list[str]:
    """Return one line for each condition that differs between a recorded run and this process."""
    return [
        f"{name} was {recorded.get(name)}, is {value} here"
        for name, value in here.items()
        if recorded.get(name, value) != value
    ]

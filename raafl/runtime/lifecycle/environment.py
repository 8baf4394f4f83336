"""Record the versions, threads and devices on which the bits of a result depend, and compare them in a replay."""

from __future__ import annotations

import platform
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from raafl._version import __version__
from raafl.config.experiment import Experiment
from raafl.local.numerics import precision_of, tf32


def conditions(experiment: Experiment, *, trains: bool = True) -> dict[str, Any]:
    """Return the versions, hardware and settings on which the bits of a run's results depend."""
    fabric = experiment.fabric
    found = {
        "raafl": __version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "machine": platform.machine(),
        "processor": processor(),  # libraries choose their kernels by it, also among those of one capability
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "threads": experiment.threads,
        "accelerator": fabric.accelerator,
        "precision": precision_of(fabric) if trains else fabric.precision,
    }
    on_cpu = fabric.accelerator == "cpu" and torch.device(experiment.server_device).type == "cpu"
    return found if on_cpu else {**found, **_gpu()}


def processor() -> str:
    """Return the model name of this machine's processor, or its architecture if the name is unknown."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())


def _gpu() -> dict[str, Any]:
    """Describe this machine's GPUs, with driver, libraries and numeric settings."""
    if not torch.cuda.is_available():
        return {"gpu": None}
    from torch.utils.collect_env import get_nvidia_driver_version, run

    cudnn = None
    with suppress(RuntimeError):  # raised if cuDNN does not fit this GPU or torch's build
        cudnn = torch.backends.cudnn.version()  # type: ignore[no-untyped-call]
    names = sorted({torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())})
    return {
        "gpu": ", ".join(names),
        "driver": get_nvidia_driver_version(run),  # type: ignore[no-untyped-call]
        "cuda": torch.version.cuda,
        "cudnn": cudnn,
        "tf32": tf32(),
        "deterministic": torch.are_deterministic_algorithms_enabled() and torch.backends.cudnn.deterministic,
    }


def differences(recorded: dict[str, Any], here: dict[str, Any]) -> list[str]:
    """Describe each version, device or setting that differs between a recorded run and this process, a line each."""
    if recorded:  # earlier versions did not record the processor
        recorded = {"processor": "not recorded", **recorded}
    return [
        f"{name} was {recorded.get(name)}, is {value} here"
        for name, value in here.items()
        if recorded.get(name, value) != value
    ]

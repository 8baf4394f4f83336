"""Set how torch computes in this process: threads, deterministic kernels, TF32."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from raafl.core.options import FabricOptions

_WORKSPACE = "CUBLAS_WORKSPACE_CONFIG"
_FLAGS = (
    *((torch.backends.cudnn, name) for name in ("deterministic", "benchmark", "allow_tf32")),
    (torch.backends.cuda.matmul, "allow_tf32"),
)


def set_numerics(threads: int, options: FabricOptions) -> None:
    """Set all options of torch that influence the bits of a run; call it before the run computes anything."""
    torch.set_num_threads(threads)
    if options.deterministic:
        os.environ.setdefault(_WORKSPACE, ":4096:8")  # read by cuBLAS at its first use
        torch.use_deterministic_algorithms(True)
        torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark = True, False
    if options.tf32 is not None:
        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = options.tf32


def device_type(options: FabricOptions) -> str:
    """Return the type of device on which the run computes: the requested one, or the one that `auto` selects."""
    if options.accelerator != "auto":
        return options.accelerator
    return "cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu"


def precision_of(options: FabricOptions) -> str:
    """Return the precision in which this process computes: on a CPU, Lightning uses bf16 in place of 16-mixed."""
    on_cpu = options.accelerator == "auto" and device_type(options) == "cpu"
    return "bf16-mixed" if on_cpu and options.precision == "16-mixed" else options.precision


def tf32() -> str:
    """Describe in words which float32 operations torch rounds to TF32."""
    matmul: Any = torch.backends.cuda.matmul
    cudnn: Any = torch.backends.cudnn
    try:
        found = matmul.allow_tf32, cudnn.allow_tf32
    except RuntimeError:  # torch rejects the older setting once the newer `fp32_precision` was set
        found = matmul.fp32_precision, cudnn.conv.fp32_precision
    return f"matmul {found[0]}, convolutions {found[1]}"


@contextmanager
def numerics_left() -> Iterator[None]:
    """Return a context that restores torch's numeric options at its end."""
    threads, mode, workspace = torch.get_num_threads(), torch.get_deterministic_debug_mode(), os.environ.get(_WORKSPACE)
    flags: list[tuple[Any, str, bool]] = []
    for owner, name in _FLAGS:
        with suppress(RuntimeError):  # torch refuses to read some flags, as `tf32` explains
            flags.append((owner, name, getattr(owner, name)))
    try:
        yield
    finally:
        torch.set_num_threads(threads)
        torch.set_deterministic_debug_mode(mode)
        for owner, name, value in flags:
            setattr(owner, name, value)
        if workspace is None:
            os.environ.pop(_WORKSPACE, None)

"""Define the options of local steps; importing them does not import torch."""

from __future__ import annotations

from dataclasses import dataclass, replace

from raafl.devices.gpus import Place

CAPTURES = ("auto", "on", "off")
"""Values of `FabricOptions.capture`."""


@dataclass(frozen=True, slots=True)
class FabricOptions:
    """Options of local training, named as in Lightning.

    Attributes:
        accelerator: type of device: cpu, cuda or auto.
        device: number of the GPU that all training processes use; None = distribute the processes over all GPUs.
        precision: numeric precision: 32-true, bf16-mixed, or on a GPU 16-mixed.
        gradient_clip_val: largest gradient norm; None = no clipping.
        accumulate_grad_batches: number of batches whose gradients are added up for one optimiser step.
        capture: whether a training step on a GPU is recorded as a CUDA graph and repeated with one launch: auto = where
            eager steps are seen to give the same; on = the same, and log why others are eager; off. auto and on train
            with the fused or capturable form of torch's optimizers, whose last bits differ. No effect on a CPU.
        deterministic: whether torch and cuDNN must use deterministic kernels, and fail where there is none.
        shard: whether the processes of one client share parameters, gradients and optimizer state (FSDP2); false = each
            process has all of them. No effect on a client of one process.
        tf32: whether float32 products and convolutions on a GPU are rounded to TF32; None = torch's own setting.
    """

    accelerator: str = "cpu"
    device: int | None = None
    precision: str = "32-true"
    gradient_clip_val: float | None = None
    accumulate_grad_batches: int = 1
    capture: str | bool = "auto"
    deterministic: bool = False
    tf32: bool | None = None
    shard: bool = False

    def __post_init__(self) -> None:
        """Read on and off as such, which YAML takes for true and false."""
        if isinstance(self.capture, bool):
            object.__setattr__(self, "capture", "on" if self.capture else "off")

    def at(self, place: Place) -> FabricOptions:
        """Return these options for the process at ``place`` in the run: with a GPU of its own, unless ``device`` is set."""
        on_gpu = self.accelerator in ("cuda", "gpu", "auto")
        return replace(self, device=place.gpu) if on_gpu and self.device is None else self

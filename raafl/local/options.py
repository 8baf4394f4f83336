"""Define the options of local steps; importing them does not import torch."""

from __future__ import annotations

from dataclasses import dataclass, replace

from raafl.devices.gpus import Place


@dataclass(frozen=True, slots=True)
class FabricOptions:
    """Options of local training, which have the same meaning as in Lightning.

    Attributes:
        accelerator: type of device: cpu, cuda or auto.
        device: index of the GPU that all training processes use; None = each process has one, in turn.
        precision: numeric precision: 32-true, bf16-mixed, or on a GPU 16-mixed.
        gradient_clip_val: largest gradient norm; None = no clipping.
        accumulate_grad_batches: number of batches whose gradients are added for one optimiser step.
        deterministic: whether torch and cuDNN use deterministic kernels, and fail if there is none.
        shard: whether a client of several processes shards parameters, gradients and the optimizer's state over them (FSDP2);
            false = each process has all of them. No effect on a client of one process.
        tf32: whether float32 is rounded to TF32 in products and convolutions on a GPU; None = torch's own setting.
    """

    accelerator: str = "cpu"
    device: int | None = None
    precision: str = "32-true"
    gradient_clip_val: float | None = None
    accumulate_grad_batches: int = 1
    deterministic: bool = False
    tf32: bool | None = None
    shard: bool = False

    def at(self, place: Place) -> FabricOptions:
        """Return these options with the GPU of the process at ``place``, if GPUs are used and none is named."""
        on_gpu = self.accelerator in ("cuda", "gpu", "auto")
        return replace(self, device=place.gpu) if on_gpu and self.device is None else self

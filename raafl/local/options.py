"""Define the options of local steps; importing them does not import torch."""

from __future__ import annotations

from dataclasses import dataclass, replace

from raafl.devices.gpus import Place


@dataclass(frozen=True, slots=True)
class FabricOptions:
    """Options of local training; each field means what it means in Lightning.

    Attributes:
        accelerator: cpu, cuda or auto.
        device: index of the GPU that all who train use; None = theirs in turn.
        precision: 32-true, bf16-mixed, or on a GPU 16-mixed.
        gradient_clip_val: largest gradient norm; None = no clipping.
        accumulate_grad_batches: batches to one optimiser step.
        deterministic: torch and cuDNN take deterministic kernels, or fail where there is none.
        shard: a client of several processes shards parameters, gradients and the optimizer's state over them (FSDP2); false =
            each process has all of them. Without effect on a client of one process.
        tf32: round float32 to TF32 in products and convolutions on a GPU; None = as torch has it.
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
        """Return these options with the GPU of a process's ``place``, where GPUs are used and none is named."""
        on_gpu = self.accelerator in ("cuda", "gpu", "auto")
        return replace(self, device=place.gpu) if on_gpu and self.device is None else self

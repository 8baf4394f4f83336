"""What a submodel costs the client that trains it: predicted from the small module on the meta device."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from raafl.submodel.flat import Layout
from raafl.submodel.spec import Spec

if TYPE_CHECKING:
    from raafl.submodel.submodels import Submodels


@dataclass(frozen=True, slots=True)
class Cost:
    """The cost of one submodel at one batch size.

    Attributes:
        params: parameters present.
        flops_per_sample: multiplications and additions of one sample's forward and backward pass.
        peak_bytes: device memory at the worst moment of a step: weights, buffers, gradients, optimiser state, what the
            forward pass saves for the backward pass, and the batch.
        down_bytes: bytes that a client receives.
        up_bytes: bytes that it sends.
    """

    params: int
    flops_per_sample: float
    peak_bytes: int
    down_bytes: int
    up_bytes: int


def predict(submodels: Submodels, spec: Spec, batch_size: int, num_optimizer_slots: int = 1) -> Cost:
    """Predict the cost of training ``spec``, without allocating it.

    FLOPs are counted over one `training_step` and its backward pass on the meta device; where that cannot run (it reads
    values, or there is none), over one forward pass, times 3; without an example batch, as 6 per parameter that trains.
    Elementwise operations are not counted. The peak is a sum of parts that are not all there at one moment, so it is an
    upper bound for what the parts predict.

    Args:
        submodels: of the model.
        spec: the submodel.
        batch_size: samples per step.
        num_optimizer_slots: values that the optimiser keeps for each trained one: 0 plain SGD, 1 momentum, 2 Adam.
    """
    present, trained = submodels.layout(spec), submodels.layout(spec, "trained")
    names = submodels.parameter_names
    params = sum(entry.numel for entry in present.entries if entry.name in names)
    trained_bytes = _bytes_of(trained, names)
    flops, saved = _measure(submodels, spec, batch_size)
    if flops is None:
        flops = 6.0 * batch_size * sum(entry.numel for entry in trained.entries if entry.name in names)
    peak = present.num_bytes + trained_bytes * (1 + num_optimizer_slots) + saved
    return Cost(params, flops / max(batch_size, 1), peak, present.num_bytes, trained.num_bytes)


def _bytes_of(layout: Layout, names: frozenset[str]) -> int:
    return sum(entry.numel * entry.dtype.itemsize for entry in layout.entries if entry.name in names)


def _measure(submodels: Submodels, spec: Spec, batch_size: int) -> tuple[float | None, int]:
    """Return the FLOPs of a step and the bytes of activations and batch; None where nothing could be run."""
    if submodels.example_batch is None:
        return None, 0
    batch = meta_batch(submodels.example_batch, batch_size)
    # tensors that the user's code makes without saying where are best on the meta device as well, but not always
    for default in ("meta", "cpu"):
        run = _Run(submodels, spec, batch)
        try:
            with torch.device(default):
                return run.step(), run.saved_bytes
        except Exception:
            continue
    run = _Run(submodels, spec, batch)
    try:
        return 3.0 * run.forward(), run.saved_bytes
    except Exception:
        return None, run.batch_bytes


class _Run:
    """One step of the small module on the meta device, with its saved tensors counted once per storage."""

    def __init__(self, submodels: Submodels, spec: Spec, batch: Any) -> None:
        shrunk = submodels.shrink(spec, device="meta")
        self.module, self.batch = shrunk.module, batch
        self.module.train()
        self.known = {_storage(buffer) for buffer in shrunk.present.buffers.values()}
        self.saved: dict[int, Any] = {}
        for tensor in tensors_in(batch):
            self._note(tensor)
        self.batch_bytes = self.saved_bytes
        for name in ("log", "log_dict"):
            if hasattr(self.module, name):
                self.module.__dict__[name] = _ignore  # nobody listens to metrics of a meta tensor

    @property
    def saved_bytes(self) -> int:
        """Bytes of everything saved, the batch included."""
        return sum(storage.nbytes() for storage in self.saved.values())

    def step(self) -> float:
        """Return the FLOPs of a training step."""
        module: Any = self.module
        if not callable(getattr(module, "training_step", None)):
            raise TypeError("the module has no training_step")
        return self._count(lambda: module.training_step(self.batch, 0), backward=True)

    def forward(self) -> float:
        """Return the FLOPs of a forward pass."""
        batch = self.batch
        if isinstance(batch, Mapping):
            return self._count(lambda: self.module(**batch), backward=False)
        first = batch[0] if isinstance(batch, list | tuple) else batch
        return self._count(lambda: self.module(first), backward=False)

    def _count(self, call: Any, *, backward: bool) -> float:
        from torch.utils.flop_counter import FlopCounterMode

        with FlopCounterMode(display=False) as counter, _conditions(), _FusedAttention():
            with torch.autograd.graph.saved_tensors_hooks(self._note, lambda tensor: tensor):
                output = call()
            if backward:
                loss = output["loss"] if isinstance(output, Mapping) else output
                if loss.requires_grad:
                    loss.backward()
        return float(counter.get_total_flops())

    def _note(self, tensor: Tensor) -> Tensor:
        key = _storage(tensor)
        if key not in self.known:
            self.saved.setdefault(key, tensor.untyped_storage())
        return tensor


def _conditions() -> Any:
    """Return a mode in which a condition on a tensor without values is false: no mask is all ones, nothing is NaN."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Conditions(TorchDispatchMode):  # type: ignore[no-untyped-call]
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func is torch.ops.aten._local_scalar_dense.default and args[0].is_meta and args[0].dtype == torch.bool:
                return False
            return func(*args, **(kwargs or {}))

    return Conditions()  # type: ignore[no-untyped-call]


class _FusedAttention(TorchFunctionMode):
    """Attention by the fused kernel that a CPU would take, which saves no scores; the meta device alone takes none."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is F.scaled_dot_product_attention:
            fused = _fused_attention(*args, **kwargs)
            if fused is not None:
                return fused
        return func(*args, **kwargs)


def _fused_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor | None:
    """Return what the kernel makes of tensors without values, shapes (batch, heads, positions, width); None = not for it."""
    if dropout_p or query.dim() != 4 or not query.is_meta or query.shape[-1] != value.shape[-1]:
        return None
    if enable_gqa:
        key, value = (x.repeat_interleave(query.shape[1] // x.shape[1], 1) for x in (key, value))
    if attn_mask is not None:
        attn_mask = attn_mask.to(query.dtype)
    kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    output: Tensor = kernel(query, key, value, 0.0, is_causal, attn_mask=attn_mask, scale=scale)[0]
    return output


def _ignore(*args: Any, **kwargs: Any) -> None:
    return None


def _storage(tensor: Tensor) -> int:
    # unlike data_ptr, it tells storages on the meta device apart
    return int(tensor.untyped_storage()._cdata)


def tensors_in(batch: Any) -> list[Tensor]:
    """Return the tensors of a nested batch, in order."""
    if isinstance(batch, Tensor):
        return [batch]
    if isinstance(batch, Mapping):
        batch = list(batch.values())
    return [tensor for item in batch for tensor in tensors_in(item)] if isinstance(batch, list | tuple) else []


def meta_batch(batch: Any, batch_size: int) -> Any:
    """Return ``batch`` on the meta device with ``batch_size`` samples (dimension 0 of its first tensor)."""
    tensors = [tensor for tensor in tensors_in(batch) if tensor.dim() > 0]
    samples = tensors[0].shape[0] if tensors else 0

    def resized(item: Any) -> Any:
        if isinstance(item, Tensor):
            size = (batch_size, *item.shape[1:]) if item.dim() > 0 and item.shape[0] == samples else item.shape
            return torch.empty(size, dtype=item.dtype, device="meta")
        if isinstance(item, Mapping):
            return {key: resized(value) for key, value in item.items()}
        if isinstance(item, tuple) and hasattr(item, "_fields"):
            return type(item)(*map(resized, item))
        return type(item)(map(resized, item)) if isinstance(item, list | tuple) else item

    return resized(batch)

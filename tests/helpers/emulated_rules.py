"""Find the device that an operation computes on by PyTorch's rules, and refuse tensors of two devices where PyTorch does."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

aten = torch.ops.aten
CPU = torch.device("cpu")
MIXES_SCALARS = {aten.fill_, aten.masked_fill, aten.masked_fill_}
COPIES = {aten.copy_, aten._to_copy, aten._copy_from, aten._foreach_copy_}
INDEXING = {
    aten.index,
    aten._unsafe_index,
    aten.index_put,
    aten.index_put_,
    aten._index_put_impl_,
    aten._unsafe_index_put,
}


def where(func: Any, args: Any, kwargs: dict[str, Any], tensors: list[Tensor]) -> torch.device:
    """Find the device on which ATen's operation ``func`` computes; raise PyTorch's error if its tensors' devices do not fit."""
    devices = [tensor.device for tensor in tensors]
    first, packet = (devices or [CPU])[0], func.overloadpacket
    if len(set(devices)) < 2 or packet in COPIES:
        return first
    if packet in INDEXING:
        of, indices, *values = args[:3]
        if any(i is not None and i.device not in (CPU, of.device) for i in indices):
            raise RuntimeError(
                f"indices should be either on cpu or on the same device as the indexed tensor ({of.device})"
            )
        if any(value.device != of.device and value.dim() for value in values):
            raise _mixed([of.device, values[0].device])
        return of.device
    if packet is aten._pack_padded_sequence:  # it takes the lengths, and returns the batch sizes, on the CPU
        return first
    lists = [item for item in args if isinstance(item, list | tuple) and item and isinstance(item[0], Tensor)]
    if len(lists) > 1 and func.__name__.startswith("_foreach"):
        for together in zip(*lists, strict=True):
            where(aten.add.Tensor, (), {}, list(together))
        return first
    common = next((device for device in devices if device.type == "cuda"), CPU)
    written = {id(value) for value, of in zip(args, func._schema.arguments, strict=False) if of.is_write}
    written |= {id(kwargs.get(of.name)) for of in func._schema.arguments if of.is_write}
    pointwise = leaves_devices_to_its_iterator(func) or func.__name__.startswith("_foreach")
    others = [t for t in tensors if t.device != common]
    if not pointwise or any(t.dim() or t.device != CPU or id(t) in written for t in others):
        raise _mixed(devices)
    if len(others) > 1 and packet is not aten.where:
        raise _mixed(devices)
    return common


@cache
def leaves_devices_to_its_iterator(func: Any) -> bool:
    """Check in torch's kernel table whether an elementwise operation accepts a scalar on the CPU.

    The other operations check all tensors first (`device_check: ExactSame`, the default for operations with a CUDA
    kernel).
    """
    if torch.Tag.pointwise not in func.tags and func.overloadpacket not in MIXES_SCALARS:
        return False
    # cosine_similarity makes its scalar on the CPU, where C++ sees its operands
    if func.overloadpacket is aten.clamp_min_:
        return True
    name, overload = func._schema.name.removeprefix("aten::"), func._schema.overload_name
    written = f"{name}.{overload}(" if overload else f"{name}("
    entry = next((one for one in _kernels() if one.startswith(written)), "")
    return "device_check: NoCheck" in entry or not ("CUDA" in entry or "structured_delegate" in entry)


@cache
def _kernels() -> list[str]:
    import torchgen

    path = Path(torchgen.__file__).parent / "packaged" / "ATen" / "native" / "native_functions.yaml"
    return re.split(r"^- func: ", path.read_text(encoding="utf-8"), flags=re.MULTILINE)


def _mixed(devices: list[torch.device]) -> RuntimeError:
    names = " and ".join(map(str, dict.fromkeys(devices)))
    return RuntimeError(f"Expected all tensors to be on the same device, but found at least two devices, {names}!")

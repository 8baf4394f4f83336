"""What kernels of a CPU do beside what their operands and results say: copies, padding, slow and fresh elements.

oneDNN computes convolutions in blocks of channels: where the channels of a value are not a multiple of a block it takes a
padded copy of it, otherwise a reordered one, and frees it at the end. Where oneDNN is not used, every window is unfolded into
a column. Found with torch 2 on a processor with AVX2, by what the allocator notes; with AVX-512 blocks may be twice as large.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

_Convolution = tuple[Tensor, Tensor, Tensor, int, Sequence[bool], bool]
_aten = torch.ops.aten
_BLOCK = 8
_FLOPS_PER_BYTE = 10.0
"""That take as long as a byte that counts once (8.2 to 10.5 by `benchmarks.probes`): what padding costs, as bytes."""
_COPY = 5
"""Bytes that take as long as one that is reordered: read in strides, written to new memory."""
_TIMES = {
    _aten.max_pool2d_with_indices: 8.0, _aten.max_pool3d_with_indices: 8.0,
    _aten.bernoulli: 8.0, _aten.bernoulli_: 8.0, _aten.native_dropout: 8.0,
    _aten.native_batch_norm: 2.5, _aten._native_batch_norm_legit: 2.5,
    _aten.gelu: 1.5, _aten.gelu_backward: 1.5,
    _aten._scaled_dot_product_flash_attention_for_cpu: 1.5, _aten._scaled_dot_product_flash_attention_for_cpu_backward: 1.5,
    _aten.mm: 0.5, _aten.addmm: 0.5, _aten.bmm: 0.5, _aten.baddbmm: 0.5,  # operands are read while others are multiplied
    _aten.add: 0.5, _aten.sub: 0.5, _aten.mul: 0.5, _aten.div: 0.5, _aten.sqrt: 0.5, _aten.sum: 0.5, _aten.clone: 0.5,
    _aten.native_layer_norm: 0.5, _aten.native_layer_norm_backward: 0.5,
    _aten.max_pool2d_with_indices_backward: 0.25, _aten.max_pool3d_with_indices_backward: 0.25,
    _aten.add_: 0.25, _aten.sub_: 0.25, _aten.mul_: 0.25, _aten.div_: 0.25,  # in memory that is there
    _aten.lerp_: 0.25, _aten.addcmul_: 0.25, _aten.addcdiv_: 0.25, _aten.zero_: 0.25, _aten.fill_: 0.25,
}  # fmt: skip
"""How many times the bytes of an operation count; those of what is not here once. Measured operation by operation in steps of
ViT-Tiny, BERT-Small and the CNN, in bytes of the layer of `benchmarks.probes`: plain arithmetic runs at the speed of
memory, an activation at that of its exponentials."""
_FROM_SYSTEM_BYTES, _FAULT = 32 * 2**20, 4
"""Larger blocks the C library takes from the system each time (glibc's M_MMAP_THRESHOLD), page by page: so many times as long."""


def extra_traffic(packet: Any, args: Sequence[Any], made: Sequence[Tensor], moved_bytes: int) -> int:
    """Return the bytes whose reading or writing would take as long as what an operation does beside moving ``moved_bytes``.

    That is: copies into blocks and the arithmetic on padding of convolutions, and elements that are drawn or compared one by
    one. Below 0 for an operation that moves bytes faster than most.

    Args:
        packet: the operation.
        args: its arguments.
        made: its results.
        moved_bytes: of its operands and results.
    """
    shape = _convolution(packet, args, made)
    if shape is None:
        return int((_TIMES.get(packet, 1.0) - 1.0) * moved_bytes)
    x, weight, y, groups, masks, uses_onednn = shape
    if not uses_onednn:
        return _COPY * _unfolded(x, weight, y)
    flops = 2 * math.prod(weight.shape[1:]) * math.prod(y.shape)
    total = 0.0
    for needed, plain in (
        (not masks, x.shape[1] < _BLOCK),
        (bool(masks) and masks[0], False),
        (bool(masks) and masks[1], x.shape[1] == 3),
    ):
        if needed:
            in_blocks = not (plain and groups == 1)
            copies = (_blocked(x) if in_blocks else 0) + _weights(weight, groups, in_blocks=in_blocks) + _blocked(y)
            padded = _weights(weight, groups, in_blocks=in_blocks) / _bytes(weight)
            total += _COPY * copies + (padded - 1) * flops / _FLOPS_PER_BYTE
    return int(total)


def fault_traffic(num_bytes: int) -> int:
    """Return the bytes whose writing would take as long as getting a new block of this size from the system."""
    return _FAULT * num_bytes if num_bytes > _FROM_SYSTEM_BYTES else 0


def workspace_bytes(packet: Any, args: Sequence[Any], made: Sequence[Tensor]) -> int:
    """Return the bytes that an operation needs at its peak beside its operands and results; 0 for all but convolutions.

    Args:
        packet: the operation.
        args: its arguments.
        made: its results.
    """
    shape = _convolution(packet, args, made)
    if shape is None:
        return 0
    x, weight, y, groups, masks, uses_onednn = shape
    if not uses_onednn:
        return _unfolded(x, weight, y)
    results = sum(map(_bytes, made))
    if not masks:
        return _forward(x, weight, y, groups) - results
    kept = _bytes(x) if masks[0] else 0
    needs = [_backward_weights(x, weight, y, groups) + kept if masks[1] else 0]
    if masks[0]:
        needs.append(_blocked(y) + _weights(weight, groups, in_blocks=True) + _blocked(x))
        needs.append(kept + _blocked(x))
    return max(max(needs) - results, 0)


def _convolution(packet: Any, args: Sequence[Any], made: Sequence[Tensor]) -> _Convolution | None:
    """Return input, weights, output, groups, which gradients are wanted (none in a forward pass), and whether oneDNN does it."""
    masks: Sequence[bool] = ()
    if packet is _aten.convolution:
        x, weight, y, stride, dilation, groups = args[0], args[1], made[0], args[3], args[5], args[8]
    elif packet is _aten.convolution_backward:
        y, x, weight, stride, dilation, groups, masks = *args[:3], args[4], args[6], args[9], args[10]
    else:
        return None
    return x, weight, y, groups, masks, _uses_onednn(x, weight, stride, dilation, groups)


def _unfolded(x: Tensor, weight: Tensor, y: Tensor) -> int:
    windows = math.prod(weight.shape[2:])
    return x.itemsize * x.shape[0] * x.shape[1] * windows * math.prod(y.shape[2:]) if windows > 1 else 0


def _forward(x: Tensor, weight: Tensor, y: Tensor, groups: int) -> int:
    """Return the most of a forward pass, its result included: while it is computed, or while that is put in order."""
    plain = x.shape[1] < _BLOCK and groups == 1
    inside = (0 if plain else _blocked(x)) + _weights(weight, groups, in_blocks=not plain) + _blocked(y)
    return max(inside, _blocked(y) + _bytes(y))


def _backward_weights(x: Tensor, weight: Tensor, y: Tensor, groups: int) -> int:
    plain = x.shape[1] == 3 and groups == 1  # colours have a kernel of their own
    bias = y.itemsize * y.shape[1]
    return (0 if plain else _blocked(x)) + _blocked(y) + _weights(weight, groups, in_blocks=not plain) + bias


def _weights(weight: Tensor, groups: int, *, in_blocks: bool) -> int:
    if groups > 1:
        return _bytes(weight)
    inputs = _up(weight.shape[1]) if in_blocks else weight.shape[1]
    return weight.itemsize * _up(weight.shape[0]) * inputs * math.prod(weight.shape[2:])


def _blocked(value: Tensor) -> int:
    return _bytes(value) // max(value.shape[1], 1) * _up(value.shape[1])


def _up(channels: int) -> int:
    return -(-channels // _BLOCK) * _BLOCK


def _bytes(value: Tensor) -> int:
    return value.numel() * value.itemsize


def _uses_onednn(x: Tensor, weight: Tensor, stride: Sequence[int], dilation: Sequence[int], groups: int) -> bool:
    """Return whether torch hands a convolution on one thread to oneDNN, by its own rule."""
    if x.dtype in (torch.bfloat16, torch.float16):
        return True
    kernel = weight.shape[2:]
    worth_it = max(stride) > 1 or max(dilation) > 1 or x.shape[0] >= 16 or any(size != 1 for size in kernel)
    large = groups > 1 or all(size > 3 for size in kernel) or x.shape[0] > 1 or x.numel() > 20480
    return x.dtype == torch.float32 and worth_it and large

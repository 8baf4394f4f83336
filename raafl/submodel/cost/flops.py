"""Count the FLOPs of one operation, separately for products (multiply-adds) and for elementwise arithmetic.

Shapes: n samples, c channels in, o channels out, g groups, t positions, h hidden units.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

from raafl.submodel.nested_batch import tensors_in
from raafl.submodel.results import GROUPED

_aten = torch.ops.aten
_REDUCTIONS = frozenset(
    {_aten.sum, _aten.mean, _aten.prod, _aten.cumsum, _aten.var, _aten.var_mean, _aten.amax, _aten.amin}
    | {_aten.embedding_dense_backward, _aten.index_add, _aten.scatter_add, _aten._embedding_bag}
)
"""Operations that take an addition or a comparison for each value of their first operand."""


def product_flops(
    packet: torch._ops.OpOverloadPacket, args: tuple[Any, ...], kwargs: Mapping[str, Any], result: object
) -> float:
    """Return the FLOPs of a matrix product, convolution, attention, recurrent layer or FFT; 0 for other operations.

    A multiplication with its addition counts as 2 FLOPs, for complex numbers as 8.
    """
    formula = _formulas().get(packet)
    if formula is None:
        return 0.0
    flops = float(formula(*args, **kwargs, out_val=result))
    made = result if isinstance(result, Tensor) else tensors_in(result)[0]
    return 4 * flops if made.is_complex() and packet not in _TRANSFORMS else flops


def arithmetic_flops(func: Any, args: Any, results: Sequence[Tensor]) -> float:
    """Return the FLOPs of arithmetic on single values: one per value that is produced or reduced; 0 for other operations."""
    if func._overloadpacket in _REDUCTIONS:
        return float(args[0].numel())
    if torch.Tag.pointwise in func.tags and results and (results[0].is_floating_point() or results[0].is_complex()):
        return float(results[0].numel())
    return 0.0


def convolution_flops(x: Tensor, weight: Tensor, y: Tensor, transposed: bool) -> int:
    """Return the FLOPs of a convolution; its gradients multiply the same pairs of numbers and have as many.

    `x`: input of shape (n, c, positions...): n samples, c channels.
    `weight`: weight of shape (o, c / g, kernel...), for o output channels in g groups; for a transposed convolution
    (c, o / g, kernel...).
    `y`: output of shape (n, o, positions...).
    """
    return 2 * x.shape[0] * math.prod((x if transposed else y).shape[2:]) * weight.numel()


def _convolution(x: Tensor, weight: Tensor, *args: Any, out_val: Tensor) -> int:
    return convolution_flops(x, weight, out_val, transposed=args[4])


def _convolution_backward(y: Tensor, x: Tensor, weight: Tensor, *args: Any, out_val: Any) -> int:
    wanted: list[bool] = args[7]  # gradients of input, weights and bias
    return convolution_flops(x, weight, y, transposed=args[4]) * sum(wanted[:2])


def _grouped(left: Tensor, right: Tensor, *args: object, out_val: object = None, **kwargs: object) -> int:
    """Count the FLOPs of products with experts' matrices, to which rows or columns are dealt out; torch has no count of them."""
    rows = left.shape[:-1].numel() if right.dim() == 3 else left.shape[-2]
    return 2 * rows * left.shape[-1] * right.shape[-1]


def _matrix_vector(*args: object, out_val: Tensor, **kwargs: object) -> int:
    return 2 * max(one.numel() for one in args if isinstance(one, Tensor))


def _outer(base: Tensor, left: Tensor, right: Tensor, *args: object, out_val: Tensor, **kwargs: object) -> int:
    return 2 * left.numel() * right.numel()


def _summed_products(
    base: Tensor, left: Tensor, right: Tensor, *args: object, out_val: Tensor, **kwargs: object
) -> int:
    return 2 * left.numel() * right.shape[-1]


def _trilinear(*args: Any, out_val: Tensor, **kwargs: Any) -> int:
    """Count a bilinear layer, or one of its gradients: a sum of products of three tensors, each without some dimensions."""
    sizes: dict[int, int] = {}
    for tensor, missing in zip(args[:3], args[3:6], strict=True):
        there = [axis for axis in range(tensor.dim() + len(missing)) if axis not in missing]
        sizes |= dict(zip(there, tensor.shape, strict=True))
    return 2 * math.prod(sizes.values())


def _distances(left: Tensor, right: Tensor, *args: object, out_val: Tensor, **kwargs: object) -> int:
    """Count a difference, its power and their sum for each pair of rows and each of their places."""
    return 3 * left.numel() * right.shape[-2]


def _distances_backward(
    grad: Tensor, left: Tensor, right: Tensor, *args: object, out_val: Tensor, **kwargs: object
) -> int:
    return 3 * left.numel() * right.shape[-2]


def _recurrent_layer(x: Tensor, of_input: Tensor, of_hidden: Tensor, *args: object, out_val: object) -> int:
    """Count the products of a layer in one direction with its inputs (t, n, c) and its hidden states."""
    return 2 * x.shape[0] * x.shape[1] * (of_input.numel() + of_hidden.numel())


def _recurrent_layer_backward(x: Tensor, of_input: Tensor, of_hidden: Tensor, *args: object, out_val: object) -> int:
    return 2 * _recurrent_layer(x, of_input, of_hidden, out_val=out_val)


def _transform(x: Tensor, dims: Sequence[int], *args: object, out_val: Tensor, **kwargs: object) -> float:
    """Count a fast Fourier transform, 5 n log2 n for n complex values, half of that for real ones."""
    whole = x if x.numel() >= out_val.numel() else out_val
    size = math.prod(whole.shape[dim] for dim in dims)
    real = not (x.is_complex() and out_val.is_complex())
    return (2.5 if real else 5.0) * whole.numel() * math.log2(max(size, 2))


_TRANSFORMS = frozenset({_aten._fft_r2c, _aten._fft_c2c, _aten._fft_c2r})


@cache
def _formulas() -> Mapping[Any, Callable[..., float]]:
    from torch.utils.flop_counter import flop_registry

    attention, backward = _aten._scaled_dot_product_flash_attention, _aten._scaled_dot_product_flash_attention_backward
    convolutions = (_aten.convolution, _aten._convolution, _aten.cudnn_convolution, _aten._slow_conv2d_forward)
    vectors = (_aten.mv, _aten.addmv, _aten.dot, _aten.vdot)
    return {
        # torch before 2.15 has no count of a processor's, which do what those of a GPU do
        _aten._scaled_dot_product_flash_attention_for_cpu: flop_registry[attention],
        _aten._scaled_dot_product_flash_attention_for_cpu_backward: flop_registry[backward],
        **flop_registry,
        # torch counts a grouped convolution's gradient of the weights as if it had one group
        **dict.fromkeys(convolutions, _convolution),
        _aten.convolution_backward: _convolution_backward,
        # of the rest torch has no count
        **dict.fromkeys(vectors, _matrix_vector),
        _aten.addr: _outer,
        _aten.addbmm: _summed_products,
        _aten._trilinear: _trilinear,
        _aten._cdist_forward: _distances,
        _aten._cdist_backward: _distances_backward,
        _aten.mkldnn_rnn_layer: _recurrent_layer,
        _aten.mkldnn_rnn_layer_backward: _recurrent_layer_backward,
        **dict.fromkeys(_TRANSFORMS, _transform),
        GROUPED: _grouped,
    }

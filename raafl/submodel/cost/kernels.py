"""Model what CPU kernels do beyond their operands and results: copies, padding, slow elements.

oneDNN computes convolutions in blocks of channels: where the number of channels is no multiple of a block it takes a padded copy,
otherwise a reordered one, and frees it at the end. Without oneDNN, every window is unfolded into a column. Measured with torch 2 on
processors with AVX2 and with AVX-512, from the allocator's records.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from raafl.submodel.nested_batch import tensors_in

_Convolution = tuple[Tensor, Tensor, Tensor, bool, int, Sequence[bool], bool]
_aten = torch.ops.aten
CONVOLUTIONS = frozenset({_aten.convolution, _aten.convolution_backward})
RECURRENT = frozenset({_aten.mkldnn_rnn_layer, _aten.mkldnn_rnn_layer_backward})
_BLOCK = 16 if torch.backends.cpu.get_cpu_capability() == "AVX512" else 8
"""Channels of a block."""
_SMALL_BLOCK = 8
_CONVOLUTION = 0.75
"""Factor by which the bytes of a convolution count, those of its copies included."""
_TIMES = {
    _aten.bernoulli: 8.5,
    _aten.bernoulli_: 8.5,
    _aten.native_dropout: 8.5,
    _aten.max_pool2d_with_indices: 7.0,
    _aten.max_pool3d_with_indices: 7.0,
    _aten._softmax: 6.0,
    _aten._safe_softmax: 6.0,
    _aten.sqrt: 2.2,  # measured on zeros and other numbers mixed; see `root_times`
    _aten._scaled_dot_product_flash_attention_for_cpu: 2.3,
    _aten._scaled_dot_product_flash_attention_for_cpu_backward: 2.3,
    _aten.native_batch_norm: 2.0,
    _aten._native_batch_norm_legit: 2.0,
    _aten.cat: 1.8,
    _aten.addmm: 1.2,
    _aten.baddbmm: 1.2,
    _aten.gelu: 0.8,
    _aten.gelu_backward: 0.8,
    _aten.mm: 0.7,
    _aten.native_layer_norm: 0.7,
    _aten.native_layer_norm_backward: 0.7,
    _aten.native_batch_norm_backward: 0.7,
    _aten.max_pool2d_with_indices_backward: 0.7,
    _aten.max_pool3d_with_indices_backward: 0.7,
    _aten.div: 0.7,
    _aten.sum: 0.7,
    _aten.clone: 0.7,
    _aten.add: 0.45,
    _aten.sub: 0.45,
    _aten.mul: 0.45,
    _aten.relu: 0.45,
    _aten.threshold_backward: 0.45,
    _aten.bmm: 0.45,
    _aten.add_: 0.45,
    _aten.sub_: 0.45,
    _aten.mul_: 0.45,
    _aten.div_: 0.45,
    _aten.lerp_: 0.45,
    _aten.addcmul_: 0.45,
    _aten.addcdiv_: 0.45,
    _aten.zero_: 0.45,
    _aten.fill_: 0.45,
    _aten.relu_: 0.45,
}
"""Factors by which the bytes of operations count; those of others count once. Measured by `benchmarks.operations`, in bytes of
the layer of `raafl.devices.measure`: plain arithmetic runs at the speed of memory, an activation at that of its exponentials."""


_ROOT, _ROOT_OF_ZERO = 0.5, 2.75


def root_times(zero_share: float) -> float:
    """Return the factor by which a square root's bytes count, for values of which this share is zero.

    The root of zero takes 5.5 times as long as others; runs before `Rules.sees_zeros` count all as a mixture of both.
    """
    return _ROOT + zero_share * (_ROOT_OF_ZERO - _ROOT)


def traffic(
    packet: torch._ops.OpOverloadPacket, args: Sequence[Any], results: Sequence[Tensor], moved_bytes: int
) -> tuple[int, float]:
    """Return the bytes that an operation moves, weighted to be proportional to its time, and its FLOPs on padding.

    The bytes of an operation count more than once if it is slow for its bytes: a convolution copies its input, and
    others draw or compare elements one by one. Those of especially fast operations count less. Only convolutions have
    padding: they round the number of channels up.
    """
    shape = _convolution(packet, args, results)
    if shape is None:
        return int(_TIMES.get(packet, 1.0) * moved_bytes), 0.0
    x, weight, y, transposed, groups, masks, uses_onednn = shape
    if not uses_onednn:
        return int(_CONVOLUTION * (moved_bytes + _unfolded(x, weight, y))), 0.0
    passes = _passes(x, weight, y, groups, masks)
    flops = convolution_flops(x, weight, y, transposed)
    padding_flops = sum((one.weight_bytes / _bytes(weight) - 1) * flops for one in passes)
    return int(_CONVOLUTION * (moved_bytes + sum(one.num_bytes for one in passes))), padding_flops


def workspace_bytes(packet: object, args: Sequence[Any], results: Sequence[Tensor]) -> int:
    """Return the additional bytes that a convolution or oneDNN's LSTM needs while it runs; 0 for other operations."""
    if packet in RECURRENT:
        return _recurrent_workspace(*args)
    shape = _convolution(packet, args, results)
    if shape is None:
        return 0
    x, weight, y, _, groups, masks, uses_onednn = shape
    if not uses_onednn:
        return _unfolded(x, weight, y)
    result_bytes = sum(map(_bytes, results))
    passes = _passes(x, weight, y, groups, masks)
    if not masks:  # memory peaks during the computation, or while the result is reordered
        return max(passes[0].num_bytes, passes[0].y_bytes + _bytes(y)) - result_bytes
    kept, needs = _bytes(x) if masks[0] else 0, [0]
    if masks[1]:
        needs.append(passes[-1].num_bytes + y.itemsize * y.shape[1] + kept)
    if masks[0]:
        needs += [passes[0].num_bytes, kept + passes[0].x_bytes]
    return max(max(needs) - result_bytes, 0)


def _recurrent_workspace(x: Tensor, of_input: Tensor, of_hidden: Tensor, *args: object) -> int:
    """Count the temporary bytes that oneDNN allocates for an LSTM layer, beside its operands and results.

    They are blocked copies of both weights, the gates of all positions and of three more, and a copy of each argument
    that is not contiguous, such as the gradient of outputs whose first dimension is the batch.
    """
    gates = x.itemsize * (x.shape[0] + 3) * x.shape[1] * of_hidden.shape[0]
    strewn = [one for one in args if isinstance(one, Tensor) and not one.is_contiguous()]
    return _bytes(of_input) + _bytes(of_hidden) + gates + sum(map(_bytes, strewn))


def _convolution(packet: object, args: Sequence[Any], made: Sequence[Tensor]) -> _Convolution | None:
    """Return a recorded convolution's tensors, groups, gradients that it computes (none = forward), and if oneDNN runs it."""
    masks: Sequence[bool] = ()
    if packet is _aten.convolution:
        x, weight, _, stride, _, dilation, transposed, _, groups = args[:9]
        y = made[0]
    elif packet is _aten.convolution_backward:
        y, x, weight, _, stride, _, dilation, transposed, _, groups, masks = args[:11]
    else:
        return None
    return x, weight, y, transposed, groups, masks, _uses_onednn(x, weight, stride, dilation, groups)


def _unfolded(x: Tensor, weight: Tensor, y: Tensor) -> int:
    windows = math.prod(weight.shape[2:])
    return x.itemsize * x.shape[0] * x.shape[1] * windows * math.prod(y.shape[2:]) if windows > 1 else 0


class _Pass(NamedTuple):
    """Bytes that one pass of a convolution copies: of its input (0 = it is read in place), weights, and output or gradient."""

    x_bytes: int
    weight_bytes: int
    y_bytes: int

    @property
    def num_bytes(self) -> int:
        return sum(self)


def _passes(x: Tensor, weight: Tensor, y: Tensor, groups: int, masks: Sequence[bool]) -> list[_Pass]:
    """Return a convolution's passes: one forward, or a backward one for each wanted gradient (input, weights)."""
    channels, outputs = x.shape[1], y.shape[1]

    def one(block: int, plain: bool = False) -> _Pass:
        if groups > 1:
            block = _BLOCK if groups == channels == outputs else 1
        wide_x = channels if plain and groups == 1 else _up(channels, block)
        wide_y = _up(outputs, block)
        weight_bytes = (
            weight.itemsize * wide_y * (wide_x if groups == 1 else weight.shape[1]) * math.prod(weight.shape[2:])
        )
        x_bytes = 0 if plain and groups == 1 else _bytes(x) // max(channels, 1) * wide_x
        return _Pass(x_bytes, weight_bytes, _bytes(y) // max(outputs, 1) * wide_y)

    if not masks:
        return [one(_BLOCK, plain=channels < _BLOCK)]
    found = [one(_BLOCK)] if masks[0] else []
    if masks[1]:  # oneDNN has kernels of their own for images with 3 channels
        plain = channels == 3 or (_BLOCK > _SMALL_BLOCK and channels < 3)
        found.append(one(_BLOCK if plain or channels >= _BLOCK else _SMALL_BLOCK, plain))
    return found


def _up(channels: int, block: int) -> int:
    return -(-channels // block) * block


def _bytes(value: Tensor) -> int:
    return value.numel() * value.itemsize


def _uses_onednn(x: Tensor, weight: Tensor, stride: Sequence[int], dilation: Sequence[int], groups: int) -> bool:
    """Check by torch's own rule whether torch computes a convolution with oneDNN on one thread."""
    if x.dtype in (torch.bfloat16, torch.float16):
        return True
    kernel = weight.shape[2:]
    worth_it = max(stride) > 1 or max(dilation) > 1 or x.shape[0] >= 16 or any(size != 1 for size in kernel)
    large = groups > 1 or all(size > 3 for size in kernel) or x.shape[0] > 1 or x.numel() > 20480
    return x.dtype == torch.float32 and worth_it and large


# Count the FLOPs of one operation, separately for products (multiply-adds) and for elementwise arithmetic.
#
# Shapes: n samples, c channels in, o channels out, g groups, t positions, h hidden units.

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


def _convolution_flops(x: Tensor, weight: Tensor, *args: Any, out_val: Tensor) -> int:
    return convolution_flops(x, weight, out_val, transposed=args[4])


def _convolution_backward_flops(y: Tensor, x: Tensor, weight: Tensor, *args: Any, out_val: Any) -> int:
    wanted: list[bool] = args[7]  # gradients wanted: of input, weights, bias
    return convolution_flops(x, weight, y, transposed=args[4]) * sum(wanted[:2])


def _grouped(left: Tensor, right: Tensor, *args: object, out_val: object = None, **kwargs: object) -> int:
    """Count the FLOPs of a grouped product, in which each expert's matrix multiplies its own rows."""
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
    """Count the FLOPs of a bilinear layer or its gradient: a product of three tensors, summed over some dimensions."""
    sizes: dict[int, int] = {}
    for tensor, missing in zip(args[:3], args[3:6], strict=True):
        there = [axis for axis in range(tensor.dim() + len(missing)) if axis not in missing]
        sizes |= dict(zip(there, tensor.shape, strict=True))
    return 2 * math.prod(sizes.values())


def _distances(left: Tensor, right: Tensor, *args: object, out_val: Tensor, **kwargs: object) -> int:
    """Count the FLOPs of pairwise distances: for each pair of rows and each column a subtraction, a power and an addition."""
    return 3 * left.numel() * right.shape[-2]


def _distances_backward(
    grad: Tensor, left: Tensor, right: Tensor, *args: object, out_val: Tensor, **kwargs: object
) -> int:
    return 3 * left.numel() * right.shape[-2]


def _recurrent_layer(x: Tensor, of_input: Tensor, of_hidden: Tensor, *args: object, out_val: object) -> int:
    """Count the FLOPs of a recurrent layer in one direction over inputs (t, n, c)."""
    return 2 * x.shape[0] * x.shape[1] * (of_input.numel() + of_hidden.numel())


def _recurrent_layer_backward(x: Tensor, of_input: Tensor, of_hidden: Tensor, *args: object, out_val: object) -> int:
    return 2 * _recurrent_layer(x, of_input, of_hidden, out_val=out_val)


def _transform(x: Tensor, dims: Sequence[int], *args: object, out_val: Tensor, **kwargs: object) -> float:
    """Count the FLOPs of a fast Fourier transform: 5 n log2 n for n complex values, half as many for real ones."""
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
        # torch before 2.15 lacks formulas for a CPU's attention, which computes the same as a GPU's
        _aten._scaled_dot_product_flash_attention_for_cpu: flop_registry[attention],
        _aten._scaled_dot_product_flash_attention_for_cpu_backward: flop_registry[backward],
        **flop_registry,
        # torch counts the weights' gradient of a grouped convolution as that of one group
        **dict.fromkeys(convolutions, _convolution_flops),
        _aten.convolution_backward: _convolution_backward_flops,
        # torch has no formula for the following operations
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


# Run operations on the meta device, computing each distinct form of an operation once.
#
# On the meta device torch works out most results' shapes in Python, ten times slower than creating tensors of known
# shapes. A model's blocks repeat, so results are cached by operation and form of the arguments.

_MOST = 8192
"""Largest number of cached forms; then the cache is emptied."""
_PLAIN = (Tensor, nn.Parameter)
_META = torch.device("meta")
# called directly, so that no torch-function mode intercepts the call
_EMPTY = torch.ops.aten.empty_strided.default
_RECURRENT = torch.ops.aten.mkldnn_rnn_layer
_PAGE = 4096
GROUPED = getattr(torch.ops.aten, "_grouped_mm", None)
"""Products of rows with the matrices of experts to which they are dealt out; None = torch has none."""


@dataclass(slots=True)
class CachedResult:
    """Cached outcome of an operation on the meta device (on tensors without values), used again for equal arguments."""

    key: Any  # the operation, the default dtype, and shapes and dtypes of the arguments
    result: Any = None  # shapes and dtypes of the result; None = unknown, or not determined by the key
    cost: Any = None  # FLOPs and bytes of the operation; None = unknown

    def remember(self) -> None:
        """Store this entry in the cache, for later calls with equal arguments."""
        if len(_known) >= _MOST:
            _known.clear()
        _known[self.key] = self


_known: dict[Any, CachedResult] = {}
"""Results by key; any thread may add entries."""


class _OfItsOwn(Exception):
    """Raised if a cache key cannot describe an argument or result, such as a tensor with values."""


def result_of(func: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> object:
    """Return the result of an operation on tensors without values (on the meta device), from a cache if possible.

    An earlier call whose arguments had the same shapes and dtypes has the same result, so the operation need not run.
    """
    return run(func, args, kwargs, cached_result(func, args, kwargs) if _is_functional(func) else None)


def cached_result(func: object, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> CachedResult | None:
    """Return the cache entry of an operation's call, new if need be; None if shapes and dtypes do not determine its result."""
    tensors: list[Tensor] = []
    try:
        # otherwise reading an attribute of a tensor would go through all active modes
        with torch._C.DisableTorchFunction():
            forms = _form(args, tensors), _form(tuple(kwargs.items()), tensors)
        if not tensors:  # without tensors among the arguments the device is unknown
            return None
        first: dict[int, int] = {}
        same = tuple([first.setdefault(id(tensor), place) for place, tensor in enumerate(tensors)])
        key = func, torch.get_default_dtype(), *forms, same
        return _known.get(key) or CachedResult(key)
    except (_OfItsOwn, TypeError):  # TypeError: an argument is not hashable
        return None


def run(
    func: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: Mapping[str, Any], form: CachedResult | None
) -> object:
    """Run an operation, or create its result from the cache entry ``form`` if that has the result's shapes.

    `form`: cache entry from `cached_result`; None = run the operation.
    """
    if form is not None and form.result is not None:
        return _made(form.result)
    own = _made_here(func._overloadpacket, args)
    result = func(*args, **kwargs) if own is None else own(*args, **kwargs)
    if form is not None and _is_functional(func):
        form.result = _fresh(result, tensors_in((args, kwargs)))
        if form.result is not None:
            form.remember()
    return result


def _made_here(packet: torch._ops.OpOverloadPacket, args: tuple[Any, ...]) -> Callable[..., Any] | None:
    """Return raafl's function for an operation that torch cannot run on the meta device; None if torch can."""
    if packet is _RECURRENT and args[0].is_meta:
        return _recurrent
    if packet is GROUPED and args[0].is_meta and args[0].dtype in (torch.float32, torch.float16):
        return _grouped_once
    return None


def _recurrent(x: Tensor, *args: object) -> tuple[Tensor, ...]:
    """Create the results of oneDNN's LSTM over ``x``, (positions, batch, inputs), with the workspace of its backward pass."""
    y, h, c, _ = torch.ops.aten.mkldnn_rnn_layer.default(x, *args)
    num, batch, hidden = *x.shape[:2], h.shape[-1]
    # as in torch 2: gates twice, six arrays of states as wide as the wider of inputs and hidden units, one of cells; rows
    # are padded to 64 bytes, by more where rows would share cache lines, and some memory pages are added
    values = 2 * num * _row(4 * hidden) + (num + 1) * (6 * _row(max(x.shape[-1], hidden)) + _row(hidden))
    return y, h, c, x.new_empty(4 * batch * values + 4 * _PAGE, dtype=torch.uint8)


def _row(width: int) -> int:
    padded = -(-width // 16) * 16
    return padded + 16 if padded % 256 == 0 else padded


def _grouped_once(left: Tensor, right: Tensor, offs: Tensor | None = None, *args: object, **kwargs: object) -> Tensor:
    """Create the result of a grouped product, which torch's meta device computes in bfloat16 only."""
    shape = left.shape[-2], right.shape[-1]
    if left.dim() == right.dim():
        groups = left.shape[0] if offs is None else offs.shape[0]
        return left.new_empty((groups, *shape))
    return left.new_empty(shape)


def _fresh(result: object, before: list[Tensor]) -> tuple[Any, ...] | None:
    """Describe a result whose tensors have storages of their own, so that `_made` can create it anew; None for other results."""
    after: list[Tensor] = []
    again: list[Tensor] = []
    try:
        form = _form(result, after)
    except _OfItsOwn:
        return None
    _form(_made(form), again)
    storages = [{tensor.untyped_storage()._cdata for tensor in tensors} for tensors in (before, after)]
    is_fresh = after and len(storages[1]) == len(after) and storages[0].isdisjoint(storages[1])
    return form if is_fresh and list(_sizes(after)) == list(_sizes(again)) else None


def _sizes(tensors: list[Tensor]) -> Iterator[int]:
    return (tensor.untyped_storage().nbytes() for tensor in tensors)


@cache
def _is_functional(func: torch._ops.OpOverload) -> bool:
    """Check whether an operation neither changes its arguments nor returns views of them."""
    return all(one.alias_info is None for one in (*func._schema.arguments, *func._schema.returns))


def _form(item: object, tensors: list[Tensor]) -> tuple[Any, ...]:
    """Describe an argument or result by nested types, shapes and dtypes; append its tensors to ``tensors``."""
    kind = type(item)
    if kind in _PLAIN and isinstance(item, Tensor):
        if not item.is_meta or item.dtype.is_complex or item.layout != torch.strided:
            raise _OfItsOwn
        tensors.append(item)
        return Tensor, item.shape, item.stride(), item.dtype
    if isinstance(item, list | tuple):
        return (kind, *[_form(part, tensors) for part in item])
    if issubclass(kind, Tensor):
        raise _OfItsOwn
    return kind, item  # the type distinguishes 1, 1.0 and True, which are equal but lead to different dtypes


def _made(form: tuple[Any, ...]) -> object:
    kind, *rest = form
    if kind is Tensor:
        size, stride, dtype = rest
        return _EMPTY(size, stride, dtype=dtype, device=_META)
    return kind(map(_made, rest)) if issubclass(kind, list | tuple) else rest[0]

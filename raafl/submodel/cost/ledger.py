"""Record what a step does on the meta device: FLOPs, bytes read and written, and peak memory."""

from __future__ import annotations

import math
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.weak import WeakIdKeyDictionary

from raafl.rules import Rules
from raafl.submodel.cost.kernels import (
    CONVOLUTIONS,
    RECURRENT,
    arithmetic_flops,
    cached_result,
    product_flops,
    root_times,
    run,
    traffic,
    workspace_bytes,
)
from raafl.submodel.nested_batch import tensors_in

_aten = torch.ops.aten
LARGE = 20_000_000
"""Number of parameters of a model above which steps are traced without values first, if they can be."""

_TAKES_NO_PART = frozenset(
    {_aten.empty, _aten.empty_like, _aten.empty_strided, _aten.new_empty, _aten.new_empty_strided}
)
_READS_ROWS = frozenset({_aten.embedding, _aten.index_select, _aten.gather, _aten.index})
_OVERWRITES = frozenset({_aten.copy_, _aten.zero_, _aten.fill_})
_CHANGES = frozenset({_aten.mul_, _aten.add_, _aten.lerp_, _aten.addcmul_, _aten.addcdiv_})
"""In-place operations of optimizers; without values they do nothing, though torch takes its time for them."""
_FUSED = {_aten._fused_adam_, _aten._fused_adamw_, _aten._fused_sgd_, _aten._fused_adagrad_}
"""Steps of whole optimizers in one operation; not all of them have a kernel for the meta device."""
_LOOP_LAUNCHES, _LOOP_BYTES = 0.22, 0.5
"""Factors of an operation's launch and bytes within a loop of torch's own, where no Python runs between two operations, and
an operand was written just before, so that it is in a cache. Measured with GRUs and RNNs: 2 to 4 us of 12 to 17 us."""


class Ledger(TorchDispatchMode):
    """Context that counts FLOPs, moved bytes and memory of all torch operations within it.

    Tensors may lack values (on the meta device); a condition on such a tensor counts as false.

    `flops`: number of FLOPs in matrix products, convolutions, attention and recurrent layers.
    `arithmetic`: number of FLOPs in all other operations.
    `padding_flops`: number of additional FLOPs that convolutions spend on padded channels.
    `moved_bytes`: bytes of operands and results, weighted by time (see `traffic`), for operations that are not views;
    of an embedding, only the rows read.
    `kernels`: number of operations of each kind, without views.
    `launches`: number of operations, without views, weighted by the time that a launch takes.
    `launched`: number of operations by kind, FLOPs and bytes, as a GPU runs them: without weights, a dropout as one.
    `live_bytes`: bytes of all tensor storage that was created in this context and is still alive.
    `peak_bytes`: largest number of bytes alive at once, including workspaces (`workspace_bytes`).
    `asked`: whether the code has tested if any element of a tensor is true, as a mixture of experts does to find an
    expert's samples; tests for NaN or infinity do not count.
    `some`: result that such a test gets.
    `stand_in`: number that code gets which reads a value of a tensor without values; None = it gets an error.
    """

    def __init__(self, held: Iterable[Tensor] = (), rules: Rules | None = None) -> None:
        """Create an empty ledger, which counts no memory of the tensors ``held``, and predicts times by ``rules``."""
        super().__init__()  # type: ignore[no-untyped-call]
        self._rules = rules or Rules()
        self.flops, self.arithmetic, self.padding_flops = 0.0, 0.0, 0.0
        self.moved_bytes, self.live_bytes, self.peak_bytes = 0, 0, 0
        self.kernels: Counter[Any] = Counter()
        self.launches = 0.0
        self.launched: Counter[tuple[Any, float, int]] = Counter()
        self._last: object = None
        self._in_loop = False
        self._zero_share: dict[int, float] = {}
        self.asked = self.some = False
        self.stand_in: int | None = None
        self._alive: dict[int, weakref.ref[Any]] = {}
        self._answers = WeakIdKeyDictionary()
        for tensor in held:
            self._note(tensor, counted=False)

    @property
    def task_flops(self) -> float:
        """FLOPs from which a step's time is predicted: those of matrix products, convolutions and the like; if none, all FLOPs."""
        return self.flops or self.arithmetic

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> object:
        """Run an operation, and add its cost to the ledger."""
        kwargs = kwargs or {}
        if func is _aten._local_scalar_dense.default and args[0].is_meta and args[0].dtype == torch.bool:
            about_some = self._answers.get(args[0], False)  # type: ignore[no-untyped-call]
            self.asked = self.asked or about_some
            return about_some and self.some  # unless ``some`` is set, no mask is all ones and nothing is NaN
        if not isinstance(func, torch._ops.OpOverload):
            return func(*args, **kwargs)
        if self.stand_in is not None and (read := _read(func, args, kwargs, self.stand_in)) is not None:
            return read
        packet, form = func._overloadpacket, cached_result(func, args, kwargs)
        if packet in _FUSED and args[0] and args[0][0].is_meta:
            result = None
        else:
            result = args[0] if packet in _CHANGES and args[0].is_meta else run(func, args, kwargs, form)
        if packet is _aten.any and isinstance(result, Tensor):
            self._answers[result] = self._answers.get(args[0], True)  # type: ignore[no-untyped-call]
        elif _finds_nothing(packet, args):
            self._answers[result] = False
        with torch._C.DisableTorchFunction():
            work = form.cost if form is not None and form.cost is not None else counted(func, args, kwargs, result)
            made = [result] if isinstance(result, Tensor) else tensors_in(result)
            for tensor in made:
                self._note(tensor)
            workspace = workspace_bytes(packet, args, made)
            if packet is _aten.native_batch_norm_backward and self._rules.sees_norms_twice and args[-1][0]:
                workspace = made[0].numel() * made[0].itemsize
            moved_bytes = self._weighted(packet, args, result, work)
        # the cost of a convolution depends on the processor, too, so it is not cached
        if form is not None and form.cost is None and packet not in CONVOLUTIONS:
            form.cost = work
            form.remember()
        self.flops += work.flops
        self.arithmetic += work.arithmetic
        self.padding_flops += work.padding_flops
        self.moved_bytes += moved_bytes
        if work.num_bytes:
            self.kernels[packet] += 1
            self.launches += _LOOP_LAUNCHES if self._in_loop and packet not in RECURRENT else 1.0
            draws = packet is _aten.bernoulli_ or (packet is _aten.div_ and self._last is _aten.bernoulli_)
            if not draws:  # on a GPU one kernel draws a dropout's mask, scales it and multiplies by it
                self.launched[packet, work.flops, work.num_bytes] += 1
            self._last = packet
        self.peak_bytes = max(self.peak_bytes, self.live_bytes + workspace)
        return result

    def take_launched(self) -> Counter[tuple[Any, float, int]]:
        """Return `launched`, and start it anew."""
        found, self.launched = self.launched, Counter()
        return found

    def __exit__(self, *error: Any) -> None:
        """Leave the context, and reset the flag of torch's loops, which an error or a backward pass may leave set."""
        self._in_loop = False
        super().__exit__(*error)  # type: ignore[no-untyped-call]

    def _weighted(
        self, packet: torch._ops.OpOverloadPacket, args: tuple[Any, ...], result: Any, work: OperationCost
    ) -> int:
        """Return an operation's moved bytes, weighted for zeros in its operand and for a loop of torch around it."""
        moved_bytes: float = work.moved_bytes
        if self._rules.sees_zeros:
            self._follow_zeros(packet, args, result)
            if packet is _aten.sqrt:
                moved_bytes = root_times(self._zero_share.get(storage_key(args[0]), 0.0)) * work.num_bytes
        return int(_LOOP_BYTES * moved_bytes if self._in_loop and packet not in RECURRENT else moved_bytes)

    def _follow_zeros(self, packet: torch._ops.OpOverloadPacket, args: tuple[Any, ...], result: Any) -> None:
        """Track which share of an embedding's rows is zero: in its gradient, and in Adam's mean of squared gradients."""
        share = None
        if packet is _aten.embedding_dense_backward:
            share = math.exp(-args[1].numel() / max(args[2], 1))
        elif packet is _aten.clone:
            share = self._zero_share.get(storage_key(args[0]))
        elif packet is _aten.addcmul_:
            share = self._zero_share.get(storage_key(args[1]))
        elif packet is not _aten.add_:
            return
        if share is None:
            self._zero_share.pop(storage_key(result), None)
        else:
            self._zero_share[storage_key(result)] = share

    @contextmanager
    def loop(self) -> Iterator[None]:
        """Count the operations within the context as those of a loop that torch runs without Python."""
        before, self._in_loop = self._in_loop, self._rules.sees_loops
        try:
            yield
        finally:
            self._in_loop = before

    def follow_backward(self, results: Iterable[Tensor], operands: Iterable[Tensor]) -> None:
        """Count the backward pass of a loop as one: everything between its ``results`` and its ``operands``."""
        if not self._rules.sees_loops:
            return
        before = {tensor.grad_fn for tensor in operands}
        nodes, seen = [tensor.grad_fn for tensor in results], set[Any]()
        while nodes:
            node = nodes.pop()
            if node is None or node in seen:
                continue
            seen.add(node)
            # nodes that add to a leaf's `.grad` do not belong to the loop whose cost is counted
            is_within = node not in before and not hasattr(node, "variable")
            node.register_prehook(partial(self._set_loop, is_within))
            if is_within:
                nodes += [above for above, _ in node.next_functions]

    def _set_loop(self, is_within: bool, gradients: object) -> None:
        self._in_loop = is_within

    def _note(self, tensor: Tensor, counted: bool = True) -> None:
        if tensor.layout != torch.strided:  # sparse tensors have no storage
            return
        storage = tensor.untyped_storage()
        key = storage_key(tensor)
        if key in self._alive:
            return
        num_bytes = storage.nbytes() if counted else 0

        def gone(_: object) -> None:
            self.live_bytes -= num_bytes
            self._alive.pop(key, None)
            self._zero_share.pop(key, None)

        self._alive[key] = weakref.ref(storage, gone)
        self.live_bytes += num_bytes
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)


class Launches(NamedTuple):
    """Launches of a training step on a GPU; `Profile.gpu_s` gives their time.

    Numbers are per sample in a `Cost`, so that a task's are these times its samples.
    """

    steps: float = 0.0  # number of steps
    operations: float = 0.0  # number of operations in forward and backward pass, products and views excluded
    products: float = 0.0  # number of matrix products, convolutions and attentions of both passes
    # operations without autograd: those of the optimizer, one for each tensor
    plain: float = 0.0
    # for each kernel its number, its FLOPs, and the bytes of its operands and results; the optimizer's once for each
    # kind
    kernels: tuple[tuple[float, float, float], ...] = ()

    def captured(self) -> Launches:
        """Return the launches of as many steps that are CUDA graphs: one each, with the same kernels."""
        return Launches(steps=self.steps, kernels=self.kernels)

    def times(self, factor: float) -> Launches:
        """Return the launches of ``factor`` times as many steps."""
        kernels = tuple((factor * number, flops, num_bytes) for number, flops, num_bytes in self.kernels)
        return Launches(
            factor * self.steps, factor * self.operations, factor * self.products, factor * self.plain, kernels
        )


def launches_of(
    passes: Mapping[tuple[Any, float, int], int], update: Mapping[tuple[Any, float, int], int], num_passes: float = 1.0
) -> Launches:
    """Return the launches of a step, from `Ledger.launched` in its passes and in its optimizer's step.

    `num_passes`: how often ``passes`` count.
    """
    products = sum(number for (_, flops, _), number in passes.items() if flops)
    kernels, moved = Counter[tuple[float, float]](), Counter[object]()
    for (_, flops, num_bytes), number in passes.items():
        kernels[flops, num_bytes] += number
    for (packet, _, num_bytes), number in update.items():
        moved[packet] += number * num_bytes
    found = [(num_passes * number, *sizes) for sizes, number in kernels.items()]
    return Launches(
        1.0,
        num_passes * (sum(passes.values()) - products),
        num_passes * products,
        float(sum(update.values())),
        (*found, *((1.0, 0.0, float(num_bytes)) for num_bytes in moved.values())),
    )


def _read(func: object, args: tuple[Any, ...], kwargs: Mapping[str, Any], stand_in: int) -> object:
    """Return the stand-in for what an operation reads of a tensor without values; None if it reads nothing of such a one."""
    if func not in (_aten._local_scalar_dense.default, _aten._to_copy.default) or not args[0].is_meta:
        return None
    if func is _aten._local_scalar_dense.default:
        return float(stand_in) if args[0].is_floating_point() else stand_in
    device = kwargs.get("device")
    if device is None or device.type == "meta":
        return None
    return torch.full(args[0].shape, stand_in, dtype=kwargs.get("dtype") or args[0].dtype, device=device)


def _finds_nothing(packet: torch._ops.OpOverloadPacket, args: tuple[Any, ...]) -> bool:
    """Check whether an operation searches for NaN or infinity: `isnan` runs as ``x != x``, `isinf` as ``abs(x) == inf``."""
    if packet is _aten.ne:
        return args[0] is args[1]
    return packet in (_aten.isnan, _aten.isinf) or (
        packet is _aten.eq and isinstance(args[1], float) and math.isinf(args[1])
    )


class OperationCost(NamedTuple):
    """FLOPs and bytes of one operation."""

    flops: float = 0.0  # FLOPs of products; see `product_flops`
    padding_flops: float = 0.0  # FLOPs that a convolution spends on padded channels
    num_bytes: int = 0  # number of bytes of operands and results
    moved_bytes: int = 0  # ``num_bytes`` weighted by time; see `traffic`
    arithmetic: float = 0.0  # FLOPs of an operation that is not a product; see `arithmetic_flops`


def counted(func: object, args: tuple[Any, ...], kwargs: Mapping[str, Any], result: object) -> OperationCost:
    """Return the FLOPs and bytes of an operation; None if it is not one of torch's own."""
    if not isinstance(func, torch._ops.OpOverload):
        return OperationCost()
    packet, made = func._overloadpacket, tensors_in(result)
    flops, arithmetic = product_flops(packet, args, kwargs, result), arithmetic_flops(func, args, made)
    num_bytes = _moved_bytes(func, args, kwargs, made)
    moved_bytes, padding_flops = traffic(packet, args, made, num_bytes)
    return OperationCost(flops, padding_flops, num_bytes, moved_bytes, arithmetic)


def _moved_bytes(
    func: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: Mapping[str, Any], made: list[Tensor]
) -> int:
    packet = func._overloadpacket
    if packet in _TAKES_NO_PART or torch.Tag.inplace_view in func.tags:
        return 0
    operands = list({id(tensor): tensor for tensor in tensors_in((args, kwargs))}.values())
    there = {storage_key(tensor) for tensor in operands}
    fresh = sum(_bytes_of(tensor) for tensor in made if storage_key(tensor) not in there)
    changed = [args[place] if place < len(args) else kwargs.get(name) for place, name in _changed_by(func)]
    written = sum(map(_bytes_of, tensors_in(changed)))
    if not fresh and not written:
        return 0  # a view moves no bytes
    if packet in _READS_ROWS:
        return 2 * fresh + sum(map(_bytes_of, operands[1:]))
    read = sum(map(_bytes_of, operands))
    return fresh + read + (0 if packet in _OVERWRITES else written)


@cache
def _changed_by(func: torch._ops.OpOverload) -> list[tuple[int, str]]:
    """Return position and name of each argument that an operation writes to."""
    arguments = enumerate(func._schema.arguments)
    return [(i, one.name) for i, one in arguments if one.alias_info is not None and one.alias_info.is_write]


def _bytes_of(tensor: Tensor) -> int:
    """Return the bytes of a tensor, in which elements repeated by broadcasting count once."""
    number = tensor.itemsize
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        number *= size if stride or not size else 1
    return number


def storage_key(tensor: Tensor) -> int:
    """Return a key that identifies a tensor's storage while it is alive; unlike `data_ptr`, it works on the meta device."""
    return int(tensor.untyped_storage()._cdata)

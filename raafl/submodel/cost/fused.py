"""Run layers on the meta device by the operations that a CPU uses for them, instead of the meta device's own."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from types import FunctionType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from raafl.rules import Rules
from raafl.submodel.nested_batch import tensors_in

if TYPE_CHECKING:
    from raafl.submodel.cost.ledger import Ledger

Layer = Callable[[Tensor, Any, Sequence[Tensor], bool, bool, list[Tensor]], tuple[Tensor, Any]]
"""A layer in one direction: inputs, state, weights, whether backwards, whether it trains, workspace -> outputs, last state."""
Cell = Callable[[Tensor, Tensor, Tensor], Tensor]
"""The next state from products of the input, the state, and products of the state."""
_LSTM = 2
"""oneDNN's number of an LSTM among its recurrent layers."""


class FusedKernels(TorchFunctionMode):
    """Context for predictions of cost: in it, attention and recurrent layers on the meta device run a CPU's fused kernels."""

    def __init__(self, rules: Rules | None = None, ledger: Ledger | None = None) -> None:
        """Select the functions that fused kernels replace under ``rules``; ``ledger`` counts the operations of torch's loops."""
        super().__init__()
        self._ledger = ledger
        left_out = set() if (rules or Rules()).fuses_multihead else {_MULTIHEAD}
        self._kernels = {func: kernel for func, kernel in _KERNELS.items() if func not in left_out}

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> object:
        """Call the fused kernel of a function if it has one for these arguments, else the function itself."""
        kwargs = kwargs or {}
        kernel = self._kernels.get(func)
        ledger = self._ledger if func in _LOOPS else None
        with nullcontext() if ledger is None else ledger.loop():
            fused = None if kernel is None else kernel(*args, **kwargs)
            result = func(*args, **kwargs) if fused is None else fused
        if ledger is not None:
            ledger.follow_backward(tensors_in(result), tensors_in((args, kwargs)))
        return result


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
    """Run the flash kernel on meta tensors (batch, heads, positions, width); None if the kernel does not support them."""
    if dropout_p or query.dim() != 4 or not query.is_meta or query.shape[-1] != value.shape[-1]:
        return None
    # no flash kernel supports a bias that is trained, such as T5's
    if attn_mask is not None and attn_mask.requires_grad:
        return None
    if enable_gqa:
        key, value = (x.repeat_interleave(query.shape[1] // x.shape[1], 1) for x in (key, value))
    if attn_mask is not None:
        attn_mask = attn_mask.to(query.dtype)
    kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    output: Tensor = kernel(query, key, value, 0.0, is_causal, attn_mask=attn_mask, scale=scale)[0]
    return output


def _attention_in_multihead(*args: Any, **kwargs: Any) -> Tensor:
    fused = _fused_attention(*args, **kwargs)
    return F.scaled_dot_product_attention(*args, **kwargs) if fused is None else fused


_MULTIHEAD = F.multi_head_attention_forward
_multihead: Callable[..., Any] = FunctionType(
    _MULTIHEAD.__code__,
    {**vars(F), F.scaled_dot_product_attention.__name__: _attention_in_multihead},
    argdefs=_MULTIHEAD.__defaults__,
)
"""torch's attention function with another kernel in it; a mode cannot replace what a Python function calls."""


def _lstm(
    x: Tensor,
    hidden: object,
    parameters: Any,
    has_biases: bool,
    num_layers: int,
    dropout: float,
    train: bool,
    bidirectional: bool,
    batch_first: bool = False,
) -> tuple[Tensor, ...] | None:
    """Run an LSTM by one oneDNN operation for each layer and direction; None if torch would not use oneDNN."""
    if not isinstance(hidden, list | tuple) or not x.is_meta or x.dtype != torch.float32:
        return None
    if hidden[0].shape[-1] != hidden[1].shape[-1]:  # with a projection, torch does not use oneDNN
        return None
    x = (x.transpose(0, 1) if batch_first else x).contiguous()
    states = list(zip(*hidden, strict=True))
    y, ends = _stacked_layers(_lstm_layer, x, states, parameters, has_biases, num_layers, dropout, train, bidirectional)
    y = y.transpose(0, 1) if batch_first else y
    return y, *(torch.stack(end) for end in zip(*ends, strict=True))


def _by_steps(cell: Cell) -> Callable[..., tuple[Tensor, Tensor] | None]:
    """Return an RNN on ``cell`` that multiplies all positions' inputs at once, as on a CPU, then runs step by step."""

    def layer(
        x: Tensor, state: Tensor, weights: Sequence[Tensor], backwards: bool, train: bool, workspace: list[Tensor]
    ) -> tuple[Tensor, Tensor]:
        workspace[:] = F.linear(x, weights[0], *weights[2:3]).unbind(0)
        outputs: list[Tensor] = []
        for given in reversed(workspace) if backwards else workspace:
            state = cell(given, state, F.linear(state, weights[1], *weights[3:]))
            outputs.append(state)
        return torch.stack(outputs[::-1] if backwards else outputs), state

    def run(
        x: Tensor,
        hidden: Any,
        parameters: Any,
        has_biases: Any,
        num_layers: Any,
        dropout: float,
        train: bool,
        bidirectional: bool,
        batch_first: bool = False,
    ) -> tuple[Tensor, Tensor] | None:
        if not isinstance(has_biases, bool) or not x.is_meta:  # a packed sequence has other arguments here
            return None
        x, states = x.transpose(0, 1) if batch_first else x, hidden.unbind(0)
        y, ends = _stacked_layers(layer, x, states, parameters, has_biases, num_layers, dropout, train, bidirectional)
        return (y.transpose_(0, 1) if batch_first else y), torch.stack(ends)

    return run


def _gru_cell(given: Tensor, state: Tensor, gates: Tensor) -> Tensor:
    reset, update, new = given.unsafe_chunk(3, 1)
    of_reset, of_update, of_new = gates.unsafe_chunk(3, 1)
    resets, updates = of_reset.add_(reset).sigmoid_(), of_update.add_(update).sigmoid_()
    news = new.add(of_new.mul_(resets)).tanh_()
    return (state - news).mul_(updates).add_(news)


def _stacked_layers(
    run: Layer,
    x: Tensor,
    states: Sequence[Any],
    parameters: Sequence[Tensor],
    has_biases: bool,
    num_layers: int,
    dropout: float,
    train: bool,
    bidirectional: bool,
) -> tuple[Tensor, list[Any]]:
    """Run the layers of a recurrent net on inputs (positions, batch, inputs); return its outputs and all last states."""
    directions, size = 2 if bidirectional else 1, 4 if has_biases else 2
    ends: list[Any] = []
    for layer in range(num_layers):
        outputs: list[Tensor] = []
        workspace: list[Tensor] = []  # keeps tensors alive until both directions are concatenated, as in torch
        for direction in range(directions):
            at = layer * directions + direction
            weights = parameters[at * size : (at + 1) * size]
            output, end = run(x, states[at], weights, direction == 1, train, workspace)
            outputs.append(output)
            ends.append(end)
        x = outputs[0] if directions == 1 else torch.cat(outputs, -1)
        workspace.clear()
        if dropout and train and layer < num_layers - 1:
            x = F.dropout(x, dropout)
    return x, ends


def _lstm_layer(
    x: Tensor, state: Any, weights: Sequence[Tensor], backwards: bool, train: bool, workspace: list[Tensor]
) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    has_biases = len(weights) == 4
    w, u = weights[:2]
    biases = weights[2:] if has_biases else (w.new_zeros(w.shape[0]), u.new_zeros(u.shape[0]))
    num_hidden = state[0].shape[-1]
    y, h, c, _ = torch.ops.aten.mkldnn_rnn_layer.default(
        x, w, u, *biases, *state, backwards, [], _LSTM, num_hidden, 1, has_biases, False, False, train
    )
    return y, (h, c)


_KERNELS: Mapping[Any, Callable[..., Any]] = {
    F.scaled_dot_product_attention: _fused_attention,
    _MULTIHEAD: _multihead,
    torch.lstm: _lstm,
    torch.gru: _by_steps(_gru_cell),
    torch.rnn_tanh: _by_steps(lambda given, state, gates: gates.add_(given).tanh()),
    torch.rnn_relu: _by_steps(lambda given, state, gates: gates.add_(given).relu()),
}
"""Replacement of each function of torch; it returns None for arguments that it does not handle."""
_LOOPS = frozenset({torch.lstm, torch.gru, torch.rnn_tanh, torch.rnn_relu})
"""Functions of torch that loop over the positions of their inputs outside Python."""

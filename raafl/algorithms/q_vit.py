"""Q-ViT (Li et al., "Q-ViT: Fully Differentiable Quantization for Vision Transformer", arXiv:2201.07703, 2022).

Co-S2P compares with Q-ViT trained on each client under FedAvg. Weights w and inputs x of layers are quantised to b bits,

    x^ = round(clip(x / s, -Q_n, Q_p)) s,      Q_n = 2^(b-1),  Q_p = 2^(b-1) - 1,

and the step sizes s and bit widths b are trained with the model: s by the gradient of learned step sizes (LSQ, Esser et al.
2020), b by the effect of more levels on clipped values, with a loss that holds the mean width at ``bits``. Rounding
passes gradients straight through. A layer has a separate step size for each bit width that it may reach (switchable scale).

Here step sizes and bit widths are parameters of the model that are sent and averaged like the rest.

Choices that the paper leaves open, and deviations from it:
- The paper learns a bit width for each head; here each layer has one for its weight and one for its input.
- Linear and convolutional layers are quantised, in models of any kind. Products between activations (the scores of an attention),
  norms, embeddings, recurrent layers and `nn.MultiheadAttention`'s own projections stay in floating point.
- An input without a negative number (after ReLU) uses only levels of 0 and above: Q_n = 0, Q_p = 2^b - 1.
- Gradients of a step size and of its bounds are scaled as in LSQ, by ``1 / sqrt(n Q_p)``: n weights of the layer, or features of
  one sample's input, and Q_p of the bit width that it has.
- The step size of a weight starts at ``2 mean |w| / sqrt(Q_p)``. That of an input starts so from the first batch of each client's
  first task, and is the clients' mean after the first merge; until then evaluation does not quantise inputs. A weight that is 0
  at the start, such as LoRA's B, gets its step size in the first task that starts with a nonzero weight.
- The first and the last layer have 8 bits. Bit widths range from 2 to 8.
- The paper limits operations; here a loss pulls the mean bit width over all weights to ``bits``.
- No memory or time is saved: quantised values are stored, multiplied and sent as floating-point numbers. A client's cost is that
  of the model plus that of quantising.
- The loss reported during training includes the loss on bit widths.

With 32 bits it is FedAvg, bit for bit.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from raafl.algorithm import (
    Algorithm,
    AllReported,
    BadInput,
    Full,
    Hook,
    Local,
    Mean,
    Sample,
    Select,
    Submodels,
    Task,
    Traits,
    positive,
)
from raafl.algorithms.ada_vit import must_train


def q_vit(
    bits: int = 4,
    learn_bits: bool = True,
    edge_bits: int = 8,
    weight: float = 1.0,
    by_samples: bool = True,
    cohort: int | None = None,
    concurrency: int | None = None,
    submodel: Select | None = None,
) -> Algorithm:
    """Return Q-ViT, trained by FedAvg: quantised layers whose step sizes and bit widths are learned.

    Args:
        bits: number of bits of weights and inputs, 2 to 8, or its target on average if it is learned; 32 = no
            quantisation.
        learn_bits: whether each layer learns its number of bits; False = the same for all layers.
        edge_bits: number of bits in the first and the last layer.
        weight: weight of the loss that pulls the mean number of bits to ``bits``.
        by_samples: whether to weight clients by their numbers of samples |D_n|; False = equally.
        cohort: number of clients in a round, drawn uniformly; None = all.
        concurrency: largest number of clients that work at the same time; None = no limit.
        submodel: rule that chooses each client's submodel, such as `raafl.parts.RateSelect`; None = the whole model for
            every client.
    """
    return Algorithm(
        name="q_vit",
        paper="Li et al. 2022, Q-ViT",
        sample=Sample(cohort, concurrency),
        select=submodel or Full(),
        local=Quantised(bits, learn_bits, edge_bits, weight),
        trigger=AllReported(),
        merge=Mean(by_samples=by_samples),
    )


# Quantise weights and inputs of layers, and learn their step sizes and bit widths (Q-ViT, Li et al. 2022).
#
# Quantisation is fake: values are rounded to a few levels and stored as floating-point numbers. `Quantised.prepare` converts each
# linear and convolutional layer to one of the classes here, in place, and adds parameters: ``weight_step``, ``input_step`` and,
# if bit widths are learned, ``weight_bits`` and ``input_bits``.

NONE = 32
"""Bit width that means no quantisation."""

LEAST, MOST = 2, 8
"""Bounds of learned bit widths."""


def _round(x: Tensor) -> Tensor:
    """Round each element of x to an integer; the gradient passes through unchanged (straight-through estimator)."""
    return x.detach().round() + (x - x.detach())


def quantise(x: Tensor, step: Tensor, low: Tensor, high: Tensor, factor: Tensor | float = 1.0) -> Tensor:
    """Round ``x`` to multiples of the step size: ``round(clip(x / s, low, high)) s`` with ``s = |step|``.

    A step size of 0 means that it is not known yet; x is then returned unchanged. The step size and both bounds can be
    learned; gradients are those of LSQ (Esser et al. 2020). Where x / s lies between the bounds, the gradient of x is 1,
    and that of s is ``round(x / s) - x / s``. Where x / s lies beyond a bound, the gradient of x is 0, that of s is the
    bound, and that of the bound is s. Gradients of s and of the bounds are multiplied by ``factor``.

    Args:
        x: values to quantise, of any shape.
        step: step size, a scalar.
        low: lowest level, as a multiple of the step size; a scalar.
        high: highest level, as a multiple of the step size; a scalar.
        factor: multiplier of the gradients of step and bounds, a scalar; LSQ uses ``1 / sqrt(n * high)`` with n the size of
            ``x``, for inputs that of one sample.
    """
    unknown = step.detach() == 0
    size = _damped(torch.where(unknown, 1.0, step.abs()), factor)
    near = torch.maximum(x / size, _damped(low, factor).to(x.dtype))
    near = torch.minimum(near, _damped(high, factor).to(x.dtype))
    return torch.where(unknown, x, _round(near) * size)


def _damped(x: Tensor, factor: Tensor | float) -> Tensor:
    """Return x unchanged, but multiply its gradient by ``factor``."""
    return x.detach() + (x - x.detach()) * factor


class _Layer:
    """Base of the quantised layer classes, which also inherit from the torch layer that they replace."""

    fixed_bits: int | None  # bit width of weight and inputs; None = learned
    sees_first: bool  # whether the next forward pass initialises step sizes that are still 0
    weight: Any
    weight_step: Tensor
    weight_bits: Tensor
    input_step: Tensor
    input_bits: Tensor

    def _values(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return the quantised input and the quantised weight of a forward pass."""
        if self.sees_first:  # not only in training mode: the flag is set for one step of a task
            self.sees_first = False
            # a weight that started at 0, as LoRA's B does, had given a step of 0
            for kind, values in (("input", x), ("weight", self.weight)):
                if bool((getattr(self, f"{kind}_step") == 0).all()):
                    self.set_steps(kind, values.detach())
        # inputs without negative values, such as outputs of a ReLU, use all levels for positive ones; weights are
        # always signed
        signed = (x.detach() < 0).any()
        return self._quantised("input", x, signed), self._quantised("weight", self.weight, torch.ones_like(signed))

    def _quantised(self, kind: str, x: Tensor, signed: Tensor) -> Tensor:
        steps: Tensor = getattr(self, f"{kind}_step")
        if self.fixed_bits is not None:
            half, step = steps.new_tensor(2.0 ** (self.fixed_bits - 1)), steps[0]
        else:
            learned: Tensor = getattr(self, f"{kind}_bits")
            bits = _round(learned.clamp(LEAST, MOST))
            half, step = 2.0 ** (bits - 1), steps.index_select(0, (bits.detach() - LEAST).long().view(1)).view(())
        low, high = torch.where(signed, -half, torch.zeros_like(half)), torch.where(signed, half - 1, 2 * half - 1)
        # n in the gradient scale of LSQ (Esser et al.): the number of weights, or of input features of one sample
        num_values = x.numel() if kind == "weight" else x[0].numel()
        return quantise(x, step, low, high, torch.rsqrt(num_values * high.detach()))

    @torch.no_grad()
    def set_steps(self, kind: str, x: Tensor) -> None:
        """Set the step size for each possible bit width b to its initial value ``2 mean |x| / sqrt(2^(b-1) - 1)``."""
        widths = range(LEAST, MOST + 1) if self.fixed_bits is None else [self.fixed_bits]
        # write to `.data`: all parameters share one storage, and autograd would find the forward pass's saved tensors
        # modified
        steps = getattr(self, f"{kind}_step").data
        for i, bits in enumerate(widths):
            steps[i] = 2 * x.abs().mean() / math.sqrt(2 ** (bits - 1) - 1)


class QuantisedLinear(_Layer, nn.Linear):
    """An `nn.Linear` with quantised weight and input."""

    def forward(self, input: Tensor) -> Tensor:
        """Return the layer's output, shape (..., out_features)."""
        x, weight = self._values(input)
        return F.linear(x, weight, self.bias)


class QuantisedConv1d(_Layer, nn.Conv1d):
    """An `nn.Conv1d` with quantised weight and input."""

    def forward(self, input: Tensor) -> Tensor:
        """Return the layer's output, shape (batch, out_channels, length)."""
        x, weight = self._values(input)
        output: Tensor = self._conv_forward(x, weight, self.bias)
        return output


class QuantisedConv2d(_Layer, nn.Conv2d):
    """An `nn.Conv2d` with quantised weight and input."""

    def forward(self, input: Tensor) -> Tensor:
        """Return the layer's output, shape (batch, out_channels, height, width)."""
        x, weight = self._values(input)
        output: Tensor = self._conv_forward(x, weight, self.bias)
        return output


CLASSES: dict[type[nn.Module], Any] = {
    nn.Linear: QuantisedLinear,
    nn.Conv1d: QuantisedConv1d,
    nn.Conv2d: QuantisedConv2d,
}
# axes are found by rules for each layer's original `forward`; `__wrapped__` leads the search to it
for _plain, _own in CLASSES.items():
    _own.forward.__wrapped__ = _plain.forward


def _prevent_fused_kernel(layer: nn.Module, args: object) -> None:
    """Do nothing; a registered hook stops torch's encoder layer from replacing its sublayers by one fused kernel in eval mode."""


# ---- local training ----


@dataclass(frozen=True)
class Quantised(Local):
    """Local training in which weights and inputs of linear and convolutional layers are quantised.

    Attributes:
        bits: number of bits of weights and inputs, 2 to 8, or its target on average if it is learned; 32 = no
            quantisation.
        learn_bits: whether each layer learns the numbers of bits of its weight and input, between 2 and 8. The loss is
            then ``weight * (mean bits / bits - 1)^2``, where the mean is over the weights of all layers.
        edge_bits: number of bits in the first and the last layer.
        weight: weight of the loss on the mean number of bits.
    """

    bits: int = 4
    learn_bits: bool = True
    edge_bits: int = 8
    weight: float = 1.0

    def __post_init__(self) -> None:
        for name in ("bits", "edge_bits"):
            if getattr(self, name) not in (*range(LEAST, MOST + 1), NONE):
                raise BadInput(
                    f"{name} is {getattr(self, name)}: give {LEAST} to {MOST}, or {NONE} for no quantisation"
                )
        positive("weight", self.weight)

    @property
    def traits(self) -> Traits:
        """What this training can do, needs, and leaves out."""
        # a step size's gradient is scaled by its tensor's size, so in a smaller tensor it rightly differs from the
        # whole model's
        return replace(super().traits, proven_as_trained=False)

    def prepare(self, module: nn.Module) -> nn.Module:
        """Convert the layers to quantised ones, in place. The step sizes of inputs need data and are set later."""
        named = [(path, part) for path, part in module.named_modules() if type(part) in CLASSES]
        layers = named if self.bits != NONE else []
        for path, layer in layers:
            if layer.weight.is_complex():
                raise BadInput(
                    f"layer '{path}' has complex weights, but q_vit quantises only real ones: use another algorithm"
                )
        for i, (_, layer) in enumerate(layers):
            is_edge = i in (0, len(layers) - 1)
            if is_edge and self.edge_bits == NONE:
                continue
            fixed = self.edge_bits if is_edge else None if self.learn_bits else self.bits
            self._convert(layer, fixed)
        for part in module.modules():
            if isinstance(part, nn.TransformerEncoderLayer):
                part.register_forward_pre_hook(_prevent_fused_kernel)
        return module

    def _convert(self, layer: Any, fixed: int | None) -> None:
        layer.__class__ = CLASSES[type(layer)]
        layer.fixed_bits, layer.sees_first = fixed, False
        for kind in ("weight", "input"):
            number = 1 if fixed is not None else MOST - LEAST + 1
            layer.register_parameter(f"{kind}_step", nn.Parameter(torch.zeros(number)))
            if fixed is None:
                layer.register_parameter(f"{kind}_bits", nn.Parameter(torch.tensor(float(self.bits))))
        if layer.weight.device.type != "meta":
            layer.set_steps("weight", layer.weight.detach())

    def hook(self, task: Task) -> Hook:
        """Return the hook that initialises step sizes from the first batch, and adds the loss on the mean number of bits."""
        return _Quantising(task, self)

    def notes(self, submodels: Submodels) -> list[str]:
        """Return messages for the user: how many layers are quantised, and what that costs."""
        layers = list(quantised(submodels.module))
        if not layers:
            return ["q_vit quantises nothing here: it is plain averaging"]
        notes = [
            f"q_vit quantises weight and input of {len(layers)} layers in floating point: clients need more memory "
            "and time than without it, and send as many bytes"
        ]
        if len(layers) <= 2 and self.edge_bits not in (self.bits, NONE):
            notes.append(
                f"q_vit uses edge_bits ({self.edge_bits}) for the first and the last layer, and the model has no "
                f"others: bits ({self.bits}) has no effect"
            )
        return notes

    def __str__(self) -> str:
        if self.bits == NONE:
            return f"{super().__str__()}, nothing quantised"
        how = f"learned bits, {self.bits} on average" if self.learn_bits else f"{self.bits} bits"
        return f"{super().__str__()}, weights and inputs quantised, {how}, learned step sizes"


def quantised(module: nn.Module) -> Iterator[Any]:
    """Yield all quantised layers of ``module``."""
    return (part for part in module.modules() if isinstance(part, _Layer))


def mean_bits(layers: list[Any]) -> Tensor | None:
    """Return the mean of all learned numbers of bits, weighted by the size of each layer; None if none is learned."""
    learned = [layer for layer in layers if layer.fixed_bits is None]
    if not learned:
        return None
    sizes = [layer.weight.numel() for layer in learned]
    sums = [
        (layer.weight_bits + layer.input_bits) * (size / (2 * sum(sizes)))
        for layer, size in zip(learned, sizes, strict=True)
    ]
    return torch.stack(sums).sum()


class _Quantising(Hook):
    """Training hook of Q-ViT: it initialises step sizes on the first batch, and adds the loss on the mean bit width."""

    def __init__(self, task: Task, local: Quantised) -> None:
        super().__init__(task)
        self.local, self.layers = local, list(quantised(task.module))
        must_train(task, [layer.input_step for layer in self.layers], "q_vit", "input_step")

    def loss(self, batch: object, index: int) -> Tensor:
        """Return the module's loss plus the loss on the mean bit width."""
        for layer in self.layers if index == 0 else ():
            layer.sees_first = True
        loss = super().loss(batch, index)
        mean = mean_bits(self.layers)
        return loss if mean is None else loss + self.local.weight * (mean / self.local.bits - 1).square()

    def update(self) -> None:
        """Make the optimizer's step, then clamp the learned bit widths to their allowed range, outside which gradients are 0."""
        super().update()
        with torch.no_grad():
            for layer in self.layers:
                if layer.fixed_bits is None:
                    layer.weight_bits.clamp_(LEAST, MOST)
                    layer.input_bits.clamp_(LEAST, MOST)

    def close(self) -> None:
        """Reset the flags, so that the forward passes of evaluation do not initialise step sizes."""
        for layer in self.layers:
            layer.sees_first = False

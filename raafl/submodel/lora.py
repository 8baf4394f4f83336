"""Find the adapters of peft's LoRA layers; the rank of each is an axis.

Hu et al. 2021 (arXiv:2106.09685): ``y = W x + scaling * B A x`` with W frozen, A (rank, in) and B (out, rank). Rows of A and
columns of B belong together; a client with a lower rank keeps some. ``scaling`` stays that of the full model, so that a submodel
is the full model with the dropped ranks zeroed, and a coverage mean is, for each rank, over the clients that have it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import nn

from raafl.submodel.cut.sizes import resizes, type_names
from raafl.submodel.spec import Axis, Member

_LORA = "peft.tuners.lora.layer.LoraLayer"


def is_lora(layer: nn.Module) -> bool:
    """Check whether ``layer`` is a LoRA layer of peft, whatever kind of layer it adapts."""
    return _LORA in type_names(layer)


def _factors(layer: Any) -> Iterator[tuple[str, str, str]]:
    """Yield each adapter's name, with the names of its matrices A, (rank, in), and B, (out, rank)."""
    for adapter, down in layer.lora_A.items():
        weight = ".weight" if isinstance(down, nn.Module) else ""
        yield adapter, f"lora_A.{adapter}{weight}", f"lora_B.{adapter}{weight}"
    for adapter in layer.lora_embedding_A:
        yield adapter, f"lora_embedding_A.{adapter}", f"lora_embedding_B.{adapter}"


def ranks(module: nn.Module) -> list[Axis]:
    """Return one axis for each LoRA layer in ``module``: its rank, which a submodel may reduce."""
    axes = []
    for path, layer in module.named_modules():
        prefix, factors = f"{path}." if path else "", list(_factors(layer)) if is_lora(layer) else []
        for adapter, down, up in factors:
            name = f"{prefix}rank" + (f".{adapter}" if len(factors) > 1 else "")
            members = [Member(f"{prefix}{down}", 0), Member(f"{prefix}{up}", 1)]
            if adapter in getattr(layer, "lora_E", ()):  # singular values of AdaLoRA, (rank, 1)
                members.append(Member(f"{prefix}lora_E.{adapter}", 0))
            axes.append(Axis(name, layer.get_parameter(down).shape[0], tuple(members)))
    return axes


def unscaled(module: nn.Module) -> frozenset[str]:
    """Return the paths of layers whose outputs are LoRA ranks; these are not rescaled when ranks are dropped."""
    return frozenset(
        f"{path}.lora_A.{adapter}" if path else f"lora_A.{adapter}"
        for path, layer in module.named_modules()
        if is_lora(layer)
        for adapter, _, _ in _factors(layer)
    )


@dataclass(frozen=True, slots=True)
class LoraPair:
    """Names of the tensors of one LoRA adapter, which adds ``scaling * B A`` to the weight of a linear layer."""

    a: str  # name of the matrix A, of shape (rank, in)
    b: str  # name of the matrix B, of shape (out, rank)
    base: str  # name of the layer's own weight, of shape (out, in), or (in, out) if ``transposed``
    scaling: float
    transposed: bool


def pairs_of(module: nn.Module) -> tuple[tuple[LoraPair, ...], tuple[str, ...]]:
    """Return the LoRA adapters of all linear layers in ``module``, and the paths of adapters on other kinds of layers."""
    pairs, others = [], []
    for path, layer in module.named_modules():
        if not is_lora(layer):
            continue
        lora: Any = layer
        for adapter, down, up in _factors(lora):
            plain = not getattr(lora, "use_dora", {}).get(adapter) and adapter in lora.lora_A
            if not plain or not isinstance(lora.lora_A[adapter], nn.Linear):
                others.append(path)
                continue
            a, b, base = (f"{path}.{name}".lstrip(".") for name in (down, up, "base_layer.weight"))
            pairs.append(
                LoraPair(a, b, base, float(lora.scaling[adapter]), bool(getattr(lora, "fan_in_fan_out", False)))
            )
    return tuple(pairs), tuple(others)


@resizes(_LORA)
def _resize(layer: Any) -> None:
    for adapter, down, _ in _factors(layer):
        layer.r[adapter] = layer.get_parameter(down).shape[0]

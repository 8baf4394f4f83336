"""What the files in `families` say of transformers of other packages: the blocks, what else is as wide, and what ends them.

A type is named in text, by its module and name, so that the package need not be there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

MODELS = "transformers.models"
PRETRAINED = "transformers.modeling_utils.PreTrainedModel"
TORCHVISION = "torchvision.models.vision_transformer.VisionTransformer"

Piece = Callable[[Any], Iterator[tuple[str, int]]]
"""``piece(layer) -> (tensor, dim)``: what of a layer outside the blocks lies along the hidden states."""

PIECES: dict[str, Piece] = {}
"""By dotted name of the layer's type."""

SQUARE: set[tuple[str, str]] = set()
"""Types of models, and layers straight below them that make hidden states of hidden states; others only read them."""

Logits = Callable[[Any, Any, Tensor, Tensor | None], Any]


@dataclass(frozen=True, slots=True)
class Tail:
    """What comes after the last block of a type of model.

    Attributes:
        paths: of the modules of which an exit has copies.
        logits: ``logits(model, modules, hidden, input_ids)``: what the model makes of hidden states, shape (batch,
            positions, width), with these modules in the place of those.
    """

    paths: Callable[[Any], tuple[str, ...]]
    logits: Logits


TAILS: dict[str, Tail] = {}
"""By dotted name of the model's type."""


def register_piece(*types: str) -> Callable[[Piece], Piece]:
    """Register the decorated function as the `Piece` of these types."""

    def add(piece: Piece) -> Piece:
        PIECES.update(dict.fromkeys(types, piece))
        return piece

    return add


def register_tail(paths: Any, logits: Logits, *types: str) -> None:
    """Register the `Tail` of these types; ``paths`` may be those paths themselves."""
    TAILS.update(dict.fromkeys(types, Tail(paths if callable(paths) else lambda model: paths, logits)))


def known(module: nn.Module, table: dict[str, Any]) -> Any:
    """Find what ``table`` has for the module's type or its nearest base; None = nothing."""
    return next((table[name] for name in bases(module) if name in table), None)


def bases(module: nn.Module) -> list[str]:
    """List the dotted names of the module's type and its bases, nearest first."""
    return [f"{base.__module__}.{base.__qualname__}" for base in type(module).__mro__]


def along(layer: nn.Module, name: str, *, square: bool = False) -> Iterator[tuple[str, int]]:
    """Yield what of a simple layer called ``name`` reads hidden states; of a square one, also what makes them."""
    part = layer.get_submodule(name)
    if isinstance(part, nn.Linear | nn.Embedding):
        yield f"{name}.weight", 1
    if square or not isinstance(part, nn.Linear | nn.Embedding):
        yield from ((f"{name}.{tensor}", 0) for tensor, _ in part.named_parameters(recurse=False))

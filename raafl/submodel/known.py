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

BLOCKS: set[str] = {
    "torch.nn.modules.transformer.TransformerEncoderLayer", "torch.nn.modules.transformer.TransformerDecoderLayer",
}  # fmt: skip
"""Types of blocks of which any may be absent, by dotted name; `families` adds those of other packages."""

HELD: dict[str, dict[str, bool]] = {}
"""Types, and layers in them that were whole before axes were found by following steps: recorded runs of them stay as they are.

Whether the features that a layer makes are hidden states as those that it reads are, and go with the residual width; else
they stay whole.
"""

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


def register_tail(paths: Any, logits: Logits, *types: str) -> None:
    """Register the `Tail` of these types; ``paths`` may be those paths themselves."""
    TAILS.update(dict.fromkeys(types, Tail(paths if callable(paths) else lambda model: paths, logits)))


def known(module: nn.Module, table: dict[str, Any]) -> Any:
    """Find what ``table`` has for the module's type or its nearest base; None = nothing."""
    return next((table[name] for name in bases(module) if name in table), None)


def bases(module: nn.Module) -> list[str]:
    """List the dotted names of the module's type and its bases, nearest first."""
    return [f"{base.__module__}.{base.__qualname__}" for base in type(module).__mro__]


def held(module: nn.Module) -> Iterator[tuple[str, bool]]:
    """Yield the path of each layer of `HELD`, and whether it goes with the residual width."""
    for path, part in module.named_modules():
        for base in bases(part):
            for layer, is_wide in HELD.get(base, {}).items():
                yield f"{path}.{layer}".removeprefix("."), is_wide


def is_packaged(module: nn.Module) -> bool:
    """Check whether the module is a whole transformer of a package."""
    return not {PRETRAINED, TORCHVISION}.isdisjoint(bases(module))


def is_block(module: nn.Module) -> bool:
    """Check whether the module is one of equal blocks of a deep model: of a type in `BLOCKS` whose forward it has."""
    kinds: tuple[Any, ...] = type(module).__mro__
    for base in kinds:
        if f"{base.__module__}.{base.__qualname__}" in BLOCKS:
            forward: Any = type(module).forward
            while forward is not base.forward and hasattr(forward, "__wrapped__"):
                forward = forward.__wrapped__
            return forward is base.forward
    return False


def renumber(layers: nn.Module, config: Any) -> None:
    """Make the small model's own ``config`` and blocks count the blocks that are there, in place."""
    present = list(layers._modules)
    if len(present) == config.num_hidden_layers:
        return
    kinds = getattr(config, "layer_types", None)
    if kinds is not None and len(kinds) == config.num_hidden_layers:
        config.layer_types = [kinds[int(name)] for name in present]
    config.num_hidden_layers = len(present)
    for place, layer in enumerate(layers.children()):
        for part in layer.modules():
            if "layer_idx" in part.__dict__:  # where a cache keeps its keys and values
                part.__dict__["layer_idx"] = place

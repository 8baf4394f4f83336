"""Name types of other packages as text, by module and name, so that the package need not be installed."""

from __future__ import annotations

from torch import nn

PRETRAINED = "transformers.modeling_utils.PreTrainedModel"
TORCHVISION = "torchvision.models.vision_transformer.VisionTransformer"


def hugging_face(names: str) -> list[str]:
    """Return the full names of types in transformers, which the user need not have installed."""
    split = [name.split(".") for name in names.split()]
    return [f"transformers.models.{family}.modeling_{family}.{kind}" for family, kind in split]


def type_names(module: nn.Module) -> list[str]:
    """Return the dotted names of a module's type and of its base classes, nearest first."""
    return [f"{base.__module__}.{base.__qualname__}" for base in type(module).__mro__]


def is_packaged(module: nn.Module) -> bool:
    """Check whether a module is a whole transformer model from another package."""
    return not {PRETRAINED, TORCHVISION}.isdisjoint(type_names(module))

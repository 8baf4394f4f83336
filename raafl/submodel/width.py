"""The residual width of whole transformers: every tensor dimension that meets the hidden states, from embeddings to head.

Only where it is asked for, since norms take statistics across it: a narrower model is not the full one with units zeroed.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn

from raafl.submodel.flow import Flow, Groups
from raafl.submodel.known import PIECES, PRETRAINED, SQUARE, TORCHVISION, along, bases, known, register_piece
from raafl.submodel.rules import composites, rule_of


def is_sealed(module: nn.Module) -> bool:
    """Check whether the module is a whole transformer of a package, whose forward is not traced."""
    return not {PRETRAINED, TORCHVISION}.isdisjoint(bases(module))


def sealed_models(module: nn.Module, prefix: str = "") -> Iterator[tuple[str, nn.Module]]:
    """Yield path and module of each outermost sealed model."""
    if is_sealed(module):
        yield prefix, module
        return
    for name, child in module.named_children():
        yield from sealed_models(child, f"{prefix}.{name}" if prefix else name)


@register_piece(PRETRAINED)
def _model(model: Any) -> Iterator[tuple[str, int]]:
    for name, part in model.named_children():
        if not list(part.children()) and list(part.parameters()):
            yield from along(model, name, square=any((base, name) in SQUARE for base in bases(model)))


def follow_widths(module: nn.Module, groups: Groups, visited: set[int]) -> None:
    """Note the residual width of each sealed model in ``module`` and add its composites to ``visited``."""
    for path, model in sealed_models(module):
        size = _hidden_size(model)
        if size is None:
            continue
        prefix = f"{path}." if path else ""
        flow = Flow(groups.new(f"{prefix}width", size), "last")
        claimed = []
        for name, part in model.named_modules():
            piece = known(part, PIECES)
            for tensor, dim in piece(part) if piece is not None else ():
                full = f"{prefix}{name}.{tensor}" if name else f"{prefix}{tensor}"
                for own in (full, *_copies(model, prefix, full)):
                    groups.consume(flow, own, dim, path or type(model).__name__)
                    claimed.append(groups.aliases.get(own, own))
        for name, block in composites(model):
            rule = rule_of(block)
            if rule is not None:
                rule.follow(block, f"{prefix}{name}", flow, groups)
                visited.add(id(block))
                claimed += [
                    groups.aliases.get(n, n) for n in (f"{prefix}{name}.{t}" for t, _ in block.named_parameters())
                ]
        _pin_unknown(model, prefix, size, set(claimed), flow, groups)


def _copies(model: nn.Module, prefix: str, tensor: str) -> list[str]:
    """Return the tensors of exits that take the place of this one."""
    exits = model.__dict__.get("submodel_exits", {})
    return [
        f"{prefix}{path}{tensor.removeprefix(prefix + place)}"
        for places in exits.values()
        for place, path in places.items()
        if tensor.startswith(f"{prefix}{place}.")
    ]


def _hidden_size(model: Any) -> int | None:
    config = getattr(model, "config", None)
    size = getattr(model, "hidden_dim", None) if config is None else getattr(config, "hidden_size", None)
    return size if isinstance(size, int) else None


def _pin_unknown(model: Any, prefix: str, size: int, claimed: set[str], flow: Flow, groups: Groups) -> None:
    """Keep the width whole where hidden states go that no rule knows of."""
    if PRETRAINED in bases(model) and not hasattr(model, model.base_model_prefix):
        groups.pin(flow.group, f"{type(model).__name__} gives its hidden states to code that is not followed")
    for name, parameter in model.named_parameters():
        full = groups.aliases.get(f"{prefix}{name}", f"{prefix}{name}")
        if full not in claimed and size in parameter.shape:
            groups.pin(flow.group, f"no rule says how '{full}' meets the hidden states")

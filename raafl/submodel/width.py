"""The residual width of whole transformers: every tensor dimension that meets the hidden states, from embeddings to head.

Only where it is asked for, since norms take statistics across it: a narrower model is not the full one with units zeroed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from torch import nn

from raafl.submodel.flow import Flow, Groups
from raafl.submodel.rules import composites, leaf, register, rule_of
from raafl.submodel.transformer import set_known

Piece = Callable[[Any], Iterator[tuple[str, int]]]
"""``piece(layer) -> (tensor, dim)``: what of a layer outside the blocks lies along the hidden states."""

_MODELS = "transformers.models"
_PRETRAINED = "transformers.modeling_utils.PreTrainedModel"
_TORCHVISION = "torchvision.models.vision_transformer.VisionTransformer"


def _bases(module: nn.Module) -> set[str]:
    return {f"{base.__module__}.{base.__qualname__}" for base in type(module).__mro__}


def is_sealed(module: nn.Module) -> bool:
    """Check whether the module is a whole transformer of a package, whose forward is not traced."""
    return not _bases(module).isdisjoint((_PRETRAINED, _TORCHVISION))


def sealed_models(module: nn.Module, prefix: str = "") -> Iterator[tuple[str, nn.Module]]:
    """Yield path and module of each outermost sealed model."""
    if is_sealed(module):
        yield prefix, module
        return
    for name, child in module.named_children():
        yield from sealed_models(child, f"{prefix}.{name}" if prefix else name)


PIECES: dict[str, Piece] = {}
"""By dotted name of the layer's type."""


def _piece(*types: str) -> Callable[[Piece], Piece]:
    def add(piece: Piece) -> Piece:
        PIECES.update(dict.fromkeys(types, piece))
        return piece

    return add


def _along(layer: nn.Module, name: str, *, square: bool = False) -> Iterator[tuple[str, int]]:
    """Yield what of a simple layer called ``name`` reads hidden states; of a square one, also what makes them."""
    part = layer.get_submodule(name)
    if isinstance(part, nn.Linear | nn.Embedding):
        yield f"{name}.weight", 1
    if square or not isinstance(part, nn.Linear | nn.Embedding):
        yield from ((f"{name}.{tensor}", 0) for tensor, _ in part.named_parameters(recurse=False))


@_piece(
    f"{_MODELS}.bert.modeling_bert.BertEmbeddings", f"{_MODELS}.roberta.modeling_roberta.RobertaEmbeddings",
    f"{_MODELS}.distilbert.modeling_distilbert.Embeddings",
)  # fmt: skip
def _embeddings(layer: Any) -> Iterator[tuple[str, int]]:
    for name, part in layer.named_children():
        if isinstance(part, nn.Embedding | nn.LayerNorm):
            yield from _along(layer, name)


@_piece(f"{_MODELS}.vit.modeling_vit.ViTEmbeddings", f"{_MODELS}.deit.modeling_deit.DeiTEmbeddings")
def _patches(layer: Any) -> Iterator[tuple[str, int]]:
    yield from ((name, 2) for name, _ in layer.named_parameters(recurse=False))
    yield from ((f"patch_embeddings.projection.{name}", 0) for name in ("weight", "bias"))


@_piece(f"{_MODELS}.bert.modeling_bert.BertPooler", f"{_MODELS}.roberta.modeling_roberta.RobertaPooler")
def _pooler(layer: Any) -> Iterator[tuple[str, int]]:
    return _along(layer, "dense", square=True)


@_piece(f"{_MODELS}.vit.modeling_vit.ViTPooler", f"{_MODELS}.deit.modeling_deit.DeiTPooler")
def _reading_pooler(layer: Any) -> Iterator[tuple[str, int]]:
    return _along(layer, "dense")


@_piece(f"{_MODELS}.albert.modeling_albert.AlbertTransformer")
def _albert_mapping(layer: Any) -> Iterator[tuple[str, int]]:
    # the embedding's own width is another one
    yield from ((f"embedding_hidden_mapping_in.{name}", 0) for name in ("weight", "bias"))


@_piece(f"{_MODELS}.bert.modeling_bert.BertLMPredictionHead")
def _bert_lm_head(layer: Any) -> Iterator[tuple[str, int]]:
    yield from (
        (f"transform.{name}", dim)
        for part, square in (("dense", True), ("LayerNorm", False))
        for name, dim in _along(layer.transform, part, square=square)
    )
    yield from _along(layer, "decoder")


@_piece(f"{_MODELS}.roberta.modeling_roberta.RobertaLMHead")
def _roberta_lm_head(layer: Any) -> Iterator[tuple[str, int]]:
    yield from _along(layer, "dense", square=True)
    yield from _along(layer, "layer_norm")
    yield from _along(layer, "decoder")


@_piece(f"{_MODELS}.roberta.modeling_roberta.RobertaClassificationHead")
def _roberta_head(layer: Any) -> Iterator[tuple[str, int]]:
    yield from _along(layer, "dense", square=True)
    yield from _along(layer, "out_proj")


@_piece(
    f"{_MODELS}.bert.modeling_bert.BertOnlyNSPHead", f"{_MODELS}.bert.modeling_bert.BertPreTrainingHeads",
    f"{_MODELS}.albert.modeling_albert.AlbertSOPHead",
)  # fmt: skip
def _sentence_head(layer: Any) -> Iterator[tuple[str, int]]:
    (name,) = (name for name, part in layer.named_children() if isinstance(part, nn.Linear))
    return _along(layer, name)


@_piece(f"{_MODELS}.albert.modeling_albert.AlbertMLMHead")
def _albert_lm_head(layer: Any) -> Iterator[tuple[str, int]]:
    return _along(layer, "dense")


_SQUARE = {
    (f"{_MODELS}.distilbert.modeling_distilbert.DistilBertForSequenceClassification", "pre_classifier"),
    (f"{_MODELS}.distilbert.modeling_distilbert.DistilBertForMultipleChoice", "pre_classifier"),
    (f"{_MODELS}.distilbert.modeling_distilbert.DistilBertForMaskedLM", "vocab_transform"),
    (f"{_MODELS}.albert.modeling_albert.AlbertModel", "pooler"),
}
"""Layers straight below a model that make hidden states of hidden states; others read them for something else."""


@_piece(_PRETRAINED)
def _model(model: Any) -> Iterator[tuple[str, int]]:
    bases = _bases(model)
    for name, part in model.named_children():
        if not list(part.children()) and list(part.parameters()):
            yield from _along(model, name, square=any((base, name) in _SQUARE for base in bases))


@_piece(_TORCHVISION)
def _torchvision(model: Any) -> Iterator[tuple[str, int]]:
    last = "conv_proj" if isinstance(model.conv_proj, nn.Conv2d) else "conv_proj.conv_last"
    yield from ((f"{last}.{name}", 0) for name in ("weight", "bias"))
    yield from (("class_token", 2), ("encoder.pos_embedding", 2))
    yield from _along(model, "encoder.ln")
    yield from _along(model, f"heads.{next(iter(dict(model.heads.named_children())))}")


def _resize_torchvision(model: Any) -> None:
    set_known(model, {"hidden_dim": model.class_token.shape[2]})


register(_TORCHVISION, resize=_resize_torchvision)(leaf)


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
            piece = next((PIECES[base] for base in _ordered_bases(part) if base in PIECES), None)
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


def _ordered_bases(module: nn.Module) -> Iterator[str]:
    return (f"{base.__module__}.{base.__qualname__}" for base in type(module).__mro__)


def _hidden_size(model: Any) -> int | None:
    config = getattr(model, "config", None)
    size = getattr(model, "hidden_dim", None) if config is None else getattr(config, "hidden_size", None)
    return size if isinstance(size, int) else None


def _pin_unknown(model: Any, prefix: str, size: int, claimed: set[str], flow: Flow, groups: Groups) -> None:
    """Keep the width whole where hidden states go that no rule knows of."""
    if _PRETRAINED in _bases(model) and not hasattr(model, model.base_model_prefix):
        groups.pin(flow.group, f"{type(model).__name__} gives its hidden states to code that is not followed")
    for name, parameter in model.named_parameters():
        full = groups.aliases.get(f"{prefix}{name}", f"{prefix}{name}")
        if full not in claimed and size in parameter.shape:
            groups.pin(flow.group, f"no rule says how '{full}' meets the hidden states")

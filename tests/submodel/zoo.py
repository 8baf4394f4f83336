"""Every model of the zoo in a tiny size, and a tiny one for each Hugging Face adapter and torch layer, with its axes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor, nn

import model_zoo
from raafl.submodel import FlatTensors, Spec, Submodels, add_exits
from tests.submodel import models, networks
from tests.submodel.models import slow_masks, specs


@dataclass(frozen=True)
class Model:
    """How to make and run a model, in double precision, and what must be found in it.

    Attributes:
        make: a new one.
        answer: its output.
        loss: what a training step makes of it.
        batch: of a training step, or of a call where it has none.
        axes: name and size of each, without the residual width.
        width: name of the axis of the residual width, where there is one that a norm spans.
        inner: path of the transformer that can be given exits; None = there is none.
    """

    make: Callable[[], nn.Module]
    answer: Callable[[nn.Module], Tensor]
    loss: Callable[[nn.Module], Tensor]
    batch: Any
    axes: Mapping[str, int]
    width: str | None = None
    inner: str | None = None


def _draw() -> torch.Generator:
    return torch.Generator().manual_seed(3)


def _normal(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=_draw(), dtype=torch.float64)


LABELS = torch.tensor([0, 2, 1])
TOKENS = torch.randint(1, 23, (3, 9), generator=_draw())
MASK = (torch.arange(9) < torch.tensor([[9], [5], [7]])).long()
WINDOW = (TOKENS[:, :-1], TOKENS[:, 1:])


def _zoo(
    make: Callable[[], nn.Module], batch: tuple[Tensor, ...], axes: Mapping[str, int], width: str | None = None
) -> Model:
    return Model(
        make,
        lambda module: module(*batch[:-1]),
        lambda module: module.training_step(list(batch), 0),
        list(batch),
        axes,
        width,
        None if width is None else "model",
    )


def _network(name: str) -> Model:
    case = networks.CASES[name]
    torch.manual_seed(3)
    inputs = {key: value.double() if value.is_floating_point() else value for key, value in case.inputs().items()}
    return Model(
        case.make,
        lambda module: networks.output(module, inputs),
        lambda module: networks.output(module, inputs).square().mean(),
        inputs,
        case.axes,
        case.width,
        "" if name.startswith(HUGGING_FACE) and name not in ("albert", "bert_tied") else None,
    )


def _small(name: str) -> Model:
    case = models.CASES[name]
    torch.manual_seed(3)
    inputs = case.inputs()
    inputs = inputs.double() if inputs.is_floating_point() else inputs
    return Model(
        case.make, lambda module: module(inputs), lambda module: module(inputs).square().mean(), [inputs], case.axes
    )


def _blocks(path: str, ffn: int) -> dict[str, int]:
    return {f"{path}.{index}.{axis}": n for index in range(2) for axis, n in (("heads", 2), ("ffn", ffn))}


_RESNET_20 = {f"stage{s}.{i}.conv1": 2**s for s in (1, 2, 3) for i in range(3)}
_VGG = dict(zip((0, 4, 8, 11, 15, 18, 22, 25), (2, 4, 8, 8, 16, 16, 16, 16), strict=True))
_ALBERT = "model.albert.encoder.albert_layer_groups.0.albert_layers.0"

ZOO: dict[str, Model] = {
    "MLP": _zoo(lambda: model_zoo.MLP(8, (7, 5), 3), (_normal(3, 2, 4), LABELS), {"layers.1": 7, "layers.3": 5}),
    "CNN": _zoo(
        lambda: model_zoo.CNN(2, 8, (3, 5), (6, 4), 3),
        (_normal(3, 2, 8, 8), LABELS),
        {"conv1": 3, "conv2": 5, "fc1": 6, "fc2": 4},
    ),
    "CNN with batch norm": _zoo(
        lambda: model_zoo.CNN(2, 8, (3, 5), (6, 4), 3, batch_norm=True),
        (_normal(3, 2, 8, 8), LABELS),
        {"conv1": 3, "conv2": 5, "fc1": 6, "fc2": 4},
    ),
    "ResNet-20": _zoo(lambda: model_zoo.ResNet(20, 3, 3, 2), (_normal(3, 3, 8, 8), LABELS), _RESNET_20),
    "ResNet with projections": _zoo(
        lambda: model_zoo.ResNet(8, 3, 3, 3, projection=True),
        (_normal(3, 3, 8, 8), LABELS),
        {
            "conv": 3,
            "stage1.0.conv1": 3,
            "stage2.0.conv1": 6,
            "stage2.0.conv2": 6,
            "stage3.0.conv1": 12,
            "stage3.0.conv2": 12,
        },
    ),
    "VGG11": _zoo(
        lambda: model_zoo.VGG11(3, 3, width=1 / 32),
        (_normal(3, 3, 32, 32), LABELS),
        {f"features.{place}": channels for place, channels in _VGG.items()},
    ),
    "VGG": _zoo(
        lambda: model_zoo.VGG([4, "pool", 6], 1, 3), (_normal(3, 1, 8, 8), LABELS), {"features.0": 4, "features.4": 6}
    ),
    "ViT": _zoo(
        lambda: model_zoo.ViT("micro", 8, 4, num_classes=3),
        (_normal(3, 3, 8, 8), LABELS),
        _blocks("model.vit.layers", 64),
        "model.width",
    ),
    "BERT": _zoo(
        lambda: model_zoo.BERT("micro", 3, 23, 16, dropout=0.0),
        (TOKENS * MASK, MASK, LABELS),
        _blocks("model.bert.encoder.layer", 128),
        "model.width",
    ),
    "ALBERT": _zoo(
        lambda: model_zoo.ALBERT("micro", 23, 16), WINDOW, {f"{_ALBERT}.heads": 2, f"{_ALBERT}.ffn": 128}, "model.width"
    ),
    "LLaMA": _zoo(lambda: model_zoo.LLaMA("micro", 23, 16), WINDOW, _blocks("model.model.layers", 88), "model.width"),
    "LLaMA, tied": _zoo(
        lambda: model_zoo.LLaMA("micro", 23, 16, tied=True), WINDOW, _blocks("model.model.layers", 88), "model.width"
    ),
    "FastText": _zoo(
        lambda: model_zoo.FastText(23, 6, (7, 5), 3),
        (TOKENS * MASK, MASK, LABELS),
        {"embedding": 6, "layers.0": 7, "layers.2": 5},
    ),
    "KeywordSpotter": _zoo(
        lambda: model_zoo.KeywordSpotter(5, 3, (4, 6), 7, dropout=0.0),
        (_normal(3, 12, 5), LABELS),
        {"conv1": 4, "conv2": 6, "gru": 7, "fc1": 7},
    ),
    "CharLM": _zoo(lambda: model_zoo.CharLM(23, 4, 6), WINDOW, {"embedding": 4, "rnn": 6}),
    "CharLM with LSTM": _zoo(lambda: model_zoo.CharLM(23, 4, 6, cell="lstm"), WINDOW, {"embedding": 4, "rnn": 6}),
}

HUGGING_FACE = ("bert", "roberta", "distilbert", "vit", "deit", "albert", "llama", "mistral", "qwen2")
NETWORKS = {
    f"{name} of transformers" if name.startswith(HUGGING_FACE) else name: _network(name) for name in networks.CASES
}
SMALL = {name: _small(name) for name in models.CASES}
TORCHS = ("held", "encoder", "decoder", "attention", "both_ways", "lstm", "rnn")
"""Networks of torch's own layers that have every kind of them between them; they and the small models are quick."""
COVERING = (
    "MLP",
    "CNN with batch norm",
    "ResNet with projections",
    "VGG11",
    "ViT",
    "ALBERT",
    "LLaMA, tied",
    "FastText",
    "KeywordSpotter",
    "CharLM with LSTM",
    "bert_tied of transformers",
    "deit of transformers",
    "mistral of transformers",
)
"""Models that have every kind of layer between them; what holds for all is tested of the others in `make test-long`."""

MODELS = {**ZOO, **NETWORKS, **SMALL}


@cache
def built(name: str, **options: bool) -> tuple[nn.Module, Submodels, FlatTensors]:
    """A model with exits where they can be added, no tensor plain, its submodels and its state; leave them as they are."""
    torch.manual_seed(0)
    module = MODELS[name].make()
    inner = MODELS[name].inner
    if inner is not None and name != "ALBERT":
        add_exits(module.get_submodule(inner), [1])
    module = module.double().eval()
    with torch.no_grad():
        for tensor in module.parameters():
            if tensor.dim() > 1:
                tensor.normal_().mul_((2 / (tensor.numel() / len(tensor))) ** 0.5)
            else:
                tensor.add_(torch.randn_like(tensor), alpha=0.3)
    for layer in module.modules():
        if isinstance(layer, nn.BatchNorm2d):
            layer.running_mean.normal_().mul_(0.3)
            layer.running_var.uniform_(0.5, 1.5)
    submodels = Submodels(module, MODELS[name].batch, **options)
    return module, submodels, submodels.state(module)


@st.composite
def any_spec(draw: st.DrawFn, submodels: Submodels) -> Spec:
    """Any spec of the model: units of every axis, blocks, exits, and what trains."""
    width = draw(specs({axis.name: axis.size for axis in submodels.axes.values()}))
    blocks = {}
    for name, stack in submodels.stacks.items():
        blocks[name] = draw(st.lists(st.integers(0, len(stack) - 1), min_size=1, unique=True))
    exits = (
        draw(st.none() | st.lists(st.sampled_from(sorted(submodels.exits)), unique=True)) if submodels.exits else None
    )
    names = sorted({*submodels.parameters, *submodels.aliases})
    paths = sorted(
        {".".join(name.split(".")[:depth]) for name in names for depth in range(1, 1 + len(name.split(".")))}
    )
    trained = draw(st.none() | st.lists(st.sampled_from(paths), min_size=1, max_size=3, unique=True))
    return Spec.select(dict(width.kept), blocks=blocks, trained=trained, exits=exits)


def lies_in(name: str, paths: tuple[str, ...] | list[str]) -> bool:
    """Whether a tensor is one of these, or in one of these modules."""
    return any(f"{name}.".startswith(f"{path}.") for path in paths)


def kept_masks(submodels: Submodels, spec: Spec) -> dict[str, Tensor]:
    """What is there of each tensor, element by element; nothing of those in blocks and exits that are left out."""
    absent = []
    for name, stack in submodels.stacks.items():
        indices = dict(spec.blocks).get(name, range(len(stack)))
        absent += [stack.block(index) for index in range(len(stack)) if index not in indices]
    if spec.exits is not None:
        for name, one in submodels.exits.items():
            absent += one.instead_of if name in spec.exits else one.paths
    masks = slow_masks(submodels, spec)
    return {name: mask & (not lies_in(name, absent)) for name, mask in masks.items()}


def trains(submodels: Submodels, spec: Spec, name: str) -> bool:
    """Whether a parameter is among those that the spec trains, by any of its names."""
    own = [name, *(other for other, first in submodels.aliases.items() if first == name)]
    return spec.trained is None or any(lies_in(one, spec.trained) for one in own)


def one_step(name: str, module: nn.Module) -> None:
    """One step of plain SGD on the model's own loss, where anything that trains has a part in it."""
    loss = MODELS[name].loss(module.train())
    if loss.requires_grad:
        loss.backward()
        torch.optim.SGD([p for p in module.parameters() if p.requires_grad], lr=0.05).step()

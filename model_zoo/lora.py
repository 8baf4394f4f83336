"""LoRA through peft: low-rank adapters beside frozen layers of a transformers model.

Hu et al. 2021 (arXiv:2106.09685). peft is imported when the first such model is made.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final, Literal

import torch
from torch import nn

from model_zoo.nf4 import NF4Linear, linear_layers, quantise

Base = Literal["fp32", "bf16", "nf4"]

DTYPES: Final = {"fp32": torch.float32, "bf16": torch.bfloat16, "nf4": torch.bfloat16}
"""What the frozen model may be kept in, the most precise first; with nf4 what is no linear layer of its body."""


@dataclass(frozen=True)
class LoRA:
    """Settings of LoRA adapters: matrices A and B beside a frozen layer, ``y = W x + alpha / rank * B A dropout(x)``.

    Attributes:
        rank: rank r, the number of rows of A and columns of B; clients may have a lower rank.
        alpha: scaling factor of the adapters.
        dropout: probability with which an input of an adapter is dropped.
        target_modules: names of the layers to adapt, such as ``[query, value]``, or ``all-linear``; null = peft's
            default for this architecture.
        base: precision of the frozen model: fp32; bf16, half of the memory; or nf4 (QLoRA, Dettmers et al. 2023,
            arXiv:2305.14314), a seventh of the memory for linear layers. Trained parameters are always float32. Of a
            list, highest precision first, each client uses the first one with which its task fits its memory, and the
            server uses the first of all.
    """

    rank: int = 8
    alpha: float = 16.0
    dropout: float = 0.0
    target_modules: list[str] | str | None = None
    base: Base | list[Base] = "fp32"

    def __post_init__(self) -> None:
        """Raise `ValueError`, naming the field, for an invalid value."""
        if self.rank < 1:
            raise ValueError(f"lora.rank is {self.rank}: give 1 or more")
        if self.alpha <= 0:
            raise ValueError(f"lora.alpha is {self.alpha}: give more than 0")
        if not 0 <= self.dropout < 1:
            raise ValueError(f"lora.dropout is {self.dropout}: give 0 or more, and less than 1")
        if self.target_modules is not None and not self.target_modules:
            raise ValueError("lora.target_modules is empty: name layers to adapt, or leave it out")
        unknown = [one for one in self.bases if one not in DTYPES]
        if unknown or not self.bases:
            raise ValueError(f"lora.base is {self.base!r}: give one of {', '.join(DTYPES)}, or a list of them")
        if list(self.bases) != [one for one in DTYPES if one in self.bases]:
            raise ValueError(f"lora.base is {self.base!r}: give each once, the most precise first: {', '.join(DTYPES)}")

    @property
    def bases(self) -> tuple[str, ...]:
        """Precisions that the frozen model may have, highest first."""
        return (self.base,) if isinstance(self.base, str) else tuple(self.base)

    @classmethod
    def of(cls, value: LoRA | Mapping[str, Any] | None) -> LoRA | None:
        """Convert ``value`` to a `LoRA`; in checkpoints it is a plain mapping. None stays None."""
        return cls(**value) if isinstance(value, Mapping) else value

    def to_plain(self) -> dict[str, Any]:
        """Return all fields as plain data."""
        return asdict(self)


def base_of(lora: LoRA | Mapping[str, Any] | None) -> torch.dtype:
    """Return the dtype of the frozen parameters for these settings."""
    found = LoRA.of(lora)
    return torch.float32 if found is None else DTYPES[found.bases[0]]


def adapt(model: Any, lora: LoRA, *, trains_head: bool) -> None:
    """Freeze a transformers model and add adapters to its layers, in place.

    Args:
        model: model to adapt; it keeps its type and its ``forward``.
        lora: settings of the adapters.
        trains_head: whether layers outside the pretrained body, such as a new classifier, train, too.

    Raises:
        ValueError: peft is not installed, the model has none of the layers to adapt, or peft does not know its
            architecture.
    """
    try:
        import peft
    except ImportError as error:
        raise ValueError(f"lora needs the package peft ({error}): pip install peft") from error
    if "nf4" in lora.bases and not linear_layers(model):
        raise ValueError(
            f"lora.base is {lora.base!r}, but this {model.config.model_type} has no torch.nn.Linear in its body: "
            f"{'give bf16' if lora.base == 'nf4' else 'leave nf4 out'}"
        )
    if lora.bases[0] == "nf4":
        quantise(model)
    targets = lora.target_modules
    config = peft.LoraConfig(
        r=lora.rank,
        lora_alpha=lora.alpha,  # type: ignore[arg-type]
        lora_dropout=lora.dropout,
        target_modules=targets if targets is None or isinstance(targets, str) else list(targets),
    )
    try:
        peft.inject_adapter_in_model(config, model)
    except ValueError as error:
        raise ValueError(
            f"lora.target_modules is {targets}: {' '.join(str(error).split()).split('. ')[0]}: give names of layers of this "
            f"{model.config.model_type}, such as {', '.join(_linear_names(model))}, or all-linear"
        ) from error
    _refuse_tied(model)
    if trains_head:
        body = {id(parameter) for parameter in getattr(model, model.base_model_prefix, model).parameters()}
        for parameter in model.parameters():
            if id(parameter) not in body:
                parameter.requires_grad_(True)
    if lora.bases[0] != "fp32":
        _train_in_float32(model)


def hold(model: Any, base: str) -> None:
    """Convert the frozen parameters of a model with adapters to a lower precision, in place.

    The result is the same as that of `adapt` with this precision. Adapters are not converted, even frozen ones.

    Args:
        model: model with adapters.
        base: name of the precision, such as "nf4".
    freezes one.
    """
    for name, parameter in model.named_parameters():
        is_base = not parameter.requires_grad and ".lora_" not in name
        if is_base and parameter.is_floating_point():
            parameter.data = parameter.data.to(DTYPES[base])
    if base == "nf4":
        quantise(model)
    _train_in_float32(model)


def _train_in_float32(model: Any) -> None:
    """Set parameters that train to float32: peft casts the inputs of adapters, and heads get casts of their own."""
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.float()
    for layer in model.children():
        if {parameter.requires_grad for parameter in layer.parameters()} == {True}:
            layer.register_forward_pre_hook(_cast)


def _cast(layer: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
    dtype = next(layer.parameters()).dtype
    return tuple(x.to(dtype) if isinstance(x, torch.Tensor) and x.is_floating_point() else x for x in inputs)


def _refuse_tied(model: Any) -> None:
    """Raise `ValueError` for an adapted layer whose weight is another's, too: a merged one would change both."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    for name, layer in model.named_modules():
        if isinstance(layer, BaseTunerLayer) and len(names[id(layer.get_base_layer().weight)]) > 1:
            raise ValueError(
                f"lora.target_modules names '{name}', whose weight is also another layer's: leave it out, or give the "
                "architecture tie_word_embeddings: false"
            )


def merged(model: Any) -> Any:
    """Return a copy of the model in which the adapters are added to the layers' weights, as plain transformers needs it."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    plain = copy.deepcopy(model)
    for name, layer in list(plain.named_modules()):
        if isinstance(layer, NF4Linear):
            plain.set_submodule(name, layer.plain(DTYPES["nf4"]))
    for name, layer in list(plain.named_modules()):
        if isinstance(layer, BaseTunerLayer):
            layer.merge()
            parent, _, own = name.rpartition(".")
            setattr(plain.get_submodule(parent), own, layer.get_base_layer())
    del plain.peft_config
    return plain


def save_adapter(model: Any, folder: Path) -> None:
    """Save the adapters, and a head that trains with them, for peft's ``PeftModel.from_pretrained(base, folder)``."""
    from peft import get_peft_model_state_dict
    from safetensors.torch import save_file

    (config,) = model.peft_config.values()
    tensors = get_peft_model_state_dict(model)
    heads = {name: value for name, value in model.named_parameters() if value.requires_grad and ".lora_" not in name}
    config = copy.deepcopy(config)
    config.base_model_name_or_path = model.name_or_path or None
    config.modules_to_save = sorted({name.rpartition(".")[0] for name in heads}) or None
    config.inference_mode = True
    config.target_modules = sorted(config.target_modules)  # a set, which would be written in another order each time
    folder.mkdir(parents=True, exist_ok=True)
    found = {f"base_model.model.{name}": value.detach().contiguous() for name, value in {**tensors, **heads}.items()}
    save_file(found, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    config.save_pretrained(folder)


def _linear_names(model: Any) -> list[str]:
    return sorted({name.rpartition(".")[2] for name, layer in model.named_modules() if isinstance(layer, nn.Linear)})

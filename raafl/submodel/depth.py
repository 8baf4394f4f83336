"""Cut a model in depth: windows of a stack, and exits that end a model early."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn

from raafl.errors import BadInput, fraction, nearest
from raafl.submodel.cut.shrink import StandIn
from raafl.submodel.cut.sizes import TORCHVISION, hugging_face, type_names
from raafl.submodel.declared import Stack, declarations, find_stacks, within
from raafl.submodel.spec import Spec, SpecError

if TYPE_CHECKING:
    from raafl.submodel.submodels import Submodels


def depth_window(
    submodels: Submodels,
    start: int,
    stop: int,
    *,
    stack: str | None = None,
    exit: str | Sequence[str] = (),
    kept: Mapping[str, Iterable[int]] | None = None,
) -> Spec:
    """Return the submodel that trains only blocks ``start`` to ``stop - 1``, a window of the model (method Co-S2P).

    Blocks below the window, and all layers before the blocks, run frozen and without gradients; if ``start`` is 0, the
    layers before the blocks train, too. Blocks above are absent. Layers after the blocks train: the exit if one is
    named, else the model's own last layers. A tensor that is tied to a frozen one is frozen, too.

    `stack`: name of the list of blocks; None = the only one.

    Raises:
        SpecError: there is no such list of blocks, window or exit.
    """
    blocks = stack_of(submodels, stack)
    name = next(iter(submodels.stacks)) if stack is None else stack
    if not 0 <= start < stop <= len(blocks):
        raise SpecError(
            f"window is blocks {start} to {stop} of '{name}', which has {len(blocks)} blocks: give 0 <= start < stop "
            f"<= {len(blocks)}"
        )
    chosen = (exit,) if isinstance(exit, str) else tuple(exit)
    for one in chosen:
        if one not in submodels.exits:
            known = nearest(one, submodels.exits, "it has none (`add_exits`, `submodel_exits`)")
            raise SpecError(f"exit is '{one}', which this model does not have; {known}")
    names = list(submodels.parameters)
    inside = [place for place, full in enumerate(names) if within(full, (blocks.path,))]
    heads = [path for head in submodels.exits.values() for path in head.paths]
    above = [n for n in names[inside[-1] + 1 :] if not within(n, heads)]
    trained = [n for n in names if within(n, [blocks.block(i) for i in range(start, stop)])]
    ends = [path for one in chosen for path in submodels.exits[one].paths]
    trained += [n for n in names if within(n, ends)] if chosen else above
    trained += [n for n in names[: inside[0]] if start == 0 and not within(n, heads)]
    exits = chosen if submodels.exits else None
    return Spec.select(kept, blocks={name: range(stop)}, trained=_prefixes(submodels, trained), exits=exits)


def last_fraction(submodels: Submodels, share: float) -> Spec:
    """Return the submodel in which only the last layers train, those that have at most a given share of all parameters.

    At least one layer trains, even if it has more than that share; all others only run forward (TimelyFL, Algorithm 3:
    partial training). A block counts as one layer, like any other module that has parameters of its own. Exits that the
    model's own forward does not use are left out.

    Raises:
        BadInput: the share is not in (0, 1].
    """
    fraction("share", share)
    layers: dict[str, list[str]] = {}
    blocks = [stack.block(i) for stack in submodels.stacks.values() for i in range(len(stack))]
    heads = [path for head in submodels.exits.values() for path in head.paths]
    sizes = {name: size for name, size in submodels.parameters.items() if not within(name, heads)}
    for name in sizes:
        owner = next((path for path in blocks if within(name, (path,))), name.rpartition(".")[0])
        layers.setdefault(owner, []).append(name)
    total = sum(sizes.values())
    trained: list[str] = []
    for names in reversed(layers.values()):
        if trained and sum(sizes[n] for n in (*trained, *names)) > share * total * (1 + 1e-9):
            break
        trained += names
    exits = () if heads else None
    return Spec.select(trained=None if len(trained) == len(sizes) else _prefixes(submodels, trained), exits=exits)


def stack_of(submodels: Submodels, name: str | None = None) -> Stack:
    """Return a stack (a list of blocks) by its name.

    `name`: name of the stack; None = the only one.

    Raises:
        SpecError: there is no stack of that name; or, without a name, there is not exactly one.
    """
    stacks = submodels.stacks
    if not stacks:
        raise SpecError("depth is given, but the model has no stack of blocks: declare `submodel_blocks` on it")
    if name is None:
        if len(stacks) > 1:
            raise SpecError(f"the model has several stacks of blocks: give stack as one of {', '.join(stacks)}")
        return next(iter(stacks.values()))
    if name not in stacks:
        raise SpecError(f"stack is '{name}', which this model does not have; {nearest(name, stacks)}")
    return stacks[name]


def _prefixes(submodels: Submodels, chosen: Iterable[str]) -> list[str]:
    """Return the shortest list of paths and names that matches all parameters in ``chosen`` and no others."""
    wanted = set(chosen)
    every = {**{name: name for name in submodels.parameters}, **submodels.aliases}
    others = {".".join(n.split(".")[:k]) for n in every if every[n] not in wanted for k in range(1, n.count(".") + 1)}
    result = set()
    for name in wanted:
        parts = name.split(".")
        paths = (".".join(parts[:k]) for k in range(1, len(parts) + 1))
        result.add(next((path for path in paths if path not in others), name))
    return sorted(result)


# Add exit heads to transformers of Hugging Face and torchvision, which have none of their own.
#
# An exit after k blocks is a copy of the layers after the last block. In a submodel with k blocks and this exit the
# copy replaces the original, so that the model's own forward ends early.


def add_exits(model: nn.Module, depths: Sequence[int]) -> nn.Module:
    """Add an exit (an output head) to ``model`` after each of the given numbers of blocks, in place; return the model.

    The exits are modules named ``exits.exit4`` and so on. Each is a copy of the model's current last norm and head, and
    is declared in ``submodel_exits``. An exit of a language model has its own norm and shares the output matrix over
    the vocabulary. A model of your own declares its exits itself; see `Submodels`.

    Args:
        model: a classifier or causal language model of transformers (BERT, RoBERTa, DistilBERT, ViT, DeiT, LLaMA,
            Mistral, Qwen2) or torchvision's `VisionTransformer`.
        depths: numbers of blocks after which an exit is added, each from 1 to one less than the model has.

    Raises:
        BadInput: the model has another type, has too few blocks for one of the depths, or has exits already.
    """
    tail = tail_of(model)
    if tail is None:
        raise BadInput(
            f"exits: {type(model).__name__} is of no type whose last layers are known: declare `submodel_exits` on it, "
            "or give " + ", ".join(sorted(name.rpartition(".")[2] for name in TAILS))
        )
    if hasattr(model, "submodel_exits") or hasattr(model, "exits"):
        raise BadInput(f"exits: {type(model).__name__} has exits already: call add_exits once, with all depths")
    sizes = {s: sum(p.numel() for p in model.get_submodule(s.path).parameters()) for s in find_stacks(model).values()}
    # take the stack with the most parameters, since a model may have lists of adapters, too
    stack = max(sizes, key=sizes.__getitem__, default=Stack("", ()))
    exits, declared, after = nn.ModuleDict(), {}, {}
    for depth in sorted(set(depths)):
        if not 0 < depth < len(stack):
            raise BadInput(f"exits: there is no exit after {depth} of {len(stack)} blocks: give 1 to {len(stack) - 1}")
        name = f"exit{depth}"
        exits[name] = nn.ModuleList(copy.deepcopy(model.get_submodule(path)) for path in tail.paths(model))
        declared[name] = {path: f"exits.{name}.{place}" for place, path in enumerate(tail.paths(model))}
        after[name] = stack.block(depth - 1)
    model.exits = exits
    model.submodel_exits = declared  # type: ignore[assignment]  # plain data
    model.submodel_exits_after = after  # type: ignore[assignment]
    return model


def give_exits(module: nn.Module, depths: Sequence[int]) -> None:
    """Add exits (output heads), in place, to the transformers model in ``module``, as the option ``submodels.exits`` says.

    Raises:
        BadInput: ``module`` does not contain exactly one such model, or the model has exits already or too few blocks.
    """
    if not depths:
        return
    name = type(module).__name__
    own = next((path for path, _ in declarations(module, "submodel_exits")), None)
    if own is not None:
        where = f"'{own}' of {name}" if own else name
        raise BadInput(
            f"submodels.exits is {list(depths)}, but {where} declares its own exits: leave one of the two out"
        )
    found = [(path, part) for path, part in module.named_modules() if tail_of(part) is not None]
    if len(found) > 1:
        several = " and ".join(f"'{path}'" for path, _ in found[:3])
        raise BadInput(
            f"submodels.exits is {list(depths)}, but {name} contains several models, {several}: call `add_exits` on one of them"
        )
    if not found:
        raise BadInput(
            f"submodels.exits is {list(depths)}, but raafl does not know the last layers of {name}: declare "
            "`submodel_exits` on it, or use a classifier or causal language model of BERT, RoBERTa, DistilBERT, "
            "ViT, DeiT, LLaMA, Mistral or Qwen2 (transformers), or torchvision's VisionTransformer"
        )
    try:
        add_exits(found[0][1], depths)
    except BadInput as error:
        reason = str(error).removeprefix("exits: ")
        raise BadInput(f"submodels.exits is {list(depths)}: {reason}") from None


class EarlyLogits:
    """Logits of all exits from one forward pass of the model, so that exits can learn from each other.

    >>> import torch, torchvision
    >>> model = torchvision.models.VisionTransformer(8, 4, 3, 2, hidden_dim=8, mlp_dim=8, num_classes=5)
    >>> early = EarlyLogits(add_exits(model, [1, 2]))
    >>> _ = model(torch.ones(2, 3, 8, 8))
    >>> {name: tuple(logits.shape) for name, logits in early.logits().items()}
    {'exit1': (2, 5), 'exit2': (2, 5)}
    """

    def __init__(self, module: nn.Module) -> None:
        """Register hooks that record the outputs of the blocks before exits, in a model to which `add_exits` was applied.

        Raises:
            BadInput: no model in ``module`` has exits.
        """
        found = next((part for part in module.modules() if "submodel_exits_after" in part.__dict__), None)
        if found is None:
            raise BadInput(f"exits: no part of {type(module).__name__} has exits: call add_exits on the model first")
        self.model = cast(Any, found)
        self._hidden: dict[str, Tensor] = {}
        self._input_ids: Tensor | None = None
        self._handles: list[Any] = []
        self.names = [name for name, path in self.model.submodel_exits_after.items() if self._watch(name, path)]
        self._handles.append(self.model.register_forward_pre_hook(self._begin, with_kwargs=True))

    def _watch(self, name: str, path: str) -> bool:
        """Register a hook for the block before an exit; False if this submodel lacks the block, or ends with that exit."""
        own = self.model.submodel_exits[name]
        parts = dict(self.model.named_modules())
        taken = any(
            isinstance(parts.get(place), StandIn) and parts[place].stands_for[0] is parts.get(exit)
            for place, exit in own.items()
        )
        if path not in parts or taken or any(exit not in parts for exit in own.values()):
            return False

        def keep(block: nn.Module, args: object, answer: Any) -> None:
            self._hidden[name] = answer[0] if isinstance(answer, tuple) else answer

        self._handles.append(parts[path].register_forward_hook(keep))
        return True

    def _begin(self, model: nn.Module, args: Any, kwargs: Any) -> None:
        self._hidden.clear()
        self._input_ids = kwargs.get("input_ids", args[0] if args else None)

    def close(self) -> None:
        """Stop recording logits, and remove the hooks from the model."""
        for handle in self._handles:
            handle.remove()
        self._hidden.clear()

    def logits(self) -> dict[str, Tensor]:
        """Return the logits of each exit in the latest forward pass, shallowest first; then release the tensors of that pass."""
        tail: Any = tail_of(self.model)
        answers = {}
        for name in self.names:
            own = [self.model.get_submodule(path) for path in self.model.submodel_exits[name].values()]
            answers[name] = tail.logits(self.model, own, self._hidden.pop(name), self._input_ids)
        return answers


@dataclass(frozen=True, slots=True)
class Tail:
    """Description of the layers after a model's last block (norm and head), for one type of model."""

    names: str  # paths of the modules that an exit copies; {} is the model's ``base_model_prefix``
    # function ``logits(model, modules, hidden, input_ids)`` that computes logits from hidden states (batch, positions,
    # width) with copies of these modules
    logits: Callable[[Any, Any, Tensor, Tensor | None], Any]

    def paths(self, model: nn.Module) -> list[str]:
        """Return the paths of the modules after the last block (norm and head) in ``model``."""
        return self.names.format(getattr(model, "base_model_prefix", "")).split()


def _at_last_token(model: Any, logits: Tensor, ids: Tensor | None) -> Tensor:
    if ids is None or model.config.pad_token_id is None:
        return logits[:, -1]
    places = torch.arange(ids.shape[1], device=ids.device) * (ids != model.config.pad_token_id)
    return logits[torch.arange(len(ids), device=ids.device), places.argmax(-1)]


_GENERIC = "transformers.modeling_layers.Generic"
_ENDS: list[tuple[list[str], Tail]] = [
    (
        hugging_face("bert.BertForSequenceClassification"),
        Tail("{}.pooler classifier", lambda model, own, hidden, ids: own[1](model.dropout(own[0](hidden)))),
    ),
    (
        hugging_face(
            "bert.BertForTokenClassification roberta.RobertaForTokenClassification "
            "distilbert.DistilBertForTokenClassification"
        ),
        Tail("classifier", lambda model, own, hidden, ids: own[0](model.dropout(hidden))),
    ),
    (
        hugging_face("roberta.RobertaForSequenceClassification"),
        Tail("classifier", lambda model, own, hidden, ids: own[0](hidden)),
    ),
    (
        hugging_face("distilbert.DistilBertForSequenceClassification"),
        Tail(
            "pre_classifier classifier",
            lambda model, own, hidden, ids: own[1](model.dropout(torch.relu(own[0](hidden[:, 0])))),
        ),
    ),
    (
        [f"{_GENERIC}ForSequenceClassification"],
        Tail("{}.norm score", lambda model, own, hidden, ids: _at_last_token(model, own[1](own[0](hidden)), ids)),
    ),
    (
        [f"{_GENERIC}ForTokenClassification"],
        Tail("{}.norm score", lambda model, own, hidden, ids: own[1](model.dropout(own[0](hidden)))),
    ),
    # all exits of a language model share its last layer, which is large and often tied to the embedding
    (
        hugging_face("llama.LlamaForCausalLM mistral.MistralForCausalLM qwen2.Qwen2ForCausalLM"),
        Tail("{}.norm", lambda model, own, hidden, ids: model.lm_head(own[0](hidden))),
    ),
    (
        hugging_face("vit.ViTForImageClassification deit.DeiTForImageClassification"),
        Tail("{}.layernorm classifier", lambda model, own, hidden, ids: own[1](own[0](hidden)[:, 0])),
    ),
    (
        hugging_face("deit.DeiTForImageClassificationWithTeacher"),
        Tail(
            "{}.layernorm cls_classifier distillation_classifier",
            lambda model, own, hidden, ids: (own[1](own[0](hidden)[:, 0]) + own[2](own[0](hidden)[:, 1])) / 2,
        ),
    ),
    ([TORCHVISION], Tail("encoder.ln heads", lambda model, own, hidden, ids: own[1](own[0](hidden)[:, 0]))),
]
TAILS = {name: tail for names, tail in _ENDS for name in names}
"""Last layers of a family of models, by dotted name of the model's type."""


def tail_of(model: nn.Module) -> Tail | None:
    """Return the description of a model's last layers; None if the model's type is not known."""
    return next((TAILS[name] for name in type_names(model) if name in TAILS), None)

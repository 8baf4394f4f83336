"""Add exit heads to transformers of Hugging Face and torchvision, which have none of their own.

An exit after k blocks has its own copy of the layers after the last block. A submodel with k blocks and that exit puts the copy in
place of the original, so that the model's own forward ends early.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any, cast

from torch import Tensor, nn

from raafl.errors import BadInput
from raafl.submodel.cut.shrink import StandIn
from raafl.submodel.declared import Stack, declarations, find_stacks
from raafl.submodel.depth.tails import TAILS, tail_of


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
    stack = max(sizes, key=sizes.__getitem__, default=Stack("", ()))  # beside it there may be lists of adapters
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
        """Record the blocks of the model in ``module`` to which `add_exits` was applied, or of a submodel of it.

        Raises:
            BadInput: there is none.
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
        """Keep what the block gives; return whether there is such a block and exit, other than that of the model's end."""
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

"""Read what a model, or any part of it, declares about its structure: axes, stacks of blocks, exits.

A part declares it as plain data, in an attribute or a method of the same name, with paths relative to itself. Stacks of equal
blocks are found without a declaration.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from raafl.errors import nearest
from raafl.submodel.spec import Spec, SpecError


@dataclass(frozen=True, slots=True)
class Stack:
    """A list of a model's blocks, any of which a submodel may leave out: the path of the list, and the blocks' names in order."""

    path: str
    names: tuple[str, ...]

    def __len__(self) -> int:
        """Return the number of blocks in the stack."""
        return len(self.names)

    def block(self, index: int) -> str:
        """Return the path of the block with number ``index``."""
        return join(self.path, self.names[index])


@dataclass(frozen=True, slots=True)
class Exit:
    """An early exit: an output head that computes logits after some of the blocks.

    Attributes:
        paths: paths of the exit's modules.
        instead_of: paths of the modules, such as the last norm and the head, that those in ``paths`` replace if the
            exit is kept; empty for an exit that the model's own forward calls.
    """

    paths: tuple[str, ...]
    instead_of: tuple[str, ...] = ()


def join(*parts: str) -> str:
    """Join components of a path, some of which may be empty."""
    return ".".join(part for part in parts if part)


def within(name: str, paths: Iterable[str]) -> bool:
    """Check whether a tensor or module is one of ``paths`` or inside one of them; the path '' contains all."""
    return any(not path or name == path or name.startswith(f"{path}.") for path in paths)


def above(name: str) -> list[str]:
    """Return the paths of all modules that contain the tensor or module ``name``, outermost first, starting with ''."""
    parts = name.split(".")[:-1]
    return [".".join(parts[:end]) for end in range(len(parts) + 1)]


def declarations(module: nn.Module, attribute: str) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield each module that declares ``attribute``, outermost first: its path and its declaration."""
    for path, part in module.named_modules():
        value = getattr(part, attribute, None)
        if value is not None:
            yield path, value() if callable(value) else value


def find_stacks(module: nn.Module) -> dict[str, Stack]:
    """Find the stacks (lists of blocks, any of which may be left out) of a model, by name.

    Stacks that `submodel_blocks` declares come first, then all other lists of equal blocks. The blocks of such a list
    must have submodules, one type and equal shapes. If their shapes differ, as within a stage of a ResNet, blocks of
    that type form no stack. Lists inside of blocks, such as lists of experts, form none either.

    Raises:
        SpecError: a declared path is neither a `ModuleList` nor a `Sequential`.
    """
    stacks = {}
    for prefix, declared in declarations(module, "submodel_blocks"):
        for name, path in declared.items():
            stacks[join(prefix, name)] = _stack(module, join(prefix, path), name)
    known = [stack.path for stack in stacks.values()]
    lists = [(path, part) for path, part in module.named_modules() if isinstance(part, nn.ModuleList | nn.Sequential)]
    lists = [(path, part) for path, part in lists if len(part) > 1 and len(set(map(type, part))) == 1]
    lists = [(path, part) for path, part in lists if part[0] is not None]  # a list may have None in place of blocks
    mixed = {type(part[0]) for _, part in lists if len(set(map(_form, part))) > 1}
    for path, part in lists:
        if _form(part[0]) and type(part[0]) not in mixed and not within(path, known):
            known.append(path)
            stacks[path or "blocks"] = Stack(path, tuple(part._modules))
    return stacks


def _form(block: nn.Module) -> tuple[Any, ...]:
    """Return names and shapes of a block's parameters, by which blocks are compared; empty for a layer without parts."""
    has_parts = next(block.children(), None) is not None
    return tuple((name, tuple(p.shape)) for name, p in block.named_parameters()) if has_parts else ()


def _stack(module: nn.Module, path: str, name: str) -> Stack:
    try:
        blocks = module.get_submodule(path)
    except AttributeError:
        blocks = None
    if not isinstance(blocks, nn.ModuleList | nn.Sequential):
        raise SpecError(
            f"submodel_blocks names '{path}' for '{name}', which is no list of blocks: give the path of a ModuleList or Sequential"
        )
    return Stack(path, tuple(blocks._modules))


def _is_module(module: nn.Module, path: str) -> bool:
    try:
        module.get_submodule(path)
    except AttributeError:
        return False
    return True


def find_exits(module: nn.Module) -> dict[str, Exit]:
    """Find the exits (output heads after some of the blocks) that a model declares in `submodel_exits`, by name.

    An exit that the model's own forward calls is declared by a list of the paths of its modules; a submodel without
    the exit has None in their place. Any other exit is declared by a mapping ``{path: path}``: in a submodel with the
    exit, the exit's module at the second path replaces the model's module at the first, such as the head.

    Raises:
        SpecError: a path in a mapping does not lead to a module.
    """
    exits = {}
    for prefix, declared in declarations(module, "submodel_exits"):
        for name, value in declared.items():
            if not isinstance(value, Mapping):
                exits[join(prefix, name)] = Exit(tuple(join(prefix, path) for path in value))
                continue
            if missing := [path for path in (*value, *value.values()) if not _is_module(module, join(prefix, path))]:
                raise SpecError(
                    f"submodel_exits names '{missing[0]}' for '{name}', which is not a module: give paths of modules"
                )
            places = tuple(join(prefix, path) for path in value)
            exits[join(prefix, name)] = Exit(tuple(join(prefix, path) for path in value.values()), places)
    return exits


def check_names(
    spec: Spec, names: Sequence[str], aliases: Mapping[str, str], stacks: Mapping[str, Stack], exits: Mapping[str, Exit]
) -> None:
    """Raise `SpecError` if ``spec`` names something that the model lacks, or leaves out a tensor that kept modules share."""
    for name, indices in spec.blocks:
        if name not in stacks:
            known = nearest(name, stacks, "it declares none (`submodel_blocks`)")
            raise SpecError(f"spec keeps blocks of '{name}', which this model does not have; {known}")
        if indices[-1] >= len(stacks[name]):
            raise SpecError(
                f"spec keeps block {indices[-1]} of '{name}', which has {len(stacks[name])} blocks: give lower indices"
            )
    names = [*names, *aliases]
    for prefix in spec.trained or ():
        if not any(within(name, (prefix,)) for name in names):
            modules = {name.rpartition(".")[0] for name in names} - {""}
            raise SpecError(
                f"spec trains '{prefix}', which this model does not have; {nearest(prefix, {*names, *modules})}"
            )
    for name in spec.exits or ():
        if name not in exits:
            known = nearest(name, exits, "it declares none (`submodel_exits`)")
            raise SpecError(f"spec keeps the exit '{name}', which this model does not have; {known}")
    gone = absent(spec, stacks, exits)
    for alias, name in aliases.items() if gone else ():
        if within(name, gone) and not within(alias, gone):
            raise SpecError(f"spec leaves out '{name}', which is tied to '{alias}': keep both, or leave out both")


def stand_ins(spec: Spec, exits: Mapping[str, Exit]) -> dict[str, str]:
    """Map the path of each module that a kept exit replaces to the path of the exit's module that replaces it.

    If several kept exits replace a module, the last one counts.
    """
    kept = [one for name, one in exits.items() if name in (spec.exits or ())]
    return {place: path for one in kept for place, path in zip(one.instead_of, one.paths, strict=False)}


def absent(spec: Spec, stacks: Mapping[str, Stack], exits: Mapping[str, Exit]) -> tuple[str, ...]:
    """Return the paths of the modules that the submodel leaves out."""
    gone = []
    for name, kept in spec.blocks:
        stack = stacks[name]
        gone += [stack.block(i) for i in range(len(stack)) if i not in kept]
    for name, one in exits.items() if spec.exits is not None else ():
        gone += () if name in spec.exits else one.paths  # type: ignore[operator]
    return (*gone, *stand_ins(spec, exits))

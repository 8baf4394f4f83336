"""What a model, or any part of it, says of its own structure: axes, stacks of blocks, exits.

A part says it as plain data, in an attribute or a method of the same name, with paths relative to itself. Stacks of
equal blocks are found without.
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
    """Blocks of which any may be absent: path of the container, and the names of the blocks in it, in order."""

    path: str
    names: tuple[str, ...]

    def __len__(self) -> int:
        """Return the number of blocks."""
        return len(self.names)

    def block(self, index: int) -> str:
        """Return the path of a block."""
        return join(self.path, self.names[index])


@dataclass(frozen=True, slots=True)
class Exit:
    """An exit head.

    Attributes:
        paths: of its modules.
        instead_of: for each module, in order, the path whose place it takes when the exit is kept, as the last norm and
            the head of a shorter model; empty for an exit that the model's own forward asks for.
    """

    paths: tuple[str, ...]
    instead_of: tuple[str, ...] = ()


def join(*parts: str) -> str:
    """Return the path made of these parts, of which some may be empty."""
    return ".".join(part for part in parts if part)


def within(name: str, paths: Iterable[str]) -> bool:
    """Check whether a tensor or module of this name is one of ``paths``, or lies in one; all lies in the root, ''."""
    return any(not path or name == path or name.startswith(f"{path}.") for path in paths)


def above(name: str) -> list[str]:
    """Return the paths of all modules that a tensor or module of this name lies in, outermost first, the root's included."""
    parts = name.split(".")[:-1]
    return [".".join(parts[:end]) for end in range(len(parts) + 1)]


def said(module: nn.Module, attribute: str) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield the path of each part that has ``attribute``, outermost first, and what it says."""
    for path, part in module.named_modules():
        value = getattr(part, attribute, None)
        if value is not None:
            yield path, value() if callable(value) else value


def find_stacks(module: nn.Module) -> dict[str, Stack]:
    """Return the stacks by name: those declared (`submodel_blocks`), then lists of equal blocks, by path.

    Blocks have parts, and those of a list the same type and shapes. Where a list mixes blocks of other shapes, as that of a
    stage of a ResNet does, its type makes no stacks at all; nor do lists within blocks, as those of experts.

    Raises:
        SpecError: a declared path is not that of a `ModuleList` or `Sequential`.
    """
    stacks = {}
    for prefix, declared in said(module, "submodel_blocks"):
        for name, path in declared.items():
            stacks[join(prefix, name)] = _stack(module, join(prefix, path), name)
    known = [stack.path for stack in stacks.values()]
    lists = [(path, part) for path, part in module.named_modules() if isinstance(part, nn.ModuleList | nn.Sequential)]
    lists = [(path, part) for path, part in lists if len(part) > 1 and len(set(map(type, part))) == 1]
    lists = [(path, part) for path, part in lists if part[0] is not None]  # places that a model leaves empty
    mixed = {type(part[0]) for _, part in lists if len(set(map(_form, part))) > 1}
    for path, part in lists:
        if _form(part[0]) and type(part[0]) not in mixed and not within(path, known):
            known.append(path)
            stacks[path or "blocks"] = Stack(path, tuple(part._modules))
    return stacks


def _form(block: nn.Module) -> tuple[Any, ...]:
    """Return names and shapes of a block's parameters; nothing where it has no parts."""
    has_parts = next(block.children(), None) is not None
    return tuple((name, tuple(p.shape)) for name, p in block.named_parameters()) if has_parts else ()


def _stack(module: nn.Module, path: str, name: str) -> Stack:
    try:
        blocks = module.get_submodule(path)
    except AttributeError:
        blocks = None
    if not isinstance(blocks, nn.ModuleList | nn.Sequential):
        raise SpecError(f"submodel_blocks names '{path}' for '{name}': give the path of a ModuleList or Sequential")
    return Stack(path, tuple(blocks._modules))


def find_exits(module: nn.Module) -> dict[str, Exit]:
    """Return the exits by name, as declared (`submodel_exits`): a list of paths, or a mapping.

    In a list are the modules of the exit, which are None where it is left out. A mapping goes from the path of a module
    to the path of the one that takes its place where the exit is kept.

    Raises:
        SpecError: a path in a mapping is not that of a module.
    """
    exits = {}
    for prefix, declared in said(module, "submodel_exits"):
        for name, value in declared.items():
            if not isinstance(value, Mapping):
                exits[join(prefix, name)] = Exit(tuple(join(prefix, path) for path in value))
                continue
            for path in (*value, *value.values()):
                try:
                    module.get_submodule(join(prefix, path))
                except AttributeError:
                    raise SpecError(
                        f"submodel_exits names '{path}' for '{name}', which is no module: give paths of modules"
                    ) from None
            places = tuple(join(prefix, path) for path in value)
            exits[join(prefix, name)] = Exit(tuple(join(prefix, path) for path in value.values()), places)
    return exits


def check_names(
    spec: Spec, names: Sequence[str], aliases: Mapping[str, str], stacks: Mapping[str, Stack], exits: Mapping[str, Exit]
) -> None:
    """Raise `SpecError` unless the stacks, blocks, parameters (of ``names``) and exits that ``spec`` names are there.

    Nor may it leave out the first of several places that share a tensor, which has its name from there; ``aliases`` are the
    other names.
    """
    for name, indices in spec.blocks:
        if name not in stacks:
            known = nearest(name, stacks, "it declares none (`submodel_blocks`)")
            raise SpecError(f"spec keeps blocks of '{name}', which this model does not have; {known}")
        if indices[-1] >= len(stacks[name]):
            raise SpecError(
                f"spec keeps block {indices[-1]} of '{name}', which has {len(stacks[name])}: give lower indices"
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
            raise SpecError(
                f"spec leaves out '{name}', which is also '{alias}': keep what it lies in, or leave out both"
            )


def stand_ins(spec: Spec, exits: Mapping[str, Exit]) -> dict[str, str]:
    """Return the places that modules of kept exits take -> their paths; of several exits, the last has the place."""
    kept = [one for name, one in exits.items() if name in (spec.exits or ())]
    return {place: path for one in kept for place, path in zip(one.instead_of, one.paths, strict=False)}


def absent(spec: Spec, stacks: Mapping[str, Stack], exits: Mapping[str, Exit]) -> tuple[str, ...]:
    """Return the paths of the modules that ``spec`` leaves out."""
    gone = []
    for name, kept in spec.blocks:
        stack = stacks[name]
        gone += [stack.block(i) for i in range(len(stack)) if i not in kept]
    for name, one in exits.items() if spec.exits is not None else ():
        gone += () if name in spec.exits else one.paths  # type: ignore[operator]
    return (*gone, *stand_ins(spec, exits))

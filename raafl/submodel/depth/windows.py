"""Select submodels by depth: a window of trained blocks, or only the last layers. Layers are in order of registration."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from raafl.errors import fraction, nearest
from raafl.submodel.declared import within
from raafl.submodel.spec import Spec, SpecError

if TYPE_CHECKING:
    from raafl.submodel.declared import Stack
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
    """Return the fewest module paths and names that cover the parameters chosen and no others, by no name of theirs."""
    wanted = set(chosen)
    every = {**{name: name for name in submodels.parameters}, **submodels.aliases}
    others = {".".join(n.split(".")[:k]) for n in every if every[n] not in wanted for k in range(1, n.count(".") + 1)}
    result = set()
    for name in wanted:
        parts = name.split(".")
        paths = (".".join(parts[:k]) for k in range(1, len(parts) + 1))
        result.add(next((path for path in paths if path not in others), name))
    return sorted(result)

"""Divide a model into fragments, say whose turn it is, and merge one fragment of each update: Streaming DiLoCo's schedule."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Literal

from raafl.core.algorithm import SelectContext
from raafl.core.memory import OneValue
from raafl.core.state import GlobalState
from raafl.core.types import Assignment, ClientInfo, Update, Work
from raafl.errors import one_of, positive
from raafl.parts.merge.nesterov import DelayedNesterov
from raafl.parts.merge.wrapped import Wrapped, WrappedSelect
from raafl.submodel import FULL, FlatTensors, Spec, SpecError, Submodels

Pattern = Literal["strided", "sequential"]

UP, DOWN = "up", "down"
"""In `Work.extra`: index of the fragment that a task sends, and of the one that it receives; no "down" = the whole model."""


@dataclass(frozen=True)
class Fragments:
    """Division of a model into P fragments, each of whole layers (section 2.1 of the paper).

    A layer is a block of the model, such as a transformer's, or another module that has tensors of its own. There are
    at most as many fragments as layers.

    Attributes:
        num: number of fragments (P).
        pattern: assignment of layers to fragments: strided = layer l is in fragment l mod P; sequential = neighbouring
            layers, in fragments of about equal size.
    """

    num: int = 4
    pattern: Pattern = "strided"

    def __post_init__(self) -> None:
        positive("fragments", self.num)
        one_of("pattern", self.pattern, Pattern)

    def names(self, submodels: Submodels) -> tuple[frozenset[str], ...]:
        """Return the names of the tensors in each fragment: trained parameters, and the running statistics of their layers."""
        return submodels.cached("fragments", self, lambda: self._names(submodels))

    def _names(self, submodels: Submodels) -> tuple[frozenset[str], ...]:
        layers: dict[str, list[str]] = {}
        sizes: dict[str, int] = {}
        for entry in submodels.layout(part="trained").entries:
            layer = _layer(entry.name)
            layers.setdefault(layer, []).append(entry.name)
            sizes[layer] = sizes.get(layer, 0) + entry.numel
        num = min(self.num, len(layers))
        turns = [i % num for i in range(len(layers))] if self.pattern == "strided" else _runs(list(sizes.values()), num)
        found: list[list[str]] = [[] for _ in range(num)]
        for turn, names in zip(turns, layers.values(), strict=True):
            found[turn] += names
        return tuple(map(frozenset, found))

    def count(self, submodels: Submodels) -> int:
        """Return the number of fragments of this model, at most the number of its layers."""
        return len(self.names(submodels))

    def spec(self, submodels: Submodels, index: int) -> Spec:
        """Return the submodel that trains only one fragment.

        Args:
            submodels: submodels of the model.
            index: number of the fragment, from 0.
        """
        names = self.names(submodels)
        return FULL if len(names) == 1 else Spec.select(trained=names[index] & submodels.parameter_names)

    def names_for_task(self, submodels: Submodels, extra: Mapping[str, Any], key: str) -> frozenset[str] | None:
        """Return the names of the tensors that a task receives or sends; None = those of the whole model.

        Args:
            submodels: submodels of the model.
            extra: the task's settings, with the numbers of its fragments.
            key: `UP` = the fragment that the client sends, `DOWN` = the one that it receives.

        Raises:
            SpecError: there is no such fragment.
        """
        index, names = extra.get(key), self.names(submodels)
        if index is None:
            return None
        if type(index) is not int or not 0 <= index < len(names):
            raise SpecError(
                f"fragment {str(index)[:20]!r} is not one of this model's {len(names)}: give 0 to {len(names) - 1}"
            )
        return names[index]

    def __str__(self) -> str:
        return f"{self.num} {self.pattern} fragments"


def _runs(sizes: Sequence[int], num: int) -> list[int]:
    """Return the fragment of each layer: the one in whose equal share of all elements its middle lies; none stays empty."""
    total, before, turns = sum(sizes), 0, [-1]
    for index, size in enumerate(sizes):
        middle = (2 * before + size) * num // (2 * total)
        turns.append(max(min(middle, turns[-1] + 1), num - len(sizes) + index))
        before += size
    return turns[1:]


def _layer(name: str) -> str:
    """Return the path of a tensor's layer: of the first member of a stack in its name, else of the module that owns it."""
    parts = name.split(".")
    member = next((i for i, part in enumerate(parts) if part.isdigit()), len(parts) - 2)
    return ".".join(parts[: member + 1])


@dataclass
class _TurnMemory(OneValue[dict[int, int]]):
    """For each client that is present, the fragment that it sends with its latest task."""

    key = "fragment_turns"
    value: dict[int, int] = field(default_factory=dict)


@dataclass(frozen=True)
class InTurn(WrappedSelect):
    """Rule that chooses which fragment of the model a client sends with its next task, and which one it receives.

    A client receives the fragment that it sent with its last task, now merged with those of other clients. In synchronous
    rounds all clients send the same fragment, t mod P in round t (P fragments). Otherwise each client sends one fragment
    after the other, beginning with the number that is its id.

    Attributes:
        fragments: division of the model.
        in_rounds: whether clients work in synchronous rounds.
    """

    fragments: Fragments = field(default_factory=Fragments)
    in_rounds: bool = True

    def __call__(self, client: ClientInfo, fleet: SelectContext) -> Work:
        """Return the wrapped select part's work with the fragments to send and to receive."""
        work, state = super().__call__(client, fleet), fleet.state
        turns, num = state.memory.of(_TurnMemory).value, self.fragments.count(state.submodels)
        last = turns.get(client.id)
        turn = state.version if self.in_rounds else client.id if last is None else last + 1
        turns[client.id] = turn % num
        return replace(work, extra={**work.extra, UP: turn % num, **({} if last is None else {DOWN: last})})

    @property
    def needs_last_update(self) -> bool:
        """Whether a client's next task needs its last one to be complete: yes, it continues from the client's own copy."""
        return True

    def on_update(self, client: ClientInfo, assignment: Assignment, seconds: float, fleet: SelectContext) -> None:
        """Tell the wrapped select part how long a task took, for its estimate of the client's speed.

        With `overlap` it is not told: a client may then begin a task before the server assigns it, so that the time
        from assignment to update is too short.
        """
        if not fleet.overlap:
            super().on_update(client, assignment, seconds, fleet)

    def on_join(self, client: ClientInfo, fleet: SelectContext) -> None:
        """Delete the record of the client's fragment, since a newly joined client has no copy of the model yet."""
        super().on_join(client, fleet)
        fleet.state.memory.of(_TurnMemory).value.pop(client.id, None)

    def on_loss(self, client: ClientInfo, fleet: SelectContext) -> None:
        """Delete the record of the lost client's fragment."""
        super().on_loss(client, fleet)
        fleet.state.memory.of(_TurnMemory).value.pop(client.id, None)

    def __str__(self) -> str:
        return f"{self.inner}, {self.fragments} in turn"


@dataclass(frozen=True)
class ByFragment(Wrapped):
    """Merge that takes one fragment (some layers) of each client's update, and merges it by another rule, ``inner``.

    The server decides which fragment a client sends.

    Attributes:
        fragments: division of the model.
    """

    by_client: ClassVar[bool] = True
    fragments: Fragments = field(default_factory=Fragments)

    def _part(self, state: GlobalState, update: Update) -> tuple[Update, Spec]:
        spec = self.fragments.spec(state.submodels, update.work[UP])
        if spec.is_full:
            return update, spec
        layout = state.submodels.layout(spec, "trained")
        return replace(update, tensors=FlatTensors.empty(layout, update.tensors.device).take_(update.tensors)), spec

    def check(self, state: GlobalState) -> list[str]:
        """Return error messages, such as for running statistics (of batch norm) that belong to no fragment."""
        found = {name for names in self.fragments.names(state.submodels) for name in names}
        covered: set[str] = set()
        for index in range(self.fragments.count(state.submodels)):
            covered |= set(state.submodels.layout(self.fragments.spec(state.submodels, index), "trained").by_name)
        problems = self.inner.check(state)
        if found != covered:
            name = min(found ^ covered)
            problems.append(
                f"'{name}' is in no fragment: use submodel_batch_norm static, or a norm without running statistics"
            )
        return problems

    def notes(self, state: GlobalState, num_clients: int) -> list[str]:
        """Return messages for the user, one of them on the number of fragments and the bytes of the largest one."""
        submodels = state.submodels
        specs = [self.fragments.spec(submodels, index) for index in range(self.fragments.count(submodels))]
        largest = max(submodels.layout(spec, "trained").num_bytes for spec in specs)
        whole = submodels.layout(part="trained").num_bytes
        return [
            *self.inner.notes(state, num_clients),
            f"streaming: {len(specs)} fragments of at most {largest:,} of {whole:,} bytes before compression; a client's first "
            "task brings the whole model",
        ]

    def reject_reason(self, state: GlobalState, update: Update, spec: Spec, staleness: int) -> str | None:
        """Return the reason for which the inner merge rule refuses the fragment; None = it accepts the fragment."""
        return self.inner.reject_reason(state, *self._part(state, update), staleness)

    def receive(self, state: GlobalState, update: Update, spec: Spec, staleness: int) -> None:
        """Add the update's fragment to the next merge."""
        self.inner.receive(state, *self._part(state, update), staleness)

    def __str__(self) -> str:
        return f"{self.inner}, by fragment"


@dataclass(frozen=True)
class DelayedByFragment(DelayedNesterov):
    """Nesterov momentum that is applied once in N updates: as many as it takes each client to send each fragment once.

    N is the number of clients times the number of fragments, unless a number is given.

    Attributes:
        fragments: division of the model.
    """

    fragments: Fragments = field(default_factory=Fragments)

    def period(self, state: GlobalState) -> int:
        """Return the number of updates after which the momentum is applied once."""
        return self.every or state.num_clients * self.fragments.count(state.submodels)

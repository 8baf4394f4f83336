"""Select the lowest blocks of a model with an exit at their top, and the leading units of each axis (DepthFL, ScaleFL)."""

from __future__ import annotations

from dataclasses import dataclass

from raafl.core.algorithm import Select, SelectContext
from raafl.core.types import ClientInfo, Work
from raafl.errors import BadInput
from raafl.parts.local.distilled import exit_depths
from raafl.parts.select.rate_select import Rates, RateSelect, rates_in_words
from raafl.parts.select.segments import stack_of
from raafl.parts.select.units import count, leading
from raafl.parts.select.windows import RollingWindows, window_notes
from raafl.submodel import Spec, Submodels


@dataclass(frozen=True)
class LeadingBlocks(Select):
    """Select part (choice of submodels): each client gets the lowest blocks of the model, and the first units of each layer.

    The exits (output heads after a block) among these blocks are part of the submodel. Submodels are nested, since
    every client trains the lowest blocks. A client gets fewer blocks if its share does not fit its memory. A model
    without a stack of blocks keeps its depth; one without exits ends with its own last layers.

    Attributes:
        depths: share of the blocks that a client gets: one number for all; a list that clients 1, 2, ... take in turn;
            or a mapping from device name.
        widths: share of each axis's units that a client gets, in the same form.
    """

    depths: Rates = 1.0
    widths: Rates = 1.0

    def __post_init__(self) -> None:
        for rates in (self.depths, self.widths):
            RateSelect(rates=rates)

    def __call__(self, client: ClientInfo, fleet: SelectContext) -> Work:
        """Return the work for ``client``, as region ``client.id``; raises `BadInput` if not even one block fits its memory."""
        if client.id not in fleet.cache:
            fleet.cache[client.id] = self._largest(client, fleet)
        return Work(fleet.cache[client.id], region=client.id)

    def _largest(self, client: ClientInfo, fleet: SelectContext) -> Spec:
        submodels, stack = fleet.state.submodels, stack_of(fleet.state.submodels)
        most = 1 if stack is None else count(len(stack), RateSelect(rates=self.depths).rate(client))
        width = RateSelect(rates=self.widths).rate(client)
        specs = [self.spec(submodels, num, width) for num in range(most, 0, -1)]
        found = next((spec for spec in specs if fleet.fits(client, spec)), None)
        if found is None:
            need = fleet.cost(specs[-1]).peak_bytes
            raise BadInput(
                f"client {client.id}: memory_bytes is {client.profile.memory_bytes:.4g}, its smallest submodel needs {need:.4g} to "
                "train: raise memory_bytes, lower widths, or use a smaller batch or model"
            )
        return found

    def spec(self, submodels: Submodels, num_blocks: int, width: float) -> Spec:
        """Return the submodel of the lowest blocks with the first units of each axis.

        Args:
            submodels: submodels of the model.
            num_blocks: number of blocks; fewer are used if no exit follows the last of them.
            width: share of each axis's units to keep.
        """
        stack, exits = stack_of(submodels), exit_depths(submodels)
        kept = dict(leading(submodels.axes, width).kept)
        if stack is None:
            return Spec.select(kept)
        if exits and num_blocks < len(stack) and num_blocks not in exits:
            num_blocks = max((depth for depth in exits if depth < num_blocks), default=min(exits))
        above = [f"{stack.block(i)}." for i in range(num_blocks, len(stack))]
        kept = {
            name: units
            for name, units in kept.items()
            if not all(m.name.startswith(tuple(above)) for m in submodels.axes[name].members) or not above
        }
        return RollingWindows().window(submodels, 0, num_blocks, kept, distils=True)

    def check(self, fleet: SelectContext) -> list[str]:
        """Return a problem for each client that has no rate, or whose memory is too small for any submodel."""
        return fleet.problems(lambda client: self._largest(client, fleet))

    def forget(self, client: ClientInfo, fleet: SelectContext) -> None:
        """Delete the client's cached submodel; other clients' submodels do not depend on it."""
        fleet.cache.pop(client.id, None)

    def notes(self, fleet: SelectContext) -> list[str]:
        """Return notes if the model cannot have fewer blocks, has no exits, or cannot be narrowed as requested."""
        notes = window_notes(fleet.state.submodels)
        return notes if self.widths != 1.0 else [note for note in notes if not note.startswith("the model's width")]

    def __str__(self) -> str:
        width = "" if self.widths == 1.0 else f", {rates_in_words(self.widths)} of the width"
        return f"lowest blocks, at most {rates_in_words(self.depths)} of them{width}"

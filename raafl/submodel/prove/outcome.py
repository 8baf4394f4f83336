"""Record what one training step came to: outputs, loss, gradients and buffers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from torch import Tensor

from raafl.submodel.axes import Runs
from raafl.submodel.frozen import select


@dataclass
class StepOutcome:
    """Outcome of one training step."""

    outputs: list[tuple[str, list[Tensor]]] = field(default_factory=list)
    loss: Tensor | None = None
    gradients: dict[str, Tensor | None] = field(default_factory=dict)
    buffers: dict[str, Tensor] = field(default_factory=dict)
    forced: bool = False
    noisy: bool = False

    def named(self, selections: Mapping[str, Mapping[int, Runs]]) -> Iterator[tuple[str, Tensor]]:
        """Yield all that is compared, as messages name it."""
        if self.loss is not None:
            yield "the loss", self.loss
        yield from ((output_of(path), tensor) for path, given in self.outputs for tensor in given)
        for name, gradient in self.gradients.items():
            if gradient is not None:
                yield f"the gradient of '{name}'", select(gradient, selections.get(name, {}))
        for name, buffer in self.buffers.items():
            yield f"buffer '{name}'", select(buffer, selections.get(name, {}))

    def loss_and_gradients(self) -> Iterator[Tensor]:
        """Yield the loss and the gradients, which have to be finite."""
        if self.loss is not None:
            yield self.loss
        yield from (g for g in self.gradients.values() if g is not None)


def output_of(path: str) -> str:
    """Name the output of the module at a path, for messages."""
    return f"the output of '{path or 'the model'}'"


def largest_of(gradients: Mapping[str, Tensor | None]) -> dict[str, float]:
    """Return the largest absolute value in each gradient, by the name of its parameter."""
    return {name: float(g.abs().max()) for name, g in gradients.items() if g is not None and g.numel()}

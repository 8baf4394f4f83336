"""Keep buffers in flat storage when a module's code replaces them (``self.mean = new``) instead of changing them in place."""

from __future__ import annotations

from torch import nn

from raafl.submodel import FlatTensors


class Buffers:
    """Buffers of a small module, stored as views into its flat storage."""

    def __init__(self, module: nn.Module, present: FlatTensors) -> None:
        self._views = [
            (part, name, buffer)
            for path, part in module.named_modules()
            for name, buffer in part._buffers.items()
            if buffer is not None and (f"{path}.{name}" if path else name) in present
        ]

    def gather(self) -> None:
        """Copy buffers that a step has replaced into the flat storage, and make them views of it again."""
        for part, name, view in self._views:
            buffer = part._buffers[name]
            if buffer is not view and buffer is not None:
                view.copy_(buffer.detach())
        self.restore()

    def restore(self) -> None:
        """Make the buffers views of the flat storage again, and discard tensors that a step has assigned instead."""
        for part, name, view in self._views:
            part._buffers[name] = view

"""Keep buffers in flat storage when a module's code replaces them (``self.mean = new``) instead of changing them in place."""

from __future__ import annotations

from torch import nn

from raafl.submodel import FlatTensors


class Buffers:
    """Buffers of a submodel's module (such as running statistics), kept as views into the storage that is sent."""

    def __init__(self, module: nn.Module, present: FlatTensors) -> None:
        self._views = [
            (part, name, buffer)
            for path, part in module.named_modules()
            for name, buffer in part._buffers.items()
            if buffer is not None and (f"{path}.{name}" if path else name) in present
        ]

    def gather(self) -> None:
        """Copy the values of buffers that a step has replaced by new tensors into the original tensors, and use these again."""
        for part, name, view in self._views:
            buffer = part._buffers[name]
            if buffer is not view and buffer is not None:
                view.copy_(buffer.detach())
        self.restore()

    def restore(self) -> None:
        """Use the original tensors of all buffers again; values of new tensors that have replaced them are lost."""
        for part, name, view in self._views:
            part._buffers[name] = view

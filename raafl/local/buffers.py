"""Buffers that a module's own code replaces (``self.mean = new``) instead of changing them in place."""

from __future__ import annotations

from torch import nn

from raafl.submodel import FlatTensors


class Buffers:
    """A small module's buffers, which are views into its flat storage and are to stay so."""

    def __init__(self, module: nn.Module, present: FlatTensors) -> None:
        self._views = [
            (part, name, buffer)
            for path, part in module.named_modules()
            for name, buffer in part._buffers.items()
            if buffer is not None and (f"{path}.{name}" if path else name) in present
        ]

    def gather(self) -> None:
        """Copy what has replaced a view into its storage, and put the view back."""
        for part, name, view in self._views:
            buffer = part._buffers[name]
            if buffer is not view and buffer is not None:
                view.copy_(buffer.detach())
        self.restore()

    def restore(self) -> None:
        """Put the views back, whatever has replaced them."""
        for part, name, view in self._views:
            part._buffers[name] = view

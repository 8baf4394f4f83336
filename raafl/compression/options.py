"""Define the options of compression; importing them needs no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from raafl.errors import fraction, one_of, refuse_unused_fields

Name = Literal["none", "bf16", "int8", "top_k"]
NAMES: tuple[Name, ...] = ("none", "bf16", "int8", "top_k")


@dataclass(frozen=True, slots=True)
class Compress:
    """Compression of tensors between server and clients; off by default.

    Attributes:
        down: compressor of tensors sent to clients: none, bf16, int8 or top_k (on the changes since the client's last
            task).
        up: compressor of tensors sent to the server, as differences from the received ones: none, bf16, int8 or top_k.
        top_k: share of the elements that top_k sends, above 0 and at most 1.
    """

    down: Name = "none"
    up: Name = "none"
    top_k: float = 0.1

    def __post_init__(self) -> None:
        for field, name in (("down", self.down), ("up", self.up)):
            one_of(f"compress.{field}", name, NAMES)
        fraction("compress.top_k", self.top_k)
        if "top_k" not in (self.down, self.up):
            reason = "neither compress.down nor compress.up is top_k"
            refuse_unused_fields("compress", self, ("top_k",), reason, "set one of these to top_k")

"""Encode the scalars of a client's steps as text, for `Update.extra`."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Sequence

import numpy as np


def pack(scalars: Sequence[float]) -> str:
    """Encode the numbers that a client sends as little-endian float32 in base64."""
    return base64.b64encode(np.asarray(scalars, "<f4").tobytes()).decode("ascii")


def unpack(text: object) -> list[float] | None:
    """Decode text that `pack` has made; return None for any other text."""
    if not isinstance(text, str):
        return None
    try:
        data = base64.b64decode(text.encode("ascii"), validate=True)
    except (UnicodeEncodeError, binascii.Error):
        return None
    return None if len(data) % 4 else [float(value) for value in np.frombuffer(data, "<f4")]


def packed_bytes(num_scalars: int) -> int:
    """Return the length in bytes of the text into which `pack` encodes ``num_scalars`` numbers."""
    return 4 * -(-4 * num_scalars // 3)

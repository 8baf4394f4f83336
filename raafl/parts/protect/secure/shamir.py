"""Share a secret among clients so that any `threshold` of them restore it, and fewer learn nothing (Shamir 1979).

Each byte is shared on its own, over GF(2^8) modulo x^8 + x^4 + x^3 + x + 1, as in draft-mcgrew-tss-03, whose vectors are tests.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from functools import reduce

import numpy as np

MAX_SHARES = 255  # the field GF(256) has 255 points other than 0, where the polynomial's value is the secret


def _tables() -> tuple[np.ndarray, np.ndarray]:
    """Return the powers of the generator 3, twice in a row, and the logarithms to base 3; log[0] is never read."""
    powers, logs, value = np.zeros(510, np.uint8), np.zeros(256, np.int64), 1
    for exponent in range(255):
        powers[exponent] = powers[exponent + 255] = value
        logs[value] = exponent
        value ^= value << 1  # multiply by the generator 3; the next line reduces by the field's polynomial
        value ^= 0x11B if value & 0x100 else 0
    return powers, logs


_POWERS, _LOGS = _tables()


def _times(values: np.ndarray, factor: int) -> np.ndarray:
    """Multiply bytes by a factor other than 0."""
    return np.where(values == 0, 0, _POWERS[_LOGS[values] + _LOGS[factor]]).astype(np.uint8)


def share(secret: bytes, threshold: int, num: int) -> list[bytes]:
    """Split a secret into shares, any ``threshold`` of which restore it; each is as long as the secret.

    The shares are numbered 1, 2, and so on.
    """
    if not 1 <= threshold <= num <= MAX_SHARES:
        raise ValueError(
            f"threshold is {threshold} of {num} shares: give 1 to {MAX_SHARES} shares, and a threshold of at most "
            "as many"
        )
    # coefficients in Horner's order: the secret is the constant term
    texts = [*(secrets.token_bytes(len(secret)) for _ in range(threshold - 1)), secret]
    rows = [np.frombuffer(text, np.uint8) for text in texts]
    return [reduce(lambda total, row: _times(total, point) ^ row, rows).tobytes() for point in range(1, num + 1)]


def combine(shares: Mapping[int, bytes]) -> bytes:
    """Restore a secret that `share` has split; fewer shares than its ``threshold``, or wrong ones, give a wrong secret."""
    total = np.zeros(len(next(iter(shares.values()))), np.uint8)
    for point, text in shares.items():
        exponent = sum(int(_LOGS[other]) - int(_LOGS[other ^ point]) for other in shares if other != point)
        total ^= _times(np.frombuffer(text, np.uint8), int(_POWERS[exponent % 255]))
    return total.tobytes()

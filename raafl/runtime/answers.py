"""What a client says in its answer beside the tensors, checked."""

from __future__ import annotations

from typing import Any

from raafl.core.types import ClientInfo, client_from_json
from raafl.foreign import foreign
from raafl.runtime.transport import Refused


def extra_of(meta: dict[str, Any]) -> dict[str, Any]:
    """Read the data that a hook sends the merge beside the tensors; raises `Refused`."""
    extra = meta.get("extra", {})
    if not isinstance(extra, dict):
        raise Refused("bad-json", "extra is not a table")
    return extra


def metrics_of(meta: dict[str, Any]) -> dict[str, float]:
    """Read the client's measurements; raises `Refused`."""
    metrics = meta.get("metrics", {})
    if not isinstance(metrics, dict) or len(metrics) > 100:
        raise Refused("bad-json", "metrics is not a small table")
    try:
        return {foreign(k): float(v) for k, v in metrics.items() if isinstance(v, int | float)}
    except OverflowError:
        raise Refused("bad-json", "a metric is out of range") from None


class TooMany(Refused):
    """A client says that it has more samples than it was dealt."""


def count_of(meta: dict[str, Any], field: str, least: int = 0) -> int:
    """Return a count that a client gives; raises `Refused` for anything else."""
    value = meta.get(field)
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value < 2**53:
        raise Refused("bad-json", f"{field} is {foreign(value)}")
    return value


def client_of(hello: dict[str, Any], client: int, incarnation: int, share: int | None) -> ClientInfo:
    """Describe the client for its HELLO.

    ``share`` is how many samples it was dealt of the run's data; None = not known.

    Raises:
        TooMany: it says that it has more.
        Refused: it makes no sense.
    """
    num_samples, profile = count_of(hello, "num_samples", least=1), hello.get("profile")
    try:
        if isinstance(profile, dict):
            profile = {**profile, "name": foreign(profile.get("name", "default"))}
        info = client_from_json({**hello, "client": client, "incarnation": incarnation, "profile": profile})
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise Refused("bad-json", f"profile of client {client}: {foreign(error)}") from None
    if share is not None and not info.own_data and num_samples > share:
        raise TooMany(
            "too-many-samples",
            f"client {client} says that it has {num_samples} samples, but its share of the run's data is {share}: it has "
            "other data than the run",
        )
    return info

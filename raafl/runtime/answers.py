"""What a client says in its answer beside the tensors, checked."""

from __future__ import annotations

from typing import Any

from raafl.core.types import ClientInfo, client_from_json, client_to_json
from raafl.devices.series import long_series, restored, shortened, too_long
from raafl.sanitize import sanitize_text
from raafl.transport import Refused


def extra_of(meta: dict[str, Any]) -> dict[str, Any]:
    """Read the data that a hook sends the merge beside the tensors; raises `Refused`."""
    extra = meta.get("extra", {})
    if not isinstance(extra, dict):
        raise Refused("bad-json", "extra is not a table")
    return extra


MOST_METRIC = 3.5e38
"""A little above the largest single-precision number, which is what clients measure in: sums of these are finite."""


def metrics_of(meta: dict[str, Any]) -> dict[str, float]:
    """Read the client's measurements; those that are no number, or above `MOST_METRIC`, are left out. Raises `Refused`."""
    metrics = meta.get("metrics", {})
    if not isinstance(metrics, dict) or len(metrics) > 100:
        raise Refused("bad-json", "metrics is not a small table")
    try:
        numbers = {
            sanitize_text(name): float(value) for name, value in metrics.items() if isinstance(value, int | float)
        }
    except OverflowError:
        raise Refused("bad-json", "a metric is out of range") from None
    return {name: value for name, value in numbers.items() if abs(value) <= MOST_METRIC}  # NaN is not


def count_of(meta: dict[str, Any], field: str, least: int = 0) -> int:
    """Return a count that a client gives; raises `Refused` for anything else."""
    value = meta.get(field)
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value < 2**53:
        raise Refused("bad-json", f"{field} is {sanitize_text(value)}")
    return value


def hello_of(client: ClientInfo) -> dict[str, Any]:
    """Describe a client for its HELLO; a long series of its profile goes by its digest, for a server that has it."""
    data = client_to_json(client)
    return {**data, "profile": shortened(data["profile"])}


def client_of(hello: dict[str, Any], known: ClientInfo, incarnation: int, *, own_data: bool = True) -> ClientInfo:
    """Describe the client for its HELLO.

    Args:
        hello: what it says.
        known: what the server knows of it: its id, how many samples of the run's data it was dealt (0 = that is not known), and
            its profile, whose long series it may name by digest.
        incarnation: which life it is.
        own_data: whether it may train on data of its own.

    Raises:
        Refused: it makes no sense, or says more than it may; the detail is for the client.
    """
    num_samples, profile, client = count_of(hello, "num_samples", least=1), hello.get("profile"), known.id
    try:
        if not isinstance(profile, dict):
            raise ValueError("it is no table")
        if (problem := too_long(profile)) is not None:
            raise ValueError(
                f"{problem}: give client {client} the same devices in the server's config, or a shorter series"
            )
        series = long_series(client_to_json(known)["profile"])
        profile = {**restored(profile, series), "name": sanitize_text(profile.get("name", "default"))}
        info = client_from_json({**hello, "client": client, "incarnation": incarnation, "profile": profile})
    except (KeyError, IndexError, TypeError, ValueError, AttributeError, OverflowError) as error:
        raise Refused("bad-json", f"profile of client {client}: {sanitize_text(error)}") from None
    if info.own_data and not own_data:
        raise Refused("own-data", f"client {client} has data of its own, which guard.own_data of this run forbids")
    if known.num_samples and not info.own_data and num_samples > known.num_samples:
        raise Refused(
            "too-many-samples",
            f"client {client} says that it has {num_samples} samples, but its share of the run's data is {known.num_samples}: "
            "it has other data than the run",
        )
    return info

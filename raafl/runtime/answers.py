"""What a client says in its answer beside the tensors, checked."""

from __future__ import annotations

from typing import Any

from raafl.runtime.transport import Refused


def extra_of(meta: dict[str, Any]) -> dict[str, Any]:
    """Return what a hook has to say to the merge, beside the tensors; raises `Refused`."""
    extra = meta.get("extra", {})
    if not isinstance(extra, dict):
        raise Refused("bad-json", "extra is not a table")
    return extra


def metrics_of(meta: dict[str, Any]) -> dict[str, float]:
    """Return what the client has measured; raises `Refused`."""
    metrics = meta.get("metrics", {})
    if not isinstance(metrics, dict) or len(metrics) > 100:
        raise Refused("bad-json", "metrics is not a small table")
    try:
        return {str(k): float(v) for k, v in metrics.items() if isinstance(v, int | float)}
    except OverflowError:
        raise Refused("bad-json", "a metric is out of range") from None

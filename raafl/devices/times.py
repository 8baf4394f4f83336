"""Predict the time of a task on a device from the task's cost."""

from __future__ import annotations

from raafl.devices.profiles import Profile, TaskTime
from raafl.submodel.cost import Cost


def time_on(profile: Profile, cost: Cost, samples: float, tested: float = 0.0) -> TaskTime:
    """Predict the time of a task that trains and then evaluates.

    A forward pass costs a third of a training step; each of the cost's ``num_exchanges`` adds the link's latency twice.

    Args:
        profile: of the device.
        cost: per sample and per task.
        samples: to train on.
        tested: samples to evaluate on.
    """
    passes = samples + tested / 3
    return profile.task_time(
        cost.flops_per_sample * passes, cost.down_bytes, cost.up_bytes,
        cost.moved_bytes_per_sample * passes, cost.padding_flops_per_sample * passes, cost.num_exchanges,
        cost.kernels_per_sample * passes,
    )  # fmt: skip

"""Predict the time of a task on a device."""

from __future__ import annotations

from raafl.devices.profiles import Profile, TaskTime
from raafl.submodel.cost import Cost


def time_on(profile: Profile, cost: Cost, samples: float, tested: float = 0.0) -> TaskTime:
    """Predict the time in which a device trains a task and then evaluates the result.

    A sample to evaluate counts as a third of a training sample, since it needs the forward pass only.
    """
    passes = samples + tested / 3
    return profile.task_time(
        cost.flops_per_sample * passes,
        cost.down_bytes,
        cost.up_bytes,
        cost.moved_bytes_per_sample * passes,
        cost.padding_flops_per_sample * passes,
        cost.num_exchanges,
        cost.kernels_per_sample * passes,
    )

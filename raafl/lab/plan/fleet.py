"""Describe an experiment's fleet in numbers: by them a method is chosen (`raafl.lab.plan.choose`)."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from statistics import fmean, median_low

from raafl.algorithms import ALGORITHMS
from raafl.core.types import ClientInfo, Work
from raafl.lab.plan.dry import World

_SCALES = {"slowest": 1.0, "fastest": 1.0, "link": 0.3, "fits": 0.3, "present": 0.3, "clients": 1.0}
_MOMENTS, _TASKS_AHEAD = 64, 50


@dataclass(frozen=True, slots=True)
class Features:
    """A fleet (all clients' devices) described by six numbers; task times are for training the whole model.

    Attributes:
        slowest: base-2 logarithm of the slowest client's task time divided by the median.
        fastest: base-2 logarithm of the median task time divided by the fastest client's.
        link: share of the median client's task time that is spent on transfers.
        fits: share of the clients that have enough memory for the whole model.
        present: mean share of the time in which a client is available.
        clients: base-10 logarithm of the number of clients.
    """

    slowest: float
    fastest: float
    link: float
    fits: float
    present: float
    clients: float

    def distance(self, other: Features) -> float:
        """Return the Euclidean distance between the numbers that describe two fleets, after scaling them to similar ranges."""
        ours, theirs = asdict(self), asdict(other)
        return math.sqrt(sum(((ours[name] - theirs[name]) / scale) ** 2 for name, scale in _SCALES.items()))

    def sentence(self) -> str:
        """Describe the fleet in one sentence."""
        return (
            f"slowest client {2**self.slowest:.3g} x the median, fastest 1/{2**self.fastest:.3g}; {self.link:.0%} of a task "
            f"is transfers; the model fits {self.fits:.0%}; a client is there {self.present:.0%} of the time"
        )


@dataclass(frozen=True, slots=True)
class FleetSummary:
    """Properties of an experiment's fleet (all clients' devices), from which a method is chosen."""

    features: Features  # description of the fleet by numbers
    num_clients: int  # number of clients (N)
    median_s: float  # seconds of a task with the whole model on the median client
    steps: int  # number of local steps of a task on the median client

    @classmethod
    def of(cls, world: World) -> FleetSummary:
        """Compute the properties of an experiment's fleet from the predicted times of tasks."""
        fleet = world.fleet(ALGORITHMS["fed_avg"]())
        times = {client.id: fleet.task_time(client, Work()) for client in world.clients}
        seconds = sorted(max(time.total_s, 1e-9) for time in times.values())
        median_s = median_low(seconds)
        links = [(time.down_s + time.up_s) / max(time.total_s, 1e-9) for time in times.values()]
        steps = [fleet.samples(client.num_samples, Work()) / world.batch_size for client in world.clients]
        features = Features(
            slowest=math.log2(seconds[-1] / median_s),
            fastest=math.log2(median_s / seconds[0]),
            link=median_low(links),
            fits=fmean(fleet.fits(client, Work().spec) for client in world.clients),
            present=fmean(_present(client, median_s) for client in world.clients),
            clients=math.log10(len(world.clients)),
        )
        return cls(features, len(world.clients), median_s, max(math.ceil(median_low(steps)), 1))


def _present(client: ClientInfo, task_s: float) -> float:
    """Return the share of a period, or of the next tasks, in which a client may work."""
    horizon_s = client.profile.period_s or _TASKS_AHEAD * task_s
    return fmean(client.profile.available((i + 0.5) / _MOMENTS * horizon_s) for i in range(_MOMENTS))
